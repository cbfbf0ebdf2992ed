"""Checkpoints: a tree of arrays on disk, restored onto any layout, whole or not at all.

A checkpoint is a directory, or a prefix of an object store: zarr v3 arrays that any tool reads, and
a manifest that is written last, with size and checksum of every file.

Functions, ``Run``, ``PerProcess``, ``Pending`` and errors are stable; the classes of results, such
as ``Contents``, are provisional: see ``docs/stable.md``.

Read in this order: ``format``, ``saving`` over ``writing``, ``restoring`` over ``reading``.

>>> import gda, numpy as np, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     gda.checkpoint.save(folder, {'w': np.arange(3), 'step': 1})
...     gda.checkpoint.restore(folder)
{'step': 1, 'w': array([0, 1, 2])}
"""

from gda.checkpoint.comparing.diff import diff as diff
from gda.checkpoint.comparing.differences import Differences as Differences
from gda.checkpoint.comparing.differences import LeafDifference as LeafDifference
from gda.checkpoint.format.manifest import ChunkGrid as ChunkGrid
from gda.checkpoint.format.manifest import StoredArray as StoredArray
from gda.checkpoint.inspecting import Contents as Contents
from gda.checkpoint.inspecting import inspect as inspect
from gda.checkpoint.inspecting import verify as verify
from gda.checkpoint.pending import Pending as Pending
from gda.checkpoint.reading.saved_arrays import open as open  # noqa: A004
from gda.checkpoint.restoring import restore as restore
from gda.checkpoint.runs.follow import follow as follow
from gda.checkpoint.runs.run import Run as Run
from gda.checkpoint.saving import save as save
from gda.checkpoint.saving import save_async as save_async
from gda.storage.stores.errors import CheckpointNotFoundError as CheckpointNotFoundError
from gda.storage.stores.errors import CorruptionError as CorruptionError
from gda.storage.stores.errors import NewerFormatError as NewerFormatError
from gda.storage.stores.errors import SaveError as SaveError
from gda.trees.per_process import PerProcess as PerProcess
from gda.trees.records.recorded_tree import ArrayLeaf as ArrayLeaf
from gda.trees.records.recorded_tree import PerProcessLeaf as PerProcessLeaf
from gda.trees.records.recorded_tree import Piece as Piece
from gda.trees.records.recorded_tree import ValueLeaf as ValueLeaf

__all__ = [  # noqa: RUF022
    "save",
    "save_async",
    "PerProcess",
    "Pending",
    "restore",
    "Run",
    "follow",
    "open",
    "inspect",
    "verify",
    "diff",
    "Differences",
    "LeafDifference",
    "Contents",
    "ArrayLeaf",
    "ValueLeaf",
    "PerProcessLeaf",
    "StoredArray",
    "Piece",
    "ChunkGrid",
    "CheckpointNotFoundError",
    "CorruptionError",
    "NewerFormatError",
    "SaveError",
]


def __dir__() -> list[str]:
    return list(__all__)

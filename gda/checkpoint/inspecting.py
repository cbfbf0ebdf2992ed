"""Looking at a checkpoint without a device: what is in it, and whether all of it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gda import reading
from gda.agreement import join_some
from gda.checkpoint import zarr_format
from gda.checkpoint.errors import CorruptionError
from gda.checkpoint.files import Chunk, Files
from gda.checkpoint.found import load_complete
from gda.checkpoint.manifest import ArrayLeaf, Leaf
from gda.checkpoint.opening import default_workers, open_store
from gda.checkpoint.structure import format_path

MAX_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has, by its manifest.

    Attributes:
      path: where it is.
      data: where its zarr arrays are, for any tool that reads zarr v3.
      leaves: one line for each leaf of the tree.
      nbytes: of all arrays together.
      about: when, by what and by how many processes it was saved.
    """

    path: str
    data: str
    leaves: tuple[Leaf, ...]
    nbytes: int
    about: dict[str, Any]

    def __str__(self) -> str:
        rows = [(format_path(leaf.path), *_described(leaf)) for leaf in self.leaves]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        by = ", ".join(f"{key} {value}" for key, value in self.about.items())
        total = f"{len(self.leaves)} leaves, {format_bytes(self.nbytes)}; {by}"
        return "\n".join([*lines, total, f"zarr arrays: {self.data}"])


def inspect(path: Any) -> Contents:
    """Return what a checkpoint has. Reads the manifest only, and uses no device.

    Args:
      path: as for ``save``.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: its manifest is damaged.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': np.zeros((2, 3)), 'step': 7})
    >>> contents = gda.checkpoint.inspect(folder.name)
    >>> contents.nbytes, [leaf.path for leaf in contents.leaves]
    (48, [('step',), ('w',)])
    """
    store = open_store(path)
    manifest = load_complete(store)
    nbytes = sum(leaf.nbytes for leaf in manifest.leaves if isinstance(leaf, ArrayLeaf))
    return Contents(store.url, store.join(manifest.data), manifest.leaves, nbytes, manifest.about)


def verify(path: Any, *, max_workers: int | None = None, max_bytes: int = MAX_BYTES) -> Contents:
    """Read all of a checkpoint, and return what it has if everything is what was saved.

    Uses no device. Every chunk is compared with the checksum at its end and with that in the
    manifest.

    Args:
      path: as for ``save``.
      max_workers: how many files are read at a time, as for ``restore``.
      max_bytes: how much memory may be taken; at least a chunk.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: something is damaged or missing; ``problems`` has a line for each file.

    >>> import gda, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'w': np.zeros((2, 3))})
    >>> gda.checkpoint.verify(folder.name).nbytes
    48
    """
    zarr_format.require_crc32c()
    store = open_store(path)
    manifest = load_complete(store)
    files = Files(store, manifest)
    problems: list[str] = []
    reading.run(
        (
            reading.Task(nbytes, lambda check=check: _problems(check), problems.extend)
            for nbytes, check in _checks(files)
        ),
        max_workers=default_workers(store) if max_workers is None else max_workers,
        max_bytes=max_bytes,
    )
    if problems:
        problems.sort()
        raise CorruptionError(f"{store.url} is damaged: {join_some(problems)}", problems)
    return inspect(path)


def _checks(files: Files) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield what is to be checked, and how much memory that takes."""
    for number, array in enumerate(files.manifest.arrays):
        yield 2**20, lambda number=number: files.check_metadata(number)
        for chunk in range(array.grid.num_chunks):
            nbytes = array.file_bytes(chunk) + (array.chunk_bytes if array.codec == "zstd" else 0)
            yield nbytes, lambda where=(number, chunk): _load(files, where)


def _load(files: Files, where: Chunk) -> None:
    number, chunk = where
    files.check_size(where)
    payload = files.manifest.arrays[number].file_bytes(chunk) - zarr_format.CRC_BYTES
    files.load(where, np.empty(payload, np.uint8))


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except CorruptionError as error:
        return list(error.problems)
    return []


def _described(leaf: Leaf) -> tuple[str, str, str]:
    if not isinstance(leaf, ArrayLeaf):
        return type(leaf.value).__name__, f"{leaf.value!r:.40}", ""
    shape = ",".join(map(str, leaf.shape))
    layout = f"{leaf.spec} over {leaf.mesh}" if leaf.spec is not None else ""
    kind = f"keys of {leaf.key_impl}" if leaf.key_impl else leaf.kind
    return f"{leaf.dtype.name}[{shape}]", format_bytes(leaf.nbytes), f"{kind} {layout}".rstrip()


def format_bytes(nbytes: int) -> str:
    """Return a size as people read it.

    >>> format_bytes(1536), format_bytes(3)
    ('1.5 KiB', '3 B')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"

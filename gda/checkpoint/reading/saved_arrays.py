"""A checkpoint as a tree of sources, which read the chunks of each block."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.checkpoint.reading.checked_files import Files, check_not_replaced, load_complete
from gda.checkpoint.step_folders.folder import path_of
from gda.layout.boundary import public, set_module
from gda.layout.indices import index_at, start_of
from gda.layout.spec import Index, Shape
from gda.mesh import own_settings
from gda.storage.sources import HasReader, Source, Unreadable
from gda.storage.stores import checksums
from gda.storage.stores.errors import CorruptionError
from gda.storage.stores.opening import Store, open_store
from gda.storage.views.lazy import lazy
from gda.trees.per_process import PerProcess
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    PerProcessLeaf,
    ValueLeaf,
    format_path,
    unflatten,
)

AnyArray = np.ndarray[Any, Any]

# Of chunks: blocks of another layout need them again, and small arrays share them.
_CACHE_BYTES = 32 * 2**20


@set_module("gda.checkpoint")
@public
def open(path: Any, *, timeout: float = 600) -> Any:  # noqa: A001
    """Return the tree of a checkpoint with lazy sources, to pick, rename and transpose leaves.

    The manifest, PRNG keys and NumPy numbers are read, and no other data. Each array is read where
    it is used: by ``gda.load_tree``, which gives it a mesh and specs, by ``save`` and
    ``gda.storage.save_safetensors``, which take the tree or any part of it, or by
    ``numpy.asarray``. A read compares the checksums of the chunks that it needs. No file is open
    between reads. Does not communicate; each process may open it and read the blocks that it needs.

    Args:
      path: as for ``restore``.
      timeout: seconds to wait for each answer of an object store, as for ``save``.

    Returns:
      the tree as it was saved, with a ``gda.storage.LazyArray`` for each array, whatever its
        container was. Typed PRNG keys are a ``jax.Array`` of keys on one device. Numbers, strings
        and ``None`` are values. A ``PerProcess`` has the value of this process, if as many
        processes saved it; the use of another one is an error.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: its manifest is damaged; a later read raises it for a chunk.
      RuntimeError: a later read finds that another save has replaced the checkpoint.
      OSError: reading failed for another reason; the message names the file.

    >>> import gda, jax, numpy as np, tempfile
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> folder = tempfile.TemporaryDirectory()
    >>> gda.checkpoint.save(folder.name, {'dense': {'kernel': np.ones((4, 8))}, 'step': 7})
    >>> tree = gda.checkpoint.open(folder.name)
    >>> renamed = {'w': tree['dense']['kernel'].T, 'step': tree['step']}
    >>> renamed['w'].shape, renamed['step']
    ((8, 4), 7)
    >>> mesh = Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> gda.load_tree(renamed, mesh, P('x'), dtype='float32')['w']
    GlobalArray(shape=(8, 4), dtype=float32, mesh={'x': 8}, spec=P('x'))
    >>> folder.cleanup()
    """
    checksums.require_crc32c()
    store = open_store(path_of(path, timeout), timeout)
    return tree_of_sources(store, load_complete(store))


def tree_of_sources(store: Store, manifest: Manifest) -> Any:
    """Return the saved tree with a ``LazyArray`` for each array; keys and numbers are read."""
    chunks = ChunkCache(Files(store, manifest))
    return unflatten(manifest.structure, [_value_of(leaf, chunks) for leaf in manifest.leaves])


def _value_of(leaf: Leaf, chunks: ChunkCache) -> Any:
    if isinstance(leaf, ValueLeaf):
        return leaf.value
    if isinstance(leaf, PerProcessLeaf):
        saved, count = len(leaf.files), jax.process_count()
        if saved == count:
            return PerProcess(chunks.files.value_of(leaf, jax.process_index()))
        return OfOtherProcesses(
            f"{format_path(leaf.path)} has the values of {saved} processes, and this program has "
            f"{count}; restore the checkpoint with merge=",
            [partial(chunks.files.value_of, leaf, process) for process in range(saved)],
        )
    source = SavedArray(leaf, chunks)
    if leaf.key_impl is None and leaf.kind != "number":
        return lazy(source)
    data: Any = np.asarray(lazy(source))
    if leaf.key_impl is None:
        return data[()]
    with own_settings():
        return jax.random.wrap_key_data(data, impl=leaf.key_impl)


class OfOtherProcesses(Unreadable):
    """A ``PerProcess`` of another number of processes, with a function that reads each value."""

    def __init__(self, reason: str, reads: Sequence[Callable[[], Any]]) -> None:
        super().__init__(reason)
        self.reads = reads


@dataclass
class _Slot:
    """A chunk that one thread reads, and others wait for."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    data: AnyArray | None = None
    nbytes: int = 0  # that count for the cache


class ChunkCache:
    """The chunks that were read last, which any number of threads may ask for."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._guard = threading.Lock()
        self._slots: OrderedDict[Chunk, _Slot] = OrderedDict()
        self._held = 0

    def __getitem__(self, where: Chunk) -> AnyArray:
        with self._guard:
            slot = self._slots.setdefault(where, _Slot())
            self._slots.move_to_end(where)
        with slot.guard:
            if slot.data is not None:
                return slot.data
            slot.data = data = self.files.checked(where)
        with self._guard:
            if self._slots.get(where) is slot:
                slot.nbytes = data.nbytes
                self._held += slot.nbytes
            while self._held > _CACHE_BYTES:
                _, oldest = self._slots.popitem(last=False)
                self._held -= oldest.nbytes
        return data


class SavedArray(HasReader, Source):
    """An array of a checkpoint, for ``gda.storage.lazy``; any number of threads may read it."""

    def __init__(self, leaf: ArrayLeaf, chunks: ChunkCache) -> None:
        self.leaf, self._cache = leaf, chunks
        self.shape: Shape = leaf.shape
        self.dtype = leaf.dtype
        manifest = chunks.files.manifest
        whole = leaf.shape if leaf.array is None else manifest.arrays[leaf.array].chunk_shape
        self.chunks: Shape | None = whole if whole and 0 not in leaf.shape else None

    @property
    def _reader(self) -> SavedArray:
        return self

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], AnyArray]) -> AnyArray:
        """Return the block at an index, read into memory from ``empty``.

        ``CorruptionError`` if it is damaged, ``RuntimeError`` if the checkpoint was replaced.
        """
        out = empty(self.dtype)
        files = self._cache.files
        try:
            if self.leaf.array is None:
                self._read_pieces(index, out)
            else:
                self._read_chunks(self.leaf.array, index, out)
        except CorruptionError:
            check_not_replaced(files.store, files.manifest)
            raise
        return out

    def _read_pieces(self, index: Index, out: AnyArray) -> None:
        is_whole = out.shape == self.shape
        whole = out if is_whole else np.empty(self.shape, self.dtype)
        for piece in self.leaf.pieces:
            chunk = self._cache[self._cache.files.manifest.chunk_of(piece)]
            whole[index_at(piece.start, piece.shape)] = piece.of_chunk(chunk)
        if not is_whole:
            out[...] = whole[index]

    def _read_chunks(self, array: int, index: Index, out: AnyArray) -> None:
        files = self._cache.files
        grid = files.manifest.arrays[array].grid
        for overlap in grid.overlaps(start_of(index), out.shape):
            where, part = (array, overlap.chunk), out[(*overlap.in_block, ...)]
            if not overlap.is_whole:
                part[...] = self._cache[where][overlap.in_chunk]
            elif part.flags.c_contiguous:
                files.check([where], {})
                files.load(where, part.reshape(-1).view(np.uint8))
            else:
                part[...] = files.checked(where)

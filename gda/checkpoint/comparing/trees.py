"""The two sides of a comparison: a checkpoint, or a tree in memory; read part by part."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.fingerprints.formula import digest_of
from gda.arrays.transport.source_blocks import SourceBlock
from gda.checkpoint.format.chunks import ChunkGrid, chunk_shape_of
from gda.checkpoint.format.manifest import ArrayLeaf, Chunk, Leaf, Manifest, Path
from gda.checkpoint.format.structure import flatten, subtree
from gda.checkpoint.reading.files import Files
from gda.checkpoint.reading.restored_leaves import saved_type
from gda.checkpoint.stores.opening import Store
from gda.checkpoint.writing.saved_leaves import (
    Block,
    SavedLeaf,
    check_same_values,
    saved_leaves,
    values_of,
)
from gda.layout.spec import Index, Shape, index_at
from gda.multihost.steps import all_do
from gda.storage.options import Options

AnyArray = np.ndarray[Any, Any]

_PART_BYTES = 16 * 2**20
_CACHE_BYTES = 128 * 2**20  # of chunks, which the parts of an array sharded otherwise need again


class ComparedPart(NamedTuple):
    """A block of an array to compare: its first element, its sizes, and a function to read it."""

    start: Shape
    shape: Shape
    read: Callable[[], AnyArray]


class SavedSide:
    """A checkpoint, or its subtree at a path, which must be there."""

    def __init__(self, store: Store, manifest: Manifest, at: Path) -> None:
        subtree(manifest.structure, at)
        self.name = store.url
        self.data = manifest.data
        self.leaves = manifest.leaves_at(at)
        self.files = Files(store, manifest)
        self._chunks = _Chunks(self.files)

    def parts(self, path: Path) -> Iterator[ComparedPart]:
        """Yield the parts of an array: its chunks, or the whole if it is a small one."""
        leaf = self._array(path)
        if leaf.array is None:
            first = (0,) * len(leaf.shape)
            yield ComparedPart(first, leaf.shape, lambda: self.read(path, first, leaf.shape))
            return
        grid = self.files.manifest.arrays[leaf.array].grid
        for chunk in range(grid.num_chunks):
            shape = grid.shape_within(chunk)
            read = functools.partial(self._within, (leaf.array, chunk), shape)
            yield ComparedPart(grid.start(chunk), shape, read)

    def _within(self, where: Chunk, shape: Shape) -> AnyArray:
        return self.files.checked(where)[tuple(map(slice, shape))]

    def read(self, path: Path, start: Shape, shape: Shape) -> AnyArray:
        """Return a block of an array; by any thread."""
        leaf = self._array(path)
        out = np.empty(leaf.shape if leaf.array is None else shape, leaf.dtype)
        if leaf.array is None:
            for piece in leaf.pieces:
                chunk = self._chunks[self.files.manifest.chunk_of(piece)]
                out[index_at(piece.start, piece.shape)] = piece.of_chunk(chunk)
            return out[index_at(start, shape)]
        for overlap in self.files.manifest.arrays[leaf.array].grid.overlaps(start, shape):
            part = self._chunks[leaf.array, overlap.chunk][overlap.in_chunk]
            if part.shape == shape:
                return part
            out[overlap.in_block] = part
        return out

    def _array(self, path: Path) -> ArrayLeaf:
        leaf = self.leaves[path]
        assert isinstance(leaf, ArrayLeaf)
        return leaf


@dataclass
class _Slot:
    """A chunk that one thread reads, and others wait for."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    data: AnyArray | None = None
    nbytes: int = 0  # that count for the cache


class _Chunks:
    """The chunks of a checkpoint; those that were used last are kept."""

    def __init__(self, files: Files) -> None:
        self._files = files
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
            slot.data = data = self._files.checked(where)
        with self._guard:
            if self._slots.get(where) is slot:
                slot.nbytes = data.nbytes
                self._held += slot.nbytes
            while self._held > _CACHE_BYTES:
                _, oldest = self._slots.popitem(last=False)
                self._held -= oldest.nbytes
        return data


class GivenSide:
    """A tree of arrays and values in memory, of which each must be one that can be saved."""

    name = "the tree"

    def __init__(self, tree: Any, at: Path) -> None:
        self._all = saved_leaves(flatten(tree)[1], Options())
        self.leaves: dict[Path, Leaf] = {}
        self._arrays: dict[Path, SavedLeaf] = {}
        for leaf in self._all:
            record = leaf.record if isinstance(leaf, SavedLeaf) else leaf
            path = at + record.path
            self.leaves[path] = replace(record, path=path)
            if isinstance(leaf, SavedLeaf):
                self._arrays[path] = leaf

    def record_fingerprints(self, paths: Collection[Path]) -> None:
        """Compute the fingerprints of arrays. All processes must call it, with the same paths."""
        arrays = [self._arrays[path] for path in paths]

        def work() -> dict[str, Any]:
            begun = [leaf.begin_sums() for leaf in arrays]
            values = values_of(self._all) if jax.process_count() > 1 else {}
            return {"values": values, "sums": [sums.to_json() for sums in begun]}

        def judge(parts: dict[int, Any]) -> list[str]:
            check_same_values([part["values"] for part in parts.values()])
            shares = [part["sums"] for part in parts.values()]
            return [
                digest_of(*saved_type(leaf.record), of_all)
                for leaf, of_all in zip(arrays, zip(*shares, strict=True), strict=True)
            ]

        what = "comparing fingerprints of a tree with a checkpoint"
        done = all_do(work, judge=judge, what=what, timeout=600)
        for path, digest in zip(paths, done.verdict, strict=True):
            leaf: Any = self.leaves[path]
            self.leaves[path] = replace(leaf, fingerprint=digest)

    def parts(self, path: Path) -> Iterator[ComparedPart]:
        """Yield the parts of an array that this process compares: all processes, each once."""
        for block in self._arrays[path].blocks:
            shape: Shape = block.data.shape
            if not block.data.size:
                continue
            grid = ChunkGrid(shape, chunk_shape_of(shape, block.data.dtype.itemsize, _PART_BYTES))
            for chunk in range(grid.num_chunks):
                first, sizes = grid.start(chunk), grid.shape_within(chunk)
                start = tuple([a + b for a, b in zip(block.start, first, strict=True)])
                index = index_at(first, sizes)
                yield ComparedPart(start, sizes, functools.partial(_on_host, block, index))


Side = SavedSide | GivenSide


def _on_host(block: Block, index: Index) -> AnyArray:
    with jax.transfer_guard("allow"):
        if isinstance(block.data, SourceBlock):
            return block.data.read()[index]
        return np.asarray(block.data[index] if index else block.data)

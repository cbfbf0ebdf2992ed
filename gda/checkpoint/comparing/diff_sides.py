"""The two sides of a comparison: a checkpoint, other files, or a tree; read part by part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.fingerprints.formula import digest_of
from gda.arrays.transport.source_blocks import SourceArray, SourceBlock
from gda.checkpoint.format.manifest import Chunk, ChunkGrid, Manifest, chunk_shape_of
from gda.checkpoint.reading.checked_files import Files
from gda.checkpoint.reading.saved_arrays import ChunkCache, SavedArray
from gda.checkpoint.tree_at import OpenedTree
from gda.layout.indices import index_at
from gda.layout.spec import Index, Shape
from gda.multihost.settings import own_settings
from gda.multihost.steps import all_do
from gda.storage.options import Options
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.opening import Store
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    ValueLeaf,
    flatten,
    saved_type,
    subtree,
)
from gda.trees.records.saved_leaves import (
    Block,
    SavedLeaf,
    SavedPerProcess,
    check_same_values,
    saved_leaves,
    values_of,
)

AnyArray = np.ndarray[Any, Any]

_PART_BYTES = 16 * 2**20


class ComparedPart(NamedTuple):
    """A block of an array to compare: its first element, its sizes, and a function to read it."""

    start: Shape
    shape: Shape
    read: Callable[[], AnyArray]


class SavedSide:
    """A checkpoint, or its subtree at a path, which must be there."""

    def __init__(self, store: Store, manifest: Manifest, at: Path, by_name: bool) -> None:
        subtree(manifest.structure, at)
        self.name = store.url
        self.data = manifest.data
        leaves = manifest.leaves_at(at).items()
        self.leaves = {_compared_path(path, by_name): leaf for path, leaf in leaves}
        self.files = Files(store, manifest)
        chunks = ChunkCache(self.files)
        self._arrays = {
            path: SavedArray(leaf, chunks)
            for path, leaf in self.leaves.items()
            if isinstance(leaf, ArrayLeaf)
        }

    def parts(self, path: Path) -> Iterator[ComparedPart]:
        """Yield the parts of an array: its chunks, or the whole if it is a small one."""
        leaf = self._arrays[path].leaf
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
        return self._arrays[path].block(index_at(start, shape))


class GivenSide:
    """A tree of arrays and values in memory, of which each must be one that can be saved."""

    def __init__(self, tree: Any, at: Path, by_name: bool, name: str = "the tree") -> None:
        self.name = name
        self._all = saved_leaves(flatten(tree)[1], Options(max_bytes=2 * _PART_BYTES))
        self.leaves: dict[Path, Leaf] = {}
        self._arrays: dict[Path, SavedLeaf] = {}
        self._files: dict[Path, SavedPerProcess] = {}
        for leaf in self._all:
            record = leaf if isinstance(leaf, ValueLeaf) else leaf.record
            path = _compared_path(at + record.path, by_name)
            self.leaves[path] = replace(record, path=path)
            if isinstance(leaf, SavedLeaf):
                self._arrays[path] = leaf
            if isinstance(leaf, SavedPerProcess):
                self._files[path] = leaf

    def record_fingerprints(self, paths: Collection[Path]) -> None:
        """Compute the fingerprints of arrays, and the checksums of what each process has by itself.

        All processes must call it, with the same paths.
        """
        arrays = [self._arrays[path] for path in paths]

        def work() -> dict[str, Any]:
            begun = [leaf.begin_sums() for leaf in arrays]
            values = values_of(self._all) if jax.process_count() > 1 else {}
            return {
                "values": values,
                "sums": [sums.result().tolist() for sums in begun],
                "files": [size_and_crc(leaf.data) for leaf in self._files.values()],
            }

        def decide(parts: dict[int, Any]) -> tuple[list[str], list[Any]]:
            check_same_values([part["values"] for part in parts.values()])
            shares = [part["sums"] for part in parts.values()]
            digests = [
                digest_of(*saved_type(leaf.record), of_all)
                for leaf, of_all in zip(arrays, zip(*shares, strict=True), strict=True)
            ]
            return digests, [*zip(*[part["files"] for part in parts.values()], strict=True)]

        what = "comparing fingerprints of a tree with a checkpoint"
        done = all_do(work, decide=decide, what=what, timeout=600)
        digests, files = done.decision
        for path, digest in zip(paths, digests, strict=True):
            leaf: Any = self.leaves[path]
            self.leaves[path] = replace(leaf, fingerprint=digest)
        for path, of_all in zip(self._files, files, strict=True):
            leaf = self.leaves[path]
            self.leaves[path] = replace(leaf, files=tuple(map(tuple, of_all)))

    def parts(self, path: Path) -> Iterator[ComparedPart]:
        """Yield the parts of an array that this process compares: all processes, each once."""
        for block in self._arrays[path].blocks:
            shape: Shape = block.data.shape
            if not block.data.size:
                continue
            if isinstance(block.data, SourceBlock):  # read as a whole
                yield ComparedPart(block.start, shape, block.data.read)
                continue
            grid = ChunkGrid(shape, chunk_shape_of(shape, block.data.dtype.itemsize, _PART_BYTES))
            for chunk in range(grid.num_chunks):
                first, sizes = grid.start(chunk), grid.shape_within(chunk)
                start = tuple([a + b for a, b in zip(block.start, first, strict=True)])
                index = index_at(first, sizes)
                yield ComparedPart(start, sizes, functools.partial(_on_host, block, index))


class OpenedSide(GivenSide):
    """Safetensors files or an Orbax run, or the subtree at a path, which must be there."""

    def __init__(self, opened: OpenedTree, at: Path, by_name: bool) -> None:
        tree = opened.tree
        subtree(flatten(tree)[0], at)
        for key in at:
            tree = tree[key]
        super().__init__(tree, at, by_name, opened.url)

    def read(self, path: Path, start: Shape, shape: Shape) -> AnyArray:
        """Return a block of an array; by any thread."""
        leaf, index = self._arrays[path], index_at(start, shape)
        if isinstance(leaf.own, SourceArray):
            return leaf.own.source.read(index, lambda dtype: np.empty(shape, dtype))
        data = leaf.blocks[0].data if leaf.own is None else leaf.own
        return np.asarray(data)[index]


Side = SavedSide | GivenSide


def _compared_path(path: Path, by_name: bool) -> Path:
    """Return the path by which leaves match; that of a name in a safetensors file has one part."""
    return (".".join(map(str, path)),) if by_name else path


def _on_host(block: Block, index: Index) -> AnyArray:
    with own_settings():
        assert not isinstance(block.data, SourceBlock)
        return np.asarray(block.data[index] if index else block.data)

"""The two sides of a comparison: a checkpoint, other files, or a tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax

from gda.arrays.fingerprints.formula import digest_of
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.tree_at import OpenedTree
from gda.multihost.agreement import wait_for_arrays
from gda.multihost.steps import all_do
from gda.storage.options import Options
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.opening import Store
from gda.trees.records.recorded_tree import (
    Leaf,
    Path,
    ValueLeaf,
    flatten,
    saved_type,
    subtree,
)
from gda.trees.records.saved_leaves import (
    SavedLeaf,
    SavedPerProcess,
    check_same_values,
    saved_leaves,
    values_of,
)

_MAX_BYTES = 32 * 2**20


class SavedSide:
    """A checkpoint, or its subtree at a path, which must be there."""

    def __init__(self, store: Store, manifest: Manifest, at: Path, by_name: bool) -> None:
        subtree(manifest.structure, at)
        self.name = store.url
        self.data = manifest.data
        leaves = manifest.leaves_at(at).items()
        self.leaves = {_compared_path(path, by_name): leaf for path, leaf in leaves}


class GivenSide:
    """A tree of arrays and values in memory, of which each must be one that can be saved."""

    def __init__(self, tree: Any, at: Path, by_name: bool, name: str = "the tree") -> None:
        self.name = name
        wait_for_arrays("gda.checkpoint.diff", tree)
        self._all = saved_leaves(flatten(tree)[1], Options(max_bytes=_MAX_BYTES))
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


class OpenedSide(GivenSide):
    """Safetensors files or an Orbax run, or the subtree at a path, which must be there."""

    def __init__(self, opened: OpenedTree, at: Path, by_name: bool) -> None:
        tree = opened.tree
        subtree(flatten(tree)[0], at)
        for key in at:
            tree = tree[key]
        super().__init__(tree, at, by_name, opened.url)


Side = SavedSide | GivenSide


def _compared_path(path: Path, by_name: bool) -> Path:
    """Return the path by which leaves match; that of a name in a safetensors file has one part."""
    return (".".join(map(str, path)),) if by_name else path

"""The comparison of two checkpoints or other files, or of one and a tree, leaf by leaf."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from gda.arrays.fingerprints.formula import digest_of
from gda.checkpoint.comparing.differences import Differences, are_of_one_type, differences_of
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.reading.checked_files import read_complete
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import FileKind, OpenedTree, kind_at, open_tree
from gda.layout.boundary import set_module
from gda.multihost.agreement import check_same_call, communicates, wait_for_arrays
from gda.multihost.steps import all_do
from gda.storage.options import Options
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.opening import Store, names_store, open_store
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    ValueLeaf,
    checked_path,
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
_NAME = "gda.checkpoint.diff"


@set_module("gda.checkpoint")
@communicates(_NAME, lambda given: None if all(names_store(given[x]) for x in "ab") else ())
def diff(
    a: Any,
    b: Any,
    *,
    at: Iterable[str | int] = (),
    timeout: float = 600,
) -> Differences:
    """Compare two checkpoints, or a checkpoint and a tree; leaves match by path.

    Reads only the manifests of checkpoints, and compares the fingerprints there. Those of a tree
    are computed, on its devices, and those of safetensors files and Orbax runs, whose arrays are
    read for that. Containers, layouts and classes of nodes do not count. Uses no device, and does
    not communicate, to compare two checkpoints. Otherwise, all processes must call it, with the
    same tree, and communicate: each takes the fingerprints of the blocks that it would save, and
    all get the same answer.

    Args:
      a, b: the path of a checkpoint, as for ``restore``, of safetensors files or of an Orbax run;
        or a tree of arrays and values. One of them is a path. Beside safetensors files, leaves
        match by the names that they have there, such as ``'layers.0.w'``.
      at: compare only the subtree at this path, such as ``['params']``; a tree is that subtree.
      timeout: seconds to wait for each answer of an object store, as for ``save``.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: a manifest is damaged.
      TypeError: neither ``a`` nor ``b`` is a path, or a leaf of the tree is of a kind that
        cannot be saved.
      KeyError: there is nothing at ``at``.
      RuntimeError: a checkpoint was replaced while it was read, as for ``restore``; or an array of
        the tree was deleted or donated.
      OSError: reading failed for another reason; the message names the file.
      DisagreementError, LateProcessError: of a tree in several processes, these have different
        values, or one failed or did not arrive in time.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder + '/1', {'w': np.zeros((2, 3)), 'step': 1})
    ...     gda.checkpoint.save(folder + '/2', {'w': np.ones((2, 3)), 'step': 1})
    ...     differences = gda.checkpoint.diff(folder + '/1', folder + '/2')
    >>> print(*differences.of_other_content, differences.num_equal)
    w float64[2,3] 1
    """
    path = checked_path(at)
    if not (names_store(a) or names_store(b)):
        raise TypeError(
            f"diff compares with a checkpoint, but a is a {type(a).__name__} and b is a "
            f"{type(b).__name__}; pass the path of a checkpoint as one of them"
        )
    given = [_DiffArgument.of(each, timeout) for each in (a, b)]
    return read_complete(
        [each.store for each in given if each.store and each.kind is FileKind.CHECKPOINT],
        partial(_differences, given, path),
        is_alone=lambda: jax.process_count() == 1,
    )


class _DiffArgument(NamedTuple):
    what: Any  # a path or a tree; of other files than a checkpoint, an OpenedTree
    store: Store | None = None
    kind: FileKind | None = None

    @classmethod
    def of(cls, what: Any, timeout: float) -> _DiffArgument:
        if not names_store(what):
            return cls(what)
        what = path_of(what, timeout)
        store = open_store(what, timeout)
        kind = kind_at(store)
        return cls(what if kind is FileKind.CHECKPOINT else open_tree(what, timeout), store, kind)


def _differences(given: Sequence[_DiffArgument], at: Path, *manifests: Manifest) -> Differences:
    by_name = FileKind.SAFETENSORS in [each.kind for each in given]
    following = iter(manifests)

    def side_of(each: _DiffArgument) -> _Side:
        if each.store is None:
            return _GivenSide(each.what, at, by_name)
        if each.kind is FileKind.CHECKPOINT:
            return _SavedSide(each.store, next(following), at, by_name)
        return _OpenedSide(each.what, at, by_name)

    a, b = map(side_of, given)  # an error here comes before a process waits for others
    if trees := [each for each in given if each.store is None]:
        store = next(each.store for each in given if each.store is not None)
        arguments = {
            "order": "tree, checkpoint" if given[0].store is None else "checkpoint, tree",
            "checkpoint": manifests[0].data if manifests else store.url,
            "at": at,
        }
        check_same_call(_NAME, trees[0].what, arguments)
    for side, other in ((a, b), (b, a)):
        if isinstance(side, _GivenSide):
            side.record_fingerprints(_to_compare(side, other))
    return differences_of((a.name, b.name), a.leaves, b.leaves)


def _to_compare(given: _Side, saved: _Side) -> list[Path]:
    """Return the paths of arrays of one type on both sides, the other with a fingerprint.

    It may still get one if it is of a tree or of other files.
    """
    return [
        path
        for path, leaf in saved.leaves.items()
        if isinstance(leaf, ArrayLeaf)
        and (leaf.fingerprint is not None or isinstance(saved, _GivenSide))
        and path in given.leaves
        and are_of_one_type(given.leaves[path], leaf)
    ]


class _SavedSide:
    """A checkpoint, or its subtree at a path, which must be there."""

    def __init__(self, store: Store, manifest: Manifest, at: Path, by_name: bool) -> None:
        subtree(manifest.structure, at)
        self.name = store.url
        leaves = manifest.leaves_at(at).items()
        self.leaves = {_compared_path(path, by_name): leaf for path, leaf in leaves}


class _GivenSide:
    """A tree of arrays and values in memory, of which each must be one that can be saved."""

    def __init__(self, tree: Any, at: Path, by_name: bool, name: str = "the tree") -> None:
        self.name = name
        wait_for_arrays(_NAME, tree)
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


class _OpenedSide(_GivenSide):
    """Safetensors files or an Orbax run, or the subtree at a path, which must be there."""

    def __init__(self, opened: OpenedTree, at: Path, by_name: bool) -> None:
        tree = opened.tree
        subtree(flatten(tree)[0], at)
        for key in at:
            tree = tree[key]
        super().__init__(tree, at, by_name, opened.url)


_Side = _SavedSide | _GivenSide


def _compared_path(path: Path, by_name: bool) -> Path:
    """Return the path by which leaves match; that of a name in a safetensors file has one part."""
    return (".".join(map(str, path)),) if by_name else path

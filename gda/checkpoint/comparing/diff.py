"""The comparison of two checkpoints or other files, or of one and a tree, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from gda.checkpoint.comparing.diff_sides import GivenSide, OpenedSide, SavedSide, Side
from gda.checkpoint.comparing.differences import Differences, are_of_one_type, differences_of
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.reading.checked_files import read_complete
from gda.checkpoint.step_folders.references import path_of
from gda.checkpoint.tree_at import FileKind, kind_at, open_tree
from gda.layout.boundary import public, set_module
from gda.multihost.agreement import check_same_call, communicates
from gda.storage.stores.opening import Store, names_store, open_store
from gda.trees.records.recorded_tree import ArrayLeaf, Path, checked_path

_NAME = "gda.checkpoint.diff"


@set_module("gda.checkpoint")
@public
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
    opened = [each.opened(timeout) for each in given]
    return read_complete(
        [each.store for each in opened if each.store and each.kind is FileKind.CHECKPOINT],
        partial(_differences, opened, path),
        is_alone=lambda: jax.process_count() == 1,
    )


class _DiffArgument(NamedTuple):
    """One of the two that are compared: a path, its store and the kind of its files, or a tree."""

    what: Any  # a path or a tree; of other files than a checkpoint, an OpenedTree
    store: Store | None = None
    kind: FileKind | None = None

    @classmethod
    def of(cls, what: Any, timeout: float) -> _DiffArgument:
        if not names_store(what):
            return cls(what)
        what = path_of(what, timeout)
        store = open_store(what, timeout)
        return cls(what, store, kind_at(store))

    def opened(self, timeout: float) -> _DiffArgument:
        if self.kind in (None, FileKind.CHECKPOINT):
            return self
        return self._replace(what=open_tree(self.what, timeout))


def _differences(given: Sequence[_DiffArgument], at: Path, *manifests: Manifest) -> Differences:
    """Compare two sides, of which the checkpoints have these manifests."""
    by_name = FileKind.SAFETENSORS in [each.kind for each in given]
    following = iter(manifests)

    def side_of(each: _DiffArgument) -> Side:
        if each.store is None:
            return GivenSide(each.what, at, by_name)
        if each.kind is FileKind.CHECKPOINT:
            return SavedSide(each.store, next(following), at, by_name)
        return OpenedSide(each.what, at, by_name)

    a, b = map(side_of, given)  # an error here comes before a process waits for others
    if trees := [each for each in given if each.store is None]:
        store = next(each.store for each in given if each.store is not None)
        arguments = {
            "order": "tree, checkpoint" if given[0].store is None else "checkpoint, tree",
            "checkpoint": manifests[0].data if manifests else store.url,
            "at": at,
        }
        check_same_call(_NAME, trees[0].what, arguments)
    return _compared(a, b)


def _compared(a: Side, b: Side) -> Differences:
    for given, other in ((a, b), (b, a)):
        if isinstance(given, GivenSide):
            given.record_fingerprints(_to_compare(given, other))
    return differences_of((a.name, b.name), a.leaves, b.leaves)


def _to_compare(given: Side, saved: Side) -> list[Path]:
    """Return the paths of arrays of one type on both sides, the other with a fingerprint.

    It may still get one if it is of a tree or of other files.
    """
    return [
        path
        for path, leaf in saved.leaves.items()
        if isinstance(leaf, ArrayLeaf)
        and (leaf.fingerprint is not None or isinstance(saved, GivenSide))
        and path in given.leaves
        and are_of_one_type(given.leaves[path], leaf)
    ]

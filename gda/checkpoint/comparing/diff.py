"""The comparison of two checkpoints, or of one and a tree, leaf by leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from gda.arrays.fingerprints.formula import digest_of
from gda.checkpoint.comparing.differences import Differences, are_of_one_type, differences_of
from gda.checkpoint.reading.checked_files import load_complete
from gda.checkpoint.step_folders.folder import path_of
from gda.layout.boundary import set_module
from gda.multihost.agreement import (
    check_same_call,
    communicates,
    tells_alone,
    timeout_of_calls,
    wait_for_arrays,
)
from gda.multihost.steps import all_do
from gda.storage.options import Options
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.opening import names_store, open_store
from gda.trees.records.recorded_tree import Leaf, Path, ValueLeaf, flatten, saved_type
from gda.trees.records.saved_leaves import (
    SavedLeaf,
    SavedPerProcess,
    check_same_values,
    given_leaves,
    values_of,
    with_blocks,
)

_MAX_BYTES = 32 * 2**20
_NAME = "gda.checkpoint.diff"


@set_module("gda.checkpoint")
@communicates(
    _NAME, lambda given: None if names_store(given["a"]) and names_store(given["b"]) else ()
)
def diff(a: Any, b: Any, *, timeout: float = 600) -> Differences:
    """Compare a checkpoint with another one, or with a tree; leaves match by path.

    Reads only the manifests of checkpoints, and compares the fingerprints there. Those of a tree
    are computed, on its devices; sources are read for that. Containers, layouts and classes of
    nodes do not count. Uses no device, and does not communicate, to compare two checkpoints. With a
    tree, all processes must call it, with the same tree, and communicate: each takes the
    fingerprints of the blocks that it would save, and all get the same answer.

    Args:
      a: the path of a checkpoint, as for ``restore``.
      b: the path of another one, or a tree of arrays and values.
      timeout: seconds to wait for the other processes to call it, if a tree is given, and for each
        answer of an object store, as for ``save``.

    Raises:
      CheckpointNotFoundError: there is no complete checkpoint.
      CorruptionError: a manifest is damaged.
      TypeError: ``a`` is no path, or a leaf of the tree is of a kind that cannot be saved.
      RuntimeError: an array of the tree was deleted or donated.
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
    are_paths = names_store(a) and names_store(b)
    try:
        url, data, saved = _saved(a, timeout)
        if are_paths:
            other, _, leaves = _saved(b, timeout)
        else:
            other, leaves = "the tree", _leaves_of(b, saved, {"checkpoint": data}, timeout)
    finally:
        if are_paths:
            tells_alone(_NAME, "both arguments are paths")
    return differences_of((url, saved), (other, leaves))


def _saved(path: Any, timeout: float) -> tuple[str, str, dict[Path, Leaf]]:
    """Return the place of a checkpoint, the name of its data, and the records of its leaves."""
    store = open_store(path_of(path, timeout), timeout)
    manifest = load_complete(store)
    return store.url, manifest.data, {leaf.path: leaf for leaf in manifest.leaves}


def _leaves_of(
    tree: Any, saved: Mapping[Path, Leaf], arguments: Mapping[str, Any], timeout: float
) -> dict[Path, Leaf]:
    """Return the records of a tree, with the needed fingerprints; all processes must call it."""
    wait_for_arrays(_NAME, tree)
    leaves = with_blocks(given_leaves(flatten(tree)[1], Options(max_bytes=_MAX_BYTES)))
    seconds = min(timeout, timeout_of_calls())
    # An error before it is told to the others.
    check_same_call(_NAME, tree, arguments, timeout=seconds)
    arrays = [leaf for leaf in leaves if isinstance(leaf, SavedLeaf) and _is_known(leaf, saved)]
    files = [leaf for leaf in leaves if isinstance(leaf, SavedPerProcess)]

    def work() -> dict[str, Any]:
        begun = [leaf.begin_sums() for leaf in arrays]
        return {
            "values": values_of(leaves) if jax.process_count() > 1 else {},
            "sums": [sums.result().tolist() for sums in begun],
            "files": [size_and_crc(leaf.data) for leaf in files],
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
    digests, of_files = all_do(work, decide=decide, what=what, timeout=600).decision
    records = [leaf if isinstance(leaf, ValueLeaf) else leaf.record for leaf in leaves]
    found: dict[Path, Leaf] = {record.path: record for record in records}
    for leaf, digest in zip(arrays, digests, strict=True):
        found[leaf.record.path] = replace(leaf.record, fingerprint=digest)
    for leaf, of_all in zip(files, of_files, strict=True):
        found[leaf.record.path] = replace(leaf.record, files=tuple(map(tuple, of_all)))
    return found


def _is_known(leaf: SavedLeaf, saved: Mapping[Path, Leaf]) -> bool:
    """Return True if the saved leaf is an array of this type."""
    there = saved.get(leaf.record.path)
    return there is not None and are_of_one_type(leaf.record, there)

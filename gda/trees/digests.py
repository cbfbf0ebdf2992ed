"""The fingerprints of all arrays of a tree, in one round between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprints.fingerprint import OTHERWISE, fingerprints_of
from gda.arrays.fingerprints.formula import fingerprint_of_numpy
from gda.arrays.liveness import check_held
from gda.layout.boundary import set_module
from gda.mesh import is_tracer, processes_of, sharding_of
from gda.multihost.agreement import check_same_call, communicates, tells_alone, wait_for_arrays
from gda.storage.sources import check_unmasked
from gda.trees.leaves import (
    Tree,
    array_of,
    grid_of_leaf,
    held_by,
    is_array,
    is_container,
    is_leaf,
    is_value,
    with_paths,
    without_data,
)

_NAME = "gda.fingerprint"


@set_module("gda")
@communicates(_NAME, lambda given: _layouts_of(given["tree"]))
def fingerprint(tree: Tree) -> Tree:
    """Return the fingerprint of an array: a digest of shape, dtype and content, 16 hex digits.

    A NumPy array, a ``jax.Array``, a ``GlobalArray`` and a ``PaddedArray`` of the same shape, dtype
    and content have the same fingerprint, and a checkpoint records it. Of a NumPy array it needs no
    device, and reads a memory map in pieces. See ``GlobalArray.fingerprint``.

    Of a tree it returns the same tree with the fingerprint of each array, which ``==`` compares
    with that of another run. If processes share arrays, or it has none, all processes must call it,
    and it communicates once for the whole tree. An array of one process gets the same fingerprint
    in all of them.

    Args:
      tree: a container, a ``jax.Array`` or a NumPy array, of any byte order and memory layout, or a
        pytree of them. Numbers and strings in a tree stay as they are. The dtype counts: JAX makes
        a float64 array float32 unless ``jax_enable_x64`` is set.

    Raises:
      TypeError: a leaf is something else, holds no numbers, or is being traced. Errors of a tree
        have a note with the path.
      ValueError, RuntimeError: as ``GlobalArray.fingerprint``.
      DisagreementError, LateProcessError: if processes share arrays, as ``check_replicas_agree``.

    >>> import gda, jax.numpy as jnp, numpy as np
    >>> gda.fingerprint(np.arange(6, dtype=np.int32)) == gda.fingerprint(jnp.arange(6))
    True
    >>> gda.fingerprint(np.arange(6)) == gda.fingerprint(np.arange(6).reshape(2, 3))
    False
    >>> gda.fingerprint({'w': jnp.arange(6), 'step': 3})
    {'step': 3, 'w': '3b994048625d0383'}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    is_one = is_leaf(tree)
    arrays = [number for number, leaf in enumerate(leaves) if is_array(leaf)]
    is_joint = _is_joint(tree, leaves)

    def prepared(leaf: Any) -> Any:
        if is_array(leaf):
            array = array_of(leaf)
            if not is_joint:
                check_held(array, "fingerprint()")
            grid_of_leaf(leaf)  # here, for an error with the path
            return array
        if isinstance(leaf, np.ndarray | np.generic) and (is_one or not is_value(leaf)):
            check_unmasked(leaf)
            return fingerprint_of_numpy(np.asarray(leaf))
        return leaf if is_value(leaf) and not is_one else array_of(leaf, OTHERWISE)  # raises

    results = with_paths(tree, prepared, leaves)
    if is_joint:
        # Arrays of one process alone are compared by number only: the others may have their own.
        shared = {number for number in arrays if _is_shared(held_by(leaves[number]))}
        layouts = [
            without_data(leaf) if number in shared else 0 if number in arrays else None
            for number, leaf in enumerate(leaves)
        ]
        check_same_call(_NAME, jax.tree.unflatten(structure, layouts), {})
        wait_for_arrays(_NAME, [results[number] for number in shared])
    with_grids = [(results[number], grid_of_leaf(leaves[number])) for number in arrays]
    for number, digest in zip(arrays, fingerprints_of(with_grids, _NAME), strict=True):
        results[number] = digest
    if not is_joint and not is_one:
        tells_alone(_NAME, "all arrays of the tree are of this process alone")
    return jax.tree.unflatten(structure, results)


def _layouts_of(tree: Any) -> Any:
    """Return a tree for ``communicates``: ``None`` if all leaves are arrays of this process."""
    leaves = jax.tree.leaves(tree, is_leaf=is_container)
    others = [leaf for leaf in leaves if not is_array(leaf)]
    are_known = all(is_value(leaf) or isinstance(leaf, np.ndarray) for leaf in others)
    is_number = is_leaf(tree) and is_value(tree) and not isinstance(tree, np.generic)
    return None if are_known and not is_number and not _is_joint(tree, leaves) else ()


def _is_joint(tree: Any, leaves: Sequence[Any]) -> bool:
    """Return True if processes share an array of a tree, or if it has no array."""
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    if not arrays and not is_leaf(tree):
        return not any(isinstance(leaf, np.ndarray) for leaf in leaves)
    return any(_is_shared(held_by(leaf)) for leaf in arrays)


def _is_shared(array: Any) -> bool:
    if is_tracer(array) or not isinstance(array, jax.Array) or array.is_fully_addressable:
        return False
    mesh: Any = sharding_of(array).mesh
    return len(processes_of(mesh).numbers) > 1

"""Trees of containers to trees of plain arrays: of NumPy, or of JAX."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.layout.boundary import public, set_module
from gda.layout.spec import check_reduced
from gda.mesh import is_tracer, own_settings
from gda.storage.sources import settled
from gda.trees.leaves import Tree, are_keys, array_of, held_by, is_container, opened, with_paths


@set_module("gda")
@public
def to_numpy(tree: Tree) -> Tree:
    """Return the tree with a NumPy array for every array in it.

    ``jax.device_get`` would leave a container around each NumPy array. All copies to the host
    start before the first is awaited. Never communicates between processes.

    Args:
      tree: a pytree of ``GlobalArray``s, ``PaddedArray``s, which come without padding, and
        ``jax.Array``s. This process must hold every block of each. PRNG keys come as a
        ``jax.Array``, and other leaves stay as they are.

    Returns:
      a tree of NumPy arrays as ``numpy.asarray`` returns them: read-only, and on CPU possibly the
      memory of the array itself.

    Raises, with a note of the leaf's path:
      RuntimeError: this process does not hold every block of an array, or it was deleted.
      TypeError: an array is traced, a ``GlobalArray`` holds no data, or a ``PaddedArray`` has PRNG
        keys.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
    >>> gda.to_numpy({'step': 3, 'w': g})
    {'step': 3, 'w': array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(opened(tree), is_leaf=is_container)
    with own_settings():
        with_paths(tree, _begin_copy, leaves)
        values = with_paths(tree, _value_of, leaves)
    return jax.tree.unflatten(structure, values)


def _begin_copy(leaf: Any) -> None:
    array = held_by(leaf)
    if isinstance(array, jax.Array) and not is_tracer(array) and not array.is_deleted():
        check_reduced(getattr(array.sharding, "spec", ()))
        array.copy_to_host_async()


def _value_of(leaf: Any) -> Any:
    if are_keys(leaf) and not isinstance(leaf, PaddedArray):
        return array_of(leaf)
    leaf = settled(leaf)
    if isinstance(leaf, jax.Array):
        leaf = GlobalArray._from_leaf(leaf)  # whose errors say what to do
    return np.asarray(leaf) if is_container(leaf) else leaf


@set_module("gda")
@public
def to_jax(tree: Tree) -> Tree:
    """Return the tree with the ``jax.Array`` of every ``GlobalArray`` in it; copies nothing.

    Args:
      tree: a pytree. Leaves that are no containers stay as they are.

    Raises:
      ValueError: a leaf is a ``PaddedArray``, and no ``jax.Array`` has its shape. The error has a
        note of the leaf's path.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
    >>> gda.to_jax({'step': 3, 'w': g})
    {'step': 3, 'w': Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(opened(tree), is_leaf=is_container)
    return jax.tree.unflatten(structure, with_paths(tree, _array_of, leaves))


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, PaddedArray):
        raise ValueError(
            f"a PaddedArray of shape {leaf.shape} has no jax.Array of that shape. Take "
            "p.filled(value) or p.array, which have the padding too, or a spec that divides"
        )
    return held_by(leaf)

"""Trees of containers to trees of ``jax.Array``s."""

from __future__ import annotations

from typing import Any

import jax

from gda.arrays.padded_array import PaddedArray
from gda.layout.boundary import public, set_module
from gda.trees.leaves import held_by, is_container, opened, with_paths


@set_module("gda")
@public
def to_jax(tree: Any) -> Any:
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
    return jax.tree.unflatten(structure, with_paths(tree, _plain, leaves))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, PaddedArray):
        raise ValueError(
            f"a PaddedArray of shape {leaf.shape} has no jax.Array of that shape. Take "
            "p.filled(value) or p.array, which have the padding too, or a spec that divides"
        )
    return held_by(leaf)


def check_not_padding(plain: bool, pad: bool) -> None:
    """Raise ``ValueError`` if both options were given."""
    if plain and pad:
        raise ValueError(
            "plain=True and pad=True exclude each other: no jax.Array has the shape of a "
            "PaddedArray. Omit one, or choose specs that divide"
        )

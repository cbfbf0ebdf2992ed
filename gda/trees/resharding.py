"""The move of a whole tree of arrays to another mesh, in few rounds.

Provisional: see ``docs/stable.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gda.arrays.construction.from_process_local import array_from_process_local
from gda.arrays.padded_array import PaddedArray
from gda.arrays.transport.carrying import Relayout
from gda.arrays.transport.moving import reshard_all
from gda.layout.boundary import set_module
from gda.mesh import MeshLike, mesh_and_spec, processes_of, sharding_of
from gda.multihost.agreement import checking_agreement, communicates, tells_alone
from gda.trees.leaves import Keys, Tree, array_of, held_by, is_container, is_value, with_paths
from gda.trees.matching import SpecOf, mesh_and_spec_of, mesh_named_by, specs_per_leaf

_NAME = "gda.reshard_tree"


@set_module("gda")
@communicates(_NAME, lambda given: [given["tree"], given["mesh"]])
def reshard_tree(
    tree: Tree,
    mesh: MeshLike | Tree,
    specs: PartitionSpec | SpecOf | Tree = None,
    *,
    pad: bool = False,
    max_device_bytes: int | None = None,
    donate: bool = False,
) -> Tree:
    """Move a tree of arrays to any mesh of the program's devices; communicates.

    Each array moves as ``GlobalArray.reshard`` moves it. Arrays of equal layouts share the compiled
    programs, and small ones travel together, so that a whole model takes few rounds. Each process
    with a device in the old or the new meshes must call it with the same tree; others need not.

    An uncommitted array, such as the count of optax, a PRNG key or any ``jnp.asarray(x)``, is in
    each process an array of its own, and must have the same value in all.

    Args:
      tree: a pytree of ``GlobalArray``, ``PaddedArray`` and ``jax.Array``, of which each stays what
        it is, also of a weak type and in its kind of memory. Numbers and strings stay as they are.
        A process without an array has a ``jax.ShapeDtypeStruct`` with its present sharding in its
        place.
      mesh, specs: as in ``load_tree``; specs are those of the new mesh.
      pad: an array that the new mesh does not divide becomes a ``PaddedArray``.
      max_device_bytes: the most bytes that a device holds of pieces on their way, by default
        256 MiB.
      donate: delete each array as soon as it has left. The arrays of ``max_device_bytes``, or one
        larger array, are then held twice at a time, not the whole tree. Without it, both trees may
        share the blocks that stay on their devices.

    Returns:
      the same tree in its new layout, with a ``jax.Array`` for each ``jax.ShapeDtypeStruct``.

    Raises:
      TypeError, ValueError: as ``GlobalArray.reshard`` and ``load_tree``, with a note of the path,
        before anything moves.
      DisagreementError, LateProcessError: as ``GlobalArray.reshard``. With ``donate``, some of the
        arrays may be gone.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> devices = np.array(jax.devices()[:8])
    >>> mesh = jax.sharding.Mesh(devices.reshape(4, 2), ('x', 'y'))
    >>> model = gda.load_tree({'w': np.zeros((8, 2)), 'b': np.zeros(2)}, mesh, P('x'), pad=True)
    >>> fewer = jax.sharding.Mesh(devices[:2], ('z',))
    >>> gda.reshard_tree(model, fewer, {'w': P('z'), 'b': P()})['w']
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'z': 2}, spec=P('z'))
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    found = specs_per_leaf(tree, mesh, specs, _shaped)

    def relayout(leaf: Any, found: Any, keys: Keys) -> Relayout | None:
        if is_value(leaf):
            return None
        may_pad = pad or isinstance(leaf, PaddedArray)
        over = mesh_and_spec(*mesh_and_spec_of(mesh, found))
        each = Relayout(_data_of(leaf), over, leaf.shape if may_pad else None, keys)
        each.check()  # here, for an error with the path
        return each

    keys = [pair.keys for pair in found.pairs]
    relayouts = with_paths(tree, relayout, leaves, found.of_each_leaf(), keys)
    arrays = [each for each in relayouts if each is not None]
    is_shared = any(not sharding_of(each.array).is_fully_addressable for each in arrays)
    copies = {each: None for each in arrays if _is_a_copy(each, is_shared)}
    moving = [each for each in arrays if each not in copies]
    # The processes of the mesh meet even if nothing moves; without a mesh, all do.
    named = mesh_named_by(mesh)
    others = range(jax.process_count()) if named is None else processes_of(named).numbers
    moved = reshard_all(moving, _NAME, max_device_bytes, donate, [*copies], others)
    placed = [_placed(each) for each in copies]
    if donate:
        jax.block_until_ready(placed)
        for each in copies:
            each.array.delete()
    array_of_each = dict(zip([*moving, *copies], [*moved, *placed], strict=True))
    results = [
        leaf if each is None else _contained_like(leaf, array_of_each[each], each.target.is_padded)
        for leaf, each in zip(leaves, relayouts, strict=True)
    ]
    if named is not None and others == (jax.process_index(),) and all(e.is_local for e in arrays):
        tells_alone(_NAME, "arrays and mesh are of this process alone")
    return jax.tree.unflatten(structure, results)


@dataclass(frozen=True, eq=False)
class Moving:
    """A leaf in a tree for ``moved_together``, and the move of its array if it is to move."""

    leaf: Any
    relayout: Relayout
    moves: bool = True


def moved_together(tree: Any, name: str, others: Iterable[int] = ()) -> Any:
    """Return a tree whose leaves that are ``Moving`` have moved, after one comparison of all."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, Moving) or is_container(node)
    )
    relayouts = {
        leaf: replace(leaf.relayout, keys=keys) for keys, leaf in found if isinstance(leaf, Moving)
    }
    moving = [each for leaf, each in relayouts.items() if leaf.moves]
    kept = [each for leaf, each in relayouts.items() if not leaf.moves]
    moved = dict(zip(moving, reshard_all(moving, name, others=others, kept=kept), strict=True))

    def result(leaf: Any) -> Any:
        if not isinstance(leaf, Moving):
            return leaf
        if not leaf.moves:
            return leaf.leaf
        is_padded = isinstance(leaf.leaf, PaddedArray)
        return _contained_like(leaf.leaf, moved[relayouts[leaf]], is_padded)

    return jax.tree.unflatten(structure, [result(leaf) for _, leaf in found])


def _is_a_copy(each: Relayout, is_shared: bool) -> bool:
    """Return True if every process made this array by itself, such as the count of optax.

    In a tree that no processes share, one that is not in the new mesh has arrays of its own.
    """
    array = each.array
    if jax.process_count() == 1 or not isinstance(array, jax.Array) or array.committed:
        return False
    is_whole = each.shape in (None, array.shape)
    return is_whole and (is_shared or bool(each.sharding.addressable_devices))


def _placed(each: Relayout) -> jax.Array:
    """Return an array of the copy that this process has, which shares no memory with it."""
    array, sharding = each.array, each.sharding
    with checking_agreement(False):  # the processes have compared it
        if each.target.is_padded:
            return PaddedArray.from_source(array, sharding).array
        dtype = None if sharding.addressable_devices else array.dtype
        return array_from_process_local(array, sharding, None, array.shape, dtype=dtype, copy=True)


def _data_of(leaf: Any) -> Any:
    held = held_by(leaf)
    return held if isinstance(held, jax.ShapeDtypeStruct) else array_of(leaf)


def _shaped(leaf: Any) -> jax.ShapeDtypeStruct:
    _data_of(leaf)  # raises for what is no array
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _contained_like(leaf: Any, array: jax.Array, is_padded: bool) -> Any:
    if is_padded:
        return PaddedArray(array, leaf.shape)
    return leaf._with_array(array) if is_container(leaf) else array

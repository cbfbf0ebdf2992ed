"""The module ``gda.compat``: functions of other libraries, for code that uses them.

The functions of ``jax.experimental.multihost_utils`` are as there, but for any order of devices in
the mesh, as long as the blocks of each process form a regular grid. Those of the placement guide,
which axlearn and loadax share, are in ``host_arrays``.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from gda.arrays.construction.from_process_local import BatchBuffers, array_from_process_local
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import local_array_of
from gda.arrays.transport.carrying import Relayout
from gda.layout.boundary import public, set_module
from gda.mesh import check_mesh, is_tracer, mesh_and_spec, processes_of, sharding_of
from gda.multihost.agreement import communicates, if_checked, together
from gda.trees.batches.host_arrays import (
    DataPartitionType,
    global_to_host_array,
    host_to_global_device_array,
    with_sharding_constraint,
)
from gda.trees.leaves import Tree, array_of, held_by
from gda.trees.matching import map_with_specs
from gda.trees.resharding import Moving, moved_together

__all__ = [  # noqa: RUF022
    "host_local_array_to_global_array",
    "global_array_to_host_local_array",
    "host_to_global_device_array",
    "global_to_host_array",
    "with_sharding_constraint",
    "DataPartitionType",
]


def __dir__() -> list[str]:
    return list(__all__)


_NAME = "host_local_array_to_global_array"
_TO_LOCAL = "global_array_to_host_local_array"


@set_module("gda.compat")
@communicates(_NAME, if_checked("global_mesh"))
def host_local_array_to_global_array(local_inputs: Tree, global_mesh: Mesh, pspecs: Tree) -> Tree:
    """Return a tree of ``GlobalArray``s, built from the part that each process has.

    Each leaf is built by ``GlobalArray.from_process_local``. An array that is global already, with
    parts in other processes, is returned unchanged. Communicates only to check that processes
    agree, inside ``with gda.checking_agreement()``: then all processes of the mesh must call it.

    Args:
      local_inputs: a pytree of arrays, PRNG keys and scalars.
      global_mesh: ``jax.sharding.Mesh`` over any devices in any order.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``local_inputs``.

    Raises:
      ValueError, TypeError, DoesNotFitError: as ``GlobalArray.from_process_local``, with a note of
        the leaf's path; or ``pspecs`` is no prefix, or has ``None`` for an array.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> batch = {'tokens': np.zeros((16, 5), np.int32), 'step': np.int32(3)}
    >>> specs = {'tokens': P('x'), 'step': P()}
    >>> gda.compat.host_local_array_to_global_array(batch, mesh, specs)['tokens']
    GlobalArray(shape=(16, 5), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x'))
    """

    def work(_: object) -> Any:
        return _placed(local_inputs, global_mesh, pspecs)

    return together(_NAME, global_mesh, work)


@set_module("gda.compat")
@public
def global_array_to_host_local_array(global_inputs: Tree, global_mesh: Mesh, pspecs: Tree) -> Tree:
    """Return a tree of ``jax.Array``s, each the part of a global array in this process.

    Each is the distinct blocks of this process side by side, over ``global_mesh.local_mesh``;
    nothing is copied. An array that only one process holds is returned unchanged. Those with
    another layout are first moved together, as by ``reshard_tree``. Communicates: all processes of
    the mesh must call this, and compare the tree.

    Args:
      global_inputs: a pytree of ``GlobalArray``s and ``jax.Array``s, PRNG keys too.
      global_mesh: ``jax.sharding.Mesh``.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``global_inputs``.

    Raises:
      ValueError: as ``host_local_array_to_global_array``; or the devices of this process form no
        contiguous subcube of the mesh.
      TypeError: a leaf is a ``PaddedArray`` or no array, or something is not a spec.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> batch = gda.compat.host_local_array_to_global_array({'tokens': np.arange(8)}, mesh, P('x'))
    >>> gda.compat.global_array_to_host_local_array(batch, mesh, P('x'))['tokens'].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def local(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        return local_array_of(array, global_mesh, spec) if _is_global(array) else array

    return map_with_specs(local, _moved(global_inputs, global_mesh, pspecs), pspecs, "pspecs")


@communicates(_TO_LOCAL, lambda given: [given["tree"]])
def _moved(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Return the arrays of a tree in these layouts, except those of one process alone."""
    check_mesh(mesh)  # here, so that the other processes are told of the error

    def moving(leaf: Any, spec: PartitionSpec) -> jax.Array | Moving:
        if isinstance(leaf, PaddedArray):
            raise TypeError(
                "the array is a PaddedArray, and its blocks without padding are not a jax.Array; "
                "take them from p.local_shards"
            )
        array = array_of(leaf)
        if not _is_global(array):
            return array
        relayout = Relayout(array, mesh_and_spec(mesh, spec))
        relayout.check()  # here, for an error with the path
        is_there = array.sharding.is_equivalent_to(relayout.sharding, array.ndim)
        return Moving(array, relayout, not is_there)

    found = map_with_specs(moving, tree, specs, "pspecs")
    return moved_together(found, _TO_LOCAL, processes_of(mesh).numbers)


def _is_global(leaf: Any) -> bool:
    """Return True if an array is over several processes, the same in all of them."""
    array: Any = held_by(leaf)
    if not isinstance(array, jax.Array) or is_tracer(array) or array.is_fully_addressable:
        return False
    return len(processes_of(sharding_of(array).mesh).numbers) > 1


def _placed(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Return a tree of ``GlobalArray``s over ``mesh``, built from the part of this process."""

    def placed(leaf: Any, spec: PartitionSpec) -> GlobalArray | PaddedArray:
        if _is_global(leaf):
            return leaf if isinstance(leaf, PaddedArray) else GlobalArray.from_array(leaf)
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # JAX's dtype for no gradient
            leaf = np.zeros(leaf.shape, np.bool_)
        return GlobalArray.from_array(array_from_process_local(leaf, mesh, spec, batch=batch))

    check_mesh(mesh)
    with BatchBuffers(len(jax.tree.leaves(tree))) as batch:
        return map_with_specs(placed, tree, specs, "pspecs")

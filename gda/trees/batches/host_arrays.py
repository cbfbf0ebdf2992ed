"""The functions of the placement guide: the rows of each host to global arrays, and back.

The guide is by the authors of GlobalDeviceArray; axlearn and loadax have these functions too. A
mesh is passed, or is the current one: that of ``jax.set_mesh(mesh)`` or of ``with mesh:``.
"""

from __future__ import annotations

import contextlib
import enum
from functools import partial
from types import NoneType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.buffers import aligned_empty
from gda.arrays.construction.from_process_local import BatchBuffers, array_from_process_local
from gda.arrays.dtypes import is_extended
from gda.arrays.global_array import GlobalArray
from gda.arrays.process_local import distinct_shards
from gda.layout.boundary import public, set_module
from gda.layout.process_view import infer_global_shape
from gda.layout.spec import Shape
from gda.mesh import (
    check_mesh,
    is_tracer,
    own_settings,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import checks_are_on, communicates, together
from gda.trees.jit import constrain
from gda.trees.leaves import Tree, array_of, grid_of_leaf, held_by
from gda.trees.matching import SPECS, EntryKind, map_with_specs


@set_module("gda.compat")
class DataPartitionType(enum.Enum):
    """The ways to shard the arrays of a batch over a mesh.

    ``FULL``: dimension 0 over all axes of the mesh, so that each process has some of the rows.
    ``REPLICATED``: not at all, so that every device has the whole array.
    ``BATCH``: dimension 0 over the axes ``'data'`` and ``'fsdp'``, and dimension 1, if there is
    one, over the axis ``'seq'``. Axes that the mesh does not have are omitted; it must have
    ``'data'`` or ``'fsdp'``.

    >>> import gda
    >>> gda.compat.DataPartitionType('full')
    <DataPartitionType.FULL: 'full'>
    """

    FULL = "full"
    REPLICATED = "replicated"
    BATCH = "batch"


_PARTITIONS = EntryKind(
    "partition", (DataPartitionType, PartitionSpec, NoneType), "DataPartitionType.REPLICATED"
)
_CONSTRAINTS = SPECS._replace(classes=(PartitionSpec, NamedSharding, NoneType))


def _mesh_if_checked(given: dict[str, Any]) -> Any:
    return (given["mesh"] or current_mesh()) if checks_are_on() else None


@set_module("gda.compat")
@communicates("host_to_global_device_array", _mesh_if_checked)
def host_to_global_device_array(
    host_arrays: Tree, partition: Tree = DataPartitionType.FULL, *, mesh: Mesh | None = None
) -> Tree:
    """Return a tree of ``GlobalArray``s, built from the part that each process has.

    - ``FULL``: each process passes the rows of its own devices. The global batch is the local batch
      divided by the devices of this process and multiplied by all devices.
    - ``BATCH``: each process passes its rows, with the whole of dimension 1. The global batch is
      the local batch divided by the blocks of rows of this process and multiplied by all blocks.
    - ``REPLICATED``: every process passes the whole array.
    - A spec: every process passes its part, as for ``GlobalArray.from_process_local``.

    The rows of a process are on its own devices, in their order in the mesh, whatever that order
    is. Communicates only to check that processes agree, inside
    ``with gda.checking_agreement()``.

    Args:
      host_arrays: a pytree of arrays of shape ``[local batch, ...]``; under ``REPLICATED`` and
        specs of any shape. Leaves may have batches of different sizes.
      partition: a ``DataPartitionType``, a ``PartitionSpec``, or a tree of both that is a prefix
        of ``host_arrays``.
      mesh: by default the current one.

    Raises:
      ValueError, TypeError, DoesNotFitError: as ``GlobalArray.from_process_local``, with a note of
        the leaf's path; or there is no mesh, or under ``BATCH`` it has no axis ``'data'`` or
        ``'fsdp'``; or an array has no dimensions under ``FULL`` or ``BATCH``.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'seq'))
    >>> batch, kinds = {'tokens': np.zeros((16, 6), np.int32)}, gda.compat.DataPartitionType
    >>> with jax.set_mesh(mesh):
    ...     full = gda.compat.host_to_global_device_array(batch)
    >>> full['tokens']
    GlobalArray(shape=(16, 6), dtype=int32, mesh={'data': 4, 'seq': 2}, spec=P(('data', 'seq')))
    >>> tuple(gda.compat.host_to_global_device_array(batch, kinds.BATCH, mesh=mesh)['tokens'].spec)
    ('data', 'seq')
    """
    _check_partition(partition)
    over = current_mesh() if mesh is None else mesh
    if over is None:
        raise ValueError(
            "there is no current mesh to place arrays on; pass mesh=, or write "
            "`with jax.set_mesh(mesh):` around this"
        )

    def placed(leaf: Any, part: Any) -> GlobalArray:
        layout = _layout_of(leaf, part, over)
        array = array_from_process_local(leaf, over, *layout, batch=batch)
        return GlobalArray.from_array(array)

    def work(_: object) -> Any:
        check_mesh(over)
        return map_with_specs(placed, host_arrays, partition, "partition", _PARTITIONS)

    with BatchBuffers(len(jax.tree.leaves(host_arrays))) as batch:
        return together("host_to_global_device_array", over, work)


@set_module("gda.compat")
@public
def global_to_host_array(global_arrays: Tree, partition: Tree = None) -> Tree:
    """Return a tree of new NumPy arrays: the blocks of each array in this process, each once.

    The blocks are side by side in the order of their indices, however the array is sharded. This
    is the inverse of ``host_to_global_device_array``. Needs no mesh, and never communicates.

    Args:
      global_arrays: a pytree of ``GlobalArray``s, ``PaddedArray``s and ``jax.Array``s. The result
        has no padding.
      partition: a check of the arrays, by default none. ``FULL``: this process has whole rows.
        ``REPLICATED``: it has the whole array. ``BATCH`` or a ``PartitionSpec``: the array has this
        layout. Or a tree of these that is a prefix of ``global_arrays``, with ``None`` for no
        check.

    Raises:
      ValueError: the blocks of this process do not form a regular grid, or it has none of them; an
        array does not pass the check of ``partition``. With a note of the leaf's path.
      TypeError: a leaf is not such an array, or has PRNG keys, which NumPy does not have.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.compat.host_to_global_device_array({'tokens': np.arange(16)})
    >>> gda.compat.global_to_host_array(batch)['tokens']
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
    """
    _check_partition(partition)
    return map_with_specs(_taken, global_arrays, partition, "partition", _PARTITIONS)


@set_module("gda.compat")
@communicates("reshard", lambda given: [given["x"], given["shardings"], given["mesh"]])
def with_sharding_constraint(x: Tree, shardings: Tree, *, mesh: Mesh | None = None) -> Tree:
    """Shard ``x`` as ``shardings`` says: inside ``jit`` a constraint, outside it a move.

    ``gda.constrain`` over the current mesh. If there is no mesh, or it has one device, a spec
    leaves ``x`` as it is, so that a model runs unchanged on a laptop. Outside ``jit`` the data is
    moved. If processes hold parts of an array, all of them must call this.

    Args:
      x: a pytree of arrays as ``constrain`` takes, which come back as such.
      shardings: a ``PartitionSpec``, a ``NamedSharding``, or a tree of them that is a prefix of
        ``x``; ``None`` leaves a subtree as it is.
      mesh: of the specs, by default the current one.

    Raises:
      ValueError: a spec does not fit, or ``shardings`` is no prefix. With the path of the leaf.
      TypeError: a leaf of ``x`` is not an array, or one of ``shardings`` is something else.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     y = jax.jit(lambda x: gda.compat.with_sharding_constraint(2 * x, P('x')))(np.ones(8))
    >>> y.sharding.shard_shape(y.shape), gda.compat.with_sharding_constraint(1.0, P('x'))
    ((2,), 1.0)
    """
    constrained = partial(_constrained, mesh=mesh)
    return map_with_specs(constrained, x, shardings, "shardings", _CONSTRAINTS)


def _constrained(leaf: Any, sharding: Any, mesh: Mesh | None) -> Any:
    if sharding is None:
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = jax.numpy.array(leaf)
    if isinstance(sharding, NamedSharding):
        return constrain(leaf, sharding)
    over: Any = mesh or _mesh_of_trace(leaf) or current_mesh()
    if over is None or over.size == 1:
        return leaf
    return constrain(leaf, sharding, mesh=over if isinstance(over, Mesh) else None)


# The current mesh.


def _mesh_of_trace(leaf: Any) -> Any:
    """Return the mesh that a traced array knows, perhaps an ``AbstractMesh``; None if none."""
    array = held_by(leaf)
    if not is_tracer(array):
        return None
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(array).sharding.mesh  # pyright: ignore
    return next((mesh for mesh in meshes if not mesh.empty), None)


def current_mesh() -> Mesh | None:
    """Return the mesh of ``jax.set_mesh``, or else of ``with mesh:``; None if there is none."""
    if hasattr(jax.sharding, "get_mesh"):  # not in JAX 0.8
        with contextlib.suppress(ValueError):  # in a trace it does not answer
            mesh: Any = jax.sharding.get_mesh()
            if not mesh.empty:
                return mesh
    try:
        steps = jax.make_jaxpr(_constrained_scalar)().eqns
    except RuntimeError:  # JAX: with_sharding_constraint requires a non-empty mesh in context
        return None
    # Over Explicit axes, JAX 0.8 omits a constraint that holds already.
    if steps and isinstance(mesh := steps[-1].params["sharding"].mesh, Mesh):
        return mesh
    # That of jax.set_mesh has no devices there. In a trace it is compiled, but not run. This needs
    # the mesh of the user.
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        if is_tracer(jax.numpy.zeros(())):
            return _probe.lower().compile().output_shardings.mesh
        return _probe().sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]


def _constrained_scalar() -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.numpy.zeros(()), PartitionSpec())


_probe = jax.jit(_constrained_scalar)


# Layouts by partition.


def _check_partition(partition: Any) -> None:
    for leaf in jax.tree.leaves(partition, is_leaf=_PARTITIONS.has):
        if not _PARTITIONS.has(leaf):
            raise NotImplementedError(
                f"partition has {leaf!r}; expected is a DataPartitionType (FULL, REPLICATED or "
                "BATCH), a PartitionSpec or a tree of these"
            )


def _layout_of(leaf: Any, partition: Any, mesh: Mesh) -> tuple[PartitionSpec, Shape | None]:
    """Return the spec and the global shape; ``None`` for a shape to be inferred by the spec."""
    if partition is None:
        raise NotImplementedError("partition is None; write PartitionSpec() for replicated arrays")
    shape = np.shape(leaf)
    spec = _spec_of(partition, mesh, shape)
    if partition is not DataPartitionType.BATCH:
        return spec, None
    # Only rows are divided between processes: each process passes whole sequences.
    rows, me = PartitionSpec(spec[0]), jax.process_index()
    return spec, infer_global_shape(shape, mesh.shape, rows, processes_of(mesh), me)


def _spec_of(partition: Any, mesh: Any, shape: Shape) -> PartitionSpec:
    if isinstance(partition, PartitionSpec):
        return partition
    if partition is DataPartitionType.REPLICATED:
        return PartitionSpec()
    if not shape:
        raise ValueError(
            f"the array is a scalar, and {partition} shards dimension 0, which it does not have; "
            "use DataPartitionType.REPLICATED for it, in a tree as partition"
        )
    if partition is DataPartitionType.FULL:
        return PartitionSpec(mesh.axis_names)
    # The names of the axes are those of axlearn's meshes.
    rows = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))
    if not rows:
        raise ValueError(
            "DataPartitionType.BATCH shards dimension 0 over the mesh axes 'data' and 'fsdp', and "
            f"the mesh {dict(mesh.shape)} has neither; rename one of its axes, or pass a "
            "PartitionSpec as partition"
        )
    has_sequences = "seq" in mesh.axis_names and len(shape) > 1
    return PartitionSpec(rows, "seq") if has_sequences else PartitionSpec(rows)


# Arrays to the host.


def _taken(leaf: Any, partition: Any) -> np.ndarray[Any, Any]:
    array = array_of(leaf)
    if is_extended(array.dtype):
        raise TypeError(
            f"NumPy has no {array.dtype}; take the numbers of the keys: jax.random.key_data(array)"
        )
    grid = grid_of_leaf(leaf)
    view = grid.view(jax.process_index())
    if partition is not None:
        _check_layout(leaf, view.local_shape, partition)
    value = aligned_empty(view.local_shape, array.dtype)
    with own_settings():
        blocks = distinct_shards(array, grid).values()
        for block in blocks:
            block.copy_to_host_async()
        for index, block in zip(view.indices_within(value.shape), blocks, strict=True):
            value[index] = block
    return value


def _check_layout(leaf: Any, local_shape: Shape, partition: Any) -> None:
    """Raise ``ValueError`` if this process has other blocks of an array than ``partition`` says."""
    array, sharding = array_of(leaf), sharding_of(array_of(leaf))
    spec = _spec_of(partition, sharding.mesh, leaf.shape)
    if array.is_fully_addressable:
        return
    if partition in (DataPartitionType.FULL, DataPartitionType.REPLICATED):
        is_full = partition is DataPartitionType.FULL
        if local_shape[is_full:] != leaf.shape[is_full:]:
            raise ValueError(
                f"the array has the shape {leaf.shape}, and this process has {local_shape} of it; "
                f"under {partition} it must have {'whole rows' if is_full else 'the whole'}. Omit "
                "partition= for the part of this process, or move the array first with "
                "GlobalArray.reshard"
            )
    elif not sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), array.ndim):
        raise ValueError(
            f"the array is sharded by {sharding.spec}, and partition says {spec}; pass the "
            "spec that it has, or move it there first with GlobalArray.reshard"
        )

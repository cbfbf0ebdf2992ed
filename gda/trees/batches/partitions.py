"""Batches of a training loop: from the hosts to the devices of the current mesh and back.

The current mesh is that of ``jax.set_mesh(mesh)``. axlearn has functions of the same names and
meanings.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import NoneType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import process_local_of
from gda.layout.boundary import public, set_module
from gda.layout.process_view import ProcessView, infer_global_shape
from gda.layout.spec import Shape
from gda.mesh import is_tracer, local_positions, processes_of, sharding_of
from gda.multihost.agreement import checks_are_on, communicates, together
from gda.multihost.descriptions import describe
from gda.multihost.settings import own_settings
from gda.trees.batches.host_local import place
from gda.trees.jit import constrain
from gda.trees.leaves import array_of, grid_of_leaf, held_by, path_of
from gda.trees.specs import SPECS, Kind, map_with_specs


@set_module("gda")
class DataPartitionType(enum.Enum):
    """The ways to shard the arrays of a batch over the current mesh.

    ``FULL``: dimension 0 over all axes of the mesh, so that each process has some of the rows.
    ``REPLICATED``: not at all, so that every device has the whole array.
    ``BATCH``: dimension 0 over the axes ``'data'`` and ``'fsdp'``, and dimension 1, if there is
    one, over the axis ``'seq'``. Axes that the mesh does not have are omitted; it must have
    ``'data'`` or ``'fsdp'``.

    >>> import gda
    >>> gda.DataPartitionType('full')
    <DataPartitionType.FULL: 'full'>
    """

    FULL = "full"
    REPLICATED = "replicated"
    BATCH = "batch"


# The axis names of axlearn's meshes.
_BATCH_AXES = ("data", "fsdp")
_SEQUENCE_AXES = ("seq",)
_BY_ROWS = (DataPartitionType.FULL, DataPartitionType.BATCH)

_PARTITIONS = Kind("partition", (DataPartitionType, PartitionSpec), "DataPartitionType.REPLICATED")
_PARTITIONS_OR_NONE = _PARTITIONS._replace(classes=(*_PARTITIONS.classes, NoneType))
_CONSTRAINTS = SPECS._replace(classes=(PartitionSpec, NamedSharding, NoneType))


@set_module("gda")
@public
@communicates("host_to_global_array", lambda given: _current_mesh() if checks_are_on() else None)
def host_to_global_array(host_arrays: Any, *, partition: Any = DataPartitionType.FULL) -> Any:
    """Return a tree of ``GlobalArray``s over the current mesh, built from the part of each process.

    - ``FULL``: each process passes the rows of its own devices. The global batch is the local batch
      divided by the devices of this process and multiplied by all devices. If every process has as
      many devices, this is the local batch times the number of processes.
    - ``BATCH``: each process passes its rows, with the whole of dimension 1. The global batch is
      the local batch divided by the blocks of rows of this process and multiplied by all blocks.
    - ``REPLICATED``: every process passes the whole array.
    - A spec: every process passes its part, as for ``GlobalArray.from_process_local``.

    The rows of a process are on its own devices, in their order in the mesh, whatever that order
    is. NumPy data is copied once. Communicates between processes only to check that they agree,
    inside ``with gda.check_processes_agree()``. ``host_to_global_device_array``
    is the former name of this function.

    Args:
      host_arrays: a pytree of arrays of shape ``[local batch, ...]``; under ``REPLICATED`` and
        specs of any shape. Leaves may have batches of different sizes.
      partition: a ``DataPartitionType``, a ``PartitionSpec``, or a tree of both that is a prefix
        of ``host_arrays``.

    Raises:
      ValueError: there is no current mesh, or under ``BATCH`` it has no axis ``'data'`` or
        ``'fsdp'``; the devices of this process do not divide the local batch; an array without
        dimensions under ``FULL`` or ``BATCH``. With a note of the leaf's path.
      NotImplementedError: ``partition`` is something else.
      TypeError, DoesNotFitError: as in ``GlobalArray.from_process_local``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'seq'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.host_to_global_array({'tokens': np.zeros((16, 6), np.int32)})
    >>> batch['tokens']
    GlobalArray(shape=(16, 6), dtype=int32, mesh={'data': 4, 'seq': 2}, spec=P(('data', 'seq')))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.host_to_global_array(
    ...         {'tokens': np.zeros((16, 6), np.int32), 'step': 3},
    ...         partition={'tokens': gda.DataPartitionType.BATCH,
    ...                    'step': gda.DataPartitionType.REPLICATED})
    >>> batch['tokens']
    GlobalArray(shape=(16, 6), dtype=int32, mesh={'data': 4, 'seq': 2}, spec=P('data', 'seq'))
    """
    mesh = _current_mesh()
    if mesh is None:
        raise ValueError(
            "there is no current mesh to place arrays on; call jax.set_mesh(mesh), or write "
            "`with jax.set_mesh(mesh):` around this"
        )
    _check_partition(partition)
    if partition is None:
        raise NotImplementedError(
            "partition is None; write DataPartitionType.REPLICATED, or PartitionSpec(), for "
            "replicated arrays"
        )

    layout_of = partial(_layout_of, mesh=mesh)

    def work(_: object) -> Any:
        return place(host_arrays, mesh, partition, "partition", _PARTITIONS, layout_of)

    return together("host_to_global_array", mesh, work, describe)


host_to_global_device_array = host_to_global_array


@set_module("gda")
@public
def global_to_host_array(global_arrays: Any, *, partition: Any = None) -> Any:
    """Return a tree of new NumPy arrays: the blocks of each array in this process, each once.

    The blocks are side by side in the order of their indices, without gaps, however the array is
    sharded. This is the inverse of ``host_to_global_array`` if each process passed its own blocks
    only. Needs no current mesh, and never communicates between processes.

    Args:
      global_arrays: a pytree of ``GlobalArray``s, ``PaddedArray``s and ``jax.Array``s. The result
        has no padding.
      partition: a check of the arrays. ``FULL``: this process has whole rows. ``REPLICATED``: it
        has the whole array. ``BATCH`` or a ``PartitionSpec``: the array has this layout. Or a tree
        of these that is a prefix of ``global_arrays``, with ``None`` for no check. Under ``FULL``
        and ``BATCH`` arrays of one batch size must also have the same rows in this process. It
        never changes the result.

    Raises:
      ValueError: the blocks of this process do not form a regular grid, or it has none of them; an
        array does not pass the check of ``partition``. With a note of the leaf's path.
      TypeError: a leaf is not such an array, or has PRNG keys, which NumPy does not have.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.host_to_global_array({'tokens': np.arange(16)})
    >>> gda.global_to_host_array(batch)['tokens']
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
    """
    _check_partition(partition)
    numbers = itertools.count()
    first_rows: dict[int, tuple[int, Sequence[slice]]] = {}  # by batch size, with the leaf

    def taken(leaf: Any, part: Any) -> np.ndarray[Any, Any]:
        number, array = next(numbers), array_of(leaf)
        _check_layout(leaf, array, part)
        if part in _BY_ROWS:
            is_here = array.is_fully_addressable
            rows = (slice(0, leaf.shape[0]),) if is_here else _view_of(leaf).rows
            first, expected = first_rows.setdefault(leaf.shape[0], (number, rows))
            if rows != expected:
                raise _other_rows_error(rows, expected, path_of(global_arrays, first))
        return process_local_of(array, leaf.grid if isinstance(leaf, PaddedArray) else None)

    return map_with_specs(taken, global_arrays, partition, "partition", _PARTITIONS_OR_NONE)


@set_module("gda")
@public
@communicates("reshard", lambda given: [given["x"], given["shardings"]])
def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Shard ``x`` as ``shardings`` says: inside ``jit`` a constraint, outside it a move.

    ``gda.constrain`` over the current mesh. If there is no current mesh, or it has one device, a
    spec leaves ``x`` as it is, so that a model runs unchanged on a laptop. Outside ``jit`` JAX
    moves the data. If processes hold parts of an array, all of them must call this.

    Args:
      x: a pytree of arrays as ``constrain`` takes, which come back as such.
      shardings: a ``PartitionSpec`` over the current mesh, a ``NamedSharding``, or a tree of them
        that is a prefix of ``x``; ``None`` leaves a subtree as it is.

    Raises:
      ValueError: a spec does not fit, or ``shardings`` is no prefix. With the path of the leaf.
      TypeError: a leaf of ``x`` is not an array, or one of ``shardings`` is something else.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     y = jax.jit(lambda x: gda.with_sharding_constraint(2 * x, P('x')))(np.ones(8))
    >>> y.sharding.shard_shape(y.shape), gda.with_sharding_constraint(1.0, P('x'))
    ((2,), 1.0)
    """
    # The current mesh is looked for when it is first needed.
    constrained = partial(_constrained, current=cache(_current_mesh))
    return map_with_specs(constrained, x, shardings, "shardings", _CONSTRAINTS)


def _constrained(leaf: Any, sharding: Any, current: Callable[[], Mesh | None]) -> Any:
    if sharding is None:
        return leaf
    is_placed = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
    else:
        mesh, spec = _mesh_for(leaf, current), sharding
    if mesh is None or (mesh.size == 1 and not is_placed):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = jax.numpy.array(leaf)
    if is_placed:
        return constrain(leaf, sharding)
    return constrain(leaf, spec, mesh=mesh if isinstance(mesh, Mesh) else None)


# The current mesh.


def _mesh_for(leaf: Any, current: Callable[[], Mesh | None]) -> Any:
    """Return the current mesh, inside ``jit`` perhaps an ``AbstractMesh``; ``None`` if none."""
    array = held_by(leaf)
    if is_tracer(array):
        meshes = jax.sharding.get_abstract_mesh(), jax.typeof(array).sharding.mesh  # pyright: ignore
        for mesh in meshes:
            if not mesh.empty:
                return mesh
    return current()


def _current_mesh() -> Mesh | None:
    """Return the mesh of ``jax.set_mesh``, or else of ``with mesh:``; ``None`` if there is none."""
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
    # That of jax.set_mesh has no devices there. In a trace it is compiled, but not run.
    with own_settings():
        if is_tracer(jax.numpy.zeros(())):
            return _probe.lower().compile().output_shardings.mesh
        return _probe().sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]


def _constrained_scalar() -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.numpy.zeros(()), PartitionSpec())


_probe = jax.jit(_constrained_scalar)


# Partitions.


def _check_partition(partition: Any) -> None:
    for leaf in jax.tree.leaves(partition, is_leaf=_PARTITIONS_OR_NONE.has):
        if not _PARTITIONS_OR_NONE.has(leaf):
            raise NotImplementedError(
                f"partition has {leaf!r}; expected is a DataPartitionType (FULL, REPLICATED or "
                "BATCH), a PartitionSpec or a tree of these"
            )


def _layout_of(
    leaf: Any, partition: DataPartitionType | PartitionSpec, mesh: Mesh
) -> tuple[PartitionSpec, Shape | None]:
    """Return the spec and the global shape of local data; ``None`` for a shape to be inferred."""
    shape = np.shape(leaf)
    if isinstance(partition, PartitionSpec):
        return partition, None
    if partition is DataPartitionType.REPLICATED:
        return PartitionSpec(), None
    if not shape:
        raise _scalar_error(partition)
    if partition is DataPartitionType.FULL:
        _check_rows(shape, mesh)
        return PartitionSpec(mesh.axis_names), None
    spec = _batch_spec(mesh, len(shape))
    # Only rows are divided between processes: each process passes whole sequences.
    rows, me = PartitionSpec(spec[0]), jax.process_index()
    return spec, infer_global_shape(shape, mesh.shape, rows, processes_of(mesh), me)


def _batch_spec(mesh: Any, ndim: int) -> PartitionSpec:
    rows, sequence = (
        tuple(axis for axis in mesh.axis_names if axis in names)
        for names in (_BATCH_AXES, _SEQUENCE_AXES)
    )
    if not rows:
        raise ValueError(
            "DataPartitionType.BATCH shards dimension 0 over the mesh axes 'data' and 'fsdp', and "
            f"the mesh {dict(mesh.shape)} has neither; rename one of its axes, or pass a "
            "PartitionSpec as partition"
        )
    return PartitionSpec(rows, sequence) if sequence and ndim > 1 else PartitionSpec(rows)


def _check_rows(shape: Shape, mesh: Mesh) -> None:
    devices = len(local_positions(mesh))
    if devices and shape[0] % devices:
        below = shape[0] // devices * devices
        nearest = f"{below} or {below + devices}" if below else f"{devices}"
        raise ValueError(
            f"the array has a local batch of {shape[0]} rows, and this process has {devices} "
            f"devices of the mesh {dict(mesh.shape)}, which do not divide it; pass "
            f"{nearest} rows"
        )


def _scalar_error(partition: object) -> ValueError:
    return ValueError(
        f"the array is a scalar, and {partition} shards dimension 0, which it does not have; use "
        "DataPartitionType.REPLICATED for it, in a tree as partition"
    )


# The part of an array that this process has.


def _check_layout(
    leaf: Any, array: jax.Array, partition: DataPartitionType | PartitionSpec | None
) -> None:
    """Raise ``ValueError`` if this process has other blocks of an array than ``partition`` says."""
    if partition in _BY_ROWS and not array.ndim:
        raise _scalar_error(partition)
    if partition is None or array.is_fully_addressable:
        return
    sharding: Any = sharding_of(array)
    if partition is DataPartitionType.FULL:
        if (local := _view_of(leaf).local_shape)[1:] != leaf.shape[1:]:
            raise ValueError(
                f"the array has the shape {leaf.shape}, and this process has only parts of its "
                f"rows, {local} in all; omit partition= for those parts, or shard the array "
                "along dimension 0 with GlobalArray.reshard"
            )
    elif partition is DataPartitionType.REPLICATED:
        if (local := _view_of(leaf).local_shape) != leaf.shape:
            raise ValueError(
                f"the array has the shape {leaf.shape}, and this process has {local} of it; with "
                "DataPartitionType.REPLICATED it must have the whole. Omit partition= for the part "
                "of this process, or use GlobalArray.gather for the whole"
            )
    else:
        spec: Any = partition
        if partition is DataPartitionType.BATCH:
            spec = _batch_spec(sharding.mesh, array.ndim)
        if not sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), array.ndim):
            raise ValueError(
                f"the array is sharded by {sharding.spec}, and partition says {spec}; pass the "
                "spec that it has, or move it there first with GlobalArray.reshard"
            )


def _other_rows_error(rows: Sequence[slice], expected: Sequence[slice], path: str) -> ValueError:
    return ValueError(
        f"this process has the rows {_rows_text(expected)} of the array at {path}, and the rows "
        f"{_rows_text(rows)} of this one; shard dimension 0 of both over the same mesh axes, for "
        "instance with GlobalArray.reshard, or omit partition="
    )


def _view_of(leaf: Any) -> ProcessView:
    return grid_of_leaf(leaf).view(jax.process_index())


def _rows_text(rows: Sequence[slice]) -> str:
    return " and ".join(f"{r.start}:{r.stop}" for r in rows[:8]) + " ..." * (len(rows) > 8)

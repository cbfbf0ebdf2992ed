"""The names of ``jax.experimental.multihost_utils`` and axlearn, for code that uses them.

``host_local_array_to_global_array`` and ``global_array_to_host_local_array`` are as in
``multihost_utils``, but for any order of devices in the mesh, as long as the blocks of each process
form a regular grid. The others are as in axlearn, over the mesh of ``jax.set_mesh(mesh)``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from functools import cache, partial
from types import NoneType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.construction.from_process_local import BatchBuffers, array_from_process_local
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.arrays.process_local import local_array_of, process_local_of
from gda.arrays.transport.moving import reshard
from gda.layout.boundary import public, set_module
from gda.layout.process_view import infer_global_shape
from gda.layout.spec import Shape
from gda.mesh import check_mesh, is_tracer, processes_of, sharding_of
from gda.multihost.agreement import (
    checks_are_on,
    communicates,
    if_checked,
    together,
)
from gda.multihost.descriptions import describe
from gda.multihost.settings import own_settings
from gda.trees.jit import constrain
from gda.trees.leaves import array_of, grid_of_leaf, held_by, is_container
from gda.trees.matching import SPECS, EntryKind, map_with_specs
from gda.trees.replicas import check_replicas_agree

__all__ = [  # noqa: RUF022
    "host_local_array_to_global_array",
    "global_array_to_host_local_array",
    "host_to_global_array",
    "host_to_global_device_array",
    "global_to_host_array",
    "with_sharding_constraint",
    "DataPartitionType",
]


def __dir__() -> list[str]:
    return list(__all__)


# Of jax.experimental.multihost_utils.

_NAME = "host_local_array_to_global_array"


@set_module("gda.compat")
@public
@communicates(_NAME, if_checked("global_mesh", "check_replicas"))
def host_local_array_to_global_array(
    local_inputs: Any, global_mesh: Mesh, pspecs: Any, *, check_replicas: bool = False
) -> Any:
    """Return a tree of ``GlobalArray``s, built from the part that each process has.

    Each leaf is built by ``GlobalArray.from_process_local``. An array that is global already, with
    parts in other processes, is returned unchanged, whatever its mesh and spec.

    Communicates between processes only to check that they agree, with ``check_replicas`` or
    inside ``with gda.check_processes_agree()``: then all processes of the mesh must call it. Call
    it outside ``jit``.

    Args:
      local_inputs: a pytree of arrays, PRNG keys and scalars.
      global_mesh: ``jax.sharding.Mesh`` over any devices in any order.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``local_inputs``.
      check_replicas: compare the blocks that several processes hold, as ``check_replicas_agree``.

    Raises:
      ValueError, TypeError, DoesNotFitError: as ``GlobalArray.from_process_local``, with a note of
        the leaf's path; or ``pspecs`` is no prefix, or has ``None`` for an array.
      ReplicaMismatchError, LateProcessError: with ``check_replicas``, as ``check_replicas_agree``.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> batch = {'tokens': np.zeros((16, 5), np.int32), 'step': np.int32(3)}
    >>> specs = {'tokens': P('x'), 'step': P()}
    >>> gda.compat.host_local_array_to_global_array(batch, mesh, specs)['tokens']
    GlobalArray(shape=(16, 5), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x'))
    """

    def layout_of(leaf: Any, spec: PartitionSpec) -> _Layout | None:
        return None if _is_global(leaf) else (spec, None)

    def work(_: object) -> Any:
        return _placed(local_inputs, global_mesh, pspecs, "pspecs", SPECS, layout_of)

    result = together(_NAME, global_mesh, work, describe, always=check_replicas)
    if check_replicas:
        given, structure = jax.tree.flatten(local_inputs, is_leaf=is_container)
        leaves = zip(given, structure.flatten_up_to(result), strict=True)
        built = [None if _is_global(leaf) else array for leaf, array in leaves]
        check_replicas_agree(jax.tree.unflatten(structure, built))
    return result


@set_module("gda.compat")
@public
def global_array_to_host_local_array(global_inputs: Any, global_mesh: Mesh, pspecs: Any) -> Any:
    """Return a tree of ``jax.Array``s, each the part of a global array in this process.

    Each is the distinct blocks of this process side by side, on their devices, over
    ``global_mesh.local_mesh``; nothing is copied. If the devices of this process do not form a
    subcube of the mesh, it is over a mesh of them with an axis ``'dim0'`` for dimension 0 if it is
    sharded, and so on, and an axis ``'replica'``. An array that only this process holds is returned
    unchanged.

    An array with another layout than ``pspecs`` is first moved by ``GlobalArray.reshard``, which
    communicates: then all processes of the mesh must call this.

    Args:
      global_inputs: a pytree of ``GlobalArray``s and ``jax.Array``s, PRNG keys too.
      global_mesh: ``jax.sharding.Mesh`` over any devices in any order.
      pspecs: a ``PartitionSpec``, or a tree of them that is a prefix of ``global_inputs``.

    Raises:
      ValueError: as ``host_local_array_to_global_array``.
      TypeError: a leaf is a ``PaddedArray`` or no array, or something is not a spec.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> batch = gda.compat.host_local_array_to_global_array({'tokens': np.arange(8)}, mesh, P('x'))
    >>> gda.compat.global_array_to_host_local_array(batch, mesh, P('x'))['tokens'].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def local(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        return array if array.is_fully_addressable else local_array_of(array, global_mesh, spec)

    arrays = _moved(global_inputs, global_mesh, pspecs)
    return map_with_specs(local, arrays, pspecs, "pspecs")


@communicates("reshard", lambda given: [given["tree"]])
def _moved(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Return the arrays of a tree in these layouts, except those of this process alone."""
    check_mesh(mesh)  # here, so that the other processes hear of the error

    def moved(leaf: Any, spec: PartitionSpec) -> jax.Array:
        if isinstance(leaf, PaddedArray):
            raise TypeError(
                "the array is a PaddedArray, and its blocks without padding are not a jax.Array; "
                "take them from p.local_shards, or side by side as NumPy from "
                "gda.compat.global_to_host_array"
            )
        array = array_of(leaf)
        wanted = NamedSharding(mesh, spec)
        if array.is_fully_addressable or array.sharding.is_equivalent_to(wanted, array.ndim):
            return array
        return reshard(array, mesh, spec)

    return map_with_specs(moved, tree, specs, "pspecs")


def _is_global(leaf: Any) -> bool:
    """Return True if an array is over other processes too."""
    array = held_by(leaf)
    return isinstance(array, jax.Array) and not is_tracer(array) and not array.is_fully_addressable


# Of axlearn.


class DataPartitionType(enum.Enum):
    """The ways to shard the arrays of a batch over the current mesh.

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


# The axis names of axlearn's meshes.
_BATCH_AXES = ("data", "fsdp")
_SEQUENCE_AXES = ("seq",)

_PARTITIONS = EntryKind(
    "partition", (DataPartitionType, PartitionSpec), "DataPartitionType.REPLICATED"
)
_PARTITIONS_OR_NONE = _PARTITIONS._replace(classes=(*_PARTITIONS.classes, NoneType))
_CONSTRAINTS = SPECS._replace(classes=(PartitionSpec, NamedSharding, NoneType))


@set_module("gda.compat")
@public
@communicates("host_to_global_array", lambda given: _current_mesh() if checks_are_on() else None)
def host_to_global_array(host_arrays: Any, *, partition: Any = DataPartitionType.FULL) -> Any:
    """Return a tree of ``GlobalArray``s over the current mesh, built from the part of each process.

    - ``FULL``: each process passes the rows of its own devices. The global batch is the local batch
      divided by the devices of this process and multiplied by all devices.
    - ``BATCH``: each process passes its rows, with the whole of dimension 1. The global batch is
      the local batch divided by the blocks of rows of this process and multiplied by all blocks.
    - ``REPLICATED``: every process passes the whole array.
    - A spec: every process passes its part, as for ``GlobalArray.from_process_local``.

    The rows of a process are on its own devices, in their order in the mesh, whatever that order
    is. NumPy data is copied once. Communicates between processes only to check that they agree,
    inside ``with gda.check_processes_agree()``. ``host_to_global_device_array`` is the former name
    of this function.

    Args:
      host_arrays: a pytree of arrays of shape ``[local batch, ...]``; under ``REPLICATED`` and
        specs of any shape. Leaves may have batches of different sizes.
      partition: a ``DataPartitionType``, a ``PartitionSpec``, or a tree of both that is a prefix
        of ``host_arrays``.

    Raises:
      ValueError, TypeError, DoesNotFitError: as ``GlobalArray.from_process_local``, with a note of
        the leaf's path; or there is no current mesh, or under ``BATCH`` it has no axis ``'data'``
        or ``'fsdp'``; or an array has no dimensions under ``FULL`` or ``BATCH``.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'seq'))
    >>> batch, kinds = {'tokens': np.zeros((16, 6), np.int32)}, gda.compat.DataPartitionType
    >>> with jax.set_mesh(mesh):
    ...     full = gda.compat.host_to_global_array(batch)
    ...     by_axes = gda.compat.host_to_global_array(batch, partition=kinds.BATCH)
    >>> full['tokens']
    GlobalArray(shape=(16, 6), dtype=int32, mesh={'data': 4, 'seq': 2}, spec=P(('data', 'seq')))
    >>> by_axes['tokens']
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
        raise NotImplementedError("partition is None; write PartitionSpec() for replicated arrays")
    layout_of = partial(_layout_of, mesh=mesh)

    def work(_: object) -> Any:
        return _placed(host_arrays, mesh, partition, "partition", _PARTITIONS, layout_of)

    return together("host_to_global_array", mesh, work, describe)


host_to_global_device_array = host_to_global_array


@set_module("gda.compat")
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
        of these that is a prefix of ``global_arrays``, with ``None`` for no check. It never changes
        the result.

    Raises:
      ValueError: the blocks of this process do not form a regular grid, or it has none of them; an
        array does not pass the check of ``partition``. With a note of the leaf's path.
      TypeError: a leaf is not such an array, or has PRNG keys, which NumPy does not have.
      NotImplementedError: ``partition`` is something else.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with jax.set_mesh(mesh):
    ...     batch = gda.compat.host_to_global_array({'tokens': np.arange(16)})
    >>> gda.compat.global_to_host_array(batch)['tokens']
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15], dtype=int32)
    """
    _check_partition(partition)

    def taken(leaf: Any, part: Any) -> np.ndarray[Any, Any]:
        array = array_of(leaf)
        _check_layout(leaf, array, part)
        return process_local_of(array, leaf.grid if isinstance(leaf, PaddedArray) else None)

    return map_with_specs(taken, global_arrays, partition, "partition", _PARTITIONS_OR_NONE)


@set_module("gda.compat")
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
    ...     y = jax.jit(lambda x: gda.compat.with_sharding_constraint(2 * x, P('x')))(np.ones(8))
    >>> y.sharding.shard_shape(y.shape), gda.compat.with_sharding_constraint(1.0, P('x'))
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


# Local data to arrays.

_Layout = tuple[PartitionSpec, Shape | None]  # None for a shape to be inferred


def _placed(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    name: str,
    kind: EntryKind,
    layout_of: Callable[[Any, Any], _Layout | None],
) -> Any:
    """Return a tree of ``GlobalArray``s over ``mesh``, built from the part of this process.

    A leaf stays as it is if ``layout_of`` the leaf and its entry of ``specs`` is ``None``.
    """

    def placed(leaf: Any, entry: Any) -> GlobalArray | PaddedArray:
        if (layout := layout_of(leaf, entry)) is None:
            return leaf if isinstance(leaf, PaddedArray) else GlobalArray.from_array(leaf)
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # JAX's dtype for no gradient
            leaf = np.zeros(leaf.shape, np.bool_)
        return GlobalArray(array=array_from_process_local(leaf, mesh, *layout, batch=batch))

    check_mesh(mesh)
    with BatchBuffers(len(jax.tree.leaves(tree))) as batch:
        return map_with_specs(placed, tree, specs, name, kind)


def _check_partition(partition: Any) -> None:
    for leaf in jax.tree.leaves(partition, is_leaf=_PARTITIONS_OR_NONE.has):
        if not _PARTITIONS_OR_NONE.has(leaf):
            raise NotImplementedError(
                f"partition has {leaf!r}; expected is a DataPartitionType (FULL, REPLICATED or "
                "BATCH), a PartitionSpec or a tree of these"
            )


def _layout_of(leaf: Any, partition: DataPartitionType | PartitionSpec, mesh: Mesh) -> _Layout:
    shape = np.shape(leaf)
    if isinstance(partition, PartitionSpec):
        return partition, None
    if partition is DataPartitionType.REPLICATED:
        return PartitionSpec(), None
    _check_has_rows(shape, partition)
    if partition is DataPartitionType.FULL:
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


def _check_has_rows(shape: Shape, partition: DataPartitionType) -> None:
    if not shape:
        raise ValueError(
            f"the array is a scalar, and {partition} shards dimension 0, which it does not have; "
            "use DataPartitionType.REPLICATED for it, in a tree as partition"
        )


def _check_layout(leaf: Any, array: jax.Array, partition: Any) -> None:
    """Raise ``ValueError`` if this process has other blocks of an array than ``partition`` says."""
    if partition in (DataPartitionType.FULL, DataPartitionType.BATCH):
        _check_has_rows(array.shape, partition)
    if partition is None or array.is_fully_addressable:
        return
    if partition in (DataPartitionType.FULL, DataPartitionType.REPLICATED):
        local = grid_of_leaf(leaf).view(jax.process_index()).local_shape
        is_full = partition is DataPartitionType.FULL
        if local[is_full:] != leaf.shape[is_full:]:
            raise ValueError(
                f"the array has the shape {leaf.shape}, and this process has {local} of it; under "
                f"{partition} it must have {'whole rows' if is_full else 'the whole'}. Omit "
                "partition= for the part of this process, or move the array first with "
                "GlobalArray.reshard"
            )
        return
    sharding: Any = sharding_of(array)
    is_batch = partition is DataPartitionType.BATCH
    spec = _batch_spec(sharding.mesh, array.ndim) if is_batch else partition
    if not sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), array.ndim):
        raise ValueError(
            f"the array is sharded by {sharding.spec}, and partition says {spec}; pass the "
            "spec that it has, or move it there first with GlobalArray.reshard"
        )

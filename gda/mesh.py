"""A real mesh or sharding: its devices, positions, processes and grid.

The functions of GlobalDeviceArray come first. An array on one device has no mesh; it gets one of
that device. In a trace, JAX knows the sharding of an array over Explicit axes alone. Last come the
settings of JAX under which gda computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from gda.layout.boundary import public, set_module
from gda.layout.grid import ShardGrid
from gda.layout.process_view import ProcessView
from gda.layout.processes import Processes
from gda.layout.spec import (
    Index,
    Shape,
    SpecLike,
    check_spec,
    format_spec,
    partitions_of,
    reductions_of,
)
from gda.layout.text import join_some

MeshLike = Mesh | NamedSharding | SingleDeviceSharding  # a sharding brings its own spec


MESHES = (Mesh, AbstractMesh)  # a traced array with Explicit axes knows only an abstract mesh


class Device(Protocol):
    """A ``jax.Device``, which JAX exports in a way that type checkers do not take for a type."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    def default_memory(self) -> Any: ...


@set_module("gda")
@public
def get_shard_shape(
    global_shape: Iterable[int], mesh: MeshLike, spec: SpecLike | None = None
) -> Shape:
    """Return the shape of the block that each device holds.

    ``mesh`` is a ``jax.sharding.Mesh`` with Auto or Explicit axes over any devices in any order. A
    ``NamedSharding`` may replace mesh and spec. Raises the errors of ``ShardGrid``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> gda.get_shard_shape((8, 2), mesh, ['x', 'y'])
    (2, 1)
    """
    return mesh_grid(global_shape, mesh, spec).shard_shape


@set_module("gda")
@public
def get_shard_indices(
    global_shape: Iterable[int], mesh: MeshLike, spec: SpecLike | None = None
) -> dict[Device, Index]:
    """Return the index of every device of the mesh, in device order; see ``get_shard_shape``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> gda.get_shard_indices((8, 2), mesh, ['x'])[mesh.devices[3, 1]]
    (slice(6, 8, None), slice(None, None, None))
    """
    over = mesh_and_spec(mesh, spec)
    grid = ShardGrid(global_shape, over.mesh.shape, over.spec)
    return dict(zip(devices_of(over.mesh), grid.indices(), strict=True))


@set_module("gda")
@public
def get_shard_indices_replica_ids(
    global_shape: Iterable[int], mesh: MeshLike, spec: SpecLike | None = None
) -> dict[Device, tuple[Index, int]]:
    """Return index and replica id of every device, in device order; see ``get_shard_shape``.

    Replica ids number the devices that hold the same block, from 0, in device order.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> [r for _, r in gda.get_shard_indices_replica_ids((8, 2), mesh, [None, 'y']).values()]
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    over = mesh_and_spec(mesh, spec)
    grid = ShardGrid(global_shape, over.mesh.shape, over.spec)
    both = zip(grid.indices(), grid.replica_ids.tolist(), strict=True)
    return dict(zip(devices_of(over.mesh), both, strict=True))


@set_module("gda")
@public
def local_rows(mesh: MeshLike, spec: SpecLike | None, size: int) -> slice:
    """Return the rows of a global batch that the data loader of this process reads.

    Processes whose devices hold the same rows, because a model takes more than one of them, read
    the same rows. Does not communicate.

    Args:
      mesh: ``jax.sharding.Mesh``; or a ``NamedSharding``, and ``None`` for the spec.
      spec: the spec of the batch. Its entries after the first do not matter.
      size: the rows of the global batch, the same in all processes.

    Returns:
      one slice, of rows for ``prefetch`` and ``GlobalArray.from_process_local``. It is empty if the
      process has no device of the mesh. ``ValueError`` if its rows are not contiguous.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('data', 'model'))
    >>> gda.local_rows(mesh, P('data'), 64)  # all of them in a program of one process
    slice(0, 64, None)
    """
    over = mesh_and_spec(mesh, spec)
    shape = (size, *[0] * (len(partitions_of(over.spec)) - 1))  # 0 fits any spec
    grid = ShardGrid(shape, over.mesh.shape, over.spec, process_of=processes_of(over.mesh))
    rows = grid.view(jax.process_index()).rows
    if len(rows) > 1:
        shown = join_some([f"{each.start}:{each.stop}" for each in rows])
        raise ValueError(
            f"process {jax.process_index()} reads the rows {shown} of {size}, sharded by "
            f"{format_spec(grid.spec)} on the mesh {dict(grid.mesh_shape)}, and a data loader "
            "reads contiguous ones; place the devices of each process side by side in the mesh, "
            "or give the loader the slices of gda.ShardGrid(..., process_of=...).view(process).rows"
        )
    return rows[0] if rows else slice(0, 0)


def mesh_grid(
    global_shape: Iterable[int],
    mesh: MeshLike | AbstractMesh,
    spec: SpecLike | None = None,
    pad: bool = False,
) -> ShardGrid:
    over = mesh_and_spec(mesh, spec, MESHES)
    return ShardGrid(global_shape, over.mesh.shape, over.spec, pad=pad)


class MeshAndSpec(NamedTuple):
    """The mesh and spec of an array, and the kind of memory that holds it."""

    mesh: Any  # a Mesh, or an AbstractMesh where those are allowed
    spec: SpecLike
    memory_kind: str | None  # that of a sharding; None if a mesh and a spec were given


def mesh_and_spec(
    mesh: MeshLike | AbstractMesh, spec: SpecLike | None, kinds: tuple[type, ...] = (Mesh,)
) -> MeshAndSpec:
    """Return the given mesh, of the classes ``kinds``, and spec, or those of a sharding."""
    if isinstance(mesh, kinds):
        if spec is None:
            raise TypeError(
                "a mesh was given without a spec; write P() for a replicated array, or give a "
                "NamedSharding in place of both"
            )
        return MeshAndSpec(mesh, spec, None)
    if isinstance(mesh, NamedSharding):
        found = MeshAndSpec(mesh.mesh, mesh.spec, mesh.memory_kind)
    elif isinstance(mesh, SingleDeviceSharding):
        (device,) = mesh.device_set
        found = MeshAndSpec(mesh_on(device), PartitionSpec(), mesh.memory_kind)
    else:
        raise _no_mesh_error(mesh, ", or a NamedSharding in place of mesh and spec")
    if spec is not None:
        raise TypeError(
            f"the spec {spec!r} was given with {mesh!r}, which has its own; give the sharding "
            "alone, or a mesh and a spec"
        )
    check_mesh(found.mesh, kinds)
    return found


def skip_spec_if_sharding(mesh: object, spec: Any, following: Any) -> tuple[Any, Any]:
    """Return the spec and the argument after it, moved up if a sharding replaces the spec."""
    # In this order: to ask for the class of a sharding takes JAX three times as long.
    if following is None and not isinstance(spec, PartitionSpec) and isinstance(mesh, Sharding):
        return None, spec
    return spec, following


def check_mesh(mesh: object, kinds: tuple[type, ...] = (Mesh,)) -> None:
    if not isinstance(mesh, kinds):
        raise _no_mesh_error(mesh)


def _no_mesh_error(mesh: object, otherwise: str = "") -> TypeError:
    return TypeError(
        f"mesh must be a jax.sharding.Mesh{otherwise}, not {mesh!r:.80}; without devices use "
        "gda.ShardGrid"
    )


@cache
def mesh_on(device: Device) -> Mesh:
    return Mesh(np.array([device]), ("device",))


def mesh_of_all(devices: Iterable[Device]) -> Mesh | None:
    """Return a mesh of devices in the order of platforms and ids; ``None`` without devices."""
    in_order = sorted(set(devices), key=lambda device: (device.platform, device.id))
    return Mesh(np.array(in_order), ("device",)) if in_order else None


# Walking over all devices of a mesh costs O(mesh), so it is done once per mesh.


@lru_cache(maxsize=64)
def devices_of(mesh: Mesh) -> tuple[Device, ...]:
    check_mesh(mesh)
    return tuple(mesh.devices.flat)


@lru_cache(maxsize=64)
def local_positions(mesh: Mesh) -> dict[Device, int]:
    """Return the flat positions of this process's devices, in device order."""
    local = set(mesh.local_devices)
    return {device: i for i, device in enumerate(devices_of(mesh)) if device in local}


@lru_cache(maxsize=64)
def processes_of(mesh: Mesh) -> Processes:
    return Processes([device.process_index for device in devices_of(mesh)])


@lru_cache(maxsize=1024)
def grid_of(
    global_shape: Shape, mesh: Mesh | AbstractMesh, spec: SpecLike, pad: bool = False
) -> ShardGrid:
    """Return the grid of an array, with the processes of its devices if the mesh has devices."""
    processes = processes_of(mesh) if isinstance(mesh, Mesh) else None
    return ShardGrid(global_shape, mesh.shape, spec, pad=pad, process_of=processes)


@lru_cache(maxsize=256)
def view_of(global_shape: Shape, mesh: Mesh, spec: SpecLike) -> ProcessView:
    return grid_of(global_shape, mesh, spec).view(jax.process_index())


# The sharding of a new array, and of an existing one.


@set_module("gda")
class LayoutUnknownError(TypeError, AttributeError):
    """The array has no mesh and spec, so the attributes for them are missing.

    Its causes are a trace over Auto axes, ``jax.shard_map``, a sharding without mesh and spec, and
    a container of something that is no array. It is an ``AttributeError`` too, for ``hasattr``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> g = gda.GlobalArray.from_source(np.arange(8.0), mesh, ('x',), dtype='float32')
    >>> jax.jit(lambda g: g * 2 if hasattr(g, 'spec') else g * 3)(g).tolist()[:3]
    [0.0, 3.0, 6.0]
    """


def not_an_array_error(content: object) -> LayoutUnknownError:
    """Return the error of a container that holds no ``jax.Array``, with the cause."""
    return LayoutUnknownError(
        f"this GlobalArray holds a {type(content).__name__} and no jax.Array, because a tree "
        "function such as jax.device_get or jax.tree.map put its result into the container. For "
        "NumPy arrays use gda.to_numpy(tree). For any other result call jax.tree.map(function, "
        "tree, is_leaf=lambda x: isinstance(x, gda.GlobalArray))"
    )


def named_sharding(
    global_shape: Shape, mesh: Mesh | AbstractMesh, spec: SpecLike, memory_kind: str | None = None
) -> NamedSharding:
    """Return the sharding, its spec cut to the rank: in places JAX refuses surplus entries."""
    spec = checked_partition_spec(spec, global_shape, mesh.shape)
    return NamedSharding(mesh, spec, memory_kind=memory_kind)  # pyright: ignore


def checked_partition_spec(
    spec: SpecLike, shape: Shape, mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Return the ``PartitionSpec`` of the entries of ``check_spec``, with its reduced axes."""
    return PartitionSpec(*check_spec(spec, shape, mesh_shape), **reductions_of(spec))


def memory_kind_of(sharding: Any) -> str | None:
    """Return the kind of memory of a sharding; None for the default of its devices."""
    kind = sharding.memory_kind
    if kind is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return kind
    # Of devices that libtpu only describes, those of other hosts have no default_memory().
    device = next(iter(sharding.addressable_devices or sharding.device_set))
    return None if kind == device.default_memory().kind else kind


def is_tracer(array: object) -> bool:
    return isinstance(array, Tracer)


def sharding_of(array: Any) -> NamedSharding:
    """Return the sharding of the array in a container, or raise ``LayoutUnknownError``."""
    if is_tracer(array):
        return _sharding_in_trace(array)
    if not hasattr(array, "sharding"):
        raise not_an_array_error(array)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, SingleDeviceSharding):
        return _on_one_device(sharding)
    raise LayoutUnknownError(
        f"this {type(array).__name__} has the sharding {sharding!r}, which names no mesh and spec; "
        "give it one with jax.device_put(array, NamedSharding(mesh, spec))"
    )


def grid_of_array(array: jax.Array) -> ShardGrid:
    sharding: Any = sharding_of(array)
    return grid_of(array.shape, sharding.mesh, sharding.spec)


def _sharding_in_trace(array: Any) -> NamedSharding:
    sharding: Any = jax.typeof(array).sharding
    mesh = sharding.mesh
    if AxisType.Manual in mesh.axis_types:
        raise LayoutUnknownError(
            "inside jax.shard_map an array is the block of one device, without a mesh or spec; "
            "read them outside"
        )
    if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
        kinds = sorted({kind.name for kind in mesh.axis_types}) or ["no mesh"]
        raise LayoutUnknownError(
            "mesh, spec and shards of this GlobalArray are not known while it is being traced over "
            f"{' and '.join(kinds)} axes. Read them outside and pass them in, make the mesh with "
            "Explicit axes, or set a layout with gda.constrain"
        )
    return sharding


@cache
def _on_one_device(sharding: SingleDeviceSharding) -> NamedSharding:
    mesh, spec, kind = mesh_and_spec(sharding, None)
    return NamedSharding(mesh, spec, memory_kind=kind)  # pyright: ignore[reportArgumentType]


def is_on_host(memory_kind: str | None) -> bool:
    """Return True for the memory of a host; None is the default memory of the devices."""
    return memory_kind is not None and memory_kind.endswith("host")


# The settings of JAX under which gda computes.


def own_settings() -> AbstractContextManager[object]:
    """Return a context that overrides the user's settings in this thread, for gda's computations.

    The user asked for these transfers, and NaNs in the user's arrays are no faults of gda's
    programs. Under the user's mesh JAX refuses arrays on other devices.
    """
    config: Any = jax.config
    # Setting them takes ten times as long as this check, which counts in a tree of small arrays.
    if not (
        config.jax_transfer_guard_host_to_device in _NOT_GUARDED
        and config.jax_transfer_guard_device_to_host in _NOT_GUARDED
        and config.jax_transfer_guard_device_to_device in _NOT_GUARDED
        and config.jax_numpy_rank_promotion == "allow"
        and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)
    ):
        return _overriding()
    return _without_mesh()


_NOT_GUARDED = (None, "allow")
_AS_IT_IS = nullcontext()
_NO_MESH = Mesh(np.empty((), object), ())


@contextmanager
def _overriding() -> Iterator[None]:
    with (
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        _without_mesh(),
    ):
        yield


def _without_mesh() -> AbstractContextManager[object]:
    if jax.sharding.get_abstract_mesh().empty:
        return _AS_IT_IS
    try:
        return jax.set_mesh(_NO_MESH)
    except ValueError:  # in a trace, which has its mesh
        return _AS_IT_IS

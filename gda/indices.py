"""The ancestor's functions: shard shapes, indices and replica ids over the devices of a real mesh.

They answer from ``gda.grid`` and only add the devices. ``mesh`` is a ``jax.sharding.Mesh`` with
Auto or Explicit axes over any devices in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from jax.sharding import AbstractMesh, Mesh

from gda.boundary import hide_own_frames, public
from gda.grid import ShardGrid
from gda.processes import Processes
from gda.spec import Index, Shape, SpecLike

_MESHES = (Mesh, AbstractMesh)  # a traced array with Explicit axes knows only an abstract mesh


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


def get_shard_shape(global_shape: Iterable[int], mesh: Mesh, spec: SpecLike) -> Shape:
    """Return the shape of the block that each device holds.

    Raises:
      TypeError, ValueError: the spec does not fit the shape and the mesh; see ``ShardGrid``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> gda.get_shard_shape((8, 2), mesh, ['x', 'y'])
    (2, 1)
    """
    try:  # a decorator would cost a part of these microseconds
        return mesh_grid(global_shape, mesh, spec).shard_shape
    except Exception as error:
        hide_own_frames(error)
        raise


@public
def get_shard_indices(
    global_shape: Iterable[int], mesh: Mesh, spec: SpecLike
) -> dict[Device, Index]:
    """Return what every device of the mesh holds, also those of other processes.

    The keys are in device order; equal indices are one object.

    Raises:
      TypeError, ValueError: the spec does not fit the shape and the mesh; see ``ShardGrid``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> gda.get_shard_indices((8, 2), mesh, ['x'])[mesh.devices[3, 1]]
    (slice(6, 8, None), slice(None, None, None))
    """
    grid = mesh_grid(global_shape, mesh, spec)
    return dict(zip(devices_of(mesh), grid.indices(), strict=True))


@public
def get_shard_indices_replica_ids(
    global_shape: Iterable[int], mesh: Mesh, spec: SpecLike
) -> dict[Device, tuple[Index, int]]:
    """Return index and replica id of every device of the mesh, also those of other processes.

    Replica ids count, in device order, the devices that hold an equal index.

    Raises:
      TypeError, ValueError: the spec does not fit the shape and the mesh; see ``ShardGrid``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> [r for _, r in gda.get_shard_indices_replica_ids((8, 2), mesh, [None, 'y']).values()]
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    grid = mesh_grid(global_shape, mesh, spec)
    return dict(zip(devices_of(mesh), grid.indices_and_replica_ids(), strict=True))


def mesh_grid(global_shape: Iterable[int], mesh: Mesh, spec: SpecLike) -> ShardGrid:
    """Return the grid of a shape over a mesh; says so when ``mesh`` is not one."""
    check_mesh(mesh, _MESHES)
    return ShardGrid(global_shape, mesh.shape, spec)


def check_mesh(mesh: Mesh, kinds: tuple[type, ...] = (Mesh,)) -> None:
    """Raise ``TypeError`` if ``mesh`` is none, or is one without devices and those are needed."""
    if not isinstance(mesh, kinds):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, not {mesh!r}; without devices use gda.ShardGrid"
        )


# Walking over all devices of a mesh costs O(mesh), so it is done once per mesh.


@lru_cache(maxsize=64)
def devices_of(mesh: Mesh) -> tuple[Device, ...]:
    """Return the devices of the mesh in device order."""
    check_mesh(mesh)
    return tuple(mesh.devices.flat)


@lru_cache(maxsize=64)
def local_positions(mesh: Mesh) -> dict[Device, int]:
    """Return the flat positions of this process's devices, in device order."""
    local = set(mesh.local_devices)
    return {device: i for i, device in enumerate(devices_of(mesh)) if device in local}


@lru_cache(maxsize=64)
def processes_of(mesh: Mesh) -> Processes:
    """Return which process has which device of the mesh."""
    return Processes([device.process_index for device in devices_of(mesh)])

"""``Shard``: the block of an array on one device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

import jax
from jax.sharding import Mesh

from gda.arrays.bits import without_padding
from gda.arrays.liveness import deleted_error, describe, traced_error
from gda.layout.boundary import set_module
from gda.layout.grid import ShardGrid
from gda.layout.indices import shape_at
from gda.layout.spec import Index, Shape
from gda.mesh import Device, devices_of, is_tracer, local_positions, not_an_array_error

DataT = TypeVar("DataT", jax.Array, jax.Array | None)


class DataByDevice:
    """The single-device arrays of an array, split off when first asked for.

    Shards refer to this and not to the container: it keeps its shards, and device memory should be
    freed with the last reference, not when the garbage collector finds a cycle. ``kind`` is the
    class of the container; ``block_shape`` is needed if the array may have padding.
    """

    __slots__ = ("_array", "_block_shape", "_by_device", "_kind")

    def __init__(self, array: jax.Array, kind: str, block_shape: Shape | None) -> None:
        self._array, self._kind, self._block_shape = array, kind, block_shape
        self._by_device: dict[Device | None, jax.Array] | None = None

    def at(self, index: Index, device: Device | None) -> jax.Array | None:
        """Return the block on a device; ``None`` for a device of another process."""
        array = self._array
        if is_tracer(array):
            see = "compute on .array, or see each block with jax.shard_map"
            raise traced_error(describe(array, self._kind), see)
        if not isinstance(array, jax.Array):
            raise not_an_array_error(array)
        if array.is_deleted():
            raise deleted_error(array, self._kind)
        if self._by_device is None:
            # `array.addressable_data(i)` would be wrong here: of a fully replicated array it gives
            # the first device's shard for every i.
            self._by_device = {shard.device: shard.data for shard in array.addressable_shards}
        data = self._by_device.get(device)
        if data is None or self._block_shape is None:
            return data
        return without_padding(data, shape_at(index, self._block_shape))


@set_module("gda")
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Shard(Generic[DataT]):
    """The block of an array on one device, its index and replica id; read-only.

    Attributes:
      device: the device; ``None`` while tracing, where a mesh has no devices.
      index: the elements of the whole array that it holds: one slice per dimension.
      replica_id: the number of devices before it, in device order, that hold the same block. The
        shards with replica id 0 have every element of the array exactly once.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> g = gda.GlobalArray.from_source(np.arange(16).reshape(8, 2), mesh, ['x'])
    >>> shard = g.addressable_shards[3]
    >>> shard.index, shard.replica_id, shard.data.tolist()
    ((slice(2, 4, None), slice(None, None, None)), 1, [[4, 5], [6, 7]])
    """

    device: Device | None
    index: Index
    replica_id: int
    _data_by_device: DataByDevice

    @property
    def data(self) -> DataT:
        """A single-device ``jax.Array`` of the shard shape; ``None`` for another process's device.

        Fetched when first asked for: splitting the array costs some microseconds a device.
        ``RuntimeError`` after it was deleted or donated, ``TypeError`` while it is being traced.
        """
        return cast("DataT", self._data_by_device.at(self.index, self.device))

    def __repr__(self) -> str:
        return f"Shard(device={self.device}, index={self.index}, replica_id={self.replica_id})"


def shards_of(
    array: Any, mesh: Any, grid: ShardGrid, *, kind: str, is_local: bool, has_padding: bool
) -> tuple[Shard[Any], ...]:
    """Return the shards of an array, those of this process or all of them, in device order."""
    data = DataByDevice(array, kind, grid.shard_shape if has_padding else None)
    if not isinstance(mesh, Mesh):
        devices: Any = repeat(None)
    elif is_local and len(local := local_positions(mesh)) < grid.num_devices:
        shards = zip(local, grid.shards_at(local.values()), strict=True)
        return tuple([Shard(device, *which, data) for device, which in shards])
    else:
        devices = devices_of(mesh)
    return tuple(map(Shard, devices, grid.indices(), grid.replica_ids.tolist(), repeat(data)))

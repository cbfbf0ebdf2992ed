"""The part of a global array in this process: its blocks, or one local array of them.

The *local array* of a process is its distinct blocks side by side, in the order of their
coordinates. It exists where these are all combinations of some coordinates in each dimension.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from gda.arrays.bits import without_padding
from gda.arrays.dtypes import is_weak, weakly_typed
from gda.layout.grid import ShardGrid
from gda.layout.indices import shape_at
from gda.layout.spec import Shape, SpecLike, check_reduced
from gda.mesh import (
    Device,
    grid_of_array,
    local_positions,
    named_sharding,
    sharding_of,
    view_of,
)


def is_all_here(array: jax.Array) -> bool:
    """Return True if this process has every block of an array, and so knows the whole value."""
    check_reduced(getattr(array.sharding, "spec", ()))
    if array.is_fully_addressable:
        return True
    grid = grid_of_array(array)
    return len(grid.view(jax.process_index()).block_ids) == grid.num_shards


def check_all_here(array: jax.Array, container: object) -> None:
    if not is_all_here(array):
        raise RuntimeError(
            f"this process does not hold every block of {container!r}; g.gather() gives the whole "
            "value to every process, and g.local_shards has the blocks of this one; for a "
            "jax.Array x, g is gda.GlobalArray.from_array(x)"
        )


def distinct_shards(array: jax.Array, grid: ShardGrid) -> dict[int, jax.Array]:
    """Return the data of each distinct block of this process by number, as its first device has it.

    ``grid`` is that of the array, or the padded one of the array without its padding.
    """
    mesh: Any = sharding_of(array).mesh
    data_on = data_by_device(array)
    distinct = {block: data_on[device] for block, device in first_holders(grid, mesh).items()}
    if array.shape == grid.global_shape:
        return distinct
    return {
        block: without_padding(data, shape_at(grid.block_index(block), grid.shard_shape))
        for block, data in distinct.items()
    }


@lru_cache(maxsize=1024)
def first_holders(grid: ShardGrid, mesh: Mesh) -> dict[int, Device]:
    """Return the first device of this process that holds each of its blocks."""
    holders: dict[int, Device] = {}
    for device, position in local_positions(mesh).items():
        holders.setdefault(grid.block_id(position), device)
    return holders


def has_padding_for(grid: ShardGrid, shape: Shape) -> bool:
    """Return True if an array of this shape has all elements and padding of a padded grid.

    XLA replicates some results, whose padding is then more than that of the grid.
    """
    if len(shape) != len(grid.global_shape):
        return False
    sides = zip(shape, grid.padded_shape, grid.parts, strict=True)
    return all(size == padded or (ways == 1 and size > padded) for size, padded, ways in sides)


def local_array_of(array: jax.Array, mesh: Mesh, spec: SpecLike) -> jax.Array:
    """Return the local array of this process, over its devices; nothing is copied or moved.

    ``ValueError`` if the devices of this process form no subcube of the mesh, or their blocks no
    regular grid, or if it has none.
    """
    shape = view_of(array.shape, mesh, spec).local_shape
    local = local_sharding(array.shape, mesh, spec)
    data_on = data_by_device(array)
    buffers = [data_on[device] for device in local.mesh.devices.flat]  # pyright: ignore
    if (kind := array.sharding.memory_kind) is not None:
        local = local.with_memory_kind(kind)
    local_array = jax.make_array_from_single_device_arrays(shape, local, buffers)
    return weakly_typed(local_array) if is_weak(array) else local_array


@lru_cache(maxsize=256)
def local_sharding(global_shape: Shape, mesh: Mesh, spec: SpecLike) -> NamedSharding:
    """Return the sharding of the local array; raises as ``local_array_of``."""
    view_of(global_shape, mesh, spec).check_regular()
    return named_sharding(global_shape, mesh.local_mesh, spec)


def data_by_device(array: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}

"""Moves of the data of an array: to another layout, or the whole to the host of every process."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from gda.arrays.buffers import aligned_empty
from gda.arrays.liveness import elsewhere_error
from gda.arrays.narrowing import is_extended
from gda.arrays.process_local import distinct_shards
from gda.arrays.to_host import MAX_BYTES, one_by_one
from gda.layout.spec import Index, Shape, SpecLike, check_spec
from gda.mesh import (
    MeshLike,
    grid_of_array,
    local_positions,
    mesh_and_spec,
    mesh_grid,
    named_sharding,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import check_moving
from gda.multihost.allgather import all_gather


def reshard(array: jax.Array, mesh: MeshLike, spec: SpecLike | None = None) -> jax.Array:
    """Return the array sharded by ``spec`` over ``mesh``, in the same kind of memory.

    Or as a sharding says, which tells the kind of memory too. See ``GlobalArray.reshard``, which
    says what is raised.
    """
    over = mesh_and_spec(mesh, spec)
    entries = check_spec(over.spec, array.shape, over.mesh.shape)
    mesh_grid(array.shape, over.mesh, entries)
    kind = over.memory_kind or array.sharding.memory_kind
    sharding = named_sharding(array.shape, over.mesh, entries, kind)
    array = _over_auto_axes(array, over.mesh)
    if array.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    _check_same_devices(array, over.mesh)
    check_moving((array, sharding), "GlobalArray.reshard", processes_of(over.mesh).numbers)
    if not local_positions(over.mesh):
        # This process has nothing to send or to receive, and JAX refuses to take part.
        return jax.make_array_from_single_device_arrays(
            array.shape, sharding, [], dtype=array.dtype
        )
    return jax.device_put(array, sharding)


def _over_auto_axes(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the array for JAX to move to ``mesh``; the data stays where it is.

    JAX 0.8 cannot move an array over Explicit axes to a mesh whose axes have other names or sizes.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape == mesh.shape:
        return array
    before: Any = sharding.mesh
    if AxisType.Explicit not in before.axis_types:
        return array
    twin = Mesh(before.devices, before.axis_names)
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(twin, sharding.spec, memory_kind=sharding.memory_kind),
        [shard.data for shard in array.addressable_shards],
        dtype=array.dtype,
    )


def _check_same_devices(array: jax.Array, mesh: Mesh) -> None:
    before, after = array.sharding.device_set, set(mesh.devices.flat)
    if before == after:
        return
    if array.is_fully_addressable:
        raise ValueError(
            "only this process holds the array, and several processes have devices of the mesh. If "
            "every process has the same value, shard it with GlobalArray.from_callback(shape, "
            "mesh, spec, lambda index: g[index]). If each has its part, use "
            "GlobalArray.from_process_local"
        )
    raise ValueError(
        "JAX's public API moves an array between processes only within one set of devices, in any "
        f"order; this mesh lacks {len(before - after)} of the array's devices and adds "
        f"{len(after - before)}. Use a mesh of the {len(before)} devices of the array, or go "
        "through the hosts: value = g.gather() and then GlobalArray.from_callback(..., lambda "
        "index: value[index]). If the value is too large for a host, go through storage"
    )


def gather(
    array: jax.Array,
    process: int | None = None,
    max_bytes: int | None = None,
    shape: Shape | None = None,
) -> np.ndarray[Any, Any] | None:
    """Return the whole value on the host of every process, or of one.

    See ``GlobalArray.gather``.

    Args:
      shape: the first elements of each dimension that are wanted, where it is not all of them.
    """
    if is_extended(array.dtype):
        raise TypeError(
            f"NumPy has no {array.dtype}; gather the numbers of the keys: "
            "GlobalArray.from_array(jax.random.key_data(g.array)).gather()"
        )
    is_wanted = _is_wanted(process)
    max_bytes = MAX_BYTES if max_bytes is None else operator.index(max_bytes)
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be 1 or more, not {max_bytes}")
    name = "GlobalArray.gather" if shape is None else "PaddedArray.gather"
    shape = array.shape if shape is None else shape
    if array.is_fully_addressable:
        return np.array(np.asarray(array)[tuple(map(slice, shape))]) if is_wanted else None
    pieces = _Pieces(array, max_bytes)
    # If this fails, the others wait in the check, which names a process that does not come.
    value = aligned_empty(shape or (1,), array.dtype) if is_wanted else None
    check_moving(array, name, shape=shape, process=process, max_bytes=max_bytes)
    for index, piece in pieces.local() if pieces.are_everywhere else pieces.gathered():
        if value is not None:
            place = value[index]
            place[...] = np.atleast_1d(piece)[tuple(map(slice, place.shape))]
    return None if value is None else value.reshape(shape)


def _is_wanted(process: int | None) -> bool:
    if process is None:
        return True
    number, count = operator.index(process), jax.process_count()
    if not 0 <= number < count:
        raise ValueError(f"process must be None or from 0 to {count - 1}, not {process}")
    return number == jax.process_index()


class _Pieces:
    """The blocks of an array on their way to the hosts: those here, or those of all processes.

    Each block is sent once, by a process that holds it, some of its rows in each round, so that no
    device has more than ``max_bytes`` of others at a time. A scalar counts as one row.
    """

    def __init__(self, array: jax.Array, max_bytes: int) -> None:
        self._grid = grid_of_array(array)
        mesh: Any = sharding_of(array).mesh
        numbers = processes_of(mesh).numbers
        if len(numbers) == 1:
            raise elsewhere_error("gather()", numbers[0])
        self._processes = tuple(range(jax.process_count()))
        self._views = [self._grid.view(process) for process in self._processes]
        self._array = array
        self._max_bytes = max_bytes

    @property
    def are_everywhere(self) -> bool:
        """True if every process has every block."""
        return all(len(view.block_ids) == self._grid.num_shards for view in self._views)

    def local(self) -> Iterator[tuple[Index, np.ndarray[Any, Any]]]:
        """Return the blocks of this process."""
        shards = distinct_shards(self._array, self._grid)
        indices = map(self._grid.block_index, shards)
        return one_by_one(zip(indices, shards.values(), strict=True), self._max_bytes)

    def gathered(self) -> Iterator[tuple[Index, np.ndarray[Any, Any]]]:
        """Yield parts of all blocks. Communicates."""
        written = [view.written_blocks() for view in self._views]
        shards = distinct_shards(self._array, self._grid)
        mine = ((number, shards[number]) for number in written[jax.process_index()])
        on_host = one_by_one(mine, self._max_bytes)
        block_shape = self._grid.shard_shape or (1,)
        rows, row_shape = block_shape[0], block_shape[1:]
        row_bytes = math.prod(row_shape) * self._array.dtype.itemsize
        if not rows * row_bytes:
            return
        step = min(rows, max(1, self._max_bytes // (row_bytes * len(written))))
        nothing = None, np.zeros((0, *row_shape), self._array.dtype)
        for turn in range(max(map(len, written))):
            block = np.atleast_1d(next(on_host, nothing)[1])
            for start in range(0, rows, step):
                part = np.zeros((step, *row_shape), self._array.dtype)
                some = block[start : start + step]
                part[: len(some)] = some
                received = all_gather(part.view(np.uint8).ravel(), self._processes)
                for numbers, data in zip(written, received, strict=True):
                    if turn < len(numbers):
                        index = self._rows_of(numbers[turn], start, min(start + step, rows))
                        piece = data.view(self._array.dtype).reshape(part.shape)
                        yield index, piece[: min(step, rows - start)]

    def _rows_of(self, block: int, start: int, stop: int) -> Index:
        first, *rest = self._grid.block_index(block) or (slice(None),)
        offset = first.start or 0
        return slice(offset + start, offset + stop), *rest

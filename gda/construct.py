"""From callbacks to one ``jax.Array``: which blocks are read, and how they are placed.

``jax.make_array_from_callback``, fed with blocks that were read before, is the fastest public way
to place blocks: lists through ``device_put`` take 4 to 5 times as long, a loop of ``device_put`` 6
to 8 times (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec

from gda.agreement import checked
from gda.blocks import Block, BlockReader
from gda.grid import ShardGrid
from gda.indices import Device, check_mesh, local_positions, mesh_grid
from gda.sharding import is_tracer, named_sharding
from gda.spec import Index, Shape, SpecLike, check_shape, check_spec


@checked("GlobalArray.from_callback")
def array_from_callback(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[..., Any],
    *,
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
    into: bool = False,
) -> jax.Array:
    """Build an array by one call of ``data_callback`` per distinct index of this process.

    See ``GlobalArray.from_callback``, which says what the arguments mean and what is raised.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    if into and dtype is None:
        raise ValueError("into=True needs dtype=, the type of the buffer that the callback fills")
    if into and copy is not None:
        raise ValueError("copy= says what happens to memory of the callback; into=True has none")
    reader = plan.reader(dtype, copy)
    read = reader.fill if into else reader.read
    return plan.place(read(data_callback, plan.distinct), reader.dtype)


@checked("GlobalArray.from_batched_callback")
def array_from_batched_callback(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[[list[Index]], Iterable[Any]],
    *,
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
) -> jax.Array:
    """Build an array by one call of ``data_callback`` with the index of every local device.

    See ``GlobalArray.from_batched_callback``.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    reader = plan.reader(dtype, copy)
    blocks: list[Block] = []
    if plan.devices:
        batch = _Batch(data_callback(list(plan.indices)), plan, reader)
        blocks = reader.read(batch.next_distinct, plan.distinct)
        batch.check_rest()
    return plan.place(blocks, reader.dtype)


@checked("GlobalArray.from_batched_callback_with_devices")
def array_from_batched_callback_with_devices(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
    *,
    dtype: npt.DTypeLike | None = None,
) -> jax.Array:
    """Build an array from on-device arrays that one call of ``data_callback`` returns.

    See ``GlobalArray.from_batched_callback_with_devices``.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    reader = plan.reader(dtype, None)
    holders: list[list[Device]] = [[] for _ in plan.distinct]
    for device, block in zip(plan.devices, plan.block_of_device, strict=True):
        holders[block].append(device)
    request = list(zip(plan.distinct, map(tuple, holders), strict=True))
    buffers: list[Any] = []
    if request:
        buffers = _as_list(data_callback(request), len(plan.devices), "device")
    expected = [device for _, devices in request for device in devices]
    return plan.assemble(buffers, expected, reader, "the callback's array")


@checked("GlobalArray")
def array_from_device_buffers(
    global_shape: Iterable[int], mesh: Mesh, spec: SpecLike, device_buffers: Iterable[jax.Array]
) -> jax.Array:
    """Build an array of single-device arrays in ``mesh.local_devices`` order."""
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(None)
    buffers = _as_list(device_buffers, len(plan.devices), "device of mesh.local_devices")
    return plan.assemble(buffers, plan.devices, plan.reader(None, None), "device_buffers")


class Plan:
    """What this process reads for one shape, mesh and spec, and where it goes.

    Attributes:
      devices, indices: the devices of this process, in device order, and what each holds.
      distinct: the indices without repeats; a *block* is a position in this list.
      block_of_device: the block of each device.
      firsts: the devices, by position in ``devices``, that are the first to hold their block.
    """

    def __init__(self, grid: ShardGrid, mesh: Mesh, spec: SpecLike) -> None:
        local = local_positions(mesh)
        self.grid = grid
        self.sharding = named_sharding(grid.global_shape, mesh, spec)
        self.devices = tuple(local)
        self.indices = [index for index, _ in grid.shards_at(local.values())]
        first_at: dict[tuple[int | None, ...], int] = {}
        for i, index in enumerate(self.indices):
            first_at.setdefault(_start(index), i)
        self.firsts = set(first_at.values())
        self.distinct = [self.indices[i] for i in first_at.values()]
        self._block_at = {start: block for block, start in enumerate(first_at)}
        self.block_of_device = [self._block_at[_start(index)] for index in self.indices]
        self._first_device = self.devices[0] if local else None
        # JAX copies an unaligned block for every device that holds it, and an aligned one for none.
        has_replicas = len(self.distinct) < len(self.devices)
        self._align = has_replicas and self.devices[0].platform == "cpu"
        # JAX asks with the index objects of its own cached map. They are kept here, so that as
        # long as this plan lives no other object has their id.
        asked: Any = self.sharding.addressable_devices_indices_map(grid.global_shape).values()
        self._asked: list[Index] = list(asked)
        self._block_of_id = {id(index): self._block_at[_start(index)] for index in self._asked}

    def check_dtype_is_known(self, dtype: object) -> None:
        if dtype is None and not self.devices:
            raise ValueError(
                f"no device of the mesh {dict(self.grid.mesh_shape)} belongs to process "
                f"{jax.process_index()}, so no block tells the dtype; pass dtype="
            )

    def reader(self, dtype: npt.DTypeLike | None, copy: bool | None) -> BlockReader:
        count = len(self.distinct)
        return BlockReader(self.grid, dtype, copy, self._first_device, count, self._align)

    def place(self, blocks: Sequence[Block], dtype: Any) -> jax.Array:
        """Build the array of one block per distinct index."""
        if not self.devices:
            # JAX would ask for the one block of a replicated array here too.
            return jax.make_array_from_single_device_arrays(
                self.grid.global_shape, self.sharding, [], dtype=dtype
            )
        block_of_id, block_at = self._block_of_id, self._block_at

        def block_for(index: Any) -> Block:
            try:
                return blocks[block_of_id[id(index)]]
            except KeyError:
                return blocks[block_at[_start(index)]]

        return jax.make_array_from_callback(
            self.grid.global_shape,
            self.sharding,
            block_for,
        )

    def assemble(
        self,
        buffers: Sequence[object],
        expected: Sequence[Device],
        reader: BlockReader,
        what: str,
    ) -> jax.Array:
        """Check single-device arrays against the devices they must be on; put them together."""
        index_of = dict(zip(self.devices, self.indices, strict=True))
        checked: dict[Device, jax.Array] = {}
        for i, (buffer, device) in enumerate(zip(buffers, expected, strict=True)):
            if not isinstance(buffer, jax.Array) or is_tracer(buffer):
                kind = "traced array" if is_tracer(buffer) else type(buffer).__name__
                raise TypeError(
                    f"{what}[{i}] is a {kind}, not a jax.Array on {device}; put it there with "
                    "jax.device_put, or use from_callback for host data"
                )
            if buffer.is_deleted():
                raise RuntimeError(f"{what}[{i}], for {device}, was deleted or donated")
            if buffer.devices() != {device}:
                on = ", ".join(sorted(map(str, buffer.devices())))
                raise ValueError(f"{what}[{i}] is on {on}; expected there is {device}")
            reader.check_shape(index_of[device], buffer.shape)
            checked[device] = buffer
        arrays: dict[Device, Any] = {
            device: reader.settle_jax(index_of[device], buffer)
            for device, buffer in checked.items()
        }
        return jax.make_array_from_single_device_arrays(
            self.grid.global_shape,
            self.sharding,
            [arrays[device] for device in self.devices],
            dtype=reader.dtype,
        )


# Blocks have one shape, so where one starts tells which it is; slices themselves are not hashable
# before Python 3.12.
def _start(index: Index) -> tuple[int | None, ...]:
    return tuple([s.start for s in index])


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"data_callback must be a function, not {type(callback).__name__}")


class _Batch:
    """What a batched callback returned, taken block by block.

    A result that is not a list or a tuple may make its blocks as it is walked through, all in one
    buffer, so each is settled before the next is asked for. Of a list each block is let go of as it
    is taken, which leaves the reader as the only holder of one that nobody else keeps.
    """

    def __init__(self, returned: Any, plan: Plan, reader: BlockReader) -> None:
        self._count = count = len(plan.indices)
        self._plan, self._reader = plan, reader
        self._taken = 0
        self._take: Callable[[], Any]
        if isinstance(returned, list | tuple):
            remaining = _as_list(returned, count, _PER_INDEX)
            remaining.reverse()
            self._take = remaining.pop
        else:
            self._take = iter(_iterable(returned, count, _PER_INDEX)).__next__

    def next_distinct(self, _: Index) -> Any:
        """Return the block of the next device that holds what no device before it does."""
        while self._taken not in self._plan.firsts:
            self._pass_over()
        return self._next()

    def check_rest(self) -> None:
        """Look at the blocks of the last replicas; raise if their number is not right."""
        while self._taken < self._count:
            self._pass_over()
        try:
            self._take()
        except (IndexError, StopIteration):
            return
        raise ValueError(f"expected {self._count} arrays, one per {_PER_INDEX}, not more")

    def _pass_over(self) -> None:
        index, block = self._plan.indices[self._taken], self._next()
        try:
            self._reader.check_unused(index, block)
        except Exception as error:
            self._reader.note(error, index)
            raise

    def _next(self) -> Any:
        index = self._plan.indices[self._taken]
        try:
            block = self._take()
        except StopIteration:
            raise ValueError(
                f"expected {self._count} arrays, one per {_PER_INDEX}, not {self._taken}"
            ) from None
        except Exception as error:
            self._reader.note(error, index)
            raise
        self._taken += 1
        return block


_PER_INDEX = "index, repeats included"


def _iterable(returned: Any, count: int, per: str) -> Iterable[Any]:
    is_one = isinstance(returned, np.ndarray | jax.Array | Mapping | str)
    if is_one or not isinstance(returned, Iterable):
        raise TypeError(
            f"expected a sequence of {count} arrays, one per {per}, not {type(returned).__name__}"
        )
    return returned


def _as_list(returned: Any, count: int, per: str) -> list[Any]:
    arrays = list(_iterable(returned, count, per))
    if len(arrays) != count:
        raise ValueError(f"expected {count} arrays, one per {per}, not {len(arrays)}")
    return arrays


def plan_of(global_shape: Iterable[int], mesh: Mesh, spec: SpecLike) -> Plan:
    """Return the plan, from a cache where the same array was built before."""
    shape = check_shape(global_shape)
    check_mesh(mesh)
    hashable = spec if isinstance(spec, PartitionSpec) else check_spec(spec, shape)
    return _cached_plan(shape, mesh, hashable)


@lru_cache(maxsize=256)
def _cached_plan(shape: Shape, mesh: Mesh, spec: SpecLike) -> Plan:
    return Plan(mesh_grid(shape, mesh, spec), mesh, spec)

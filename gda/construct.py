"""From callbacks to one ``jax.Array``: which blocks are read, and how they are placed.

``jax.make_array_from_callback``, fed with blocks that were read before, is the fastest public way
to place blocks: lists through ``device_put`` take 4 to 5 times as long, a loop of ``device_put`` 7
to 12 times (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec

from gda.blocks import Block, BlockReader
from gda.grid import ShardGrid
from gda.indices import Device, local_positions, mesh_grid, not_a_mesh_error
from gda.sharding import named_sharding
from gda.spec import Index, Shape, SpecLike, check_shape, check_spec


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
    plan = _plan(global_shape, mesh, spec)
    plan.check_dtype(dtype)
    _check_callable(data_callback)
    if into and dtype is None:
        raise ValueError("into=True needs dtype=, the type of the buffer that the callback fills")
    if into and copy is not None:
        raise ValueError("copy= says what happens to memory of the callback; into=True has none")
    reader = plan.reader(dtype, copy)
    read = reader.fill if into else reader.read
    return plan.place(read(data_callback, plan.distinct), reader.dtype)


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
    plan = _plan(global_shape, mesh, spec)
    plan.check_dtype(dtype)
    _check_callable(data_callback)
    reader = plan.reader(dtype, copy)
    blocks: list[Block] = []
    if plan.devices:
        returned = _as_list(
            data_callback(list(plan.indices)), len(plan.indices), "index, repeats included"
        )
        returned.reverse()
        # Popping leaves the reader as the only holder of a block that nobody else keeps.
        read = reader.read(lambda _: returned.pop(), plan.indices)
        blocks = [read[i] for i in plan.first_with_block]
    return plan.place(blocks, reader.dtype)


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
    plan = _plan(global_shape, mesh, spec)
    plan.check_dtype(dtype)
    _check_callable(data_callback)
    holders: list[list[Device]] = [[] for _ in plan.distinct]
    for device, block in zip(plan.devices, plan.block_of_device, strict=True):
        holders[block].append(device)
    request = list(zip(plan.distinct, map(tuple, holders), strict=True))
    buffers: list[Any] = []
    if request:
        buffers = _as_list(data_callback(request), len(plan.devices), "device")
    expected = [device for _, devices in request for device in devices]
    return plan.assemble(buffers, expected, dtype, "the callback's array")


def array_from_device_buffers(
    global_shape: Iterable[int], mesh: Mesh, spec: SpecLike, device_buffers: Iterable[jax.Array]
) -> jax.Array:
    """Build an array of single-device arrays in ``mesh.local_devices`` order."""
    plan = _plan(global_shape, mesh, spec)
    plan.check_dtype(None)
    buffers = _as_list(device_buffers, len(plan.devices), "device of mesh.local_devices")
    return plan.assemble(buffers, plan.devices, None, "device_buffers")


class _Plan:
    """What this process reads for one shape, mesh and spec, and where it goes.

    Attributes:
      devices, indices: the devices of this process, in device order, and what each holds.
      distinct: the indices without repeats; a *block* is a position in this list.
      block_of_device, first_with_block: from devices to blocks and back.
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
        self.first_with_block = list(first_at.values())
        self.distinct = [self.indices[i] for i in self.first_with_block]
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

    def check_dtype(self, dtype: object) -> None:
        if dtype is None and not self.devices:
            raise ValueError(
                f"no device of the mesh {dict(self.grid.mesh_shape)} belongs to process "
                f"{jax.process_index()}, so no block tells the dtype; pass dtype="
            )

    def reader(self, dtype: npt.DTypeLike | None, copy: bool | None) -> BlockReader:
        return BlockReader(self.grid, dtype, copy, self._first_device, self._align)

    def place(self, blocks: Sequence[Block], dtype: Any) -> jax.Array:
        """Build the array of one block per distinct index."""
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
            # Where there are blocks they have this dtype, and JAX need not compare.
            dtype=None if self.devices else dtype,
        )

    def assemble(
        self,
        buffers: Sequence[object],
        expected: Sequence[Device],
        dtype: npt.DTypeLike | None,
        what: str,
    ) -> jax.Array:
        """Check single-device arrays against the devices they must be on; put them together."""
        reader = BlockReader(self.grid, dtype)
        index_of = dict(zip(self.devices, self.indices, strict=True))
        arrays = {}
        for i, (buffer, device) in enumerate(zip(buffers, expected, strict=True)):
            if not isinstance(buffer, jax.Array):
                raise TypeError(
                    f"{what}[{i}] is a {type(buffer).__name__}, not a jax.Array on {device}; "
                    "put it there with jax.device_put, or use from_callback for host data"
                )
            if buffer.devices() != {device}:
                on = ", ".join(sorted(map(str, buffer.devices())))
                raise ValueError(f"{what}[{i}] is on {on}; expected there is {device}")
            arrays[device] = reader.settle_jax(index_of[device], buffer)
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


def _as_list(returned: Iterable[Any], count: int, per: str) -> list[Any]:
    if isinstance(returned, np.ndarray | jax.Array | None):
        raise TypeError(
            f"expected a sequence of {count} arrays, one per {per}, not {type(returned).__name__}"
        )
    arrays = list(returned)
    if len(arrays) != count:
        raise ValueError(f"expected {count} arrays, one per {per}, not {len(arrays)}")
    return arrays


def _plan(global_shape: Iterable[int], mesh: Mesh, spec: SpecLike) -> _Plan:
    """Return the plan, from a cache where the same array was built before."""
    shape = check_shape(global_shape)
    if not isinstance(mesh, Mesh):
        raise not_a_mesh_error(mesh)
    hashable = spec if isinstance(spec, PartitionSpec) else check_spec(spec, shape)
    return _cached_plan(shape, mesh, hashable)


@lru_cache(maxsize=256)
def _cached_plan(shape: Shape, mesh: Mesh, spec: SpecLike) -> _Plan:
    return _Plan(mesh_grid(shape, mesh, spec), mesh, spec)

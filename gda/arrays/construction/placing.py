"""The blocks of an array that this process needs, and their way onto its devices.

``jax.make_array_from_callback``, fed with blocks that were read before, is the fastest public way:
lists through ``device_put`` take 4 to 5 times as long (benchmarks/results.json, "place").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from gda.layout.cover import holders_of
from gda.layout.grid import ShardGrid
from gda.layout.indices import bounded, is_empty, sizes_of, start_of
from gda.layout.spec import Index, Shape, SpecLike, check_shape, check_spec
from gda.mesh import (
    Device,
    MeshAndSpec,
    MeshLike,
    local_positions,
    mesh_and_spec,
    mesh_grid,
    named_sharding,
    own_settings,
    processes_of,
)

Block = np.ndarray[Any, Any] | jax.Array


def local_blocks_of(
    global_shape: Iterable[int], mesh: MeshLike, spec: SpecLike | None = None, pad: bool = False
) -> LocalBlocks:
    shape = check_shape(global_shape)
    return local_blocks_over(shape, hashable_over(mesh, spec, shape), pad)


def hashable_over(mesh: MeshLike, spec: SpecLike | None, shape: Shape) -> MeshAndSpec:
    over = mesh_and_spec(mesh, spec)
    if isinstance(over.spec, PartitionSpec):
        return over
    return over._replace(spec=check_spec(over.spec, shape, over.mesh.shape))


@lru_cache(maxsize=256)
def local_blocks_over(shape: Shape, over: MeshAndSpec, pad: bool = False) -> LocalBlocks:
    return LocalBlocks(mesh_grid(shape, over.mesh, over.spec, pad), over)


class LocalBlocks:
    """The blocks of this process for one shape, mesh and spec, and their devices.

    Attributes:
      grid, sharding: of the whole array.
      shape: of the array on the devices, with the padding of the grid.
      memory_kind: the requested one, if any.
      devices, indices: the devices of this process, in device order, and the index of each.
      distinct: the indices without repeats; a *block* is a position in this list. Devices that hold
        padding alone have the number after the last block.
      block_of_device: the block of each device.
      firsts: the devices, by position in ``devices``, that are the first to hold their block.
      platform: of the devices; empty if there are none.
      needs_alignment: True if JAX would copy an unaligned block more than once.
    """

    def __init__(self, grid: ShardGrid, over: MeshAndSpec) -> None:
        local = local_positions(over.mesh)
        self.grid = grid
        self.memory_kind = over.memory_kind
        self.shape = grid.padded_shape
        self.sharding = named_sharding(self.shape, *over)
        self.devices = tuple(local)
        self.indices = [index for index, _ in grid.shards_at(local.values())]
        first_at: dict[Shape, int] = {}
        for i, index in enumerate(self.indices):
            if not (grid.is_padded and is_empty(index)):
                first_at.setdefault(start_of(index), i)
        self.firsts = set(first_at.values())
        self.distinct = [self.indices[i] for i in first_at.values()]
        self._block_at = {start: block for block, start in enumerate(first_at)}
        self.block_of_device = [self._block_of(index) for index in self.indices]
        self.has_padding_alone = len(self.distinct) in self.block_of_device
        self.platform = self.devices[0].platform if local else ""
        # JAX copies an unaligned block for every device that holds it, and an aligned one for none.
        has_replicas = len(self.distinct) < len(self.devices)
        self.needs_alignment = has_replicas and self.platform == "cpu"
        # JAX asks with the index objects of its own cached map. They are kept here, so that as
        # long as this plan lives no other object has their id.
        of_jax: Any = self.sharding.addressable_devices_indices_map(self.shape).values()
        self._indices_of_jax: list[Index] = list(of_jax)
        self._block_of_id = {id(index): self._block_of(index) for index in self._indices_of_jax}

    def _block_of(self, index: Index) -> int:
        # The blocks without padding start at the same place in both shapes.
        return self._block_at.get(start_of(index), len(self._block_at))

    @cached_property
    def boxes(self) -> dict[int, Index]:
        """The blocks by number, with every start and stop."""
        return {n: bounded(index, self.grid.global_shape) for n, index in enumerate(self.distinct)}

    @cached_property
    def of_all(self) -> tuple[dict[int, Index], dict[int, tuple[int, ...]]]:
        """The blocks of all processes, as ``boxes``, and the processes that hold each.

        Blocks of other processes only have larger numbers than those of this one. Empty blocks are
        omitted; the order is the same in all processes.
        """
        boxes: dict[int, Index] = {}
        holders: dict[int, tuple[int, ...]] = {}
        mesh: Any = self.sharding.mesh
        for number, processes in enumerate(holders_of(self.grid, processes_of(mesh))):
            index = bounded(self.grid.block_index(number), self.grid.global_shape)
            if math.prod(sizes_of(index)):
                here = self._block_at.get(start_of(index))
                number = len(self.distinct) + 1 + number if here is None else here
                boxes[number], holders[number] = index, processes
        return boxes, holders

    def check_dtype_is_known(self, dtype: object) -> None:
        if dtype is None and not self.distinct:
            raise ValueError(
                f"process {jax.process_index()} has no elements on the mesh "
                f"{dict(self.grid.mesh_shape)}, so no block tells the dtype; pass dtype="
            )

    @cached_property
    def holders(self) -> list[tuple[Device, ...]]:
        holders: list[list[Device]] = [
            [] for _ in range(len(self.distinct) + self.has_padding_alone)
        ]
        for device, block in zip(self.devices, self.block_of_device, strict=True):
            holders[block].append(device)
        return [tuple(devices) for devices in holders]

    def sent(self, number: int, block: Block) -> dict[Device, jax.Array]:
        """Begin to place a block on the devices that hold it, and return the array on each."""
        holders, kind = self.holders[number], self.memory_kind
        targets: list[Any] = list(holders)
        if kind is not None:
            targets = [SingleDeviceSharding(device, memory_kind=kind) for device in holders]
        # A list at once: the transfers of one block do not wait for each other.
        arrays = jax.device_put([block] * len(targets), targets)
        return dict(zip(holders, arrays, strict=True))

    def joined(self, arrays: Mapping[Device, jax.Array], dtype: Any) -> jax.Array:
        in_order = [arrays[device] for device in self.devices]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, in_order, dtype=dtype
        )

    @property
    def places_early(self) -> bool:
        return self.platform != "" and places_early(self.platform)

    @property
    def is_in_default_memory(self) -> bool:
        """True if blocks go into the default memory of the devices, even if a sharding names it."""
        return bool(self.devices) and (
            self.memory_kind in (None, self.devices[0].default_memory().kind)
        )

    def place(
        self, blocks: Sequence[Block], dtype: Any, padding: Callable[[], Block] | None = None
    ) -> jax.Array:
        """Build the array of a block per distinct index; ``padding`` makes one of padding alone."""
        if not self.devices:
            # JAX would ask for the one block of a replicated array here too.
            return self.joined({}, dtype)
        if self.has_padding_alone and padding is not None:
            blocks = [*blocks, padding()]
        # JAX's callback does not know kinds of memory for PRNG keys, whose dtype is JAX's own.
        if not isinstance(dtype, np.dtype):
            arrays: dict[Device, jax.Array] = {}
            for number, block in enumerate(blocks):
                arrays |= self.sent(number, block)
            return self.joined(arrays, dtype)
        block_of_id = self._block_of_id

        def block_for(index: Any) -> Block:
            try:
                return blocks[block_of_id[id(index)]]
            except KeyError:
                return blocks[self._block_of(index)]

        with own_settings():
            return jax.make_array_from_callback(self.shape, self.sharding, block_for)


def places_early(platform: str) -> bool:
    # On CPU there is nothing to send, and placing all at once was 1.2 to 1.4 times faster.
    return platform != "cpu"

"""The addresses of buffers on devices, from which arrays are known to share memory.

JAX tells the address of a buffer only of an array on one device, so that a sharded array has to be
split first. That costs 5 to 10 µs a device, and JAX keeps the parts as live arrays of their own.
Therefore it is done only for arrays that may share memory, as far as their layouts tell, and to a
copy of the array that has the same buffers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from gda.layout.spec import Shape, format_layout
from gda.mesh import Device, memory_kind_of

Address = tuple[Device, int]

# The most blocks of arrays that are split in one call, the largest first: 10 ms or so.
_MOST_BLOCKS = 1024


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks that arrays of one sharding, shape and dtype have in this process."""

    sharding: Sharding
    shape: Shape
    dtype: np.dtype[Any]
    devices: tuple[Device, ...]  # those with a block, by id
    kind: tuple[Any, ...]  # shape, dtype and kind of memory of each block
    block_bytes: int  # of each; 0 if there are none
    memory_kind: str | None  # None for the default of the devices
    is_single: bool  # the array is on one device, in all processes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all blocks in this process."""
        return self.block_bytes * len(self.devices)

    @property
    def places(self) -> list[tuple[Device, str | None]]:
        """The device and the kind of memory of each block."""
        return [(device, self.memory_kind) for device in self.devices]

    @cached_property
    def description(self) -> tuple[Shape, str, str, str | None]:
        """Shape, name of the dtype, layout and kind of memory, as they stand in a report."""
        return self.shape, str(self.dtype), self._layout, self.memory_kind

    @property
    def _layout(self) -> str:
        """The spec and the mesh, or the device, as text."""
        sharding: Any = self.sharding
        if isinstance(sharding, NamedSharding):
            return format_layout(sharding.spec, sharding.mesh.shape)
        if self.is_single and self.devices:
            return name_of(self.devices[0])
        return type(sharding).__name__

    @cached_property
    def twin(self) -> NamedSharding | None:
        """A sharding with the same blocks, which differs in the kind of the mesh axes only.

        JAX copies nothing to it. None if there is none.
        """
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding):
            return None
        mesh: Any = sharding.mesh
        is_explicit = AxisType.Explicit in mesh.axis_types
        kind = AxisType.Auto if is_explicit else AxisType.Explicit
        other = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
        return NamedSharding(other, sharding.spec, memory_kind=sharding.memory_kind)


def blocks_of(arrays: Iterable[jax.Array]) -> list[Blocks]:
    """Return the blocks of each array, the same object for all of one sharding, shape and dtype."""
    blocks = cache(_blocks)
    return [blocks(array.sharding, array.shape, array.dtype) for array in arrays]


def _blocks(sharding: Sharding, shape: Shape, dtype: np.dtype[Any]) -> Blocks:
    devices = tuple(sorted(sharding.addressable_devices, key=lambda device: device.id))
    block_shape = sharding.shard_shape(shape)
    memory = memory_kind_of(sharding)
    return Blocks(
        sharding,
        shape,
        dtype,
        devices,
        (block_shape, dtype, memory),
        math.prod(block_shape) * dtype.itemsize if devices else 0,
        memory,
        is_single=len(sharding.device_set) == 1,
    )


def name_of(device: Device) -> str:
    return f"{device.platform.upper()} {device.id}"


def addresses_of(
    arrays: Sequence[jax.Array], blocks: Sequence[Blocks]
) -> list[list[Address] | None]:
    """Return for each array the addresses of its buffers; None if it shares none, or is not read.

    None of the arrays is deleted. Which sharded ones share memory follows from their blocks: only
    those of one shape and dtype on the same devices can. Of these, at most 1,024 blocks are read:
    first of arrays that are known to be split or differ in spec or mesh, then of the largest.
    """
    found: list[list[Address] | None] = [None] * len(arrays)
    parts: dict[tuple[Any, ...], set[int]] = defaultdict(set)  # addresses by device and kind
    sharded: dict[Blocks, list[int]] = defaultdict(list)
    for number, (array, each) in enumerate(zip(arrays, blocks, strict=True)):
        if not each.block_bytes:
            continue
        if each.is_single:
            if address := _address(array):
                found[number] = [(each.devices[0], address)]
                parts[each.devices[0], each.kind].add(address)
        else:
            sharded[each].append(number)
    # The parts of an array that was split before are read at once and make no new ones.
    for each, numbers in sharded.items():
        if _has_parts(each, parts):
            for number in numbers:
                if _was_split(arrays[number]):
                    found[number] = _read(arrays[number])
                    for device, address in found[number] or ():
                        parts[device, each.kind].discard(address)
    for number in _suspects(sharded, parts, found):
        found[number] = _read(_twin(arrays[number], blocks[number]))
    return found


def _suspects(
    sharded: dict[Blocks, list[int]],
    parts: dict[tuple[Any, ...], set[int]],
    found: Sequence[list[Address] | None],
) -> Iterable[int]:
    """Yield the arrays to be split, as many as there is room for."""
    alike: dict[Any, list[Blocks]] = defaultdict(list)
    for each in sharded:
        alike[each.devices, each.kind].append(each)
    suspected = []
    for each, numbers in sharded.items():
        has_parts, others = _has_parts(each, parts), alike[each.devices, each.kind]
        # Between processes, JAX has no other way to share buffers than from parts.
        may_be_put = each.sharding.is_fully_addressable
        if has_parts or (may_be_put and sum(len(sharded[other]) for other in others) > 1):
            is_likely = has_parts or len(others) > 1
            suspected.append((not is_likely, -each.block_bytes, numbers, len(each.devices)))
    room = _MOST_BLOCKS
    for _, _, numbers, num_blocks in sorted(suspected, key=lambda each: each[:2]):
        for number in numbers:
            if found[number] is None:
                room -= num_blocks
                if room < 0:
                    return
                yield number


def _has_parts(blocks: Blocks, parts: dict[tuple[Any, ...], set[int]]) -> bool:
    return any(parts.get((device, blocks.kind)) for device in blocks.devices)


def _was_split(array: jax.Array) -> bool:
    """Return True if the parts of an array are known to be there.

    JAX keeps them as a cached property. A version that did otherwise would only lose this shortcut.
    """
    return "addressable_shards" in getattr(array, "__dict__", ())


def _read(array: jax.Array | None) -> list[Address] | None:
    """Return the addresses of the blocks of an array, which splits it."""
    try:
        shards = () if array is None else array.addressable_shards
        read = [(shard.device, _address(shard.data)) for shard in shards]
    except RuntimeError:  # deleted meanwhile, by another thread
        return None
    return read if read and all(address for _, address in read) else None


def _address(array: Any) -> int:
    """Return the address of an array on one device; 0 if it has none."""
    try:
        return array.unsafe_buffer_pointer()  # JAX 0.8 makes another array of the buffer, once
    except (RuntimeError, NotImplementedError):  # a failed computation, or deleted meanwhile
        return 0


def _twin(array: jax.Array, blocks: Blocks) -> jax.Array | None:
    """Return another array with the same buffers, to be split instead; None if there is none."""
    if not blocks.sharding.is_fully_addressable:
        return array
    try:
        return jax.device_put(array, blocks.twin) if blocks.twin else None
    except (RuntimeError, ValueError, NotImplementedError):  # such as a spec with unreduced axes
        return None

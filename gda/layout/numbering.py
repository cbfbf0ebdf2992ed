"""The block that each device of a mesh holds under a spec, and the number of its replica.

The one confusing rule, by example: the spec ``P(('x', 'y'))`` on a mesh ``{'x': 2, 'y': 3}``
divides dimension 0 into six blocks, and the device at coordinates (x, y) holds block
``x * 3 + y``: the first name of an entry is the slowest, whatever the order of the mesh axes. So
``P(('y', 'x'))`` puts block ``y * 2 + x`` there.

Every number here is a mixed radix number: the sum, over the axes of the mesh, of the device's
coordinate times a weight.

- The block: the axes of the spec, last name of the last dimension fastest.
- The replica: the axes that the spec leaves over, last axis of the mesh fastest. Why that is right:
  the block number tells apart all coordinates on the axes of the spec, so devices hold the same
  block exactly when they agree on those axes; in device order, the other axes count up among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gda.layout.spec import (
    SpecEntry,
    SpecLike,
    axes_by_dimension,
    check_mesh_shape,
    check_spec,
    entries_of,
    integers,
)

IntArray = npt.NDArray[np.int64]
Numbers = TypeVar("Numbers", int, IntArray)


class Layout:
    """A spec on a mesh, shared by all parameters of a model that have it; compared by identity.

    Attributes:
      mesh_shape: axis sizes by name, in mesh order; ``sizes`` are its values.
      axes: for each dimension the names of the axes that shard it.
      parts: the number of parts along each dimension.
      num_devices, num_shards, num_replicas: devices, distinct blocks, devices per block.
      block_weights, replica_weights: per mesh axis; 0 where the axis does not count.
    """

    def __init__(
        self, mesh_shape: dict[str, int], axes: tuple[tuple[str, ...], ...], empty: tuple[bool, ...]
    ) -> None:
        self.mesh_shape = MappingProxyType(mesh_shape)
        self.sizes = tuple(mesh_shape.values())
        self.axes = axes
        self.spec: tuple[SpecEntry, ...] = entries_of(axes)
        weights = dict.fromkeys(mesh_shape, 0)
        parts, blocks = [], 1
        for names, is_empty in zip(reversed(axes), reversed(empty), strict=True):
            ways = 1
            for name in reversed(names):
                # An axis on a dimension of size 0 tells no blocks apart: all of them are empty.
                weights[name] = 0 if is_empty else blocks * ways
                ways *= mesh_shape[name]
            parts.append(ways)
            blocks *= 1 if is_empty else ways
        replica_weights, replicas = [], 1
        for size, weight in zip(reversed(self.sizes), reversed(weights.values()), strict=True):
            replica_weights.append(0 if weight else replicas)
            replicas *= 1 if weight else size
        self.parts = tuple(reversed(parts))
        self.block_weights = tuple(weights.values())
        self.replica_weights = tuple(reversed(replica_weights))
        weights_by_axis = zip(self.sizes, self.block_weights, self.replica_weights, strict=True)
        self._from_fastest = [*weights_by_axis][::-1]
        self.num_shards = blocks
        self.num_replicas = replicas
        self.num_devices = blocks * replicas

    def numbers(self, position: int) -> tuple[int, int]:
        """Return block number and replica id of one device, O(axes)."""
        if not 0 <= position < self.num_devices:
            raise IndexError(
                f"device {position} is outside the {self.num_devices} devices of the mesh "
                f"{dict(self.mesh_shape)}; they are numbered from 0"
            )
        return self.numbers_at(position)

    def numbers_at(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return block number and replica id of a device, or of some in an array, unchecked."""
        rest: Any = positions
        block = replica = rest * 0
        for size, block_weight, replica_weight in self._from_fastest:
            rest, coordinate = divmod(rest, size)
            block = block + coordinate * block_weight
            replica = replica + coordinate * replica_weight
        return block, replica

    def position(self, coordinates: Sequence[int]) -> int:
        given = integers(coordinates, "a position, or mesh coordinates such as (0, 1)")
        if len(given) != len(self.sizes) or not all(
            0 <= c < size for c, size in zip(given, self.sizes, strict=True)
        ):
            raise IndexError(
                f"mesh coordinates {given} are outside the mesh {dict(self.mesh_shape)}; give a "
                "number for each axis, from 0 to below its size"
            )
        flat = 0
        for c, size in zip(given, self.sizes, strict=True):
            flat = flat * size + c
        return flat

    def holders(self, block: int) -> IntArray:
        """Return the flat positions of the devices that hold a block, O(``num_replicas``)."""
        first, stride = 0, self.num_devices
        counts, strides = [], []
        for size, weight in zip(self.sizes, self.block_weights, strict=True):
            stride //= size
            if weight:
                first += block // weight % size * stride
            else:
                counts.append(size)
                strides.append(stride)
        return first + spread(counts, strides).ravel()

    # All devices: once for all arrays of the layout.

    @cached_property
    def block_ids(self) -> IntArray:
        """Block number of every device: int64 ``[num_devices]``, read-only."""
        return self._of_all(self.block_weights)

    @cached_property
    def replica_ids(self) -> IntArray:
        """Replica id of every device: int64 ``[num_devices]``, read-only."""
        return self._of_all(self.replica_weights)

    def parts_along(self, dimension: int) -> IntArray:
        """Return the part of every device in a dimension, in an array that ``spread`` makes."""
        weights, ways = dict.fromkeys(self.mesh_shape, 0), 1
        for name in reversed(self.axes[dimension]):
            weights[name] = ways
            ways *= self.mesh_shape[name]
        return spread(self.sizes, tuple(weights.values()))

    def _of_all(self, weights: Sequence[int]) -> IntArray:
        numbers = np.empty(self.sizes, np.int64)
        numbers[...] = spread(self.sizes, weights)
        return read_only(numbers.reshape(-1))


@lru_cache(maxsize=32)  # with its numbers, 16 bytes a device
def layout_of(
    mesh_items: tuple[tuple[str, int], ...], spec: SpecLike, empty: tuple[bool, ...]
) -> Layout:
    """Return the layout of a spec on a mesh for an array whose dimensions are ``empty`` or not."""
    mesh_shape = check_mesh_shape(dict(mesh_items))
    entries = check_spec(spec, (0,) * len(empty), mesh_shape)
    return Layout(mesh_shape, axes_by_dimension(entries, len(empty), mesh_shape), empty)


@lru_cache(maxsize=16)  # a process asks for its own devices, of array after array
def numbers_of(layout: Layout, positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return block number and replica id of devices, whose positions are a tuple or a range."""
    return [layout.numbers(position) for position in positions]


def distinct(numbers: IntArray) -> IntArray:
    """Return the distinct ones of non-negative numbers, ascending."""
    # They mostly come in runs, on which a stable sort is quick: 3 to 70 ms for a million; np.unique
    # of NumPy 2.4 takes 700 ms.
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.diff(ordered, prepend=-1) != 0]


def read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False
    return array


def spread(sizes: Sequence[int], weights: Sequence[int]) -> IntArray:
    """Return the sum of coordinate times weight for all coordinates.

    An array that broadcasts to the shape ``sizes``: its length is 1 along axes of weight 0.
    """
    along = [
        np.arange(0, size * weight, weight).reshape(-1, *(1,) * (len(sizes) - axis - 1))
        for axis, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        if weight and size > 1
    ]
    return sum(along[1:], along[0]) if along else np.zeros((), np.int64)

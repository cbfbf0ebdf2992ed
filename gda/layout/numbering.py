"""The block that each device of a mesh holds under a spec, and the number of its replica.

A ``Layout`` knows the mesh and the spec but no sizes of an array, so the hundreds of parameters of
a model share the few layouts that their specs make.

The one confusing rule, by example: the spec ``P(('x', 'y'))`` on a mesh ``{'x': 2, 'y': 3}``
divides dimension 0 into six blocks, and the device at coordinates (x, y) holds block
``x * 3 + y``: the first name of an entry is the slowest, whatever the order of the mesh axes. So
``P(('y', 'x'))`` puts block ``y * 2 + x`` there.

Every number here is a mixed radix number: the sum, over the axes of the mesh, of the device's
coordinate times a weight.

- The block: the axes of the spec, last name of the last dimension fastest.
- The replica: the axes that the spec leaves over, last axis of the mesh fastest. Why that is right:
  the block number tells apart all coordinates on the axes of the spec, so devices hold the same
  block exactly when they agree on those axes; in device order, what counts up among them are the
  others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

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

# Below this many devices a list is filled by Python about as quickly as by NumPy and `tolist`, with
# 64 devices in a third of the time (benchmarks/results.json, "numbers of"), and is small enough to
# keep with the layout.
SMALL = 512

IntArray = npt.NDArray[np.int64]


class Held(NamedTuple):
    """The blocks that some devices hold, in the order of the block numbers.

    Attributes:
      positions: of the devices.
      combine: ``product`` if the blocks are all combinations of some parts, else ``zip``.
      parts: for each dimension the parts that ``combine`` makes blocks of.
      shards: for each device the place of its block among these, and its replica id.
    """

    positions: Sequence[int]
    combine: Callable[..., Iterable[tuple[Any, ...]]]
    parts: Sequence[Sequence[int]]
    shards: Sequence[tuple[int, int]]


class Layout:
    """A spec on a mesh. Made by ``layout_of``; immutable, shared, compared by identity.

    Attributes:
      mesh_shape: axis sizes by name, in mesh order; ``sizes`` are its values.
      axes: for each dimension the names of the axes that shard it.
      parts: the number of parts along each dimension.
      coordinates: for each dimension the parts that differ, from 0; all of size 0 are equal.
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
        sides = zip(empty, self.parts, strict=True)
        self.coordinates = tuple([range(1 if is_empty else ways) for is_empty, ways in sides])
        self.block_weights = tuple(weights.values())
        self.replica_weights = tuple(reversed(replica_weights))
        self.num_shards = blocks
        self.num_replicas = replicas
        self.num_devices = blocks * replicas
        self.is_small = self.num_devices < SMALL
        self._held = Held((), zip, [()] * len(axes), ())

    def numbers(self, position: int) -> tuple[int, int]:
        """Return block number and replica id of one device, O(axes)."""
        if not 0 <= position < self.num_devices:
            raise IndexError(
                f"device {position} is outside the {self.num_devices} devices of the mesh "
                f"{dict(self.mesh_shape)}"
            )
        block = replica = 0
        for size, block_weight, replica_weight in self._from_fastest:
            position, coordinate = divmod(position, size)
            block += coordinate * block_weight
            replica += coordinate * replica_weight
        return block, replica

    @cached_property
    def _from_fastest(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(zip(self.sizes, self.block_weights, self.replica_weights, strict=True))[::-1]

    def held(self, positions: Sequence[int]) -> Held:
        """Return the blocks of the devices at these positions, a tuple or a range."""
        held = self._held
        if held.positions != positions:
            numbers = [self.numbers(position) for position in positions]
            blocks = sorted({block for block, _ in numbers})
            columns, rest = [], blocks
            for parts in reversed(self.coordinates):
                columns.insert(0, [block % parts.stop for block in rest])
                rest = [block // parts.stop for block in rest]
            parts = [sorted(set(column)) for column in columns]
            is_regular = math.prod(map(len, parts)) == len(blocks)
            place_of = {block: place for place, block in enumerate(blocks)}
            shards = [(place_of[block], replica) for block, replica in numbers]
            held = Held(positions, *((product, parts) if is_regular else (zip, columns)), shards)
            if len(positions) <= SMALL:
                self._held = held  # a process asks for its own devices, of array after array
        return held

    def position(self, coordinates: Sequence[int]) -> int:
        """Return the flat position of mesh coordinates."""
        try:
            given = integers(coordinates)
        except TypeError:
            raise TypeError(
                "a device is given by its flat position or its mesh coordinates, integers such as "
                f"3 or (1, 0), not {coordinates!r}"
            ) from None
        if len(given) != len(self.sizes) or not all(
            0 <= c < size for c, size in zip(given, self.sizes, strict=True)
        ):
            raise IndexError(
                f"mesh coordinates {given} are outside the mesh {dict(self.mesh_shape)}"
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
        return first + _spread(counts, strides)

    # All devices. A layout lives long, so it keeps what is small; a grid keeps what it needs.

    def spread(self, weights: Sequence[int]) -> IntArray:
        """Return the sum of coordinate times weight for every device, in device order."""
        return _spread(self.sizes, weights)

    @property
    def block_list(self) -> list[int]:
        """Block number of every device, in device order; not to be changed."""
        return self._small_blocks if self.is_small else self.spread(self.block_weights).tolist()

    @property
    def replica_list(self) -> list[int]:
        """Replica id of every device, in device order; not to be changed."""
        if self.is_small:
            return self._small_replicas
        return self.spread(self.replica_weights).tolist()

    @cached_property
    def small_replica_ids(self) -> IntArray:
        """``replica_list`` as an array, read-only."""
        return read_only(np.array(self.replica_list, np.int64))

    @cached_property
    def _small_blocks(self) -> list[int]:
        return _spread_list(self.sizes, self.block_weights)

    @cached_property
    def _small_replicas(self) -> list[int]:
        return _spread_list(self.sizes, self.replica_weights)


@lru_cache(maxsize=1024)
def layout_of(
    mesh_items: tuple[tuple[str, int], ...], spec: SpecLike, empty: tuple[bool, ...]
) -> Layout:
    """Return the layout of a spec on a mesh for an array whose dimensions are ``empty`` or not."""
    mesh_shape = check_mesh_shape(dict(mesh_items))
    entries = check_spec(spec, (0,) * len(empty), mesh_shape)
    return Layout(mesh_shape, axes_by_dimension(entries, len(empty), mesh_shape), empty)


def read_only(array: IntArray) -> IntArray:
    """Mark ``array`` as not writeable and return it."""
    array.flags.writeable = False
    return array


def _spread(sizes: Sequence[int], weights: Sequence[int]) -> IntArray:
    """Return the sum of coordinate times weight for all coordinates, row-major."""
    if not any(weights):
        return np.zeros(math.prod(sizes), np.int64)
    values = np.zeros(1, np.int64)
    for size, weight in zip(sizes, weights, strict=True):
        if size > 1:
            along = np.arange(size, dtype=np.int64) * weight
            values = (values[:, np.newaxis] + along).ravel()
    return values


def _spread_list(sizes: Sequence[int], weights: Sequence[int]) -> list[int]:
    values = [0]
    for size, weight in zip(sizes, weights, strict=True):
        along = range(0, size * weight, weight) if weight else (0,) * size
        values = [value + step for value in values for step in along]
    return values

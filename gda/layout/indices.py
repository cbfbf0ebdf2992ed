"""Indices of blocks, one slice for each dimension, and the blocks of a shape by their numbers.

The index of a grid has ``slice(None)`` for a dimension that is not sharded; ``bounded`` gives it
every start and stop, and makes it a *box*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gda.layout.numbering import IntArray, Numbers
from gda.layout.spec import Index, Shape

_WHOLE = slice(None)


def shape_at(index: Index, block_shape: Shape) -> Shape:
    """Return the shape of the block at an index; ``block_shape`` has the sizes not sharded."""
    sides = zip(index, block_shape, strict=True)
    return tuple([size if s.stop is None else s.stop - s.start for s, size in sides])


def start_of(index: Index) -> Shape:
    """Return the first element of the block at an index, which is a key of the block.

    All blocks of a grid have other first elements. Slices are not hashable before Python 3.12.
    """
    return tuple([s.start or 0 for s in index])


def is_empty(index: Index) -> bool:
    """Return True if an index has no elements: of a padded grid, that of padding alone."""
    return any(s.start == s.stop is not None for s in index)


def bounded(index: Index, shape: Shape) -> Index:
    sides = zip(index, shape, strict=True)
    return tuple([slice(s.start or 0, size if s.stop is None else s.stop) for s, size in sides])


# Boxes: indices with every start and stop.


def index_at(start: Shape, shape: Shape) -> Index:
    return tuple([slice(first, first + n) for first, n in zip(start, shape, strict=True)])


def sizes_of(box: Index) -> Shape:
    return tuple([s.stop - s.start for s in box])


def hull_of(boxes: Iterable[Index]) -> Index:
    return tuple(
        [
            slice(min([s.start for s in along]), max([s.stop for s in along]))
            for along in zip(*boxes, strict=True)
        ]
    )


def common_box(one: Index, other: Index) -> Index | None:
    """Return the elements that two boxes have in common; ``None`` if there are none."""
    both: list[slice] = []
    for a, b in zip(one, other, strict=True):  # no generators: called for each part of each read
        start = a.start if a.start > b.start else b.start
        stop = a.stop if a.stop < b.stop else b.stop
        if start >= stop:
            return None
        both.append(slice(start, stop))
    return tuple(both)


def within(box: Index, start: Shape) -> Index:
    """Return the place of a box in a block that begins at an element."""
    sides = zip(box, start, strict=True)
    return tuple([slice(s.start - first, s.stop - first) for s, first in sides])


class Dimension:
    """A size divided into parts of one length; immutable.

    If that length does not divide the size, the last parts are shorter or empty. All parts of a
    size of 0 are equal and count as one. ``step`` is the length of the largest part, by default
    ``ceil(size / ways)``; ``parts`` is the number of distinct parts.
    """

    __slots__ = ("parts", "size", "step", "ways")

    def __init__(self, size: int, ways: int, step: int | None = None) -> None:
        self.size = size
        self.ways = ways
        self.step = -(-size // ways) if step is None else step
        self.parts = ways if size else min(ways, 1)

    def slice_of(self, part: int) -> slice:
        """Return the elements of a part, as they stand in an index."""
        if self.ways == 1:
            return _WHOLE
        stop = part * self.step + self.step
        return slice(stop - self.step, stop) if stop <= self.size else slice(*self.bounds(part))

    def bounds(self, part: int) -> tuple[int, int]:
        start = part * self.step
        return min(start, self.size), min(start + self.step, self.size)

    def starts(self, parts: IntArray) -> IntArray:
        return np.minimum(parts * self.step, self.size)

    def stops(self, parts: IntArray) -> IntArray:
        starts = self.starts(parts)
        return starts + np.minimum(self.step, self.size - starts)  # the sum is below 2**63


class Boxes(NamedTuple):
    """Boxes of an array: the starts and the stops of all of them, for each dimension."""

    starts: Sequence[IntArray]
    stops: Sequence[IntArray]


class Tiling:
    """A shape divided into parts of one size along each dimension; immutable.

    Blocks are numbered row-major over their *coordinates*, one part per dimension.
    """

    def __init__(
        self, global_shape: Shape, ways: Sequence[int], steps: Sequence[int | None] | None = None
    ) -> None:
        self.global_shape = global_shape
        self.ways = ways
        self.dimensions = tuple(map(Dimension, global_shape, ways, steps or (None,) * len(ways)))

    @classmethod
    def of_blocks(cls, global_shape: Shape, block_shape: Shape) -> Tiling:
        """Return the tiling in blocks of this shape; those at the edge may be smaller.

        >>> Tiling.of_blocks((5, 0), (2, 3)).parts
        (3, 0)
        """
        sides = zip(global_shape, block_shape, strict=True)
        return cls(global_shape, [-(-n // step) if n else 0 for n, step in sides], block_shape)

    @cached_property
    def shard_shape(self) -> Shape:
        return tuple([dimension.step for dimension in self.dimensions])

    @cached_property
    def parts(self) -> Shape:
        """The number of distinct parts of each dimension."""
        return tuple([dimension.parts for dimension in self.dimensions])

    @cached_property
    def is_even(self) -> bool:
        return all(each.ways * each.step == each.size for each in self.dimensions)

    def index(self, block: int) -> Index:
        """Return the elements of a block as one slice per dimension."""
        # Not by ``columns``, which takes a third longer.
        slices = []
        for dimension in reversed(self.dimensions):
            block, part = divmod(block, dimension.parts)
            slices.append(dimension.slice_of(part))
        return tuple(slices[::-1])

    def block_at(self, point: Sequence[int]) -> int:
        """Return the block that has an element.

        >>> Tiling((8, 2, 6), (4, 1, 2)).block_at((2, 0, 5))
        3
        """
        block = 0
        for dimension, first in zip(self.dimensions, point, strict=True):
            block = block * dimension.parts + first // max(dimension.step, 1)
        return block

    def columns(self, blocks: Numbers) -> list[Numbers]:
        """Return, for each dimension, the coordinate of a block, or those of some blocks.

        >>> Tiling((8, 2, 6), (4, 1, 2)).columns(3)
        [1, 0, 1]
        """
        columns: list[Any] = []
        rest: Any = blocks
        for dimension in reversed(self.dimensions):
            rest, column = divmod(rest, dimension.parts)
            columns.append(column)
        return columns[::-1]

    def boxes(self, blocks: IntArray) -> Boxes:
        columns = self.columns(blocks)
        starts = map(Dimension.starts, self.dimensions, columns)
        return Boxes([*starts], [*map(Dimension.stops, self.dimensions, columns)])

    def sizes(self, blocks: IntArray) -> IntArray:
        if self.is_even:
            return np.full(blocks.shape, math.prod(self.shard_shape), np.int64)
        sides = zip(*self.boxes(blocks), strict=True)
        return np.prod([stop - start for start, stop in sides], axis=0)


def indices_of(
    slices: Sequence[Mapping[int, slice] | Sequence[slice]],
    columns: Sequence[Sequence[int]],
    count: int,
) -> Iterable[Index]:
    """Return the indices of ``count`` blocks: the slices that their columns number."""
    if not slices:
        return [()] * count
    chosen = [map(known.__getitem__, column) for known, column in zip(slices, columns, strict=True)]
    return zip(*chosen, strict=True)

"""Which pieces the blocks of one tiling are made of, if they are cut out of the blocks of another.

A *piece* is where a target block and a source block overlap. Along one dimension the boundaries of
both tilings cut it into *segments*; each lies in one part of either. A piece is one segment for
each dimension, so the pieces of a block are all combinations of the segments of its parts. Nothing
here is proportional to pairs of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Shape


@dataclass(frozen=True, eq=False)
class Segments:
    """One dimension, cut by two tilings.

    Args:
      size: of the dimension, at least 1.
      source_step, target_step: sizes of one part of each tiling; they divide ``size``.
    """

    size: int
    source_step: int
    target_step: int

    @cached_property
    def starts(self) -> IntArray:
        """First element of each segment, ascending."""
        by_source = np.arange(0, self.size, self.source_step)
        return np.union1d(by_source, np.arange(0, self.size, self.target_step))

    @cached_property
    def lengths(self) -> IntArray:
        """Elements of each segment."""
        return np.diff(self.starts, append=self.size)

    @property
    def count(self) -> int:
        """How many there are, without making them."""
        sources, targets = self.size // self.source_step, self.size // self.target_step
        return sources + targets - math.gcd(sources, targets)

    @property
    def are_equal(self) -> bool:
        """Whether all have one length: exactly where one tiling is a refinement of the other."""
        small, large = sorted((self.source_step, self.target_step))
        return large % small == 0

    @cached_property
    def source_parts(self) -> IntArray:
        """The part of the source that each segment lies in."""
        return self.starts // self.source_step

    @cached_property
    def firsts(self) -> IntArray:
        """The first segment of each part of the target."""
        return np.searchsorted(self.starts, np.arange(0, self.size, self.target_step))

    @cached_property
    def counts(self) -> IntArray:
        """How many segments each part of the target has."""
        return np.diff(self.firsts, append=len(self.starts))

    @cached_property
    def slices(self) -> tuple[list[slice], list[slice]]:
        """Where each segment lies within its part of the source, and of the target."""
        within = []
        for step in (self.source_step, self.target_step):
            starts = self.starts % step
            pairs = zip(starts.tolist(), (starts + self.lengths).tolist(), strict=True)
            within.append([slice(start, stop) for start, stop in pairs])
        return within[0], within[1]


@dataclass(frozen=True, eq=False)
class Listed:
    """Pieces, block after block.

    Attributes:
      rows: which of the blocks that were asked for each is a piece of, ascending.
      source_blocks: the block of the source that it is cut out of.
      sizes: its elements.
      segments: for each dimension, its segment.
    """

    rows: IntArray
    source_blocks: IntArray
    sizes: IntArray
    segments: tuple[IntArray, ...]


class Pieces:
    """All pieces of the blocks of a target tiling; immutable.

    Args:
      global_shape: sizes of the whole, none of them 0.
      source_shape, target_shape: sizes of one block of each tiling.

    >>> pieces = Pieces((6,), (3,), (2,))
    >>> pieces.count, pieces.listed(np.array([1])).sizes
    (4, array([1, 1]))
    """

    def __init__(self, global_shape: Shape, source_shape: Shape, target_shape: Shape) -> None:
        sizes = zip(global_shape, source_shape, target_shape, strict=True)
        self.dimensions = tuple(Segments(*of_one) for of_one in sizes)
        self._source_parts = parts_of(global_shape, source_shape)
        self._target_parts = parts_of(global_shape, target_shape)

    @property
    def count(self) -> int:
        """Pieces of all target blocks."""
        return math.prod(segments.count for segments in self.dimensions)

    @cached_property
    def common_size(self) -> int | None:
        """Elements of each piece, where all have as many."""
        if not all(segments.are_equal for segments in self.dimensions):
            return None
        return math.prod(min(s.source_step, s.target_step) for s in self.dimensions)

    def counts(self, blocks: IntArray) -> IntArray:
        """Return how many pieces some target blocks have."""
        counts = np.ones(len(blocks), np.int64)
        for segments, column in self._columns(blocks, self._target_parts):
            counts *= segments.counts[column]
        return counts

    def listed(self, blocks: IntArray) -> Listed:
        """Return the pieces of some target blocks."""
        counts = self.counts(blocks)
        rows = np.repeat(np.arange(len(blocks)), counts)
        # The number of each piece within its block, of which the segments are the digits.
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        source_blocks = np.zeros(len(rows), np.int64)
        sizes = np.ones(len(rows), np.int64)
        chosen, weight = [], 1
        columns = zip(self._columns(blocks, self._target_parts), self._source_parts, strict=True)
        for (segments, column), parts in reversed(list(columns)):
            numbers, digits = np.divmod(numbers, segments.counts[column][rows])
            segment = segments.firsts[column][rows] + digits
            source_blocks += segments.source_parts[segment] * weight
            sizes *= segments.lengths[segment]
            chosen.append(segment)
            weight *= parts
        return Listed(rows, source_blocks, sizes, tuple(reversed(chosen)))

    def overlaps(self, source_blocks: IntArray, target_blocks: IntArray) -> IntArray:
        """Return how many elements each source block shares with the target block beside it."""
        shared = np.ones(len(source_blocks), np.int64)
        sources = self._columns(source_blocks, self._source_parts)
        targets = self._columns(target_blocks, self._target_parts)
        for (segments, source), (_, target) in zip(sources, targets, strict=True):
            source_starts = source * segments.source_step
            target_starts = target * segments.target_step
            starts = np.maximum(source_starts, target_starts)
            stops = np.minimum(
                source_starts + segments.source_step, target_starts + segments.target_step
            )
            shared *= np.maximum(stops - starts, 0)
        return shared

    def _columns(self, blocks: IntArray, parts: Sequence[int]) -> list[tuple[Segments, IntArray]]:
        """Return, with each dimension, the coordinates of some blocks in it."""
        return list(zip(self.dimensions, columns_of(blocks, parts), strict=True))


def columns_of(blocks: IntArray, parts: Sequence[int]) -> list[IntArray]:
    """Return, for each dimension, the coordinates of some blocks in it.

    >>> columns_of(np.array([0, 5]), (2, 3))
    [array([0, 1]), array([0, 2])]
    """
    columns = []
    for ways in reversed(parts):
        blocks, column = np.divmod(blocks, ways)
        columns.append(column)
    return columns[::-1]


def parts_of(global_shape: Shape, block_shape: Shape) -> Shape:
    """Return into how many parts each dimension is cut."""
    return tuple(size // step for size, step in zip(global_shape, block_shape, strict=True))

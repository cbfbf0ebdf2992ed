"""The overlaps of the blocks of two tilings.

A *piece* is the overlap of a target block and a source block. Along one dimension the boundaries of
both tilings divide it into *segments*; each is in one part of either. A piece is one segment for
each dimension, so the pieces of a block are all combinations of the segments of its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gda.layout.indices import Dimension, Tiling
from gda.layout.numbering import IntArray


class SegmentsOfParts(NamedTuple):
    """The segments of one dimension, by the parts of one tiling, in which they are consecutive.

    Attributes:
      parts: the part that has each segment.
      places: the place of each segment in its part.
      firsts, counts: first segment of each part, and the number of its segments.
      most: the most segments of a part.
    """

    parts: IntArray
    places: IntArray
    firsts: IntArray
    counts: IntArray
    most: int

    @classmethod
    def of(cls, starts: IntArray, dimension: Dimension) -> SegmentsOfParts:
        """Return them for segments that start at these elements."""
        parts = starts // dimension.step
        firsts = np.searchsorted(starts, np.arange(dimension.parts) * dimension.step)
        counts = np.diff(firsts, append=len(starts))
        places = np.arange(len(starts)) - firsts[parts]
        return cls(parts, places, firsts, counts, int(counts.max()))


@dataclass(frozen=True, eq=False)
class Segments:
    """One dimension of at least one element, divided by two tilings."""

    source: Dimension
    target: Dimension

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def steps(self) -> tuple[int, int]:
        return self.source.step, self.target.step

    @cached_property
    def starts(self) -> IntArray:
        return np.union1d(*(np.arange(0, self.size, step) for step in self.steps))

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.starts, append=self.size)

    @property
    def count(self) -> int:
        # A start of both tilings is one segment; a start is a multiple of a step below the size.
        steps = *self.steps, math.lcm(*self.steps)
        source, target, both = (-(-self.size // step) for step in steps)
        return source + target - both

    @property
    def common(self) -> int:
        """The greatest common divisor of all lengths."""
        return math.gcd(self.size, *(min(step, self.size) for step in self.steps))

    @cached_property
    def of_source(self) -> SegmentsOfParts:
        return SegmentsOfParts.of(self.starts, self.source)

    @cached_property
    def of_target(self) -> SegmentsOfParts:
        return SegmentsOfParts.of(self.starts, self.target)

    @cached_property
    def slices(self) -> tuple[list[slice], list[slice]]:
        """The place of each segment within its part of the source, and of the target."""
        within = []
        for step in self.steps:
            starts = self.starts % step
            pairs = zip(starts.tolist(), (starts + self.lengths).tolist(), strict=True)
            within.append([slice(start, stop) for start, stop in pairs])
        return within[0], within[1]


@dataclass(frozen=True, eq=False)
class Listed:
    """Pieces, block after block.

    Attributes:
      rows: which of the blocks that were asked for each is a piece of, ascending.
      source_blocks: the block of the source that has it.
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
      source, target: of one global shape, none of whose sizes is 0.

    >>> pieces = Pieces(Tiling((6,), (2,)), Tiling((6,), (3,)))
    >>> pieces.count, pieces.listed(np.array([1])).sizes
    (4, array([1, 1]))
    """

    def __init__(self, source: Tiling, target: Tiling) -> None:
        self.dimensions = tuple(map(Segments, source.dimensions, target.dimensions))
        self._source = source
        self._target = target

    @property
    def reversed(self) -> Pieces:
        """The same pieces, as those of the source blocks; segments have the same numbers."""
        return Pieces(self._target, self._source)

    @property
    def num_source_blocks(self) -> int:
        return math.prod(self._source.parts)

    @property
    def count(self) -> int:
        return math.prod(segments.count for segments in self.dimensions)

    def counts(self, blocks: IntArray) -> IntArray:
        counts = np.ones(len(blocks), np.int64)
        for segments, column in zip(self.dimensions, self._target.columns(blocks), strict=True):
            counts *= segments.of_target.counts[column]
        return counts

    def listed(self, blocks: IntArray) -> Listed:
        counts = self.counts(blocks)
        rows = np.repeat(np.arange(len(blocks)), counts)
        # The number of each piece within its block; the segments are its digits.
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        source_blocks = np.zeros(len(rows), np.int64)
        sizes = np.ones(len(rows), np.int64)
        chosen, weight = [], 1
        columns = zip(self.dimensions, self._target.columns(blocks), strict=True)
        for segments, column in reversed([*columns]):
            numbers, digits = np.divmod(numbers, segments.of_target.counts[column][rows])
            segment = segments.of_target.firsts[column][rows] + digits
            source_blocks += segments.of_source.parts[segment] * weight
            sizes *= segments.lengths[segment]
            chosen.append(segment)
            weight *= segments.source.parts
        return Listed(rows, source_blocks, sizes, tuple(reversed(chosen)))

    def overlaps(self, source_blocks: IntArray, target_blocks: IntArray) -> IntArray:
        """Return the elements that each source block shares with the target block beside it."""
        sources, targets = self._source.boxes(source_blocks), self._target.boxes(target_blocks)
        starts = map(np.maximum, sources.starts, targets.starts)
        stops = map(np.minimum, sources.stops, targets.stops)
        shared = np.ones(len(source_blocks), np.int64)
        for start, stop in zip(starts, stops, strict=True):
            shared *= np.maximum(stop - start, 0)
        return shared

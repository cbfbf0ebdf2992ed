"""The overlaps of the blocks of two tilings: one by one, and summed over the blocks of a process.

A *piece* is the overlap of a target block and a source block. Along one dimension the boundaries of
both tilings divide it into *segments*; each is in one part of either. A piece is one segment for
each dimension, so the pieces of a block are all combinations of the segments of its parts.

The blocks of a process are *regular* if they are all combinations of some parts of each dimension,
and as many devices have each of them. On a mesh whose devices are in the order of their processes
they mostly are. The elements that a box shares with all of them are then a product of one number
for each dimension, however many the blocks are.

Nothing here is proportional to pairs of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Segments:
    """One dimension, divided by two tilings.

    Args:
      size: of the dimension, at least 1.
      source_step, target_step: sizes of the largest part of each tiling.
      target_parts: the number of parts of the target.
    """

    size: int
    source_step: int
    target_step: int
    target_parts: int

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
        """The number of segments, without making them."""
        steps = self.source_step, self.target_step
        # A start of both tilings is one segment; a start is a multiple of a step below the size.
        source, target, both = (-(-self.size // step) for step in (*steps, math.lcm(*steps)))
        return source + target - both

    @property
    def are_equal(self) -> bool:
        """True if all have one length: one tiling refines the other, and no part is shorter."""
        small, large = sorted(min(step, self.size) for step in (self.source_step, self.target_step))
        return large % small == self.size % small == 0

    @cached_property
    def source_parts(self) -> IntArray:
        """The part of the source that has each segment."""
        return self.starts // self.source_step

    @cached_property
    def firsts(self) -> IntArray:
        """The first segment of each part of the target."""
        return np.searchsorted(self.starts, np.arange(self.target_parts) * self.target_step)

    @cached_property
    def counts(self) -> IntArray:
        """The number of segments of each part of the target."""
        return np.diff(self.firsts, append=len(self.starts))

    @cached_property
    def slices(self) -> tuple[list[slice], list[slice]]:
        """The place of each segment within its part of the source, and of the target."""
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

    >>> pieces = Pieces(Tiling((6,), (3,), (2,)), Tiling((6,), (2,), (3,)))
    >>> pieces.count, pieces.listed(np.array([1])).sizes
    (4, array([1, 1]))
    """

    def __init__(self, source: Tiling, target: Tiling) -> None:
        sizes = zip(
            source.global_shape, source.shard_shape, target.shard_shape, target.parts, strict=True
        )
        self.dimensions = tuple(Segments(*of_one) for of_one in sizes)
        self._source_parts = source.parts
        self._target_parts = target.parts

    @property
    def count(self) -> int:
        """Pieces of all target blocks."""
        return math.prod(segments.count for segments in self.dimensions)

    @cached_property
    def common_size(self) -> int | None:
        """Elements of each piece, where all have as many."""
        if not all(segments.are_equal for segments in self.dimensions):
            return None
        return math.prod(min(s.source_step, s.target_step, s.size) for s in self.dimensions)

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
        # The number of each piece within its block; the segments are its digits.
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
            stops = np.minimum(stops, segments.size)
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


class Boxes(NamedTuple):
    """Boxes of an array: for each dimension where each starts and stops."""

    starts: Sequence[IntArray]
    stops: Sequence[IntArray]


def boxes_of(blocks: IntArray, tiling: Tiling) -> Boxes:
    """Return the boxes of some blocks of a tiling.

    >>> boxes_of(np.array([1, 2]), Tiling((5,), (3,), (3,)))
    Boxes(starts=[array([3, 5])], stops=[array([5, 5])])
    """
    starts, stops = [], []
    columns = columns_of(blocks, tiling.parts)
    for column, step, size in zip(columns, tiling.shard_shape, tiling.global_shape, strict=True):
        starts.append(np.minimum(column * step, size))
        stops.append(np.minimum(column * step + step, size))
    return Boxes(starts, stops)


def sizes_of(blocks: IntArray, tiling: Tiling) -> IntArray:
    """Return the elements of some blocks of a tiling.

    >>> sizes_of(np.array([0, 1, 2]), Tiling((5,), (3,), (3,)))
    array([3, 2, 0])
    """
    if tiling.is_even:
        return np.full(len(blocks), math.prod(tiling.shard_shape), np.int64)
    boxes = boxes_of(blocks, tiling)
    sizes = np.ones(len(blocks), np.int64)
    for start, stop in zip(boxes.starts, boxes.stops, strict=True):
        sizes *= stop - start
    return sizes


class Along(NamedTuple):
    """The parts of one dimension that each process has.

    Attributes:
      step: elements of one part.
      parts: how many parts the dimension has.
      keys: ``process * parts + part`` of each that one has, ascending.
    """

    step: int
    parts: int
    keys: IntArray

    def below(self, processes: IntArray, ends: IntArray) -> IntArray:
        """Return how many elements of the parts of some processes lie below some elements.

        The last parts may be shorter or empty: no end is beyond the whole.
        """
        whole, rest = np.divmod(ends, self.step)
        wanted = processes * self.parts + whole
        places = np.searchsorted(self.keys, wanted)
        before = places - np.searchsorted(self.keys, processes * self.parts)
        last = np.minimum(places, len(self.keys) - 1)
        is_in_part = (whole < self.parts) & (self.keys[last] == wanted)
        return before * self.step + np.where(is_in_part, rest, 0)


class Regular:
    """The blocks of some processes, all of them regular; made by ``regular_blocks``."""

    def __init__(self, along: Sequence[Along], replicas: IntArray) -> None:
        self._along = along
        self._replicas = replicas

    def shared(self, processes: IntArray, boxes: Boxes) -> IntArray:
        """Return the elements that each box shares with each block of the process beside it.

        A block that several devices have counts once.
        """
        shared = np.ones(len(processes), np.int64)
        for along, start, stop in zip(self._along, boxes.starts, boxes.stops, strict=True):
            shared *= along.below(processes, stop) - along.below(processes, start)
        return shared

    def shared_with_devices(self, processes: IntArray, boxes: Boxes) -> IntArray:
        """As ``shared``, but a block counts for each device that has it."""
        return self.shared(processes, boxes) * self._replicas[processes]


def regular_blocks(processes: IntArray, blocks: IntArray, tiling: Tiling) -> Regular | None:
    """Return the parts of the processes of some devices; None if those of one are not regular.

    Args:
      processes: of each device, small numbers.
      blocks: of each device, its block of a tiling.

    >>> two = regular_blocks(np.array([0, 0, 1, 1]), np.arange(4), Tiling((40,), (10,), (4,)))
    >>> two.shared(np.array([0, 1]), Boxes([np.array([5, 5])], [np.array([25, 25])]))
    array([15,  5])
    """
    if not len(processes):
        return None
    parts = tiling.parts
    count = int(processes.max()) + 1
    along, regular = [], np.ones(count, np.int64)
    columns = columns_of(blocks, parts)
    for column, step, ways in zip(columns, tiling.shard_shape, parts, strict=True):
        keys = np.unique(processes * ways + column)
        along.append(Along(step, ways, keys))
        regular *= np.bincount(keys // ways, minlength=count)
    held, devices = np.unique(processes * math.prod(parts) + blocks, return_counts=True)
    owners = held // math.prod(parts)
    replicas = np.zeros(count, np.int64)
    replicas[owners] = devices
    has_blocks = np.bincount(owners, minlength=count)
    is_regular = (has_blocks == np.where(has_blocks, regular, 0)).all()
    return Regular(along, replicas) if is_regular and (replicas[owners] == devices).all() else None

"""The slices of sources that the index of a view needs: planned, joined, and read.

A *node* is a source (``SourceNode``), a map over a node (``Mapped``), or several nodes side by side
(``Joined``). All slices that one index needs are planned before the first is read, so that those of
one source that overlap or lie together become one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gda.layout.cover import READ_BYTES, boxes_of_chunks, groups_within
from gda.layout.dtype_names import native
from gda.layout.indices import bounded, common_box, hull_of, sizes_of
from gda.layout.spec import Index, Shape
from gda.layout.text import format_index
from gda.storage.casts import Origin, cast_into
from gda.storage.sources import AsyncSource, Source, checked_block
from gda.storage.tasks import Future, JoinedFutures
from gda.storage.views.mapping import (
    Box,
    ViewMap,
    chunks_of_bytes,
    num_chunks,
)

_Memory = np.ndarray[Any, Any]

# A read that does not go straight into the block has pieces of so many bytes, or one chunk.
PIECE_BYTES = 4 * 2**20
# Of the pieces that a library reads at the same time.
_BUFFERS_BYTES = 16 * 2**20


# The properties of a node are computed when it is made: later, a chain of hundreds would need a
# frame for each, and parts that are shared would be asked again and again.
class SourceNode:
    """A source of any library, given as ``value``."""

    is_cast = False

    def __init__(self, value: Any, source: Source) -> None:
        self.value, self.source = value, source
        self.shape, self.dtype = source.shape, native(source.dtype)
        self.leaf_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.is_async, self.is_local = isinstance(source, AsyncSource), source.is_local
        # Without chunks: sizes that cost no more to read alone than together.
        without = chunks_of_bytes(self.shape, self.dtype.itemsize, READ_BYTES)
        self.chunks: Shape = source.chunks or without


class Mapped:
    """A view of a node, cast to a dtype."""

    def __init__(self, node: Node, view_map: ViewMap, dtype: np.dtype[Any]) -> None:
        self.node, self.map, self.dtype = node, view_map, dtype
        self.shape = view_map.shape
        self.chunks = view_map.chunks(node.chunks)
        self.is_cast = dtype != node.dtype or node.is_cast
        self.is_async, self.leaf_bytes = node.is_async, node.leaf_bytes
        self.is_local = node.is_local


class Joined:
    """Nodes of one dtype, side by side along an axis."""

    def __init__(self, parts: Sequence[Mapped], axis: int) -> None:
        self.parts, self.axis = parts, axis
        self.dtype = parts[0].dtype
        first = parts[0].shape
        self.shape = (*first[:axis], sum(p.shape[axis] for p in parts), *first[axis + 1 :])
        # Of parts whose chunks differ, the largest divide few.
        self.chunks = tuple(map(max, *[part.chunks for part in parts], parts[0].chunks))
        self.is_cast = any(part.is_cast for part in parts)
        self.is_async = all(part.is_async for part in parts)
        self.is_local = all(part.is_local for part in parts)
        self.leaf_bytes = sum(part.leaf_bytes for part in parts)


Node = SourceNode | Mapped | Joined


def source_of_node(node: Mapped) -> Source:
    """Return the reader of a view: asynchronous if all its sources are."""
    if node.is_async:
        return _AsyncViewSource(node, _BUFFERS_BYTES)
    return _ViewSource(node, PIECE_BYTES)


class _ViewSource(Source):
    """The reader of a view, which holds at most so many bytes in buffers."""

    def __init__(self, node: Mapped, most_bytes: int) -> None:
        self._node = node
        self.shape, self.dtype, self.chunks = node.shape, node.dtype, node.chunks
        self.buffer_bytes = min(node.leaf_bytes, most_bytes)
        self.is_local = node.is_local

    def _plan(self, index: Index, out: _Memory) -> ReadPlan:
        plan = ReadPlan()
        plan.add(self._node, bounded(index, self.shape), out)
        return plan

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> _Memory:
        out = empty(self.dtype)
        plan = self._plan(index, out)
        for read in plan.reads():
            read.now()
        for copy in plan.copies:
            copy()
        return out


class _AsyncViewSource(AsyncSource, _ViewSource):
    """The reader of a view of asynchronous sources: reads into buffers begin a few at a time."""

    def begin(self, index: Index, out: _Memory) -> Future:
        plan = self._plan(index, out)
        reads = sorted(plan.reads(), key=lambda read: read.buffer_bytes > 0)
        nbytes = [read.buffer_bytes for read in reads]
        first, *others = [*groups_within(reads, nbytes, _BUFFERS_BYTES)] or [[]]

        def go_on() -> None:
            for read in first:
                read.deliver()
            for some in others:
                for future in [read.begin() for read in some]:
                    future.result()
                for read in some:
                    read.deliver()

        return JoinedFutures([read.begin() for read in first], [go_on, *plan.copies])


@dataclass(frozen=True)
class _Slice:
    """A slice of a source, and the elements of it that go into a part of the result."""

    leaf: SourceNode
    box: Box
    index: Index  # the hull of the box
    target: _Memory  # a dimension for each factor
    memory: _Memory | None  # the same in the order of the source, if it can be read into
    is_cast: bool

    def parts_at(self, index: Index) -> Iterator[_Slice]:
        """Yield the parts of the slice that have all of its elements at an index of the source."""
        if common_box(index, self.index) == self.index:
            yield self
            return
        for digits in self.box.parts_at(index):
            box = self.box.part(digits)
            target = self.target[tuple([slice(some.start, some.stop) for some in digits])]
            yield _Slice(self.leaf, box, box.hull(), target, None, self.is_cast)


_Wanted = tuple[Mapped | Joined, Index, _Memory]  # a block of a node, and where it goes


class ReadPlan:
    """The slices to read, and the copies to make afterwards, for one block of a view."""

    def __init__(self) -> None:
        # By their source, which may have been given more than one type.
        self._slices: dict[tuple[int, np.dtype[Any]], list[_Slice]] = {}
        self.copies: deque[Callable[[], object]] = deque()  # in their order

    def add(self, node: Mapped | Joined, index: Index, out: _Memory) -> None:
        """Plan to read the block of a node at an index into ``out``, of any strides.

        ``out`` may have another dtype if no node below casts: the values are then cast once.
        """
        # No recursion: a view may be a chain of hundreds.
        remaining: list[_Wanted] = [(node, index, out)]
        while remaining:
            node, index, out = remaining.pop()
            if out.size:
                if isinstance(node, Joined):
                    remaining += self._of_joined(node, index, out)
                else:
                    remaining += self._of_mapped(node, index, out)

    def _of_joined(self, node: Joined, index: Index, out: _Memory) -> Iterator[_Wanted]:
        axis, begin = node.axis, 0
        wanted = index[axis]
        for part in node.parts:
            end = begin + part.shape[axis]
            first, last = max(begin, wanted.start), min(end, wanted.stop)
            if first < last:
                own = slice(first - begin, last - begin)
                within = (slice(None),) * axis + (slice(first - wanted.start, last - wanted.start),)
                yield part, (*index[:axis], own, *index[axis + 1 :]), out[within]
            begin = end

    def _of_mapped(self, node: Mapped, index: Index, out: _Memory) -> Iterator[_Wanted]:
        below = node.node
        for box in node.map.boxes(index):
            target = out[(*box.within, ...)].reshape(box.sizes)
            for digits in box.parts(below.chunks):
                part = box.part(digits)
                within = tuple([slice(some.start, some.stop) for some in digits])
                yield from self._of_box(below, part, target[(*within, ...)])

    def _of_box(self, below: Node, box: Box, target: _Memory) -> Iterator[_Wanted]:
        index = box.hull()
        memory = self._memory_of(box, target, below)
        if isinstance(below, SourceNode):
            part = _Slice(below, box, index, target, memory, target.dtype != below.dtype)
            self._slices.setdefault((id(below.value), below.dtype), []).append(part)
        elif memory is not None:
            yield below, index, memory
        else:
            dtype = below.dtype if below.is_cast else target.dtype
            block = np.empty(sizes_of(index), dtype)
            # Before the known copies, which may use its result. Copies that fill its
            # block are put before it later.
            self.copies.appendleft(lambda: _copy(target, block, box, index))
            yield below, index, block

    def _memory_of(self, box: Box, target: _Memory, below: Node) -> _Memory | None:
        """Return the target in the order of the node below, if that can read into it."""
        is_leaf = isinstance(below, SourceNode)
        if target.dtype != below.dtype and (is_leaf or below.is_cast):
            return None
        memory = _in_order_of_source(box, target)
        # Only these take memory of any strides.
        if is_leaf and not isinstance(below.source, AsyncSource):
            return memory if memory is not None and memory.flags.c_contiguous else None
        return memory

    def reads(self) -> Iterator[_SourceRead]:
        """Yield the reads of all slices: those that share chunks are read together, in pieces."""
        for slices in self._slices.values():
            leaf = slices[0].leaf
            apart = [(hull_of([s.index for s in some]), some) for some in _apart(slices, leaf)]
            (hull, group), *others = sorted(apart, key=lambda each: [s.start for s in each[0]])
            for index, some in others:
                if _are_side_by_side(hull, index, leaf):
                    group += some
                    hull = hull_of([hull, index])
                else:
                    yield from _reads_of(group, hull)
                    group, hull = some, index
            yield from _reads_of(group, hull)


def _apart(slices: list[_Slice], leaf: SourceNode) -> Iterator[list[_Slice]]:
    """Yield groups of slices whose hulls share no chunk of the source.

    A group is divided between two chunks along any dimension, until each of these cuts would meet
    a slice. Neighbours in any one order are not enough: of a merged dimension, a slice may share a
    chunk with the next but one alone.
    """
    ends = np.array([[(s.start, s.stop - 1) for s in each.index] for each in slices])
    chunks = ends.reshape(len(slices), -1, 2) // np.reshape(leaf.chunks, (-1, 1))
    remaining = [np.arange(len(slices))]
    while remaining:
        group = remaining.pop()
        for axis in range(len(leaf.chunks) if len(group) > 1 else 0):
            group = group[np.argsort(chunks[group, axis, 0])]
            first, last = chunks[group, axis].T
            cuts = np.flatnonzero(np.maximum.accumulate(last)[:-1] < first[1:]) + 1
            if len(cuts):
                remaining += np.split(group, cuts)
                break
        else:
            yield [slices[n] for n in group]


def _are_side_by_side(one: Index, other: Index, leaf: SourceNode) -> bool:
    """Return True if two boxes of a source, which share no chunk, are one box of a piece's size."""
    hull, chunks = hull_of([one, other]), leaf.chunks
    is_box = num_chunks(hull, chunks) == num_chunks(one, chunks) + num_chunks(other, chunks)
    return is_box and math.prod(sizes_of(hull)) * leaf.dtype.itemsize <= PIECE_BYTES


def _reads_of(slices: list[_Slice], hull: Index) -> Iterator[_SourceRead]:
    """Yield the reads of slices that lie together: one into its memory, or pieces of their hull."""
    leaf = slices[0].leaf
    if len(slices) == 1 and slices[0].memory is not None:
        yield _SourceRead(hull, slices, slices[0].memory)
        return
    most_elements = max(PIECE_BYTES // max(leaf.dtype.itemsize, 1), 1)
    for piece in boxes_of_chunks(hull, leaf.chunks, most_elements):
        if parts := [part for each in slices for part in each.parts_at(piece)]:
            yield _SourceRead(hull_of([part.index for part in parts]), parts)


@dataclass
class _SourceRead:
    """A read of one source, and the slices that it has."""

    index: Index
    slices: list[_Slice]
    memory: _Memory | None = None  # of the only slice, if it is read into that
    _block: _Memory | None = field(default=None, init=False)

    @property
    def buffer_bytes(self) -> int:
        if self.memory is not None:
            return 0
        return math.prod(sizes_of(self.index)) * self.slices[0].leaf.dtype.itemsize

    def now(self) -> None:
        """Read the slices and copy their elements into the result."""
        leaf, shape, memory = self.slices[0].leaf, sizes_of(self.index), self.memory

        def empty(dtype: np.dtype[Any]) -> _Memory:
            fits = memory is not None and dtype == memory.dtype
            return memory if memory is not None and fits else np.empty(shape, dtype)

        try:
            read = leaf.source.read(self.index, empty)
            if read is memory:
                return
            are_cast = all(each.is_cast for each in self.slices)
            self._block = checked_block(leaf.source, self.index, read, any_dtype=are_cast)
            self.deliver()
        except Exception as error:
            error.add_note(
                f"gda: from {format_index(self.index)} of a {type(leaf.value).__name__} of shape "
                f"{leaf.shape}"
            )
            raise

    def begin(self) -> Future:
        """Begin to read the slices, of an asynchronous source."""
        source: Any = self.slices[0].leaf.source
        memory = self.memory
        if memory is None:
            memory = self._block = np.empty(sizes_of(self.index), source.dtype)
        return source.begin(self.index, memory)

    def deliver(self) -> None:
        """Copy the elements of the slices into the result, if they were not read into it."""
        if self._block is not None:
            for each in self.slices:
                _copy(each.target, self._block, each.box, self.index)
            self._block = None


def _copy(target: _Memory, block: _Memory, box: Box, at: Index) -> None:
    """Copy the elements of a box out of a block of the source that lies at an index."""
    taken = _taken(box, block, at)
    if taken.dtype == target.dtype:
        np.copyto(target, taken)
    else:
        cast_into(target, taken, Origin("the source of a view", box.element_at))


def _taken(box: Box, block: _Memory, at: Index) -> _Memory:
    """Return the elements of a box as a view of a block of the source that lies at an index."""
    first = tuple([slice(n - s.start, None) for n, s in zip(box.starts, at, strict=True)])
    strides = [block.strides[factor.dimension] * factor.stride for factor in box.factors]
    return _strided(block[(*first, ...)], box.sizes, strides)


def _in_order_of_source(box: Box, target: _Memory) -> _Memory | None:
    """Return a view of the target in the order of the source; None if there is none.

    There is one if the box is all of its hull, and the factors of each dimension of the source lie
    in the target as one dimension does.
    """
    flips = [slice(None, None, -1 if factor.stride < 0 else 1) for factor in box.factors]
    forward = target[(*flips, ...)]
    shape, strides = [1] * len(box.starts), [0] * len(box.starts)
    along = zip(box.factors, forward.strides, strict=True)
    for factor, stride in sorted(along, key=lambda pair: abs(pair[0].stride)):
        k = factor.dimension
        if factor.size == 1:
            continue
        if abs(factor.stride) != shape[k] or (shape[k] > 1 and stride != strides[k] * shape[k]):
            return None
        strides[k] = strides[k] or stride
        shape[k] *= factor.size
    return _strided(forward, shape, strides)


def _strided(array: _Memory, shape: Sequence[int], strides: Sequence[int]) -> _Memory:
    # NumPy looks for the dtype by kind and size, and finds none for those of ml_dtypes.
    if array.dtype.type.__module__ == "numpy":
        return as_strided(array, shape, strides)
    raw = array.view(np.dtype((np.void, array.dtype.itemsize)))
    return as_strided(raw, shape, strides).view(array.dtype)

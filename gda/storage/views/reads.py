"""From the index of a view to slices of its sources: each is planned, joined with others, and read.

A *node* is a source (``Leaf``), a map over a node (``Mapped``), or several nodes side by side
(``Joined``). All slices that one index needs are planned before the first is read, so that those of
one source that overlap or lie together become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gda.layout.dtype_names import is_raw, native
from gda.layout.sharing import boxes_of_chunks, common_box
from gda.layout.spec import Index, Shape, bounded, hull_of, sizes_of
from gda.layout.text import format_index
from gda.storage.sources import AsyncSource, Source, checked_block
from gda.storage.tasks import Future, JoinedFutures, groups_within
from gda.storage.views.mapping import (
    Box,
    ViewMap,
    chunks_of_bytes,
    num_chunks,
)

_Memory = np.ndarray[Any, Any]

# A read of a file costs as much as so many bytes, so fewer between two slices are read with them: a
# source without chunks is planned as if it had chunks of this size.
READ_BYTES = 32 * 1024
# What is not read straight into the block is read in pieces of so many bytes, or one chunk.
PIECE_BYTES = 4 * 2**20
# Of the pieces that a library reads at the same time.
_BUFFERS_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Leaf:
    """A source of any library."""

    value: Any  # as it was given
    source: Source
    is_cast = False

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return native(self.source.dtype)

    @property
    def source_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def chunks(self) -> Shape:
        """Those of the source, or parts that are as cheap to read alone as with others."""
        given = self.source.chunks
        return given or chunks_of_bytes(self.shape, self.dtype.itemsize, READ_BYTES)

    def leaves(self) -> Iterator[Leaf]:
        yield self


@dataclass(frozen=True, eq=False)
class Mapped:
    """A view of a node, cast to a dtype."""

    node: Node
    map: ViewMap
    dtype: np.dtype[Any]

    @cached_property
    def is_cast(self) -> bool:
        return self.dtype != self.node.dtype or self.node.is_cast

    @cached_property
    def shape(self) -> Shape:
        return self.map.shape

    @cached_property
    def chunks(self) -> Shape:
        return self.map.chunks(self.node.chunks)

    @property
    def source_bytes(self) -> int:
        # A part of nodes of several dtypes counts as if they were mixed evenly.
        below = math.prod(self.node.shape)
        return self.node.source_bytes * math.prod(self.shape) // below if below else 0

    def leaves(self) -> Iterator[Leaf]:
        return self.node.leaves()


@dataclass(frozen=True, eq=False)
class Joined:
    """Nodes of one dtype, side by side along an axis."""

    parts: Sequence[Mapped]
    axis: int

    @cached_property
    def is_cast(self) -> bool:
        return any(part.is_cast for part in self.parts)

    @cached_property
    def shape(self) -> Shape:
        first, axis = self.parts[0].shape, self.axis
        return (*first[:axis], sum(part.shape[axis] for part in self.parts), *first[axis + 1 :])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def source_bytes(self) -> int:
        return sum(part.source_bytes for part in self.parts)

    @cached_property
    def chunks(self) -> Shape:
        """The largest of its parts, of which those that differ divide few chunks."""
        return tuple(map(max, *[part.chunks for part in self.parts], self.parts[0].chunks))

    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves()


Node = Leaf | Mapped | Joined


def source_of_node(node: Mapped) -> Source:
    """Return the reader of a view: asynchronous if all its sources are."""
    are_async = all(isinstance(leaf.source, AsyncSource) for leaf in node.leaves())
    return _AsyncViewSource(node) if are_async else _ViewSource(node)


class _ViewSource(Source):
    """The reader of a view."""

    def __init__(self, node: Mapped) -> None:
        self._node = node
        self.shape, self.dtype, self.chunks = node.shape, node.dtype, node.chunks
        self.buffer_bytes = _buffer_bytes_of(node, PIECE_BYTES)

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> _Memory:
        out = empty(self.dtype)
        plan = Plan()
        plan.add(self._node, bounded(index, self.shape), out)
        for read in plan.reads():
            read.now()
        for copy in plan.copies:
            copy()
        return out


class _AsyncViewSource(AsyncSource):
    """The reader of a view of sources that read concurrently.

    All reads straight into the block begin at once; others a few at a time, in buffers.
    """

    def __init__(self, node: Mapped) -> None:
        self._node = node
        self.shape, self.dtype, self.chunks = node.shape, node.dtype, node.chunks
        self.buffer_bytes = _buffer_bytes_of(node, _BUFFERS_BYTES)

    def begin(self, index: Index, out: _Memory) -> Future:
        plan = Plan()
        plan.add(self._node, bounded(index, self.shape), out)
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


def _buffer_bytes_of(node: Node, most: int) -> int:
    """Return the bytes that a read of a view holds beside the block, at most ``most``."""
    return min(most, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in node.leaves()))


@dataclass(frozen=True)
class _Slice:
    """A slice of a source, and the elements of it that go into a part of the result."""

    leaf: Leaf
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

    def deliver(self, block: _Memory, at: Index) -> None:
        """Copy the elements out of a block of the source that lies at an index."""
        if is_raw(block.dtype) and block.dtype.itemsize == self.target.dtype.itemsize:
            block = block.view(self.target.dtype)
        elif native(block.dtype) != self.leaf.dtype and not self.is_cast:
            raise TypeError(
                f"the source has dtype {self.leaf.dtype}, but its block has dtype {block.dtype}, "
                "as in libraries that scale their data; choose one with .astype(dtype)"
            )
        _copy(self.target, _taken(self.box, block, at))


class Plan:
    """The slices to read, and the copies to make afterwards, for one block of a view."""

    def __init__(self) -> None:
        self._slices: dict[int, list[_Slice]] = {}
        self.copies: list[Callable[[], object]] = []

    def add(self, node: Node, index: Index, out: _Memory) -> None:
        """Plan to read the block of a node at an index into ``out``, of any strides.

        ``out`` may have another dtype if no node below casts: the values are then cast once.
        """
        if not out.size:
            return
        if isinstance(node, Joined):
            self._add_joined(node, index, out)
            return
        assert isinstance(node, Mapped)
        below = node.node
        for box in node.map.boxes(index):
            target = out[(*box.within, ...)].reshape(box.sizes)
            for digits in box.parts(below.chunks):
                part = box.part(digits)
                within = tuple([slice(some.start, some.stop) for some in digits])
                self._add_box(below, part, target[(*within, ...)])

    def _add_joined(self, node: Joined, index: Index, out: _Memory) -> None:
        axis, begin = node.axis, 0
        wanted = index[axis]
        for part in node.parts:
            end = begin + part.shape[axis]
            first, last = max(begin, wanted.start), min(end, wanted.stop)
            if first < last:
                own = slice(first - begin, last - begin)
                within = (slice(None),) * axis + (slice(first - wanted.start, last - wanted.start),)
                self.add(part, (*index[:axis], own, *index[axis + 1 :]), out[within])
            begin = end

    def _add_box(self, below: Node, box: Box, target: _Memory) -> None:
        index = box.hull()
        memory = self._memory_of(box, target, below)
        if isinstance(below, Leaf):
            part = _Slice(below, box, index, target, memory, target.dtype != below.dtype)
            self._slices.setdefault(id(below.value), []).append(part)
        elif memory is not None:
            self.add(below, index, memory)
        else:
            dtype = below.dtype if below.is_cast else target.dtype
            block = np.empty(sizes_of(index), dtype)
            self.add(below, index, block)
            self.copies.append(lambda: _copy(target, _taken(box, block, index)))

    def _memory_of(self, box: Box, target: _Memory, below: Node) -> _Memory | None:
        """Return the target in the order of what is below, if that can be read into it."""
        is_leaf = isinstance(below, Leaf)
        if target.dtype != below.dtype and (is_leaf or below.is_cast):
            return None
        memory = _in_order_of_source(box, target)
        # Only these take memory of any strides.
        if is_leaf and not isinstance(below.source, AsyncSource):
            return memory if memory is not None and memory.flags.c_contiguous else None
        return memory

    def reads(self) -> Iterator[_Read]:
        """Yield the reads of all slices: those that share chunks are read together, in pieces."""
        for slices in self._slices.values():
            leaf = slices[0].leaf
            first, *others = sorted(slices, key=lambda each: [s.start for s in each.index])
            group, hull = [first], first.index
            for each in others:
                if _are_together(hull, each.index, leaf):
                    group.append(each)
                    hull = hull_of([hull, each.index])
                else:
                    yield from _reads_of(group, hull)
                    group, hull = [each], each.index
            yield from _reads_of(group, hull)


def _are_together(one: Index, other: Index, leaf: Leaf) -> bool:
    """Return True if two slices of a source cost no more together than alone.

    Slices that share no chunk are joined up to the size of a piece.
    """
    hull, chunks = hull_of([one, other]), leaf.chunks
    together = num_chunks(hull, chunks)
    apart = num_chunks(one, chunks) + num_chunks(other, chunks)
    nbytes = math.prod(sizes_of(hull)) * leaf.dtype.itemsize
    return together < apart or (together == apart and nbytes <= PIECE_BYTES)


def _reads_of(slices: list[_Slice], hull: Index) -> Iterator[_Read]:
    """Yield the reads of slices that lie together: one into its memory, or pieces of their hull."""
    leaf = slices[0].leaf
    if len(slices) == 1 and slices[0].memory is not None:
        yield _Read(hull, slices, slices[0].memory)
        return
    most_elements = max(PIECE_BYTES // max(leaf.dtype.itemsize, 1), 1)
    for piece in boxes_of_chunks(hull, leaf.chunks, most_elements):
        if parts := [part for each in slices for part in each.parts_at(piece)]:
            yield _Read(hull_of([part.index for part in parts]), parts)


@dataclass
class _Read:
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
            self._block = checked_block(leaf.source, self.index, read)
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
                each.deliver(self._block, self.index)
            self._block = None


def _copy(target: _Memory, block: _Memory) -> None:
    np.copyto(target, block, casting="unsafe")  # as dtype= elsewhere


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
    if array.dtype.isbuiltin != 2:
        return as_strided(array, shape, strides)
    raw = array.view(np.dtype((np.void, array.dtype.itemsize)))
    return as_strided(raw, shape, strides).view(array.dtype)

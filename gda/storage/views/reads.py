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
from gda.layout.spec import Index, Shape, bounded, hull_of, sizes_of
from gda.layout.text import format_index
from gda.storage.sources import AsyncSource, Source, checked_block
from gda.storage.tasks import Future, JoinedFutures
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
# A slice that is to be transposed or cast is read in pieces of so many bytes.
PIECE_BYTES = 4 * 2**20


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
    def chunks(self) -> Shape | None:
        return None if self.node.chunks is None else self.map.chunks(self.node.chunks)

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
    def chunks(self) -> Shape | None:
        known = {part.chunks for part in self.parts}
        if len(known) > 1 or (chunks := known.pop()) is None:
            return None
        ends_with_chunk = [part.shape[self.axis] % chunks[self.axis] == 0 for part in self.parts]
        return chunks if all(ends_with_chunk[:-1]) else None

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

    def read(self, index: Index, empty: Callable[[np.dtype[Any]], _Memory]) -> _Memory:
        out = empty(self.dtype)
        plan = Plan(PIECE_BYTES)
        plan.add(self._node, bounded(index, self.shape), out)
        for group in plan.groups():
            group.read()
        for copy in plan.copies:
            copy()
        return out


class _AsyncViewSource(AsyncSource):
    """The reader of a view of sources that read concurrently, which all begin at once."""

    def __init__(self, node: Mapped) -> None:
        self._node = node
        self.shape, self.dtype, self.chunks = node.shape, node.dtype, node.chunks

    def begin(self, index: Index, out: _Memory) -> Future:
        plan = Plan(math.inf)
        plan.add(self._node, bounded(index, self.shape), out)
        groups = plan.groups()
        futures = [group.begin() for group in groups]
        return JoinedFutures(futures, [*[group.deliver for group in groups], *plan.copies])


@dataclass(frozen=True)
class _Slice:
    """A slice of a source, and the elements of it that go into a part of the result."""

    leaf: Leaf
    box: Box
    index: Index  # the hull of the box
    target: _Memory  # a dimension for each factor
    memory: _Memory | None  # the same in the order of the source, if it can be read into
    is_cast: bool

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

    def __init__(self, piece_bytes: float) -> None:
        self._piece_bytes = piece_bytes
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
        below, itemsize = node.node, node.node.dtype.itemsize
        chunks = below.chunks or chunks_of_bytes(below.shape, itemsize, READ_BYTES)
        for box in node.map.boxes(index):
            target = out[(*box.within, ...)].reshape(box.sizes)
            is_direct = self._memory_of(box, target, below) is not None
            most = math.inf if is_direct else self._piece_bytes / max(itemsize, 1)
            for digits in box.parts(chunks, most):
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

    def groups(self) -> list[_Group]:
        """Return the slices in groups that are read in one."""
        groups: list[_Group] = []
        for slices in self._slices.values():
            chunks = slices[0].leaf.chunks
            group = None
            for each in sorted(slices, key=lambda each: [s.start for s in each.index]):
                if group is not None and group.takes(each, chunks):
                    group.add(each)
                else:
                    group = _Group(each.index, [each])
                    groups.append(group)
        return groups


@dataclass
class _Group:
    """Slices of one source that are read in one."""

    index: Index
    slices: list[_Slice]
    _block: _Memory | None = field(default=None, init=False)

    def takes(self, other: _Slice, chunks: Shape) -> bool:
        """Return True if another slice costs no more together with these than alone.

        Slices that share no chunk are joined up to the size of a piece.
        """
        hull = hull_of([self.index, other.index])
        together = num_chunks(hull, chunks)
        apart = num_chunks(self.index, chunks) + num_chunks(other.index, chunks)
        nbytes = math.prod(sizes_of(hull)) * other.leaf.dtype.itemsize
        return together < apart or (together == apart and nbytes <= PIECE_BYTES)

    @property
    def sizes(self) -> Shape:
        return sizes_of(self.index)

    def add(self, other: _Slice) -> None:
        self.index = hull_of([self.index, other.index])
        self.slices.append(other)

    @property
    def _memory(self) -> _Memory | None:
        return self.slices[0].memory if len(self.slices) == 1 else None

    def read(self) -> None:
        """Read the slice and copy its elements into the result."""
        leaf, shape, memory = self.slices[0].leaf, self.sizes, self._memory

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
        """Begin to read the slice, of an asynchronous source."""
        source: Any = self.slices[0].leaf.source
        memory = self._memory
        if memory is None:
            memory = self._block = np.empty(self.sizes, source.dtype)
        return source.begin(self.index, memory)

    def deliver(self) -> None:
        """Copy the elements of the slice into the result, where they were not read into it."""
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
    return as_strided(block[(*first, ...)], box.sizes, strides, writeable=False)


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
    return as_strided(forward, shape, strides)

"""The map from the indices of a view to those of its source. Integers only.

A dimension of a view is a product of *factors*, as a number is made of digits, the last one
fastest. Each factor runs along one dimension of the source with a stride. The position in dimension
k of the source is ``starts[k]`` plus stride times digit of each factor along k::

    w = source of shape (6, 4)        ((0, 1, 6),)  ((1, 1, 4),)
    w.T                               ((1, 1, 4),)  ((0, 1, 6),)
    w.reshape(2, 3, 4)                ((0, 3, 2),)  ((0, 1, 3),)  ((1, 1, 4),)
    w.reshape(24)                     ((0, 1, 6), (1, 1, 4))
    w[::-2]                           ((0, -2, 3),)  ((1, 1, 4),)    with starts (5, 0)

Transposition, basic indices, splits and merges of such maps are such maps, with one exception: a
part of a merged dimension that begins or ends within a row. That is a view of a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

from gda.layout.spec import Index, Shape

Item = int | range | None
"""One entry of a checked index: an element, a part of a dimension, or a new dimension."""


class Factor(NamedTuple):
    """Positions along one dimension of a source, ``stride`` apart."""

    dimension: int
    stride: int  # may be negative
    size: int


# Of a view without elements, which reads nothing. Its stride is 0, and its source may lack the
# dimension.
_EMPTY = Factor(0, 0, 0)


@dataclass(frozen=True)
class ViewMap:
    """The map from a view to its source: a start for each dimension there, factors for each here.

    A dimension of size 1 has no factors, so that a source of no dimensions can have some.
    """

    starts: Shape
    factors: tuple[tuple[Factor, ...], ...]

    @property
    def shape(self) -> Shape:
        """Sizes of the view."""
        return tuple([math.prod([factor.size for factor in own]) for own in self.factors])

    def transposed(self, axes: Iterable[int]) -> ViewMap:
        """Return the map with its dimensions in another order."""
        return ViewMap(self.starts, tuple([self.factors[axis] for axis in axes]))

    def indexed(self, items: Sequence[Item]) -> ViewMap | None:
        """Return the map of a basic index, or None for a part of a merged dimension.

        ``items`` has an integer or a range for every dimension, within it, and any number of None.
        """
        starts, kept = list(self.starts), []
        remaining = iter(self.factors)

        def begin(factor: Factor, digit: int) -> None:
            if factor.stride:
                starts[factor.dimension] += factor.stride * digit

        for item in items:
            if item is None:
                kept.append(())
                continue
            own = next(remaining)
            if isinstance(item, int) or len(item) == 1:
                place = item if isinstance(item, int) else item[0]
                for factor in reversed(own):
                    place, digit = divmod(place, factor.size)
                    begin(factor, digit)
                if isinstance(item, range):
                    kept.append(())
            elif not item:
                kept.append((_EMPTY,))
            elif item == range(math.prod([factor.size for factor in own])):
                kept.append(own)
            elif len(own) == 1:
                dimension, stride, _ = own[0]
                begin(own[0], item.start)
                kept.append((Factor(dimension, stride * item.step, len(item)),))
            else:
                return None
        return ViewMap(tuple(starts), tuple(kept))

    def reshaped(self, shape: Shape) -> ViewMap | None:
        """Return the map of a shape of as many elements, or None if the rows do not line up."""
        if not math.prod(shape):
            sizes = [() if size == 1 else (Factor(0, 0, size),) for size in shape]
            return ViewMap(self.starts, tuple(sizes))
        flat = (factor for own in self.factors for factor in own)
        remaining = list(_joined(flat)[::-1])
        factors = []
        for size in shape:
            own = []
            while size > 1:
                dimension, stride, most = remaining.pop()
                if most % size and size % most:
                    return None
                taken = min(most, size)
                inner = most // taken
                if inner > 1:
                    remaining.append(Factor(dimension, stride, inner))
                own.append(Factor(dimension, stride * inner, taken))
                size //= taken
            factors.append(_joined(own))
        return ViewMap(self.starts, tuple(factors))

    def boxes(self, index: Index) -> Iterator[Box]:
        """Yield the boxes of the source that make up the block at an index, which is not empty."""
        parts = [_parts(own, s.start, s.stop) for own, s in zip(self.factors, index, strict=True)]
        for combination in product(*parts):
            starts, factors = list(self.starts), []
            for _, digits, own in combination:
                for digit, factor in zip(digits, own, strict=True):
                    starts[factor.dimension] += factor.stride * digit
                factors += own
            yield Box(tuple([part[0] for part in combination]), tuple(starts), tuple(factors))

    def chunks(self, chunks: Shape) -> Shape:
        """Return the chunks of the view, from those of its source.

        They are exact if the view begins where a chunk does, and no dimension was merged or split
        within a chunk; otherwise a boundary of chunks divides few chunks of the source.
        """
        sizes = []
        for own in self.factors:
            size = whole = 1
            for factor in reversed(own):
                along = chunks[factor.dimension] // abs(factor.stride) if factor.stride else 1
                if along > 1 and factor.size > 1:
                    size = whole * min(along, factor.size)
                whole *= factor.size
            sizes.append(size)
        return tuple(sizes)


class Box(NamedTuple):
    """A part of a block of a view, whose elements are all combinations of digits of its factors."""

    within: Index  # of the part, within the view
    starts: Shape  # of its first element, in the source
    factors: tuple[Factor, ...]

    @property
    def sizes(self) -> Shape:
        """Sizes of the part, if each factor has a dimension of its own."""
        return tuple([factor.size for factor in self.factors])

    def element_at(self, digits: Shape) -> Shape:
        """Return the element of the source at a digit of each factor."""
        place = list(self.starts)
        for factor, digit in zip(self.factors, digits, strict=True):
            place[factor.dimension] += factor.stride * digit
        return tuple(place)

    def part(self, digits: Sequence[range]) -> Box:
        """Return the part of the box at ranges of digits; ``within`` is that of the whole box."""
        starts = self.element_at(tuple([some.start for some in digits]))
        pairs = zip(self.factors, digits, strict=True)
        factors = tuple([factor._replace(size=len(some)) for factor, some in pairs])
        return Box(self.within, starts, factors)

    def hull(self) -> Index:
        """Return the smallest index of the source that has all elements."""
        first, last = list(self.starts), list(self.starts)
        for dimension, stride, size in self.factors:
            end = first if stride < 0 else last
            end[dimension] += stride * (size - 1)
        return tuple([slice(low, high + 1) for low, high in zip(first, last, strict=True)])

    def parts(self, chunks: Shape) -> Iterator[tuple[range, ...]]:
        """Yield ranges of digits; the part of each is read as its hull.

        Digits are read one by one if two of them touch more chunks together than apart.
        """
        ranges = [[range(factor.size)] for factor in self.factors]
        read = [range(1)] * len(ranges)  # the digits of a part
        apart: set[int] = set()  # dimensions
        for n in sorted(range(len(ranges)), key=lambda n: abs(self.factors[n].stride)):
            dimension, _, size = self.factors[n]
            two = [*read[:n], range(min(size, 2)), *read[n + 1 :]]
            one_of_two = num_chunks(self.part(read).hull(), chunks)
            if num_chunks(self.part(two).hull(), chunks) > 2 * one_of_two:
                apart.add(dimension)
            if dimension in apart:
                ranges[n] = [range(digit, digit + 1) for digit in range(size)]
            else:
                read[n] = range(size)
        yield from product(*ranges)

    def parts_at(self, index: Index) -> Iterator[tuple[range, ...]]:
        """Yield ranges of digits, whose parts have all elements at an index of the source."""
        order: list[int] = []
        along: list[list[tuple[range, ...]]] = []
        for dimension, (start, s) in enumerate(zip(self.starts, index, strict=True)):
            own = [n for n, factor in enumerate(self.factors) if factor.dimension == dimension]
            # Along one dimension they are nested, as digits of a number are.
            own.sort(key=lambda n: -abs(self.factors[n].stride))
            order += own
            factors = [self.factors[n] for n in own]
            along.append([*_digits_between(factors, start, s.start, s.stop - 1)])
        for combination in product(*along):
            digits = [some for each in combination for some in each]
            yield tuple([some for _, some in sorted(zip(order, digits, strict=True))])


def identity(shape: Shape) -> ViewMap:
    """Return the map of a source to itself."""
    factors = [() if size == 1 else (Factor(k, 1, size),) for k, size in enumerate(shape)]
    return ViewMap((0,) * len(shape), tuple(factors))


def num_chunks(index: Index, chunks: Shape) -> int:
    """Return the number of chunks that a block touches."""
    sides = zip(index, chunks, strict=True)
    return math.prod([(s.stop - 1) // chunk - s.start // chunk + 1 for s, chunk in sides])


def chunks_of_bytes(shape: Shape, itemsize: int, nbytes: int) -> Shape:
    """Return chunks of about ``nbytes`` that are contiguous in an array in C order.

    >>> chunks_of_bytes((100, 1000), 2, nbytes=4096)
    (2, 1000)
    """
    remaining = max(nbytes // max(itemsize, 1), 1)
    chunks = []
    for size in reversed(shape):
        chunks.append(max(min(size, remaining), 1))
        remaining = remaining // max(size, 1) or 1
    return tuple(chunks[::-1])


def _joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Return the factors, with neighbours that continue each other joined."""
    joined: list[Factor] = []
    for factor in factors:
        last = joined[-1] if joined else _EMPTY
        if last.dimension == factor.dimension and last.stride == factor.stride * factor.size:
            factor = factor._replace(size=last.size * factor.size)
            joined.pop()
        joined.append(factor)
    return tuple(joined)


_Part = tuple[slice, tuple[int, ...], tuple[Factor, ...]]


def _parts(own: tuple[Factor, ...], start: int, stop: int) -> list[_Part]:
    """Return the boxes of digits whose numbers are a range: place, starts and factors of each."""
    sizes = tuple([factor.size for factor in own])
    parts, at = [], 0
    for digits in _digits(sizes, start, stop):
        length = math.prod(map(len, digits))
        pairs = zip(own, digits, strict=True)
        factors = tuple([factor._replace(size=len(some)) for factor, some in pairs])
        parts.append((slice(at, at + length), tuple([some.start for some in digits]), factors))
        at += length
    return parts


def _digits(sizes: Shape, start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Yield the boxes of digits whose numbers are a range: a row that begins, rows, one that ends.

    >>> [*_digits((6, 4), 2, 13)]
    [(range(0, 1), range(2, 4)), (range(1, 3), range(0, 4)), (range(3, 4), range(0, 1))]
    """
    if len(sizes) < 2:
        yield (range(start, stop),) * len(sizes)
        return
    row = math.prod(sizes[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for inner in _digits(sizes[1:], start - first * row, stop - first * row):
            yield range(first, first + 1), *inner
        return
    if start % row:
        for inner in _digits(sizes[1:], start % row, row):
            yield range(first, first + 1), *inner
        first += 1
    if first < stop // row:
        yield range(first, stop // row), *map(range, sizes[1:])
    if stop % row:
        for inner in _digits(sizes[1:], 0, stop % row):
            yield range(last, last + 1), *inner


def _digits_between(
    factors: Sequence[Factor], start: int, low: int, high: int
) -> Iterator[tuple[range, ...]]:
    """Yield the boxes of digits of nested factors whose positions are from ``low`` to ``high``.

    >>> [*_digits_between([Factor(0, 10, 4), Factor(0, 1, 10)], 0, 8, 30)]  # tens and ones
    [(range(0, 1), range(8, 10)), (range(3, 4), range(0, 1)), (range(1, 3), range(0, 10))]
    """
    if not factors:
        if low <= start <= high:
            yield ()
        return
    (_, stride, size), *inner = factors
    ends = [stride * (size - 1) for _, stride, size in inner]
    before, after = sum([min(end, 0) for end in ends]), sum([max(end, 0) for end in ends])
    touched = _between(stride, size, low - start - after, high - start - before)
    within = _between(stride, size, low - start - before, high - start - after)
    if not within:  # one digit, or two
        within = range(touched.stop, touched.stop)
    for digit in chain(range(touched.start, within.start), range(within.stop, touched.stop)):
        for rest in _digits_between(inner, start + stride * digit, low, high):
            yield range(digit, digit + 1), *rest
    if within:
        yield within, *[range(size) for _, _, size in inner]


def _between(stride: int, size: int, low: int, high: int) -> range:
    """Return the digits whose multiples of a stride are from ``low`` to ``high``."""
    if stride < 0:
        stride, low, high = -stride, -high, -low
    return range(max(-(-low // stride), 0), min(high // stride + 1, size))

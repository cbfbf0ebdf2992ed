"""The pieces that one process sends, gets and copies, and the rounds in which they travel.

The pieces that one device sends to another in a lane, of all arrays that travel together, make a
*packet*: one stream of elements. In a round, each lane carries the next part of its streams. Its
length is a number of *steps*: one element in the lane of the lowest digit, two in the next.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from gda.layout.cover import boxes_of_chunks
from gda.layout.grid import ShardGrid
from gda.layout.indices import index_at, sizes_of, start_of
from gda.layout.numbering import IntArray
from gda.layout.reshard.flow import FarPieces, Flow, homes_of, numbers_of, ranks_of
from gda.layout.spec import Shape

# The last round is rounded up to so many binary digits, so that arrays of like sizes share
# the program.
_DIGITS = 7
# So that a buffer may be a part of an array, without a copy: 64 bytes of the smallest elements.
_ALIGNED = 64


class MovedPiece(NamedTuple):
    """A box of elements that one device gets from another, or keeps.

    Attributes:
      leaf: number of the array.
      source, target: the devices, by any numbers.
      source_starts, target_starts: place of the box in the block of either device.
      sizes: of the box.
    """

    leaf: int
    source: int
    target: int
    source_starts: Shape
    target_starts: Shape
    sizes: Shape

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def parts(self, most: int) -> Iterator[MovedPiece]:
        """Yield the piece in parts of at most ``most`` elements, contiguous where they can be."""
        whole = index_at((0,) * len(self.sizes), self.sizes)
        for box in boxes_of_chunks(whole, (1,) * len(whole), most):
            yield self._within(start_of(box), sizes_of(box))

    def between(self, start: int, stop: int) -> Iterator[MovedPiece]:
        """Yield the elements from ``start`` to ``stop``, in row-major order, as boxes."""
        for offsets, sizes in _boxes(self.sizes, start, stop):
            yield self._within(offsets, sizes)

    def _within(self, offsets: Shape, sizes: Shape) -> MovedPiece:
        return self._replace(
            source_starts=_sum(self.source_starts, offsets),
            target_starts=_sum(self.target_starts, offsets),
            sizes=sizes,
        )


class Lane(NamedTuple):
    """A colour of ``Lanes`` and the number of a binary digit."""

    colour: int
    digit: int


class FarPiece(NamedTuple):
    """A piece for another process, and the lanes that carry it."""

    piece: MovedPiece
    colour: int
    units: int

    def lanes(self) -> Iterator[tuple[Lane, int]]:
        """Yield each lane that carries a part of it, and the unit at which this part begins."""
        begin = 0
        for digit in reversed(range(self.units.bit_length())):
            if self.units >> digit & 1:
                yield Lane(self.colour, digit), begin
                begin += 1 << digit


@lru_cache(maxsize=16)  # most arrays of a tree have the shapes and layouts of others
def _flow_of(grids: tuple[ShardGrid, ShardGrid], ids: tuple[tuple[int, ...], ...]) -> Flow:
    return Flow(*grids, homes_of(*map(np.asarray, ids)))


class Relocation:
    """The pieces of one array between two grids with processes; ``ids`` are those of their devices.

    ``beside`` is the shape of one element, such as that of a PRNG key.
    """

    def __init__(
        self,
        leaf: int,
        grids: tuple[ShardGrid, ShardGrid],
        ids: tuple[Sequence[int], Sequence[int]],
        beside: Shape = (),
    ) -> None:
        self.leaf, self._beside = leaf, beside
        self._source, self._target = grids
        self._ids = [np.asarray(some) for some in ids]
        self._flow = _flow_of(grids, tuple(map(tuple, ids)))

    @cached_property
    def key(self) -> Hashable:
        """Equal for arrays that may share packets, and so routes and programs."""
        holders = [
            ids[np.argsort(grid.block_ids, kind="stable")].tobytes()
            for grid, ids in zip((self._source, self._target), self._ids, strict=True)
        ]
        return self._flow.lanes.key, *holders

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Relocation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def unit(self) -> int:
        return self._flow.lanes.unit * math.prod(self._beside)

    @property
    def row(self) -> int:
        lengths = (int(each.lengths.max()) for each in self._flow.pieces.dimensions[1:])
        return math.prod(lengths) * math.prod(self._beside)

    def arriving(self, process: int) -> tuple[list[MovedPiece], list[FarPiece]]:
        """Return the pieces that a process gets: those from itself, and those from others."""
        near: list[MovedPiece] = []
        far: list[FarPiece] = []
        for run in self._flow.runs(_positions(self._target, process)):
            chosen = ~run.is_far
            segments = tuple(segment[chosen] for segment in run.pieces.segments)
            near += self._pieces(run.sources[chosen], run.targets[chosen], segments)
            far += self._far(self._flow.far_pieces(run))
        return near, far

    def leaving(self, process: int) -> list[FarPiece]:
        return self._far(self._flow.sent_by(_positions(self._source, process)))

    def routes(self) -> Routes | None:
        """Return the routes between processes; ``None`` if nothing takes them."""
        far = int(self._flow.received.sum()) - self._flow.received_near
        if not far:
            return None
        ids = np.union1d(*self._ids)
        # Slots do without a list of pairs. They are wasted on devices of one process.
        is_once = self._source.num_replicas == self._target.num_replicas == 1
        has_slots = is_once and self._flow.lanes.fits(len(ids) ** 2, far)
        return Routes(ids, None if has_slots else self._pairs())

    def _pairs(self) -> dict[Lane, IntArray]:
        """Return the used lanes, with senders and receivers: int64 ``[pairs, 2]``, in NumPy."""
        found: defaultdict[Lane, list[IntArray]] = defaultdict(list)
        for run in self._flow.runs():
            far = self._flow.far_pieces(run)
            pairs = np.stack([self._ids[0][far.sources], self._ids[1][far.targets]], axis=-1)
            for digit in range(int(far.units.max(initial=0)).bit_length()):
                chosen = np.flatnonzero(far.units >> digit & 1)
                chosen = chosen[np.argsort(far.colours[chosen], kind="stable")]
                colours, firsts = np.unique(far.colours[chosen], return_index=True)
                parts = np.split(pairs[chosen], firsts)[1:]
                for colour, part in zip(colours.tolist(), parts, strict=True):
                    found[Lane(colour, digit)].append(part)
        return {lane: np.concatenate(found[lane]) for lane in sorted(found)}

    def _far(self, far: FarPieces) -> list[FarPiece]:
        pieces = self._pieces(far.sources, far.targets, far.segments)
        return [*map(FarPiece, pieces, far.colours.tolist(), far.units.tolist())]

    def _pieces(
        self, sources: IntArray, targets: IntArray, segments: tuple[IntArray, ...]
    ) -> list[MovedPiece]:
        columns: list[list[list[int]]] = [[], [], []]
        for dimension, segment in zip(self._flow.pieces.dimensions, segments, strict=True):
            starts = dimension.starts[segment]
            for column, step in zip(columns, dimension.steps, strict=False):
                column.append((starts % step).tolist())
            columns[2].append(dimension.lengths[segment].tolist())
        count, corner = len(sources), (0,) * len(self._beside)
        boxes = [
            [(*one, *beside) for one in (zip(*of, strict=True) if of else [()] * count)]
            for of, beside in zip(columns, (corner, corner, self._beside), strict=True)
        ]
        ends = self._ids[0][sources].tolist(), self._ids[1][targets].tolist()
        return [*map(MovedPiece, [self.leaf] * count, *ends, *boxes)]


class Routes:
    """The flat buffers that a device sends and gets in a round, and their devices.

    ``ids`` are those of all devices, ascending. ``lanes`` are the senders and the receivers of each
    lane, which has a buffer of its own. Without them, one buffer has a slot for each device.

    Attributes:
      pairs: the places in ``ids`` of sender and receiver, for each buffer; ``None`` without lanes.
      widths: the elements in each buffer for one step of a round.
    """

    def __init__(self, ids: IntArray, lanes: Mapping[Lane, IntArray] | None) -> None:
        self.pairs = None if lanes is None else [np.searchsorted(ids, of) for of in lanes.values()]
        self.widths = [len(ids)] if lanes is None else [1 << lane.digit for lane in lanes]
        self._buffers = None if lanes is None else {lane: at for at, lane in enumerate(lanes)}
        self._slots = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    def place(self, lane: Lane, peer: int) -> tuple[int, int]:
        """Return the buffer, and the slot in it, for a lane to or from a device."""
        return (0, self._slots[peer]) if self._buffers is None else (self._buffers[lane], 0)


class Round(NamedTuple):
    """A part of all streams, in steps: its first one, and their number."""

    start: int
    length: int


def rounds_of(total: int, most: int) -> list[Round]:
    """Return the rounds of streams of ``total`` steps, with at most ``most``, of two lengths.

    >>> rounds_of(1000, 300)  # the last one is rounded up to seven binary digits
    [Round(start=0, length=300), Round(start=300, length=300), Round(start=600, length=300),
     Round(start=900, length=100)]
    """
    whole, rest = divmod(total, most)
    rounds = [Round(number * most, most) for number in range(whole)]
    if rest:
        shift = max(rest.bit_length() - _DIGITS, 0)
        rounds.append(Round(whole * most, min(-(-rest >> shift) << shift, most)))
    return rounds


class Steps(NamedTuple):
    """The steps of one array in the streams that it shares."""

    start: int
    stop: int


class Packet:
    """The stream from one device to another in a lane, whose binary digit is given."""

    def __init__(self, digit: int) -> None:
        self._digit = digit
        self._parts: list[tuple[MovedPiece, Steps, int]] = []

    def add(self, piece: MovedPiece, steps: Steps, start: int) -> None:
        """Append the elements of a piece from ``start`` on, as many as the steps have."""
        self._parts.append((piece, steps, start))

    def boxes(self, this: Round) -> Iterator[tuple[int, MovedPiece]]:
        """Yield the boxes that travel in a round, with their places in a flat buffer."""
        for piece, steps, start in self._parts:
            begin = max(this.start, steps.start)
            end = min(this.start + this.length, steps.stop)
            first = start + (begin - steps.start << self._digit)
            stop = min(start + (end - steps.start << self._digit), piece.size)
            if begin < end and first < stop:
                place = begin - this.start << self._digit
                for box in piece.between(first, stop):
                    yield place, box
                    place += box.size


Packets: TypeAlias = dict[int, Packet]


class Streams:
    """The pieces that one process copies, sends and gets for arrays of one ``Relocation.key``.

    Attributes:
      near: the pieces that it copies.
      sent, received: by the id of a device of this process and the number of a buffer, the packets
        that this has, by their slots.
    """

    def __init__(self, moves: Sequence[Relocation], routes: Routes | None, process: int) -> None:
        self._moves = moves
        ends = [0, *itertools.accumulate(move.unit for move in moves)]
        self._steps = {
            move.leaf: Steps(*each) for move, each in zip(moves, pairwise(ends), strict=True)
        }
        self._total = ends[-1]
        self.near: list[MovedPiece] = []
        self.sent: defaultdict[tuple[int, int], Packets] = defaultdict(dict)
        self.received: defaultdict[tuple[int, int], Packets] = defaultdict(dict)
        for move in moves:
            near, far = move.arriving(process)
            self.near += near
            if routes is not None:
                for each in far:
                    self._add(self.received, routes, each, each.piece.target, each.piece.source)
                for each in move.leaving(process):
                    self._add(self.sent, routes, each, each.piece.source, each.piece.target)

    def _add(
        self,
        packets: defaultdict[tuple[int, int], Packets],
        routes: Routes,
        far: FarPiece,
        device: int,
        peer: int,
    ) -> None:
        steps = self._steps[far.piece.leaf]
        for lane, begin in far.lanes():
            buffer, slot = routes.place(lane, peer)
            packet = packets[device, buffer].setdefault(slot, Packet(lane.digit))
            packet.add(far.piece, steps, begin * (steps.stop - steps.start))

    def rounds(self, most: int) -> list[Round]:
        """Return the rounds with at most so many steps, in whole rows if that is possible."""
        row = max(move.row for move in self._moves)
        for unit in (row, _ALIGNED):
            if most >= unit:
                return rounds_of(self._total, most - most % unit)
        return rounds_of(self._total, most)


def _positions(grid: ShardGrid, process: int) -> IntArray:
    numbers = numbers_of(grid)
    place = numbers.index(process) if process in numbers else -1
    return np.flatnonzero(ranks_of(grid) == place)


def _boxes(sizes: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield starts and sizes of the boxes that are a row-major range of a larger box."""
    if stop - start == math.prod(sizes):
        yield (0,) * len(sizes), sizes
        return
    inner = math.prod(sizes[1:])
    row, within = divmod(start, inner)
    if within:
        end = min(stop, (row + 1) * inner)
        for at, some in _boxes(sizes[1:], within, within + end - start):
            yield (row, *at), (1, *some)
        row, start = row + 1, end
    if rows := (stop - start) // inner:
        yield (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
        row, start = row + rows, start + rows * inner
    if start < stop:
        for at, some in _boxes(sizes[1:], 0, stop - start):
            yield (row, *at), (1, *some)


def _sum(starts: Sequence[int], offsets: Sequence[int]) -> Shape:
    return tuple(map(sum, zip(starts, offsets, strict=True)))

"""The elements that each device gets from each other one, and that each sends.

First the devices that hold each block, and the equal shares that those of one process send of it;
then the flow from all devices to all. ``docs/design/reshard.md`` has the rule, and says why totals
need no list of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gda.layout.grid import ShardGrid
from gda.layout.indices import Boxes, Dimension, Tiling
from gda.layout.numbering import IntArray, distinct
from gda.layout.reshard.lanes import Lanes, PieceRequests
from gda.layout.reshard.overlaps import Listed, Pieces

_Numbers = IntArray | Sequence[int]

# Pieces at a time, so that a list of any length takes about 100 MB.
AT_A_TIME = 2**20
_SEARCHED_AT_A_TIME = 2**16


class Holding:
    """The devices that hold each block of a grid, those of one process together.

    A *group* is the devices of one process that hold one block.

    Attributes:
      devices: positions, block after block and group after group: int64 ``[num_devices]``.
      blocks, ranks: of each group, its block and its process, as a place in the process numbers.
      counts: devices of each group.
      num_blocks: distinct blocks of each process.
    """

    def __init__(self, grid: ShardGrid) -> None:
        num_ranks = len(numbers_of(grid))
        keys = grid.block_ids * num_ranks + ranks_of(grid)
        self.devices = np.argsort(keys, kind="stable")
        ordered = keys[self.devices]
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        self._keys, self._num_ranks = ordered[firsts], num_ranks
        self.counts = np.diff(firsts, append=len(ordered))
        self.blocks, self.ranks = np.divmod(self._keys, num_ranks)
        self.num_blocks = np.bincount(self.ranks, minlength=num_ranks)

    def groups(self, blocks: IntArray, ranks: IntArray) -> IntArray:
        """Return the group of each block and process, -1 if the process does not hold it."""
        return np.where(ranks >= 0, _places(self._keys, blocks * self._num_ranks + ranks), -1)


class Combinations:
    """The blocks that the devices of each process hold, as combinations of parts.

    A process has one combination of parts of each dimension if it holds all blocks of that, and
    each on equally many devices. Else each of its blocks is one. So the overlap of a combination
    and a box is a product over the dimensions, however many blocks it has.

    Attributes:
      firsts, counts: the first combination of each process, and their number.
    """

    def __init__(self, grid: ShardGrid) -> None:
        holding, self._tiling = Holding(grid), tiling_of(grid)
        num_ranks, ranks = len(holding.num_blocks), holding.ranks
        columns = self._tiling.columns(holding.blocks)
        spanned = np.ones(num_ranks, np.int64)
        for dimension, column in zip(self._tiling.dimensions, columns, strict=True):
            owners = distinct(ranks * dimension.parts + column) // dimension.parts
            spanned *= np.bincount(owners, minlength=num_ranks)
        devices = np.empty(num_ranks, np.int64)
        devices[ranks] = holding.counts
        is_uneven = np.bincount(ranks, holding.counts != devices[ranks], num_ranks) > 0
        self.counts = np.where((spanned == holding.num_blocks) & ~is_uneven, 1, holding.num_blocks)
        self.firsts = _begins(self.counts)
        numbers = np.empty_like(ranks)
        numbers[np.argsort(ranks, kind="stable")] = _counted(holding.num_blocks)
        numbers = self.firsts[ranks] + np.minimum(numbers, self.counts[ranks] - 1)
        self._devices = np.empty(self.counts.sum(), np.int64)
        self._devices[numbers] = holding.counts
        # The parts of all combinations along each dimension, ascending.
        self._parts = [
            distinct(numbers * dimension.parts + column)
            for dimension, column in zip(self._tiling.dimensions, columns, strict=True)
        ]

    def overlaps(self, numbers: IntArray, boxes: Boxes) -> IntArray:
        """Return the elements that each combination shares with its box, once for each device."""
        shared = self._devices[numbers]
        for along in zip(self._tiling.dimensions, self._parts, *boxes, strict=True):
            dimension, parts, starts, stops = along
            before = partial(_elements_before, dimension, parts, numbers)
            shared *= before(stops) - before(starts)
        return shared


def _elements_before(
    dimension: Dimension, parts: IntArray, numbers: IntArray, ends: IntArray
) -> IntArray:
    """Return the elements of parts of combinations that come before the ends."""
    whole, rest = np.divmod(ends, dimension.step)
    wanted = numbers * dimension.parts + whole
    places = np.searchsorted(parts, wanted)
    has_rest = parts[np.minimum(places, len(parts) - 1)] == wanted
    return places * dimension.step + rest * has_rest


class Shares(NamedTuple):
    """Equal shares of requests among the devices of each set; devices lie set after set.

    Attributes:
      totals: elements asked of each set.
      counts: devices of each set.
    """

    totals: IntArray
    counts: IntArray

    def senders(self, sets: IntArray, begins: IntArray) -> IntArray:
        """Return the places of the devices that send some pieces.

        ``sets`` has the set that each piece is asked of, ``begins`` its position among all elements
        asked of that set.
        """
        totals, counts = self.totals[sets], self.counts[sets]
        whole, rest = np.divmod(totals, counts)

        def begin_of(share: IntArray) -> IntArray:
            # ceil(share * total / count), whose product might not fit into int64.
            return share * whole - (-share * rest) // counts

        # Below 2**50 devices the rounding of floats is less than a share, so it is one off at most.
        share = (begins / np.maximum(totals, 1) * counts).astype(np.int64)
        share = np.clip(share, 0, counts - 1)
        share -= begin_of(share) > begins
        share += begin_of(share + 1) <= begins
        return _begins(self.counts)[sets] + share


class RequestQueue:
    """The pieces that are asked of each set, end to end in the order of the requests."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._ends = np.zeros_like(shares.totals)

    def senders(self, sets: IntArray, sizes: IntArray) -> IntArray:
        """Add pieces to the queues; return the places of the devices that send them."""
        order = np.argsort(sets, kind="stable")
        ordered, ends = sets[order], np.cumsum(sizes[order])
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        before = ends[firsts] - sizes[order][firsts]
        counts = np.diff(firsts, append=len(ordered))
        begins = np.empty_like(ends)
        begins[order] = ends - sizes[order] - np.repeat(before, counts) + self._ends[ordered]
        self._ends += summed(sets, sizes, len(self._ends))
        return self._shares.senders(sets, begins)


class PieceRun(NamedTuple):
    """A run of pieces in the order of the target devices.

    Attributes:
      pieces: the places of the pieces in their blocks.
      targets, sources: positions of the devices that get and send them.
      is_kept: those are one device.
      is_far: they are in two processes.
    """

    pieces: Listed
    targets: IntArray
    sources: IntArray
    is_kept: npt.NDArray[np.bool_]
    is_far: npt.NDArray[np.bool_]


class FarPieces(NamedTuple):
    """Some pieces that go from one process to another.

    Attributes:
      targets, sources: positions of the devices that get and send them.
      segments: for each dimension the segment of each.
      colours, units: as ``Lanes`` has them.
    """

    targets: IntArray
    sources: IntArray
    segments: tuple[IntArray, ...]
    colours: IntArray
    units: IntArray


@dataclass(frozen=True, eq=False)
class Flow:
    """The elements that go from the devices of a source grid to those of a target grid.

    The grids are of one global shape, of at least one element. ``homes`` has the position in the
    source of each target device, -1 where it is not in the source.
    """

    source: ShardGrid
    target: ShardGrid
    homes: IntArray

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(tiling_of(self.source), tiling_of(self.target))

    @property
    def num_pieces(self) -> int:
        return self.pieces.count * self.target.num_replicas

    # The bytes that each device gets.

    @cached_property
    def kept(self) -> IntArray:
        kept = np.zeros(self.target.num_devices, np.int64)
        old = np.flatnonzero(self.homes >= 0)
        kept[old] = self.pieces.overlaps(self._home_blocks[old], self.target.block_ids[old])
        return kept

    @property
    def received(self) -> IntArray:
        return tiling_of(self.target).sizes(self.target.block_ids) - self.kept

    @property
    def received_near(self) -> int:
        """The elements that come from another device of the same process, of all devices."""
        if len({*numbers_of(self.source), *numbers_of(self.target)}) == 1:
            return int(self.received.sum())
        return int(self._requested.sum())

    @cached_property
    def _requested(self) -> IntArray:
        """The elements that devices ask of another one of their process, of each group of it."""
        holding, needed = self._holding, Combinations(self.target)
        ranks = _places(numbers_of(self.target), numbers_of(self.source))[holding.ranks]
        requested = np.zeros_like(holding.counts)
        shared = np.flatnonzero(ranks >= 0)
        # Process after process, few at a time: what is searched stays in the processor's cache.
        shared = shared[np.argsort(ranks[shared], kind="stable")]
        counts = needed.counts[ranks[shared]]
        for run in _runs(counts, _SEARCHED_AT_A_TIME):
            groups = np.repeat(shared[run], counts[run])
            numbers = needed.firsts[ranks[groups]] + _counted(counts[run])
            boxes = tiling_of(self.source).boxes(holding.blocks[groups])
            requested += summed(groups, needed.overlaps(numbers, boxes), len(requested))
        old = np.flatnonzero(self.homes >= 0)
        groups = self._groups_near(old, self._home_blocks[old])
        near = groups >= 0
        return requested - summed(groups[near], self.kept[old[near]], len(requested))

    @cached_property
    def _near_shares(self) -> Shares:
        return Shares(self._requested, self._holding.counts)

    # Piece by piece.

    @cached_property
    def lanes(self) -> Lanes:
        """The numbers by which the far pieces find their senders, and their lanes."""
        return Lanes(self.pieces, self.source.num_replicas, self.target.num_replicas)

    def runs(self, targets: IntArray | None = None) -> Iterator[PieceRun]:
        """Yield all pieces, a million at a time; or those of the ``targets``, whole processes."""
        near = RequestQueue(self._near_shares)
        all_of = np.arange(self.target.num_devices) if targets is None else targets
        for some in _runs(self.pieces.counts(self.target.block_ids[all_of])):
            devices = all_of[some]
            pieces = self.pieces.listed(self.target.block_ids[devices])
            targets, blocks = devices[pieces.rows], pieces.source_blocks
            groups = self._groups_near(targets, blocks)
            is_kept = blocks == self._home_blocks[targets]
            is_far = ~is_kept & (groups < 0)
            is_near = ~is_kept & ~is_far
            places = np.zeros_like(targets)
            places[is_near] = near.senders(groups[is_near], pieces.sizes[is_near])
            requests = self._requests(pieces.segments, targets)
            places[is_far] = self._places_afar(blocks, requests)[is_far]
            sources = np.where(is_kept, self.homes[targets], self._holding.devices[places])
            yield PieceRun(pieces, targets, sources, is_kept, is_far)

    def far_pieces(self, run: PieceRun) -> FarPieces:
        segments = tuple(segment[run.is_far] for segment in run.pieces.segments)
        targets, sources = run.targets[run.is_far], run.sources[run.is_far]
        colours = self.lanes.colours(segments, self._requests(segments, targets))
        units = self.lanes.units(run.pieces.sizes[run.is_far])
        return FarPieces(targets, sources, segments, colours, units)

    def sent_by(self, sources: IntArray) -> FarPieces:
        """Return the far pieces that some source devices send."""
        replicas = self.target.num_replicas
        pieces = self.pieces.reversed.listed(np.unique(self.source.block_ids[sources]))
        of_pieces = np.unique(self.source.block_ids[sources])[pieces.rows]
        count = len(of_pieces)
        # Each piece once for each device that needs its target block.
        chosen = np.repeat(np.arange(count), replicas)
        needing = np.argsort(self.target.block_ids, kind="stable")
        needed = np.repeat(pieces.source_blocks * replicas, replicas)
        targets = needing[needed + np.tile(np.arange(replicas), count)]
        segments, blocks = tuple(each[chosen] for each in pieces.segments), of_pieces[chosen]
        requests = self._requests(segments, targets)
        senders = self._holding.devices[self._places_afar(blocks, requests)]
        is_sent = np.isin(senders, sources) & (blocks != self._home_blocks[targets])
        is_sent &= self._groups_near(targets, blocks) < 0
        colours = self.lanes.colours(segments, requests)[is_sent]
        return FarPieces(
            targets[is_sent],
            senders[is_sent],
            tuple(segment[is_sent] for segment in segments),
            colours,
            self.lanes.units(pieces.sizes[chosen][is_sent]),
        )

    def _requests(self, segments: Sequence[IntArray], targets: IntArray) -> PieceRequests:
        return self.lanes.requests(segments, self.target.replica_ids[targets])

    def _places_afar(self, blocks: IntArray, requests: PieceRequests) -> IntArray:
        """Return the places, in the order of ``Holding``, of the devices that answer requests."""
        return blocks * self.source.num_replicas + self.lanes.holders(blocks, requests)

    # The holders of each block.

    @cached_property
    def _holding(self) -> Holding:
        return Holding(self.source)

    def _groups_near(self, targets: IntArray, blocks: IntArray) -> IntArray:
        return self._holding.groups(blocks, self._ranks[targets])

    @cached_property
    def _home_blocks(self) -> IntArray:
        """The source block that each target device holds, or -1."""
        return np.where(self.homes >= 0, self.source.block_ids[self.homes], -1)

    @cached_property
    def _ranks(self) -> IntArray:
        """The process of each target device, as a place in the processes of the source, or -1."""
        return _places(numbers_of(self.source), numbers_of(self.target))[ranks_of(self.target)]


def summed(keys: IntArray, values: IntArray, length: int) -> IntArray:
    """Return the sum of the values of each key."""
    # Not np.bincount with weights, which adds in float64.
    totals = np.zeros(length, np.int64)
    np.add.at(totals, keys, values)
    return totals


def tiling_of(grid: ShardGrid) -> Tiling:
    """Return the places of the blocks of a grid."""
    return Tiling(grid.global_shape, grid.parts)


def numbers_of(grid: ShardGrid) -> tuple[int, ...]:
    """Return the numbers of the processes; all devices are of process 0 if none are known."""
    return (0,) if grid.processes is None else grid.processes.numbers


def ranks_of(grid: ShardGrid) -> IntArray:
    """Return the place of the process of each device in ``numbers_of``."""
    if grid.processes is None:
        return np.zeros(grid.num_devices, np.int64)
    return grid.processes.ranks


def homes_of(source_ids: IntArray, target_ids: IntArray) -> IntArray:
    """Return the position in the source of each target device, -1 for a new one."""
    order = np.argsort(source_ids)
    places = _places(source_ids[order], target_ids)
    return np.where(places >= 0, order[places], -1)


def _places(known: _Numbers, given: _Numbers) -> IntArray:
    """Return the place of each given number among the known ones, which ascend; -1 if missing."""
    known, given = np.asarray(known), np.asarray(given)
    if known[-1] - known[0] == len(known) - 1:  # without a gap
        return np.where((known[0] <= given) & (given <= known[-1]), given - known[0], -1)
    places = np.minimum(np.searchsorted(known, given), len(known) - 1)
    return np.where(known[places] == given, places, -1)


def _begins(counts: IntArray) -> IntArray:
    return np.cumsum(counts) - counts


def _counted(counts: IntArray) -> IntArray:
    """Return 0, 1, and so on for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(_begins(counts), counts)


def _runs(counts: IntArray, at_a_time: int = AT_A_TIME) -> Iterator[IntArray]:
    """Yield runs of positions that have about as many pieces as are taken at a time."""
    ends = np.cumsum(counts)
    first = done = 0
    while first < len(counts):
        stop = max(first + 1, int(np.searchsorted(ends, done + at_a_time, side="right")))
        yield np.arange(first, stop)
        first, done = stop, int(ends[stop - 1])

"""From which device each target device gets the pieces of its block, and how much that is.

All amounts are elements. The rule, and why totals need no list of pieces, is told in
``gda/layout/reshard/plan.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray
from gda.layout.reshard.pieces import Listed, Pieces, columns_of, parts_of
from gda.layout.reshard.process_boxes import Boxes, Regular, regular_blocks
from gda.layout.reshard.shares import Holding, Line, Shares, numbers_of, ranks_of, summed

# Pieces at a time, so that a list of any length takes about 100 MB.
_AT_A_TIME = 2**20


class Chunk(NamedTuple):
    """Some of the pieces, in the order of the target devices.

    Attributes:
      pieces: where they lie.
      targets, sources: positions of the devices that get and send them.
      is_kept: whether those are one device.
      is_far: whether they are in two processes.
    """

    pieces: Listed
    targets: IntArray
    sources: IntArray
    is_kept: npt.NDArray[np.bool_]
    is_far: npt.NDArray[np.bool_]


class _Near(NamedTuple):
    """What comes from another device of the same process.

    Attributes:
      received: by each target device.
      asked: of each group of holders, see ``Holding``.
    """

    received: IntArray
    asked: IntArray


@dataclass(frozen=True, eq=False)
class Flow:
    """What flows from the devices of a source grid to those of a target grid.

    Args:
      source, target: grids of one global shape, of at least one element.
      homes: position in the source of each target device, -1 where it is not in the source.
    """

    source: ShardGrid
    target: ShardGrid
    homes: IntArray

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of each target block."""
        source, target = self.source, self.target
        return Pieces(source.global_shape, source.shard_shape, target.shard_shape)

    @property
    def num_pieces(self) -> int:
        """The pieces that all target devices need together."""
        return self.pieces.count * self.target.num_replicas

    # What each device gets.

    @cached_property
    def kept(self) -> IntArray:
        """What each target device has of its block."""
        kept = np.zeros(self.target.num_devices, np.int64)
        old = np.flatnonzero(self.homes >= 0)
        kept[old] = self.pieces.overlaps(self._home_blocks[old], self.target.block_ids[old])
        return kept

    @property
    def received_near(self) -> IntArray:
        """What each target device gets from others of its process."""
        return self._near.received

    @property
    def received(self) -> IntArray:
        """What each target device gets from others."""
        return math.prod(self.target.shard_shape) - self.kept

    @cached_property
    def _near(self) -> _Near:
        return self._near_of_regular() or self._near_one_by_one()

    def _near_of_regular(self) -> _Near | None:
        """Return what is near if all processes have regular blocks: O(devices); else None."""
        known = np.flatnonzero(self._ranks >= 0)
        held = _regular(self.source, ranks_of(self.source), self.source.block_ids)
        needed = _regular(self.target, self._ranks[known], self.target.block_ids[known])
        if held is None or needed is None:
            return None
        near = _Near(np.zeros_like(self.kept), np.zeros_like(self._holding.counts))
        boxes = _boxes(self.target, self.target.block_ids[known])
        near.received[known] = held.shared(self._ranks[known], boxes)
        # A process of the source may have no device in the target, and so none that asks.
        asking = np.flatnonzero(self._holding.ranks <= self._ranks.max())
        boxes = _boxes(self.source, self._holding.blocks[asking])
        near.asked[asking] = needed.shared_with_devices(self._holding.ranks[asking], boxes)
        # What is kept is among both, where the process holds it.
        groups = self._holding.groups(self._home_blocks, self._ranks)
        old = np.flatnonzero((self.homes >= 0) & (groups >= 0))
        near.received[old] -= self.kept[old]
        near.asked[:] -= summed(groups[old], self.kept[old], len(near.asked))
        return near

    def _near_one_by_one(self) -> _Near:
        """Return what is near from all pieces, or from all held blocks, whichever are fewer."""
        near = _Near(np.zeros_like(self.kept), np.zeros_like(self._holding.counts))
        num_looks = int(self._holding.num_blocks[self._ranks[self._ranks >= 0]].sum())
        by_piece = self.num_pieces <= num_looks
        for devices, blocks, sizes in self._by_piece() if by_piece else self._by_held_block():
            groups = self._holding.groups(blocks, self._ranks[devices])
            is_near = (groups >= 0) & (blocks != self._home_blocks[devices])
            near.received[:] += summed(devices[is_near], sizes[is_near], len(near.received))
            near.asked[:] += summed(groups[is_near], sizes[is_near], len(near.asked))
        return near

    def _by_piece(self) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Yield target devices with the pieces of their blocks: source block and size."""
        for devices in _runs(self.pieces.counts(self.target.block_ids)):
            pieces = self.pieces.listed(self.target.block_ids[devices])
            yield devices[pieces.rows], pieces.source_blocks, pieces.sizes

    def _by_held_block(self) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Yield target devices with the blocks of their process, and what these have of theirs."""
        known = np.flatnonzero(self._ranks >= 0)
        counts = self._holding.num_blocks[self._ranks[known]]
        for run in _runs(counts):
            devices = np.repeat(known[run], counts[run])
            blocks = self._holding.blocks_of(self._ranks[known[run]])
            yield devices, blocks, self.pieces.overlaps(blocks, self.target.block_ids[devices])

    # What each device sends.

    @property
    def sent_near(self) -> IntArray:
        """What each source device sends to others of its process."""
        return self._sent[0]

    @property
    def sent_far(self) -> IntArray:
        """What each source device sends to other processes."""
        return self._sent[1]

    @property
    def is_listed(self) -> bool:
        """Whether only the pieces, one by one, tell what each device sends.

        So it is where they have several sizes, and some of them a choice of senders.
        """
        has_choice = not (self._near_shares.are_forced and self._far_shares.are_forced)
        return self.pieces.common_size is None and has_choice

    @cached_property
    def _sent(self) -> tuple[IntArray, IntArray]:
        near, far = (np.zeros(self.source.num_devices, np.int64) for _ in range(2))
        if self.is_listed:
            for chunk in self.chunks():
                is_near = ~chunk.is_kept & ~chunk.is_far
                for sent, chosen in [(near, is_near), (far, chunk.is_far)]:
                    sizes = chunk.pieces.sizes[chosen]
                    sent[:] += summed(chunk.sources[chosen], sizes, len(sent))
            return near, far
        size = self.pieces.common_size
        for sent, shares in [(near, self._near_shares), (far, self._far_shares)]:
            sent[self._holding.devices] = shares.forced() if size is None else shares.equal(size)
        return near, far

    @cached_property
    def _near_shares(self) -> Shares:
        return Shares(self._near.asked, self._holding.counts, np.zeros_like(self._near.asked))

    @cached_property
    def _far_shares(self) -> Shares:
        blocks = np.arange(self.source.num_shards)
        replicas = self.source.num_replicas
        near = summed(self._holding.blocks, self._near.asked, len(blocks))
        asked = self._asked - self._kept_of_blocks - near
        # The first share goes around the holders as the blocks go on.
        turns = blocks * replicas // len(blocks)
        return Shares(asked, np.full_like(blocks, replicas), turns)

    @property
    def _asked(self) -> IntArray:
        """What is asked of each source block, by all target devices together."""
        size = math.prod(self.source.shard_shape) * self.target.num_replicas
        return np.full(self.source.num_shards, size, np.int64)

    @cached_property
    def _kept_of_blocks(self) -> IntArray:
        """What of each source block is kept."""
        old = self.homes >= 0
        return summed(self._home_blocks[old], self.kept[old], self.source.num_shards)

    # Piece by piece.

    def chunks(self) -> Iterator[Chunk]:
        """Yield all pieces, many at a time."""
        near, far = Line(self._near_shares), Line(self._far_shares)
        for devices in _runs(self.pieces.counts(self.target.block_ids)):
            pieces = self.pieces.listed(self.target.block_ids[devices])
            targets = devices[pieces.rows]
            groups = self._holding.groups(pieces.source_blocks, self._ranks[targets])
            is_kept = pieces.source_blocks == self._home_blocks[targets]
            is_far = ~is_kept & (groups < 0)
            is_near = ~is_kept & ~is_far
            places = np.empty_like(targets)
            places[is_near] = near.senders(groups[is_near], pieces.sizes[is_near])
            places[is_far] = far.senders(pieces.source_blocks[is_far], pieces.sizes[is_far])
            places[is_kept] = 0
            sources = np.where(is_kept, self.homes[targets], self._holding.devices[places])
            yield Chunk(pieces, targets, sources, is_kept, is_far)

    # Who holds what.

    @cached_property
    def _holding(self) -> Holding:
        return Holding(self.source)

    @cached_property
    def _home_blocks(self) -> IntArray:
        """The source block that each target device holds, or -1."""
        return np.where(self.homes >= 0, self.source.block_ids[self.homes], -1)

    @cached_property
    def _ranks(self) -> IntArray:
        """The process of each target device, as a place in the processes of the source, or -1."""
        known, given = np.array(numbers_of(self.source)), np.array(numbers_of(self.target))
        places = np.minimum(np.searchsorted(known, given), len(known) - 1)
        return np.where(known[places] == given, places, -1)[ranks_of(self.target)]


def _regular(grid: ShardGrid, ranks: IntArray, blocks: IntArray) -> Regular | None:
    parts = parts_of(grid.global_shape, grid.shard_shape)
    return regular_blocks(ranks, columns_of(blocks, parts), grid.shard_shape, parts)


def _boxes(grid: ShardGrid, blocks: IntArray) -> Boxes:
    parts = parts_of(grid.global_shape, grid.shard_shape)
    sized = list(zip(columns_of(blocks, parts), grid.shard_shape, strict=True))
    return Boxes([c * step for c, step in sized], [c * step + step for c, step in sized])


def _runs(counts: IntArray) -> Iterator[IntArray]:
    """Yield runs of positions that have about as many pieces as are taken at a time."""
    ends = np.cumsum(counts)
    first = done = 0
    while first < len(counts):
        stop = max(first + 1, int(np.searchsorted(ends, done + _AT_A_TIME, side="right")))
        yield np.arange(first, stop)
        first, done = stop, int(ends[stop - 1])

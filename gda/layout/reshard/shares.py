"""Which devices hold which blocks, and how these share out what is asked of them.

Amounts are integers in any unit. What this is good for is told in ``gda/layout/reshard/plan.py``.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray


class Holding:
    """Which devices hold which block of a grid, those of one process together.

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
        """Return the group of each block and process, -1 where the process does not hold it."""
        keys = blocks * self._num_ranks + ranks
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where((ranks >= 0) & (self._keys[places] == keys), places, -1)

    def blocks_of(self, ranks: IntArray) -> IntArray:
        """Return the blocks of some processes, one process after the other."""
        order, firsts = self._by_rank
        counts = self.num_blocks[ranks]
        return self.blocks[order[np.repeat(firsts[ranks], counts) + _counted(counts)]]

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        return np.argsort(self.ranks, kind="stable"), _begins(self.num_blocks)


class Shares(NamedTuple):
    """Equal shares of what is asked of some sets of devices, which lie set after set.

    Attributes:
      totals: what is asked of each set.
      counts: devices of each set.
      turns: which of its devices has the first share.
    """

    totals: IntArray
    counts: IntArray
    turns: IntArray

    def senders(self, sets: IntArray, begins: IntArray) -> IntArray:
        """Return the places of the devices that send some pieces.

        Args:
          sets: of which set each piece is asked.
          begins: where it begins in all that is asked of that set.
        """
        totals, counts = self.totals[sets], self.counts[sets]
        whole, rest = np.divmod(totals, counts)

        def begin_of(share: IntArray) -> IntArray:
            # ceil(share * total / count), which might not fit into int64 if it were multiplied.
            return share * whole - (-share * rest) // counts

        # Below 2**50 devices the rounding of floats is less than a share, so it is one off at most.
        share = (begins / np.maximum(totals, 1) * counts).astype(np.int64)
        share = np.clip(share, 0, counts - 1)
        share -= begin_of(share) > begins
        share += begin_of(share + 1) <= begins
        return _begins(self.counts)[sets] + (share + self.turns[sets]) % counts

    def equal(self, size: int) -> IntArray:
        """Return what each device sends, where all pieces have one size."""
        counts, pieces = (np.repeat(of, self.counts) for of in (self.counts, self.totals // size))
        share = (_counted(self.counts) - np.repeat(self.turns, self.counts)) % counts
        # The pieces that begin in a share are those from ceil(share * pieces / count) on.
        return (-(share * pieces) // counts - -((share + 1) * pieces) // counts) * size

    @property
    def are_forced(self) -> bool:
        """Whether no set that is asked for something has a choice of devices."""
        return bool((self.counts[self.totals > 0] == 1).all())

    def forced(self) -> IntArray:
        """Return what each device sends, where none has a choice."""
        return np.repeat(self.totals, self.counts)


class Line:
    """The pieces that are asked of some sets, laid end to end as they come."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._ends = np.zeros_like(shares.totals)

    def senders(self, sets: IntArray, sizes: IntArray) -> IntArray:
        """Lay on more pieces; return the places of the devices that send them."""
        return self._shares.senders(sets, self._begins(sets, sizes))

    def _begins(self, sets: IntArray, sizes: IntArray) -> IntArray:
        order = np.argsort(sets, kind="stable")
        ordered, ends = sets[order], np.cumsum(sizes[order])
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        before = ends[firsts] - sizes[order][firsts]
        counts = np.diff(firsts, append=len(ordered))
        begins = np.empty_like(ends)
        begins[order] = ends - sizes[order] - np.repeat(before, counts) + self._ends[ordered]
        self._ends += summed(sets, sizes, len(self._ends))
        return begins


def summed(keys: IntArray, values: IntArray, length: int) -> IntArray:
    """Return the sum of the values of each key.

    >>> summed(np.array([0, 2, 0]), np.array([5, 6, 7]), 3)
    array([12,  0,  6])
    """
    # Not np.bincount with weights, which adds in float64.
    totals = np.zeros(length, np.int64)
    np.add.at(totals, keys, values)
    return totals


def numbers_of(grid: ShardGrid) -> tuple[int, ...]:
    """Return the numbers of the processes; where none are known, all devices are of one."""
    return (0,) if grid.processes is None else grid.processes.numbers


def ranks_of(grid: ShardGrid) -> IntArray:
    """Return, for each device, where in these numbers its process is."""
    if grid.processes is None:
        return np.zeros(grid.num_devices, np.int64)
    return grid.processes.ranks


def _begins(counts: IntArray) -> IntArray:
    return np.cumsum(counts) - counts


def _counted(counts: IntArray) -> IntArray:
    """Return 0, 1, and so on for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(_begins(counts), counts)

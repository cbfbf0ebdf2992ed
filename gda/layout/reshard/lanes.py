"""The lanes of a move: sets of senders and their receivers, with each device at most once in each.

A *request* is the elements that a target device needs of a source block without a copy nearby.
Every process numbers requests and lanes alike by a formula, and so finds its own alone:

- Along one dimension, a segment has a place in its source part, and one in its target part. The
  dimension *scatters* if each target part is one segment, else it *gathers* if each source part is
  one, else it is *mixed*.
- The requests to a block are numbered: by the places of their segments in their source parts, of
  mixed dimensions first, then by the replica of the target. They go to the holders in turn, and
  each turn begins one holder later, so that the same replica does not always meet the same holder.
  For each choice of mixed segments, turns count from 0.
- The *colour* of a request is the sum of its turn and its places in the target parts that gather,
  modulo their number. One holder has a turn once, and a target device asks all blocks in the same
  turn, so neither has a colour twice. In a mixed dimension, the segments of a part are consecutive:
  their numbers modulo the most segments of a part differ, and are a further digit of the colour.

Pieces may differ in size. A colour is one lane for each binary digit of its sizes, in *units*: a
piece goes in those lanes whose digit it has. So all that goes in one lane has one length. One lane
a colour, of the largest size, would be simpler, but an array that leaves a fourth of its devices
would send 1.5 times its bytes: ``docs/design/reshard.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.reshard.overlaps import Pieces, Segments

# Of pieces of several sizes, less than a unit is sent too much: at most 1/64 on average.
_UNITS = 64
# Pieces and slots count as equal to smaller ones if they are larger by at most 1/32.
_NEARLY = 32


class PieceRequests(NamedTuple):
    """Some requests: their numbers, of which each block has 0, 1 and so on, and their turns."""

    numbers: IntArray
    turns: IntArray


@dataclass(frozen=True, eq=False)
class Lanes:
    """The lanes of the pieces of two tilings.

    ``num_holders`` devices hold each source block, ``num_replicas`` need each target block.
    """

    pieces: Pieces
    num_holders: int
    num_replicas: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the lanes of arrays whose sizes differ only by a common factor."""
        ways = [(each.source.ways, each.target.ways) for each in self._dimensions]
        sizes = [
            tuple(size // each.common for size in (each.size, *each.steps))
            for each in self._dimensions
        ]
        divided = [both for both in zip(ways, sizes, strict=True) if both[0] != (1, 1)]
        return *divided, self.num_holders, self.num_replicas

    # Requests and their senders.

    def requests(self, segments: Sequence[IntArray], replicas: IntArray) -> PieceRequests:
        """Return requests, from their segments and the replicas of their targets."""
        pure, mixed = np.zeros_like(replicas), np.zeros_like(replicas)
        num_pure = np.ones_like(replicas)
        for dimension, segment in zip(self._dimensions, segments, strict=True):
            of_source = dimension.of_source
            places, counts = of_source.places[segment], of_source.counts[of_source.parts[segment]]
            if _is_mixed(dimension):
                mixed = mixed * counts + places
            else:
                pure, num_pure = pure * counts + places, num_pure * counts
        numbers = (mixed * num_pure + pure) * self.num_replicas + replicas
        turns = (pure * self.num_replicas + replicas) // self.num_holders
        return PieceRequests(numbers, turns)

    def holders(self, blocks: IntArray, requests: PieceRequests) -> IntArray:
        """Return the holders of source blocks, from 0 on, that answer requests to them."""
        return (requests.numbers + requests.turns + self._first(blocks)) % self.num_holders

    def _first(self, blocks: IntArray) -> IntArray:
        # Holders are in the order of their processes: if all blocks began with the first, one
        # process would send all of a few requests to each.
        return blocks * self.num_holders // self.pieces.num_source_blocks

    # Lanes.

    def colours(self, segments: Sequence[IntArray], requests: PieceRequests) -> IntArray:
        """Return the colours of requests with these segments."""
        gathered, mixed = np.zeros_like(requests.turns), np.zeros_like(requests.turns)
        for dimension, segment in zip(self._dimensions, segments, strict=True):
            if _is_mixed(dimension):
                mixed = mixed * _most(dimension) + segment % _most(dimension)
            else:
                gathered = gathered * dimension.of_target.most + dimension.of_target.places[segment]
        return mixed * self._num_shifts + (requests.turns + gathered) % self._num_shifts

    # Sizes.

    @cached_property
    def unit(self) -> int:
        """The elements of a unit; pieces of nearly one size have one each."""
        whole = math.prod(each.size for each in self._dimensions)
        if self.fits(self.pieces.count, whole):
            return self._largest
        common = math.prod(each.common for each in self._dimensions)
        return max(whole // common // self.pieces.count // _UNITS, 1) * common

    def fits(self, slots: int, elements: int) -> bool:
        """Return True if so many slots for the largest piece are hardly more than the elements."""
        return slots * self._largest * _NEARLY <= elements * (_NEARLY + 1)

    @cached_property
    def _largest(self) -> int:
        return math.prod(int(each.lengths.max()) for each in self._dimensions)

    def units(self, sizes: IntArray) -> IntArray:
        return -(-sizes // self.unit)

    @property
    def _dimensions(self) -> Sequence[Segments]:
        return self.pieces.dimensions

    @cached_property
    def _num_turns(self) -> int:
        """The most turns of the holders of a block, for each choice of mixed segments."""
        pure = math.prod(each.of_source.most for each in self._dimensions if not _is_mixed(each))
        return -(-pure * self.num_replicas // self.num_holders)

    @cached_property
    def _num_shifts(self) -> int:
        pure = math.prod(each.of_target.most for each in self._dimensions if not _is_mixed(each))
        return max(pure, self._num_turns)


def _is_mixed(dimension: Segments) -> bool:
    return min(dimension.of_source.most, dimension.of_target.most) > 1


def _most(dimension: Segments) -> int:
    return max(dimension.of_source.most, dimension.of_target.most)

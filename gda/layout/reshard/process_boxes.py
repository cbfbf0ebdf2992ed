"""What processes have of an array along each dimension, where they have regular blocks of it.

Blocks are *regular* if they are all combinations of some parts of each dimension, and as many
devices have each of them. On a mesh whose devices are in the order of their processes they mostly
are. What a box has in common with all of them is then a product of one number for each dimension,
however many they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gda.layout.numbering import IntArray


class Boxes(NamedTuple):
    """Boxes of an array: for each dimension where each starts and stops."""

    starts: Sequence[IntArray]
    stops: Sequence[IntArray]


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
        """Return how many elements of the parts of some processes lie below some elements."""
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


def regular_blocks(
    processes: IntArray, columns: Sequence[IntArray], steps: Sequence[int], parts: Sequence[int]
) -> Regular | None:
    """Return what the processes of some devices have; None if that of one of them is not regular.

    Args:
      processes: of each device, small numbers.
      columns: for each dimension, the part of it that each device has.
      steps, parts: for each dimension, the elements of one part, and how many there are.

    >>> two = regular_blocks(np.array([0, 0, 1, 1]), [np.arange(4)], [10], [4])
    >>> two.shared(np.array([0, 1]), Boxes([np.array([5, 5])], [np.array([25, 25])]))
    array([15,  5])
    """
    if not len(processes):
        return None
    count = int(processes.max()) + 1
    along, regular = [], np.ones(count, np.int64)
    blocks = processes
    for column, step, ways in zip(columns, steps, parts, strict=True):
        blocks = blocks * ways + column
        keys = np.unique(processes * ways + column)
        along.append(Along(step, ways, keys))
        regular *= np.bincount(keys // ways, minlength=count)
    blocks, devices = np.unique(blocks, return_counts=True)
    owners = blocks // math.prod(parts)
    replicas = np.zeros(count, np.int64)
    replicas[owners] = devices
    has_blocks = np.bincount(owners, minlength=count)
    is_regular = (has_blocks == np.where(has_blocks, regular, 0)).all()
    return Regular(along, replicas) if is_regular and (replicas[owners] == devices).all() else None

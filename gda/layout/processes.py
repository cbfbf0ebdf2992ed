"""The process of each device of a mesh, and the process that writes each block."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.layout.boundary import set_module
from gda.layout.numbering import IntArray, Layout, distinct, read_only
from gda.layout.spec import integer
from gda.layout.text import counted

ProcessOf = Sequence[int] | npt.NDArray[np.integer[Any]]


@set_module("gda")
@dataclass(frozen=True, eq=False, repr=False)
class Processes:
    """The process of every device of a mesh; immutable, hashable, comparable by content.

    ``ShardGrid.processes`` is one. Several grids may share one: pass it as ``process_of``, which is
    given as non-negative integers in device order, and kept as int64 ``[num_devices]``, read-only.

    >>> from gda import Processes
    >>> processes = Processes([4, 4, 0, 0])
    >>> processes.numbers, processes.positions(4)
    ((0, 4), array([0, 1]))
    """

    process_of: IntArray

    def __init__(self, process_of: ProcessOf) -> None:
        given = _integers(process_of)
        if given.ndim != 1:
            raise ValueError(
                f"process_of has the shape {given.shape}; give the process of each device in "
                "device order, such as [0, 0, 1, 1]"
            )
        numbers = given.astype(np.int64)
        if numbers.size and numbers.min() < 0:
            device = int(np.argmin(numbers))
            raise ValueError(
                f"process_of says {given[device]} for device {device}; processes are numbered "
                "from 0 to 2**63 - 1"
            )
        self.__dict__["process_of"] = read_only(numbers)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return len(self.process_of)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The distinct process numbers, ascending."""
        firsts, _ = self._runs
        return tuple(self._by_process[1][firsts].tolist())

    @cached_property
    def ranks(self) -> IntArray:
        """The place in ``numbers`` of the process of each device: int64, read-only."""
        order, _ = self._by_process
        _, counts = self._runs
        ranks = np.empty(self.num_devices, np.int64)
        ranks[order] = np.repeat(np.arange(len(counts)), counts)
        return read_only(ranks)

    def positions(self, process: int) -> IntArray:
        """Return the flat positions of the devices of a process, in device order, read-only."""
        order, numbers = self._by_process
        process = integer(process, "the number of a process")
        # Not np.searchsorted, which has no order for an int64 and a number beyond 2**63.
        return order[bisect_left(numbers, process) : bisect_right(numbers, process)]

    @cached_property
    def _by_process(self) -> tuple[IntArray, IntArray]:
        """The positions of process after process, and the process of each."""
        if (self.process_of[:-1] <= self.process_of[1:]).all():
            return read_only(np.arange(self.num_devices)), self.process_of
        order = np.argsort(self.process_of, kind="stable")  # stable: within one, in device order
        return read_only(order), read_only(self.process_of[order])

    @cached_property
    def _runs(self) -> tuple[IntArray, IntArray]:
        firsts = np.flatnonzero(np.diff(self._by_process[1], prepend=-1))
        return firsts, np.diff(firsts, append=self.num_devices)

    @cached_property
    def _hash(self) -> int:
        return hash(self.process_of.tobytes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Processes):
            return NotImplemented
        # By hash first: it is kept, while to compare costs O(devices).
        return self is other or (
            self._hash == other._hash and np.array_equal(self.process_of, other.process_of)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        processes = counted(len(self.numbers), "process", "processes")
        return f"Processes({processes} of {counted(self.num_devices, 'device')})"

    def __reduce__(self) -> tuple[object, ...]:
        # Cached results are not pickled: the hash is valid in this Python process only.
        return Processes, (self.process_of,)


def check_process_of(process_of: ProcessOf | Processes, layout: Layout) -> Processes:
    values = process_of.process_of if isinstance(process_of, Processes) else _integers(process_of)
    if values.shape != (layout.num_devices,):
        raise ValueError(
            f"process_of has the shape {values.shape}, but the mesh {dict(layout.mesh_shape)} has "
            f"{layout.num_devices} devices; give the process of each device in device order"
        )
    return process_of if isinstance(process_of, Processes) else Processes(values)


def _integers(process_of: object) -> npt.NDArray[Any]:
    values = np.asarray(process_of)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(
            "process_of must give the process of each device in device order, integers such as "
            f"[0, 0, 1, 1], not {values.dtype}"
        )
    return values


@dataclass(frozen=True, eq=False)
class Writing:
    """The process that writes each block: the holder with the fewest blocks so far.

    The blocks with the fewest holders come first; of equal processes, the lowest number writes.

    Attributes:
      holders: the processes that hold a block, ascending, block after block.
      firsts, counts: the first and the number of the holders of each block.
      chosen: the holder that writes each block.
    """

    holders: IntArray
    firsts: IntArray
    counts: IntArray
    chosen: IntArray

    def writers(self, blocks: IntArray, turn: int) -> IntArray:
        """Return the process that writes each block, ``turn`` places after the chosen one."""
        # Any integer is a turn, also one that NumPy does not have.
        ranks = (self.chosen[blocks] + turn % self.period) % self.counts[blocks]
        return self.holders[self.firsts[blocks] + ranks]

    @cached_property
    def period(self) -> int:
        """The number of turns after which the writers are the same again."""
        return math.lcm(*np.unique(self.counts).tolist())

    @cached_property
    def by_block(self) -> list[tuple[int, ...]]:
        """The processes that hold each block, ascending."""
        holders, firsts = self.holders.tolist(), self.firsts.tolist()
        return [
            tuple(holders[first : first + count])
            for first, count in zip(firsts, self.counts.tolist(), strict=True)
        ]


@lru_cache(maxsize=64)
def writing_of(layout: Layout, processes: Processes) -> Writing:
    """Return the process that writes each block, computed once for all blocks together."""
    numbers = np.array(processes.numbers, np.int64)
    # One number for a block and a process that holds it, however many of its devices do.
    pairs = distinct(layout.block_ids * len(numbers) + processes.ranks)
    blocks, ranks = np.divmod(pairs, len(numbers))
    counts = np.bincount(blocks, minlength=layout.num_shards)
    firsts = np.cumsum(counts) - counts
    chosen = np.zeros(layout.num_shards, np.int64)
    num_written = np.bincount(ranks[firsts[counts == 1]], minlength=len(numbers)).tolist()
    shared = np.flatnonzero(counts > 1)
    shared = shared[np.argsort(counts[shared], kind="stable")]
    bounds = zip(firsts[shared].tolist(), (firsts + counts)[shared].tolist(), strict=True)
    rank_list, choices = ranks.tolist(), []
    for first, stop in bounds:
        so_far = [num_written[rank] for rank in rank_list[first:stop]]
        choice = so_far.index(min(so_far))
        num_written[rank_list[first + choice]] += 1
        choices.append(choice)
    chosen[shared] = choices
    return Writing(numbers[ranks], firsts, counts, chosen)


def turns_of(sizes: Sequence[int], layouts: Sequence[Hashable]) -> list[int]:
    """Return the turn of each array of a tree, so that all processes write about as much.

    Arrays of one layout take turns, the largest first: in the order of the tree, weights and biases
    that alternate would leave all weights to every second process. Each layout begins with another
    turn.

    >>> turns_of([4, 100, 4, 100, 50], ['x', 'x', 'x', 'x', 'y'])
    [2, 0, 3, 1, 1]
    """
    turns = [0] * len(sizes)
    following: dict[Hashable, int] = {}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        turns[number] = following.setdefault(layouts[number], len(following))
        following[layouts[number]] += 1
    return turns

"""The cover of blocks by moves: what is read once, the blocks it goes into, and who reads it.

Integers only. A load and a restore, alone or with other processes, are lists of such moves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from gda.layout.grid import ShardGrid
from gda.layout.indices import bounded, common_box, hull_of, sizes_of, start_of, within
from gda.layout.numbering import layout_of
from gda.layout.processes import Processes, Writing, writing_of
from gda.layout.spec import Index, Shape

T = TypeVar("T")

# A read costs about as much as copying so many bytes: a smaller gap between two parts is read too.
READ_BYTES = 32 * 1024
# Each read counts as so many bytes more, so that processes also share small reads evenly.
_BYTES_PER_READ = 2**20


class Part(NamedTuple):
    """The elements that a box and a block have in common."""

    block: int  # by number
    in_box: Index  # with every start and stop, as is the next one
    in_block: Index

    @property
    def shape(self) -> Shape:
        return sizes_of(self.in_box)


class BoxMove(NamedTuple):
    """A box of an array that is read once, and its parts, each of which goes into one block."""

    box: Index  # with every start and stop
    parts: tuple[Part, ...]

    def index_of(self, part: Part) -> Index:
        """Return the elements of a part in the whole array."""
        return within(part.in_box, tuple([-s.start for s in self.box]))

    def trimmed(self) -> BoxMove:
        """Return the move with the smallest box that has all its parts."""
        box = hull_of([self.index_of(part) for part in self.parts])
        if box == self.box:
            return self
        first = tuple([s.start - t.start for s, t in zip(box, self.box, strict=True)])
        parts = [part._replace(in_box=within(part.in_box, first)) for part in self.parts]
        return BoxMove(box, tuple(parts))

    @property
    def num_elements(self) -> int:
        """The elements of all parts; one that goes into several blocks counts once for each."""
        return sum([math.prod(part.shape) for part in self.parts])


def cover(
    blocks: Mapping[int, Index],
    shape: Shape,
    chunks: Shape | None,
    itemsize: int,
    *,
    box_bytes: int,
    holders: Mapping[int, tuple[int, ...]] | None = None,
    splits_blocks: bool = True,
    group_bytes: int | None = None,
) -> Iterator[list[BoxMove]]:
    """Yield groups of moves that fill each element of the blocks once.

    The blocks of a group are better read together, see ``blocks_read_together``. No box has parts
    of two groups, and no element is in two boxes of a group.

    Args:
      blocks: the blocks of one grid by number. Starts and stops may be missing where they are
        those of the array.
      shape, chunks, itemsize: of the array that is read; chunks are ``None`` for one in C order.
      box_bytes: the most bytes of a box, unless one chunk has more.
      holders: the processes that need each block. Groups that one process alone needs are then
        omitted, and a group of one block has a box for each process, of at least ``box_bytes``.
      splits_blocks: False gives a group of one block one box.
      group_bytes: the most bytes of the blocks of a group, unless one block has more. An element
        for more blocks is then read once for each of their groups.

    >>> halves = {0: (slice(0, 8), slice(0, 4)), 1: (slice(0, 8), slice(4, 8))}
    >>> (move,), = cover(halves, (8, 8), (1, 8), 4, box_bytes=2**20)
    >>> move.box
    (slice(0, 8, None), slice(0, 8, None))
    >>> [(part.block, part.in_box[1], part.in_block[1]) for part in move.parts]
    [(0, slice(0, 4, None), slice(0, 4, None)), (1, slice(4, 8, None), slice(0, 4, None))]
    """
    every = {number: bounded(index, shape) for number, index in blocks.items()}
    nbytes = {number: math.prod(sizes_of(box)) * itemsize for number, box in every.items()}
    filled = {number: box for number, box in every.items() if nbytes[number]}
    short = -(-READ_BYTES // max(itemsize, 1))
    for numbers in blocks_read_together(filled, shape, chunks, short):
        processes = 1
        if holders is not None:
            processes = len({process for number in numbers for process in holders[number]})
            if processes == 1:
                continue
        for group in groups_within(numbers, [nbytes[n] for n in numbers], group_bytes):
            most = box_bytes
            if len(group) == 1 and not (splits_blocks and holders is None):
                most = max(-(-nbytes[group[0]] // processes), box_bytes)
            own = {number: filled[number] for number in group}
            boxes = boxes_of_chunks(
                hull_of(own.values()), chunks or (1,) * len(shape), max(most // itemsize, 1)
            )
            moves = [move_of(own, box) for box in boxes]
            yield [move.trimmed() for move in moves if move.parts]


def move_of(blocks: Mapping[int, Index], box: Index) -> BoxMove:
    """Return the move from a box to blocks, which are given with every start and stop."""
    common = [(number, common_box(box, block)) for number, block in blocks.items()]
    at = start_of(box)
    parts = [
        Part(number, within(index, at), within(index, start_of(blocks[number])))
        for number, index in common
        if index is not None
    ]
    return BoxMove(box, tuple(parts))


def groups_within(
    every: Iterable[T], sizes: Iterable[int], max_bytes: int | None
) -> Iterator[list[T]]:
    """Yield groups in order, each of as many as ``max_bytes`` allows, at least one.

    >>> [*groups_within('abcd', [3, 1, 9, 1], max_bytes=4)]
    [['a', 'b'], ['c'], ['d']]
    """
    group: list[T] = []
    held = 0
    for each, nbytes in zip(every, sizes, strict=True):
        if group and max_bytes is not None and held + nbytes > max_bytes:
            yield group
            group, held = [], 0
        group.append(each)
        held += nbytes
    if group:
        yield group


def writing_of_grid(grid: ShardGrid, processes: Processes) -> Writing:
    """Return the processes that hold each block of a grid, and the one that writes it."""
    axes, empty = tuple(grid.mesh_shape.items()), tuple([not size for size in grid.global_shape])
    return writing_of(layout_of(axes, grid.spec, empty), processes)


def holders_of(grid: ShardGrid, processes: Processes) -> list[tuple[int, ...]]:
    return writing_of_grid(grid, processes).by_block


def readers_of(needed_by: Sequence[tuple[int, ...]], nbytes: Sequence[int]) -> list[int]:
    """Assign each read to one of the processes that need it, so that all read about as much.

    The reads with the fewest candidates are assigned first, and of these the largest; each goes
    to the process that has the least so far. Every process computes the same.
    """
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, processes in enumerate(needed_by):
        groups[processes].append(number)
    given: Counter[int] = Counter()
    readers = [0] * len(needed_by)
    for processes in sorted(groups, key=lambda processes: (len(processes), processes)):
        loads = [(given[process], process) for process in processes]
        heapq.heapify(loads)
        for number in sorted(groups[processes], key=lambda number: -nbytes[number]):
            load, process = loads[0]
            readers[number] = process
            heapq.heapreplace(loads, (load + nbytes[number] + _BYTES_PER_READ, process))
        given.update({process: load - given[process] for load, process in loads})
    return readers


def blocks_read_together(
    blocks: Mapping[int, Index],
    shape: Shape,
    chunks: Shape | None,
    short: int,
) -> list[list[int]]:
    """Return the numbers of blocks in groups, each of which is better read together.

    Blocks of one grid are given with every start and stop. Two are in a group if they share a
    chunk. In an array without chunks, which is in C order, a block is one run of elements or more:
    two blocks are in a group if the runs of one have fewer than ``short`` elements, and fewer lie
    between the runs of both. Eight reads of 8 KiB of a file take several times as long as one of
    64 KiB, and a store takes its time for each request.

    >>> halves = {0: (slice(0, 8), slice(0, 4)), 1: (slice(0, 8), slice(4, 8))}
    >>> blocks_read_together(halves, (8, 8), (4, 4), 0)
    [[0], [1]]
    >>> blocks_read_together(halves, (8, 8), (1, 8), 0)
    [[0, 1]]
    >>> [blocks_read_together(halves, (8, 8), None, short) for short in (2, 100)]
    [[[0], [1]], [[0, 1]]]
    """
    if not blocks:
        return []
    # For each dimension, the group of each pair of start and stop.
    numbers: list[dict[tuple[int, int], int]] = []
    for axis in reversed(range(len(shape))):
        sides = sorted({(index[axis].start, index[axis].stop) for index in blocks.values()})
        joined = [False] * (len(sides) - 1)
        if chunks is not None:
            chunk = chunks[axis]
            joined = [(a[1] - 1) // chunk >= b[0] // chunk for a, b in pairwise(sides)]
        else:
            most = -(-short // math.prod(shape[axis + 1 :])) if math.prod(shape) else 0
            joined = [
                min(a[1] - a[0], b[1] - b[0]) < most and b[0] - a[1] < most
                for a, b in pairwise(sides)
            ]
        group_of = itertools.accumulate([not each for each in joined], initial=0)
        numbers.append(dict(zip(sides, group_of, strict=True)))
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, index in blocks.items():
        along = zip(reversed(numbers), index, strict=True)
        groups[tuple([group[s.start, s.stop] for group, s in along])].append(number)
    return [*groups.values()]


def boxes_of_chunks(within: Index, chunks: Shape, most_elements: int) -> Iterator[Index]:
    """Yield boxes that divide a box between chunks, each of at most so many elements or one chunk.

    >>> [*boxes_of_chunks((slice(0, 4), slice(1, 4)), (2, 2), most_elements=8)]
    [(slice(0, 2, None), slice(1, 4, None)), (slice(2, 4, None), slice(1, 4, None))]
    """
    firsts = [s.start // chunk * chunk for s, chunk in zip(within, chunks, strict=True)]
    sizes = [max(s.stop - first, 1) for s, first in zip(within, firsts, strict=True)]
    steps = [*map(min, chunks, sizes)]
    for dimension in reversed(range(len(sizes))):
        count = max(most_elements // max(math.prod(steps), 1), 1)
        steps[dimension] = min(chunks[dimension] * count, sizes[dimension])
        if steps[dimension] < sizes[dimension]:
            break
    along = zip(within, firsts, steps, strict=True)
    starts = [range(first, s.stop, step) for s, first, step in along]
    for start in itertools.product(*starts):
        sides = zip(within, start, steps, strict=True)
        yield tuple(
            [slice(max(s.start, first), min(first + step, s.stop)) for s, first, step in sides]
        )

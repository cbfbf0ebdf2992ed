"""Reads that several processes need, shared out between them. Integers only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from gda.layout.grid import ShardGrid
from gda.layout.indices import common_box
from gda.layout.numbering import layout_of
from gda.layout.processes import Processes, Writing, writing_of
from gda.layout.spec import Index, Shape

# A read costs as much as so many bytes, beside its own: small ones are spread out by their number.
_BYTES_PER_READ = 2**20


def writing_of_grid(grid: ShardGrid, processes: Processes) -> Writing:
    """Return the processes that hold each block of a grid, and the one that writes it."""
    axes, empty = tuple(grid.mesh_shape.items()), tuple([not size for size in grid.global_shape])
    return writing_of(layout_of(axes, grid.spec, empty), processes)


def holders_of(grid: ShardGrid, processes: Processes) -> list[tuple[int, ...]]:
    return writing_of_grid(grid, processes).by_block


def readers_of(needed_by: Sequence[tuple[int, ...]], nbytes: Sequence[int]) -> list[int]:
    """Assign each read to one of the processes that need it, so that all read about as much.

    The reads with the fewest candidates are given out first, and of these the largest; each goes
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
    """Return the numbers of blocks in groups: one read of a group replaces several.

    Blocks of one grid are given with every start and stop. Two are in a group if they share a
    chunk. In an array without chunks, which is in C order, a block is one run of elements or more.
    Two blocks are in a group if the runs of one have fewer than ``short`` elements, and fewer lie
    between the runs of both: eight reads of 8 KiB of a file take several times as long as one that
    is split, and a store takes its time for each request.

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
    # Of each dimension, the number of the group of each pair of start and stop.
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
    """Yield boxes that divide a part of an array, with at most so many elements, or one chunk.

    They end where chunks end, or where the part ends.

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


def parts_in_boxes(
    blocks: Mapping[int, Index], boxes: Iterable[Index]
) -> Iterator[list[tuple[int, Index]]]:
    """Yield for each box that has any the parts of blocks in it, with the numbers of the blocks."""
    for box in boxes:
        common = [(number, common_box(box, block)) for number, block in blocks.items()]
        if parts := [(number, part) for number, part in common if part is not None]:
            yield parts

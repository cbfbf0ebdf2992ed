"""Reads that several processes need, shared out between them. Integers only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gda.layout.grid import ShardGrid
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
    """Return the processes that hold each block, ascending."""
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


def parts_of(start: Shape, sizes: Shape, count: int, chunks: Shape | None = None) -> list[Index]:
    """Return a block in about ``count`` parts, as indices within the block.

    It is divided along the first dimension that is long enough, so that a part is contiguous where
    it can be. If the array is stored in ``chunks``, a part ends where a chunk does; ``start`` is
    the place of the block in the array.
    """
    steps = chunks or (1,) * len(sizes)
    whole = tuple([slice(0, size) for size in sizes])
    most = [size // step for size, step in zip(sizes, steps, strict=True)]
    if count < 2 or max(most, default=0) < 2:
        return [whole]
    enough = (dimension for dimension, number in enumerate(most) if number >= count)
    dimension = next(enough, most.index(max(most)))
    first, size, step = start[dimension], sizes[dimension], steps[dimension]
    count = min(count, most[dimension])
    ends = {round((first + size * part / count) / step) * step - first for part in range(1, count)}
    bounds = [0, *sorted(end for end in ends if 0 < end < size), size]
    return [
        (*whole[:dimension], slice(begin, end), *whole[dimension + 1 :])
        for begin, end in pairwise(bounds)
    ]


def boxes_of_chunks(shape: Shape, chunks: Shape, most_elements: int) -> Iterator[Index]:
    """Yield boxes that divide an array, each of whole chunks, with so many elements or one chunk.

    >>> [*boxes_of_chunks((4, 4), (2, 2), most_elements=8)]
    [(slice(0, 2, None), slice(0, 4, None)), (slice(2, 4, None), slice(0, 4, None))]
    """
    sizes = [min(chunk, size) for chunk, size in zip(chunks, shape, strict=True)]
    for dimension in reversed(range(len(shape))):
        count = max(most_elements // max(math.prod(sizes), 1), 1)
        sizes[dimension] = min(chunks[dimension] * count, shape[dimension])
        if sizes[dimension] < shape[dimension]:
            break
    starts = [range(0, size, step or 1) for size, step in zip(shape, sizes, strict=True)]
    for start in itertools.product(*starts):
        yield tuple(
            slice(first, min(first + step, size))
            for first, step, size in zip(start, sizes, shape, strict=True)
        )


def common_box(one: Index, other: Index) -> Index | None:
    """Return the elements that two boxes have in common; ``None`` if there are none."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    ]
    return tuple(both) if all(s.start < s.stop for s in both) else None

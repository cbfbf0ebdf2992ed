"""Moves bring every element of every block once, and processes read about as much."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import gda
from gda.layout.cover import (
    READ_BYTES,
    blocks_read_together,
    boxes_of_chunks,
    cover,
    holders_of,
    readers_of,
)
from gda.layout.indices import bounded, common_box, hull_of, sizes_of
from gda.layout.processes import Processes
from gda.layout.spec import Shape


def test_the_holders_of_blocks_are_those_of_the_views() -> None:
    process_of = [0, 3, 1, 1, 0, 3, 2, 2]
    for spec in [(), ("x",), ("y",), (None, "y"), ("x", "y"), (("y", "x"),)]:
        grid = gda.ShardGrid((8, 8), {"x": 2, "y": 4}, spec, process_of=process_of)
        expected = [
            tuple(p for p in range(4) if block in grid.view(p).block_ids)
            for block in range(grid.num_shards)
        ]
        assert holders_of(grid, Processes(process_of)) == expected


def test_equal_reads_are_spread_evenly() -> None:
    readers = readers_of([(0, 1, 2, 3)] * 10 + [(1, 2)] * 4, [2**22] * 14)
    assert sorted(Counter(readers).values()) == [3, 3, 4, 4]
    assert set(readers[10:]) == {1, 2}


def test_a_large_read_and_many_small_ones_go_to_different_processes() -> None:
    assert readers_of([(0, 1)] * 5, [2**30, 9, 9, 9, 9]) == [0, 1, 1, 1, 1]


A_READ = 2**20  # the bytes that it costs beside its own

sizes = st.sampled_from([0, 1, A_READ, 2**24]) | st.integers(0, 2**25)


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), sizes), max_size=40))
def test_each_read_goes_to_the_one_of_those_that_need_it_with_least_so_far(
    reads: list[tuple[set[int], int]],
) -> None:
    needed_by = [tuple(sorted(processes)) for processes, _ in reads]
    nbytes = [size for _, size in reads]
    loads, expected = Counter(), [-1] * len(reads)
    for number in sorted(
        range(len(reads)), key=lambda n: (len(needed_by[n]), needed_by[n], -nbytes[n])
    ):
        expected[number] = min(needed_by[number], key=lambda process: (loads[process], process))
        loads[expected[number]] += nbytes[number] + A_READ
    assert readers_of(needed_by, nbytes) == expected


@example(2, [2**24, 2**24, 2**25])
@given(st.integers(1, 3), st.lists(sizes, min_size=1, max_size=6))
def test_no_assignment_is_much_better_balanced(processes: int, nbytes: list[int]) -> None:
    everybody = tuple(range(processes))

    def most(readers: Iterable[int]) -> int:
        loads = Counter()
        for reader, size in zip(readers, nbytes, strict=True):
            loads[reader] += size + A_READ
        return max(loads.values())

    best = min(map(most, itertools.product(everybody, repeat=len(nbytes))))
    readers = readers_of([everybody] * len(nbytes), nbytes)
    assert 3 * processes * most(readers) <= (4 * processes - 1) * best  # the largest go first


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5)), max_size=3),
    st.integers(1, 100),
)
def test_boxes_of_chunks_divide_a_part_where_chunks_end(
    sides: list[tuple[int, int, int]], most: int
) -> None:
    within = tuple(slice(start, start + size) for start, size, _ in sides)
    chunks = tuple(chunk for *_, chunk in sides)
    covered = np.zeros([s.stop for s in within], int)
    for box in boxes_of_chunks(within, chunks, most):
        covered[box] += 1
        for s, whole, chunk in zip(box, within, chunks, strict=True):
            assert s.start % chunk == 0 or s.start == whole.start
            assert s.stop % chunk == 0 or s.stop == whole.stop
        assert math.prod(sizes_of(box)) <= max(most, math.prod(chunks))
    assert (covered[within] == 1).all()
    assert covered.sum() == math.prod(sizes_of(within))


@given(
    st.sampled_from([(), ("x",), (None, "x"), ("x", "y"), ("y", None, "x"), (None, "x", "y")]),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([None, (1, 1, 1), (2, 3, 3), (1, 2, 9)]),
    st.integers(1, 60),
    st.sets(st.integers(0, 7), min_size=1),
)
def test_groups_of_blocks_share_no_chunk_and_no_short_run(
    spec: tuple[Any, ...], shape: Shape, chunks: Shape | None, short: int, devices: set[int]
) -> None:
    grid = gda.ShardGrid(shape, {"x": 4, "y": 2}, spec, pad=True)
    indices = {block: grid.block_index(block) for block in {grid.block_id(i) for i in devices}}
    blocks = {n: bounded(index, shape) for n, index in indices.items()}
    blocks = {n: index for n, index in blocks.items() if math.prod(sizes_of(index))}
    groups = blocks_read_together(blocks, shape, chunks, short)
    assert sorted(itertools.chain(*groups)) == sorted(blocks)
    # A read of one block alone takes whole chunks, or runs with short gaps between them.
    taken = {}
    for number, index in blocks.items():
        part = np.zeros(shape, bool)
        if chunks is None:
            part[index] = True
            for first, last in itertools.pairwise(np.flatnonzero(part)):
                if last - first - 1 < short:
                    part.flat[first:last] = True
        else:
            pairs = zip(index, chunks, strict=True)
            part[tuple(slice(s.start // n * n, -(-s.stop // n) * n) for s, n in pairs)] = True
        taken[number] = part
    for one, other in itertools.combinations(groups, 2):
        for pair in itertools.product(one, other):
            assert not (taken[pair[0]] & taken[pair[1]]).any()
    # Nor is more read together: along each dimension, neighbours in a group are near.
    for group, axis in itertools.product(groups, range(len(shape))):
        sides = {(index[axis].start, index[axis].stop) for index in blocks.values()}
        of_group = [blocks[number][axis] for number in group]
        first, last = min(s.start for s in of_group), max(s.stop for s in of_group)
        between = sorted(side for side in sides if first <= side[0] and side[1] <= last)
        for one, other in itertools.pairwise(between):
            if chunks is not None:
                assert (one[1] - 1) // chunks[axis] == other[0] // chunks[axis]
                continue
            step = math.prod(shape[axis + 1 :])
            assert (other[0] - one[1]) * step < short
            assert min(one[1] - one[0], other[1] - other[0]) * step < short


def test_the_common_box_of_two() -> None:
    one, other = (slice(0, 4), slice(2, 6)), (slice(3, 5), slice(0, 3))
    assert common_box(one, other) == (slice(3, 4), slice(2, 3))
    assert common_box(one, (slice(4, 5), slice(2, 6))) is None


PROCESS_OF = [0, 0, 1, 1, 2, 2, 0, 1]


def grids(
    spec: tuple[Any, ...], shape: Shape, devices: set[int]
) -> tuple[gda.ShardGrid, dict[int, tuple[slice, ...]]]:
    grid = gda.ShardGrid(
        shape, {"x": 4, "y": 2}, spec, pad=True, process_of=[0, 0, 1, 1, 2, 2, 0, 1]
    )
    indices = {block: grid.block_index(block) for block in {grid.block_id(i) for i in devices}}
    return grid, {n: bounded(index, shape) for n, index in indices.items()}


@given(
    st.sampled_from([(), ("x",), (None, "x"), ("x", "y"), ("y", None, "x"), (None, "x", "y")]),
    st.tuples(st.integers(1, 5), st.integers(0, 9), st.integers(1, 9)),
    st.sampled_from([None, (1, 1, 1), (2, 3, 3), (1, 2, 9)]),
    st.integers(1, 400),
    st.sampled_from([1, 8]),
    st.booleans(),
    st.none() | st.integers(1, 400),
    st.booleans(),
    st.sets(st.integers(0, 7), min_size=1),
)
def test_moves_bring_every_element_of_every_block_once(
    spec: tuple[Any, ...],
    shape: Shape,
    chunks: Shape | None,
    box_bytes: int,
    itemsize: int,
    splits_blocks: bool,
    group_bytes: int | None,
    is_shared: bool,
    devices: set[int],
) -> None:
    grid, blocks = grids(spec, shape, devices)
    all_holders = holders_of(grid, Processes(PROCESS_OF))
    holders = {number: all_holders[number] for number in blocks} if is_shared else None
    data = np.arange(math.prod(shape)).reshape(shape)
    found = {n: np.full(sizes_of(box), -1) for n, box in blocks.items()}
    reads = np.zeros(shape, int)
    groups = [
        *cover(
            blocks,
            shape,
            chunks,
            itemsize,
            box_bytes=box_bytes,
            holders=holders,
            splits_blocks=splits_blocks,
            group_bytes=group_bytes,
        )
    ]
    in_groups = [{part.block for move in moves for part in move.parts} for moves in groups]
    assert sum(map(len, in_groups)) == len(set().union(*in_groups)), "a block is in one group"
    for moves in groups:
        in_group = np.zeros(shape, int)
        for move in moves:
            box = data[move.box]
            in_group[move.box] += 1
            for part in move.parts:
                memory = found[part.block][part.in_block]
                assert (memory == -1).all(), "no element comes twice"
                memory[...] = box[part.in_box]
                assert memory.shape == part.shape
                np.testing.assert_array_equal(data[move.index_of(part)], memory)
            assert move.num_elements == sum(math.prod(part.shape) for part in move.parts)
            if len(move.parts) > 1:
                assert box.size * itemsize <= max(box_bytes, math.prod(chunks or (1,)) * itemsize)
        assert in_group.max(initial=0) <= 1, "no element is in two boxes of a group"
        reads += in_group
    if group_bytes is None:
        assert reads.max(initial=0) <= 1, "nothing is read twice"
    else:
        for numbers in in_groups:
            sizes = [found[number].size * itemsize for number in numbers]
            assert len(sizes) == 1 or sum(sizes) <= group_bytes
    filled = set().union(*in_groups)
    for number, memory in found.items():
        if number in filled:
            np.testing.assert_array_equal(memory, data[blocks[number]])
        else:
            assert not memory.size or (is_shared and len(all_holders[number]) == 1)


@given(
    st.sampled_from([("x",), (None, "x"), ("x", "y"), (None, None, ("x", "y"))]),
    st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(8, 40)),
    st.sampled_from([None, (1, 1, 8), (2, 3, 3)]),
    st.integers(1, 2000),
)
def test_what_is_read_beyond_the_blocks_is_bounded(
    spec: tuple[Any, ...], shape: Shape, chunks: Shape | None, box_bytes: int
) -> None:
    _, blocks = grids(spec, shape, {0, 2, 5})
    blocks = {n: box for n, box in blocks.items() if math.prod(sizes_of(box))}
    needed = np.zeros(shape, bool)
    for box in blocks.values():
        needed[box] = True
    read = np.zeros(shape, bool)
    for move in itertools.chain(*cover(blocks, shape, chunks, 4096, box_bytes=box_bytes * 4096)):
        read[move.box] = True
        of_parts = [part.in_box for part in move.parts]
        assert move.box == hull_of([move.index_of(part) for part in move.parts])
        assert all(s.start >= 0 for index in of_parts for s in index)
    beyond = read & ~needed
    if chunks is None:
        # No run between two parts is longer than a read is worth: here 8 elements.
        runs = np.diff(np.flatnonzero(np.diff(np.r_[0, beyond.ravel(), 0])))[::2]
        assert runs.max(initial=0) < READ_BYTES // 4096
    else:
        # Nothing beyond the hull of blocks that share chunks.
        hulls = np.zeros(shape, bool)
        for numbers in blocks_read_together(blocks, shape, chunks, 8):
            hulls[hull_of([blocks[n] for n in numbers])] = True
        assert not (beyond & ~hulls).any()

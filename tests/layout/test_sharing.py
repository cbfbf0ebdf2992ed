"""Reads that processes share: every one is made once, and all processes read about as much."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gda
from gda.layout.indices import bounded, common_box, sizes_of
from gda.layout.processes import Processes
from gda.layout.sharing import (
    blocks_read_together,
    boxes_of_chunks,
    holders_of,
    readers_of,
)
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


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 2**25)), max_size=40)
)
def test_each_read_is_made_by_one_that_needs_it(reads: list[tuple[set[int], int]]) -> None:
    needed_by = [tuple(sorted(processes)) for processes, _ in reads]
    nbytes = [size for _, size in reads]
    readers = readers_of(needed_by, nbytes)
    assert all(reader in needed for reader, needed in zip(readers, needed_by, strict=True))
    everybody = tuple(range(6))
    loads = Counter(dict.fromkeys(everybody, 0))
    for reader, size in zip(readers_of([everybody] * len(nbytes), nbytes), nbytes, strict=True):
        loads[reader] += size + 2**20
    # As any greedy choice of the largest first.
    assert max(loads.values()) <= sum(loads.values()) / 6 + max(nbytes, default=0) + 2**20


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


def test_the_common_box_of_two() -> None:
    one, other = (slice(0, 4), slice(2, 6)), (slice(3, 5), slice(0, 3))
    assert common_box(one, other) == (slice(3, 4), slice(2, 3))
    assert common_box(one, (slice(4, 5), slice(2, 6))) is None

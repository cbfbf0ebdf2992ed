"""Reads that processes share: every one is made once, and all processes read about as much."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gda
from gda.layout.processes import Processes
from gda.layout.sharing import (
    boxes_of_chunks,
    common_box,
    holders_of,
    parts_of,
    readers_of,
)

pytestmark = pytest.mark.no_jax


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


def test_parts_are_contiguous_where_they_can_be() -> None:
    assert parts_of((0, 0), (1, 8), 2) == [
        (slice(0, 1), slice(0, 4)),
        (slice(0, 1), slice(4, 8)),
    ]
    assert parts_of((0, 0), (4, 8), 1) == [(slice(0, 4), slice(0, 8))]
    assert parts_of((), (), 4) == [()]
    # The longest dimension, as none has so many.
    assert len(parts_of((0, 0), (2, 3), 8)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 5)), max_size=3),
    st.integers(0, 9),
    st.booleans(),
)
def test_parts_cover_a_block_once_and_end_where_chunks_do(
    dimensions: list[tuple[int, int, int]], count: int, has_chunks: bool
) -> None:
    start = tuple(first for first, _, _ in dimensions)
    sizes = tuple(size for _, size, _ in dimensions)
    chunks = tuple(chunk for _, _, chunk in dimensions) if has_chunks else None
    parts = parts_of(start, sizes, count, chunks)
    assert len(parts) <= max(count, 1)
    times = np.zeros(sizes, int)
    for part in parts:
        times[part] += 1
        assert math.prod(along.stop - along.start for along in part) > 0
        for first, size, chunk, along in zip(start, sizes, chunks or (), part, strict=False):
            assert along.stop == size or (first + along.stop) % chunk == 0
    assert (times == 1).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3), st.integers(1, 100))
def test_boxes_of_chunks_divide_the_array_where_chunks_end(
    sides: list[tuple[int, int]], most: int
) -> None:
    shape, chunks = tuple(size for size, _ in sides), tuple(chunk for _, chunk in sides)
    covered = np.zeros(shape, int)
    for box in boxes_of_chunks(shape, chunks, most):
        covered[box] += 1
        for s, size, chunk in zip(box, shape, chunks, strict=True):
            assert s.start % chunk == 0
            assert s.stop % chunk == 0 or s.stop == size
        sizes = [s.stop - s.start for s in box]
        assert math.prod(sizes) <= max(most, math.prod(chunks))
    assert (covered == 1).all()


def test_the_common_box_of_two() -> None:
    one, other = (slice(0, 4), slice(2, 6)), (slice(3, 5), slice(0, 3))
    assert common_box(one, other) == (slice(3, 4), slice(2, 3))
    assert common_box(one, (slice(4, 5), slice(2, 6))) is None

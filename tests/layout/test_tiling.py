import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.tiling import Tiling, all_blocks

pytestmark = pytest.mark.no_jax

WHOLE = slice(None)


def test_blocks_are_numbered_row_major() -> None:
    tiling = Tiling((4, 5, 6), (2, 5, 2), (2, 1, 3))
    assert [tiling.coordinates(block) for block in range(4)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (1, 0, 0),
    ]
    assert tiling.index(3) == (slice(2, 4), WHOLE, slice(0, 2))


def test_parts_of_an_empty_dimension_are_one_block() -> None:
    tiling = Tiling((0, 4), (0, 2), (3, 2))
    assert tiling.index(1) == (slice(0, 0), slice(2, 4))
    assert tiling.coordinates(1) == (0, 1)
    assert all_blocks((0, 4), (0, 2), (3, 2)) == [tiling.index(0), tiling.index(1)]


def test_a_scalar_is_one_block() -> None:
    tiling = Tiling((), (), ())
    assert (tiling.index(0), tiling.coordinates(0), tiling.columns([0, 0])) == ((), (), [])
    assert all_blocks((), (), ()) == [()]


def test_blocks_need_not_fit_in_64_bits() -> None:
    tiling = Tiling((2**80, 3), (2, 3), (2**79, 1))
    assert tiling.coordinates(2**79 - 1) == (2**79 - 1, 0)
    assert tiling.index(2**79 - 1) == (slice(2**80 - 2, 2**80), WHOLE)


def test_the_last_parts_are_shorter_or_empty() -> None:
    indices = all_blocks((5, 3), (2, 1), (4, 5))
    tiling = Tiling((5, 3), (2, 1), (4, 5))
    assert indices == [tiling.index(block) for block in range(20)]
    assert indices[11] == (slice(4, 5), slice(1, 2))
    assert indices[-1] == (slice(5, 5), slice(3, 3))
    assert not tiling.is_even


dimensions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3)


@given(dimensions)
def test_all_blocks_in_order_are_all_combinations_of_parts(
    dimensions: list[tuple[int, int]],
) -> None:
    parts = tuple(ways for ways, _ in dimensions)
    shard_shape = tuple(side for _, side in dimensions)
    global_shape = tuple(ways * side for ways, side in dimensions)
    tiling = Tiling(global_shape, shard_shape, parts)
    counted = [ways if side else 1 for ways, side in dimensions]
    expected = list(itertools.product(*map(range, counted)))
    blocks = range(math.prod(counted))
    assert [tiling.coordinates(block) for block in blocks] == expected
    if dimensions:
        assert list(zip(*tiling.columns(blocks), strict=True)) == expected
    indices = all_blocks(global_shape, shard_shape, parts)
    assert [tiling.index(block) for block in blocks] == indices
    for coordinates, index in zip(expected, indices, strict=True):
        assert index == tuple(map(tiling.slice_at, range(len(parts)), coordinates))

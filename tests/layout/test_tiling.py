import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.spec import Index
from gda.layout.tiling import Dimension, Tiling

pytestmark = pytest.mark.no_jax

WHOLE = slice(None)


def all_blocks(tiling: Tiling) -> list[Index]:
    sides = [map(each.slice_of, range(each.parts)) for each in tiling.dimensions]
    return list(itertools.product(*sides))


def test_blocks_need_not_fit_in_64_bits() -> None:
    tiling = Tiling((2**80, 3), (2**79, 1))
    assert tuple(tiling.columns(2**79 - 1)) == (2**79 - 1, 0)
    assert tiling.index(2**79 - 1) == (slice(2**80 - 2, 2**80), WHOLE)


def test_the_last_parts_are_shorter_or_empty() -> None:
    tiling = Tiling((5, 3), (4, 5))
    indices = all_blocks(tiling)
    assert indices == [tiling.index(block) for block in range(20)]
    assert indices[11] == (slice(4, 5), slice(1, 2))
    assert indices[-1] == (slice(5, 5), slice(3, 3))
    assert not tiling.is_even


dimensions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3)


@given(dimensions)
def test_blocks_in_order_are_all_combinations_of_parts(
    dimensions: list[tuple[int, int]],
) -> None:
    parts = tuple(ways for ways, _ in dimensions)
    tiling = Tiling(tuple(ways * side for ways, side in dimensions), parts)
    counted = [ways if side else 1 for ways, side in dimensions]
    expected = list(itertools.product(*map(range, counted)))
    blocks = range(math.prod(counted))
    assert [tuple(tiling.columns(block)) for block in blocks] == expected
    boxes, indices = tiling.boxes(np.array(blocks)), all_blocks(tiling)
    assert [tiling.index(block) for block in blocks] == indices
    for block, (coordinates, index) in enumerate(zip(expected, indices, strict=True)):
        assert index == tuple(map(Dimension.slice_of, tiling.dimensions, coordinates))
        for part, size, starts, stops in zip(index, tiling.global_shape, *boxes, strict=True):
            assert part.indices(size)[:2] == (starts[block], stops[block])

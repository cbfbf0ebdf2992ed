"""Pieces of one tiling cut out of another; the oracle looks at every element."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.reshard.overlaps import Pieces
from gda.layout.tiling import Tiling

pytestmark = pytest.mark.no_jax


def test_the_pieces_of_a_block() -> None:
    pieces = Pieces(Tiling((6, 4), (2, 1)), Tiling((6, 4), (3, 2)))
    listed = pieces.listed(np.array([2, 0]))  # block 2 is rows 2 and 3, on the left
    assert listed.rows.tolist() == [0, 0, 1]
    assert listed.source_blocks.tolist() == [0, 1, 0]
    assert listed.sizes.tolist() == [2, 2, 4]
    of_source, of_target = pieces.dimensions[0].slices
    assert [of_source[i] for i in listed.segments[0]] == [slice(2, 3), slice(0, 1), slice(0, 2)]
    assert [of_target[i] for i in listed.segments[0]] == [slice(0, 1), slice(1, 2), slice(0, 2)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Tiling, Tiling]:
    dimensions = []
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
        even = st.integers(1, 2).map(math.lcm(*parts).__mul__)
        dimensions.append((draw(even | st.integers(1, 14)), *parts))
    global_shape, *both = zip(*dimensions, strict=True) if dimensions else ((), (), ())
    source, target = (Tiling(global_shape, of) for of in both)
    return source, target


@given(tilings())
def test_each_pair_of_blocks_that_overlap_is_a_piece(both: tuple[Tiling, Tiling]) -> None:
    numbers = []
    for tiling in both:
        number = np.zeros(tiling.global_shape, int)
        for axis, (step, ways) in enumerate(zip(tiling.shard_shape, tiling.parts, strict=True)):
            places = np.arange(tiling.global_shape[axis]) // step
            number = number * ways + places.reshape([-1] + [1] * (number.ndim - axis - 1))
        numbers.append(number)
    expected = Counter(zip(numbers[1].ravel().tolist(), numbers[0].ravel().tolist(), strict=True))
    pieces = Pieces(*both)
    blocks = np.arange(math.prod(both[1].parts))
    listed = pieces.listed(blocks)
    pairs = list(zip(listed.rows.tolist(), listed.source_blocks.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) == pieces.count == pieces.counts(blocks).sum()
    assert dict(zip(pairs, listed.sizes.tolist(), strict=True)) == expected
    sizes = set(listed.sizes.tolist())
    assert pieces.common_size == (sizes.pop() if len(sizes) == 1 else None)
    for target in blocks:
        sources = np.arange(math.prod(both[0].parts))
        shared = pieces.overlaps(sources, np.full_like(sources, target))
        assert shared.tolist() == [expected[int(target), int(source)] for source in sources]

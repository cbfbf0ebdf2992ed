"""Chunks of blocks, and which of them a block overlaps."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gda.checkpoint.format.manifest import ChunkGrid, chunk_shape_of

shapes = st.lists(st.integers(1, 60), max_size=4).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4, 16]), st.integers(1, 5000))
def test_chunks_are_equal_contiguous_parts_of_about_the_size(
    block: tuple[int, ...], itemsize: int, most: int
) -> None:
    chunk = chunk_shape_of(block, itemsize, most)
    assert all(size % part == 0 for size, part in zip(block, chunk, strict=True))
    # Contiguous: of one dimension a part, of those before it single steps, those behind it whole.
    first = next((d for d, part in enumerate(chunk) if part > 1), len(chunk))
    assert chunk[first + 1 :] == block[first + 1 :]
    nbytes, whole = math.prod(chunk) * itemsize, math.prod(block) * itemsize
    if whole <= most:
        assert chunk == block
    elif nbytes > most:
        # No divisor came near it from below.
        assert nbytes == itemsize or nbytes <= 60 * most
    assert nbytes * 60 >= min(most, whole)


@st.composite
def grids_and_boxes(draw: st.DrawFn) -> tuple[ChunkGrid, tuple[int, ...], tuple[int, ...]]:
    chunk = draw(st.lists(st.integers(1, 4), max_size=3))
    shape = tuple(part * draw(st.integers(1, 4)) - draw(st.integers(0, part - 1)) for part in chunk)
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    box = tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, starts, strict=True))
    return ChunkGrid(shape, tuple(chunk)), starts, box


@given(grids_and_boxes())
def test_overlaps_have_every_element_of_a_block_once(
    case: tuple[ChunkGrid, tuple[int, ...], tuple[int, ...]],
) -> None:
    grid, starts, box = case
    whole = np.arange(math.prod(grid.shape)).reshape(grid.shape)
    keys = list(itertools.product(*map(range, grid.counts)))
    assert [grid.key(n) for n in range(grid.num_chunks)] == [
        ".".join(["c", *map(str, key)]) for key in keys
    ]
    out = np.full(box, -1)
    seen = []
    for overlap in grid.overlaps(starts, box):
        at = keys[overlap.chunk]
        index = [slice(i * c, (i + 1) * c) for i, c in zip(at, grid.chunk_shape, strict=True)]
        chunk = whole[tuple(index)]
        part = chunk[overlap.in_chunk]
        assert (out[overlap.in_block] == -1).all()
        out[overlap.in_block] = part
        assert part.size
        assert overlap.is_whole == (part.shape == grid.chunk_shape)
        assert chunk.shape == grid.shape_within(overlap.chunk)
        seen.append(overlap.chunk)
    assert seen == sorted(set(seen))
    index = tuple(slice(a, a + n) for a, n in zip(starts, box, strict=True))
    np.testing.assert_array_equal(out, whole[index])


def test_sizes_of_zero_have_no_chunks() -> None:
    grid = ChunkGrid((0, 4), (1, 4))
    assert grid.num_chunks == 0
    assert list(grid.overlaps((0, 0), (0, 4))) == []

"""The boxes in which a source is read and written."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.storage.read_boxes import box_shape_of, writers_of

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "chunks", "box"),
    [
        ((), None, ()),
        ((32, 4096, 4096), None, (1, 512, 4096)),
        ((4096, 4096), (1024, 1024), (1024, 2048)),
        ((32, 4096, 11008), (1, 4096, 1), (1, 4096, 344)),  # transposed and stacked
        ((8192, 8192), (4096, 4096), (4096, 4096)),  # larger than a box: read once all the same
        ((2100, 2100), (2048, 2048), (2100, 2100)),  # four chunks would be mostly empty
        ((50261, 1024), None, (2011, 1024)),  # a prime: the last is smaller
    ],
)
def test_a_box_has_whole_chunks(shape: tuple, chunks: tuple | None, box: tuple) -> None:
    assert box_shape_of(shape, 4, 64 * MIB, read=chunks) == box


def test_a_chunk_of_the_target_is_whole_even_if_both_are_too_large() -> None:
    shape = (2**20, 2**20)
    box = box_shape_of(shape, 4, MIB, read=(2**20, 1), written=(1, 2**17))
    assert box == (2, 2**17)


sizes = st.integers(1, 40)


@given(st.data(), st.integers(1, 4), st.integers(1, 3000))
def test_any_box(data: st.DataObject, rank: int, max_bytes: int) -> None:
    shapes = st.tuples(*[sizes] * rank)
    shape, written = data.draw(shapes), data.draw(st.none() | shapes)
    read = data.draw(st.none() | shapes)
    box = box_shape_of(shape, 2, max_bytes, read=read, written=written)
    assert all(1 <= part <= size for part, size in zip(box, shape, strict=True))
    for part, size, chunk in zip(box, shape, written or (1,) * rank, strict=True):
        assert part == size or part % chunk == 0
    chunk_bytes = [math.prod(map(min, each or (1,) * rank, shape)) * 2 for each in (read, written)]
    assert math.prod(box) * 2 <= max(max_bytes, *chunk_bytes)
    covered = [-(-size // part) * part for size, part in zip(shape, box, strict=True)]
    if written is None:
        assert math.prod(covered) <= 2 * math.prod(shape)  # what files may hold of nothing


@given(st.integers(0, 60), st.integers(1, 7), st.integers(0, 9))
def test_processes_write_about_as_many(count: int, processes: int, turn: int) -> None:
    writers = writers_of(count, processes, turn)
    counts = np.bincount(writers, minlength=processes)
    assert counts.sum() == count
    assert counts.max() - counts.min() <= 1

"""The chunks that two writers would both write into; the oracle looks at every element."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gda.storage.chunk_conflicts import are_aligned, first_conflict


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    ndim = draw(st.integers(1, 3))
    sides = [
        tuple(draw(st.lists(st.integers(low, high), min_size=ndim, max_size=ndim)))
        for low, high in [(1, 4), (1, 4), (1, 7), (-7, 7)]
    ]
    shard_shape, parts, chunk_shape, origin = sides
    size = int(np.prod(parts))
    numbers = st.integers(0, draw(st.integers(0, 2)))
    writers = np.array(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(parts)
    return shard_shape, writers, chunk_shape, origin


def writers_of_chunks(
    shard_shape: Any, writers: Any, chunk_shape: Any, origin: Any
) -> dict[tuple[int, ...], set[int]]:
    found: dict[tuple[int, ...], set[int]] = {}
    sizes = [step * ways for step, ways in zip(shard_shape, writers.shape, strict=True)]
    for element in itertools.product(*map(range, sizes)):
        place = zip(element, chunk_shape, origin, strict=True)
        chunk = tuple((p - first) // size for p, size, first in place)
        block = tuple(p // step for p, step in zip(element, shard_shape, strict=True))
        found.setdefault(chunk, set()).add(int(writers[block]))
    return found


@given(cases())
def test_there_is_a_conflict_where_a_chunk_has_two_writers(case: tuple[Any, ...]) -> None:
    shard_shape, writers, chunk_shape, origin = case
    two = first_conflict(writers, shard_shape, chunk_shape, origin)
    found = writers_of_chunks(*case)
    assert (two is not None) == any(len(of_chunk) > 1 for of_chunk in found.values())
    assert two is None or any(set(two) <= of_chunk for of_chunk in found.values())
    distinct = np.arange(writers.size).reshape(writers.shape)
    alone = all(
        len(of_chunk) == 1
        for of_chunk in writers_of_chunks(shard_shape, distinct, chunk_shape, origin).values()
    )
    assert are_aligned(shard_shape, writers.shape, chunk_shape, origin) == alone

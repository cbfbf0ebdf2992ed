"""Blocks of a TensorStore read by chunks: the right elements, each chunk for all blocks at once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from meshes import batch
from trials import rarely

from gda.arrays.construction import reading_by_chunks
from gda.arrays.construction.reading_by_chunks import ChunkReads
from gda.layout.grid import ShardGrid
from gda.storage.options import Options
from gda.storage.sources import AsyncSource, source_of
from gda.storage.tasks import run


def reads(source: AsyncSource, spec: tuple[Any, ...], blocks: dict[int, Any]) -> ChunkReads:
    """Return the reads of all blocks, which go into ``blocks``."""
    grid = ShardGrid(source.shape, {"x": 2, "y": 2}, spec)
    distinct = {number: grid.block_index(number) for number in range(grid.num_shards)}

    def done(number: int, index: Any, memory: np.ndarray) -> None:
        assert number not in blocks
        blocks[number] = (index, memory)

    def empty(index: Any) -> np.ndarray:
        return np.full(grid.shard_shape, -1, source.dtype)

    return ChunkReads(source, distinct, empty, done, lambda index, error: None)


def chunked(data: np.ndarray, chunks: tuple[int, ...]) -> Any:
    layout = ts.ChunkLayout(chunk_shape=chunks)
    spec = {"driver": "zarr3", "kvstore": "memory://"}
    store = ts.open(spec, create=True, dtype=data.dtype, shape=data.shape, chunk_layout=layout)
    opened = store.result()
    opened.write(data).result()
    return source_of(opened)


@rarely(2)
@given(
    st.sampled_from([(), ("x",), (None, "y"), ("y", "x"), (("x", "y"),)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([1, 100, 10_000]),
    st.sampled_from([0, 100]),
)
def test_every_block_is_that_of_numpy(
    spec: tuple[Any, ...], chunks: tuple[int, int], box_bytes: int, small_bytes: int
) -> None:
    data, blocks = batch(8, 8), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_by_chunks, "_BOX_BYTES", box_bytes)
        patch.setattr(reading_by_chunks, "_SMALL_BYTES", small_bytes)
        run(reads(chunked(data, chunks), spec, blocks).tasks(), Options())
    assert len(blocks) == ShardGrid((8, 8), {"x": 2, "y": 2}, spec).num_shards
    for index, memory in blocks.values():
        np.testing.assert_array_equal(memory, data[index])


def test_a_chunk_is_in_one_task_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_by_chunks, "_BOX_BYTES", 1)
    monkeypatch.setattr(reading_by_chunks, "_SMALL_BYTES", 0)
    source, blocks = chunked(batch(8, 8), (2, 8)), {}
    tasks = [*reads(source, (None, ("x", "y")), blocks).tasks()]
    assert [task.library_bytes for task in tasks] == [2 * 2 * 8 * 4] * 4
    begun = Counter()
    begin = type(source).begin

    def counted(self: AsyncSource, index: Any, out: np.ndarray) -> Any:
        begun[index[0].start] += 1
        return begin(self, index, out)

    monkeypatch.setattr(type(source), "begin", counted)
    for number, task in enumerate(tasks):
        task.finish(task.begin().result())
        assert begun == {2 * chunk: 4 for chunk in range(number + 1)}
    assert len(blocks) == 4

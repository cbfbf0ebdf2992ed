"""Blocks that are read together: the right elements, each of them read once for all blocks."""

import itertools
import math
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from counting import Counting
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, is_right, mesh_of, one_folder, ordered_mesh, total
from trials import rarely

import gda
from gda.arrays.construction import filling
from gda.arrays.construction import placing as placing_module
from gda.storage import open_safetensors, save_safetensors
from gda.storage.sources import AsyncSource, Source

MESH = mesh_of({"x": 2, "y": 4})
SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y")), P("x", "y")]


def chunked(data: np.ndarray, chunks: tuple[int, ...]) -> Any:
    layout = ts.ChunkLayout(chunk_shape=chunks)
    spec = {"driver": "zarr3", "kvstore": "memory://"}
    store = ts.open(spec, create=True, dtype=data.dtype, shape=data.shape, chunk_layout=layout)
    opened = store.result()
    opened.write(data).result()
    return opened


@rarely(2)
@given(
    st.sampled_from(SPECS),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([None, jnp.bfloat16]),
            "max_workers": st.sampled_from([None, 3]),
            "max_bytes": st.sampled_from([None, 1, 300]),
        }
    ),
    st.sampled_from([1, 100, 10_000]),
    st.booleans(),
    st.booleans(),
)
def test_every_block_is_that_of_numpy(
    spec: P,
    chunks: tuple[int, int],
    options: dict[str, Any],
    box_bytes: int,
    is_early: bool,
    are_small: bool,
) -> None:
    data = batch(13, 11)
    sources = [Counting(data), Counting(data, chunks), chunked(data, chunks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing_module, "places_early", lambda _: is_early)
        patch.setattr(filling, "_SMALL_BYTES", 100 * are_small)
        patch.setattr(Source, "read_bytes", box_bytes)
        patch.setattr(AsyncSource, "read_bytes", box_bytes)
        heard: list[Any] = []
        arrays = [
            gda.PaddedArray.from_source(
                source, MESH, spec, fill=-1, progress=lambda *each: heard.append(each), **options
            )
            for source in sources
        ]
    expected = data.astype(options["dtype"] or data.dtype)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
        whole = np.asarray(array.array)
        assert (whole[13:] == -1).all()
        assert (whole[:, 11:] == -1).all()
    ends = [done == total for done, total in heard]
    assert ends.count(True) == ends[-1:].count(True) * 3
    if not is_early or options["max_bytes"] is None:
        for source in sources[:2]:
            assert (source.counts == 1).all()


def test_rows_and_columns_of_a_file_are_read_once(tmp_path: Path) -> None:
    data = batch(512, 1024)
    save_safetensors(tmp_path / "a", {"w": data})
    tensors = open_safetensors(tmp_path / "a")

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    for spec in SPECS:
        for options in ({}, {"dtype": jnp.bfloat16}, {"max_workers": 2, "max_bytes": 2**17}):
            before = bytes_read()
            loaded = gda.load_tree(tensors, MESH, spec, **options)["w"]
            assert bytes_read() - before <= 1.05 * data.nbytes
            assert is_right(loaded, data.astype(loaded.dtype))


def test_a_file_that_is_mapped_is_gone_through_once(tmp_path: Path, mesh: Mesh) -> None:
    asked: list[Any] = []

    class Noting(np.memmap):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    data = batch(8, 64)
    for order, is_read in [("C", [slice(0, 8), slice(0, 64)]), ("F", [slice(0, 8), slice(0, 16)])]:
        asked.clear()
        mapped = Noting(tmp_path / order, np.float32, "w+", shape=data.shape, order=order)
        mapped[...] = data
        g = gda.GlobalArray.from_source(mapped, mesh, P(None, "x"))
        np.testing.assert_array_equal(g, data)
        assert [*asked[0]] == is_read


def test_rows_that_are_long_are_read_into_their_blocks(tmp_path: Path, mesh: Mesh) -> None:
    data = batch(4, 2**16)
    sources = [Counting(data), Counting(data, (1, 2**13))]
    for source in sources:
        gda.GlobalArray.from_source(source, mesh, P(None, "x"))
        assert (source.counts == 1).all()
        assert [index[0] for index in source.asked] == [slice(0, 4)] * mesh.shape["x"]


@pytest.mark.parametrize("max_workers", [None, 2])
def test_reads_take_as_many_rows_as_fit(max_workers: int | None) -> None:
    source = Counting(np.zeros((512, 1024), np.float32))
    most = 2**18
    gda.GlobalArray.from_source(source, MESH, P(None, "y"), max_workers=max_workers, max_bytes=most)
    assert source.most_bytes == most // (max_workers or 1)
    assert (source.counts == 1).all()


def test_blocks_for_an_accelerator_are_on_the_host_within_max_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing_module, "places_early", lambda _: True)
    data = batch(256, 1024)
    for most, times in [(None, 1), (data.nbytes // 2 + 2**17, 2)]:
        source = Counting(data, (1, 1024))
        g = gda.GlobalArray.from_source(source, MESH, P(None, "y"), max_bytes=most)
        assert is_right(g, data)
        assert (source.counts == times).all()
        assert most is None or source.most_bytes <= 2**17


def test_several_threads_read_the_blocks_for_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing_module, "places_early", lambda _: True)
    monkeypatch.setattr(Source, "read_bytes", 2**14)
    source, both = Counting(batch(32, 1024)), threading.Barrier(2)
    source.before = lambda _: both.wait(timeout=60)
    g = gda.GlobalArray.from_source(source, MESH, P(None, "y"), max_workers=2)
    assert is_right(g, source.data)
    assert len(source.asked) == 8
    assert (source.counts == 1).all()


def test_a_chunk_is_in_one_task_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncSource, "read_bytes", 1)
    monkeypatch.setattr(filling, "_SMALL_BYTES", 0)
    store = chunked(batch(8, 8), (2, 8))
    begun = Counter()
    reader = type(gda.storage.sources.source_of(store))
    begin = reader.begin

    def counted(self: AsyncSource, index: Any, out: np.ndarray) -> Any:
        begun[index[0].start] += 1
        # Of the chunks before this one, all four reads have begun.
        assert begun == {2 * n: 4 for n in range(index[0].start // 2)} | {
            index[0].start: begun[index[0].start]
        }
        return begin(self, index, out)

    monkeypatch.setattr(reader, "begin", counted)
    g = gda.GlobalArray.from_source(store, MESH, P(None, "y"))
    assert is_right(g, batch(8, 8))
    assert begun == {2 * n: 4 for n in range(4)}


# Many processes.


@pytest.mark.processes(2, devices=4)
def test_a_file_is_read_once_by_each_process_or_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch(512, 1024)
    path = Path(one_folder()) / "a"
    save_safetensors(path, {"w": data})
    tensors = open_safetensors(path)
    mesh = ordered_mesh([5, 0, 3, 6, 1, 2, 7, 4], {"x": 2, "y": 4})
    counts: list[int] = []
    preadv = os.preadv

    def counting(*given: Any) -> int:
        counts.append(preadv(*given))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for spec in SPECS[::3]:
        for options in ({}, {"read_once": True}, {"read_once": True, "max_bytes": 2**17}):
            counts.clear()
            loaded = gda.load_tree(tensors, mesh, spec, **options)["w"]
            assert is_right(loaded, data)
            read = total(sum(counts)) if options else sum(counts)
            assert read <= 1.05 * data.nbytes


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize("chunks", [None, (1, 2**14)])
def test_a_process_reads_nothing_between_its_blocks(spec: P, chunks: Any) -> None:
    mesh = ordered_mesh(ORDERS["interleaved"], {"x": 8})
    data = batch(8, 2**15 if spec == P("x") else 2**17)
    for options in ({}, {"max_bytes": 2**20}, {"max_workers": 2}, {"dtype": np.int32}):
        source = Counting(data, chunks)
        g = gda.GlobalArray.from_source(source, mesh, spec, **options)
        needed = np.zeros(data.shape, int)
        for shard in g.local_shards:
            needed[shard.index] = 1
        assert needed.sum() * 2 == data.size
        assert (source.counts == needed).all()


# Faults.


def failing(data: np.ndarray) -> Counting:
    """Return a source that fails at its second read."""
    source, numbers = Counting(data), itertools.count()

    def fail(index: Any) -> None:
        if next(numbers) == 1:
            raise OSError("gone")

    source.before = fail
    return source


@pytest.mark.parametrize("max_workers", [None, 2])
def test_an_error_names_the_rows_and_the_path(max_workers: int | None) -> None:
    options = {"max_workers": max_workers, "max_bytes": 2**17}
    source = failing(np.zeros((512, 1024), np.float32))
    with pytest.raises(OSError, match="gone") as caught:
        gda.load_tree({"w": source}, MESH, P(None, "y"), **options)
    notes = "\n".join(caught.value.__notes__)
    assert "while reading index [" in notes
    assert "0:1024] of ShardGrid((512, 1024)" in notes
    assert "at w of the tree" in notes
    again = failing(batch(512, 1024))
    g = gda.GlobalArray.from_source(
        again, MESH, P(None, "y"), retry=gda.Retry(OSError, delay=0), **options
    )
    assert is_right(g, again.data)


def test_threads_that_read_have_the_x64_mode_of_the_caller() -> None:
    class OfJax(Counting):
        def __getitem__(self, index: Any) -> Any:
            return jnp.asarray(super().__getitem__(index))

    data = np.arange(64.0).reshape(8, 8) + 2.0**40
    with jax.enable_x64(True):
        g = gda.GlobalArray.from_source(OfJax(data), MESH, P(None, "y"), max_workers=2)
    assert is_right(g, data)


def test_values_and_blocks_that_do_not_fit_are_named() -> None:
    wide = np.full((8, 8), 1)
    wide[3, 5] = 2**40
    with pytest.raises(gda.DoesNotFitError, match=r"1099511627776 at \(3, 5\)") as caught:
        gda.load_tree({"w": Counting(wide)}, MESH, P(None, "y"))
    assert "while reading index [:, 4:6]" in caught.value.__notes__[0]
    short, scaled = Counting(batch(8, 8)), Counting(batch(8, 8))
    short.data, scaled.dtype = batch(8, 8)[:4], np.dtype("int8")
    with pytest.raises(ValueError, match=r"has shape \(4, 8\); a source of shape \(8, 8\) has"):
        gda.load_tree([short], MESH, P(None, "y"))
    with pytest.raises(TypeError, match="int8, but its block has dtype float32.*choose one"):
        gda.load_tree([scaled], MESH, P(None, "y"))
    assert math.isclose(gda.load_tree([scaled], MESH, P(None, "y"), dtype=["f4"])[0][1, 2], 10)

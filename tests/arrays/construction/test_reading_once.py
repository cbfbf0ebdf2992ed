"""Arrays that all processes read together: each byte from storage once, and every bit as it is."""

import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from counting import Counting
from jax.sharding import PartitionSpec as P
from meshes import batch, is_right, ordered_mesh, total

import gda
from gda.arrays.construction import blocks, pending, placing, reading_once
from gda.storage.sources import source_of
from gda.testing import Pool

DTYPES = [
    np.dtype(of)
    for of in (np.float32, bool, np.complex64, np.int16, ml_dtypes.bfloat16, ml_dtypes.int4)
]


# Every element is read once.


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize(
    ("order", "axes"),
    [
        (range(8), {"x": 8}),
        pytest.param([0, 4, 1, 5, 2, 6, 3, 7], {"x": 2, "y": 4}, marks=pytest.mark.torture),
        ([5, 0, 3, 6, 1, 2, 7, 4], {"x": 2, "y": 2, "z": 2}),
    ],
)
def test_each_element_is_read_once_in_any_layout(
    order: Any, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_once, "_BOX_BYTES", 100)
    *_, last = axes
    specs = [P(), P("x"), P(None, last), P((last, "x")) if last != "x" else P("x")]
    data = [(batch(16, 24) * 7).astype(dtype) for dtype in DTYPES]
    sources = [Counting(each) for each in data]
    wanted = list(itertools.islice(itertools.cycle(specs), len(data)))
    arrays = gda.load_tree(sources, ordered_mesh(order, axes), wanted, read_once=True)
    assert all(map(is_right, arrays, data))
    assert (total(np.stack([source.counts for source in sources])) == 1).all()


@pytest.mark.processes(4, devices=2)
def test_small_arrays_scalars_and_none_at_all() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    data = {"scalar": np.float32(3), "empty": np.zeros((0, 4), np.int8), "one": np.ones(1, bool)}
    data |= {str(n): np.full((n and n % 3 + 1,), n, np.int16) for n in range(20)}
    sources = {name: Counting(each) for name, each in data.items()}
    arrays = gda.load_tree(sources, mesh, P(), read_once=True)
    for name, each in data.items():
        np.testing.assert_array_equal(arrays[name], each)
    counts = [source.counts.ravel() for source in sources.values()]
    assert (total(np.concatenate(counts)) == 1).all()
    reads = [int(each.max(initial=0)) for each in counts]
    assert 4 <= sum(reads) <= 7, "of 21 reads with elements, each process makes its share"
    assert gda.load_tree({}, mesh, P(), read_once=True) == {}


@pytest.mark.processes(2, devices=4)
def test_sizes_that_do_not_divide_are_padded_after_the_exchange() -> None:
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2})
    data = batch(5, 7)
    for spec in (P("y"), P("x", "y")):
        source = Counting(data)
        p = gda.PaddedArray.from_source(source, mesh, spec, fill=-1, read_once=True)
        assert (total(source.counts) == 1).all()
        padded = np.full(p.padded_shape, -1, np.float32)
        padded[:5, :7] = data
        for shard in p.array.addressable_shards:
            np.testing.assert_array_equal(shard.data, padded[shard.index])


@pytest.mark.processes(2, devices=4)
def test_blocks_are_cast_when_they_are_whole() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    data = batch(16)
    g = gda.GlobalArray.from_source(Counting(data), mesh, P(), dtype=jnp.bfloat16, read_once=True)
    assert g.dtype == jnp.bfloat16
    np.testing.assert_array_equal(g, data.astype(jnp.bfloat16))
    too_large = np.array([1, 2**40])
    with pytest.raises(gda.DoesNotFitError, match="index"):
        gda.GlobalArray.from_source(too_large, mesh, P(), read_once=True)


@pytest.mark.processes(2, devices=4)
def test_whole_blocks_are_within_the_bound_until_they_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "places_early", lambda _: True)
    monkeypatch.setattr(pending, "LARGE_BYTES", 0)
    monkeypatch.setattr(pending, "are_sent", lambda _: False)
    moving, most = [], []
    keep, wait = pending.PendingArray.keep_filled, jax.block_until_ready

    def settle(*args: Any) -> Any:
        moving.append(args)
        most.append(len(moving))
        return keep(*args)

    def block_until_ready(arrays: Any) -> Any:
        moving.pop(0)
        return wait(arrays)

    monkeypatch.setattr(pending.PendingArray, "keep_filled", settle)
    monkeypatch.setattr(pending.jax, "block_until_ready", block_until_ready)
    data = [batch(8, 6) + n for n in range(6)]
    mesh = ordered_mesh(range(8), {"x": 8})
    arrays = gda.load_tree(data, mesh, P(), read_once=True, max_bytes=2 * data[0].nbytes)
    monkeypatch.undo()
    assert max(most) == 2
    for array, each in zip(arrays, data, strict=True):
        assert is_right(array, each)


@pytest.mark.processes(2, devices=4)
def test_blocks_of_a_map_go_to_the_other_process_before_they_are_on_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for accelerators, which take large blocks from the memory of a map.
    monkeypatch.setattr(placing, "places_early", lambda _: True)
    monkeypatch.setattr(blocks, "LARGE_BYTES", 0)
    data = batch(8, 6)
    np.save(tmp_path / "a.npy", data)
    source = np.load(tmp_path / "a.npy", mmap_mode="r")
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2})
    for spec in (P(), P("y"), P("x")):
        for read_once in (True, False):
            g = gda.GlobalArray.from_source(source, mesh, spec, read_once=read_once)
            assert is_right(g, data), (spec, read_once)


# Libraries.


@pytest.mark.processes(2, devices=4)
def test_chunks_of_stores_are_read_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_once, "_BOX_BYTES", 100)
    data = batch(60, 40)
    # Each process has files of its own with the same content.
    array = zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(7, 40))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=data, chunks=(7, 9))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a.zarr")}}
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2})
    noting = Counting(data, (7, 40))
    with h5py.File(tmp_path / "a.h5") as file:
        stores = [array, file["a"], ts.open(spec).result(), noting]
        for spec in (P(), P("y")):
            for each in stores:
                g = gda.GlobalArray.from_source(each, mesh, spec, read_once=True)
                assert is_right(g, data)
    assert noting.asked
    assert all(index[0].stop in (30, 60) or index[0].stop % 7 == 0 for index in noting.asked)


def test_one_process_reads_as_always(mesh: Any) -> None:
    source = Counting(batch(8, 6))
    g = gda.GlobalArray.from_source(source, mesh, P("x"), read_once=True)
    np.testing.assert_array_equal(g, source.data)
    assert (source.counts == 1).all()
    with pytest.raises(TypeError, match="read_once must be True or False, not 'yes'"):
        gda.load_tree([source], mesh, P(), read_once="yes")


# Faults.


@pytest.mark.processes(2, devices=4)
def test_different_sources_of_processes_are_an_error() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    me = jax.process_index()
    chunked = Counting(batch(8))
    if me:
        chunked.chunks = (4,)  # pyright: ignore[reportAttributeAccessIssue]
    with gda.checking_agreement(False):  # which would find some of these
        for source in (batch(5 + me), batch(8).astype([np.float16, np.int8][me]), chunked):
            with pytest.raises(gda.DisagreementError, match="source 0"):
                gda.PaddedArray.from_source(source, mesh, P(), dtype="float32", read_once=True)


def test_chunks_that_are_no_shape_do_not_count() -> None:
    for chunks in ["auto", (4,), (4, 0), 4, None, {"x": 2}]:
        source: Any = Counting(batch(8, 6))
        source.chunks = chunks
        assert source_of(source).chunks is None


@pytest.mark.processes(2, devices=4)
def test_a_source_that_converts_its_data_is_refused() -> None:
    class Scaling(Counting):
        def __getitem__(self, index: Any) -> np.ndarray:
            return super().__getitem__(index) * 0.5

    mesh = ordered_mesh(range(8), {"x": 8})
    both = (TypeError, gda.DisagreementError)
    with pytest.raises(both, match=r"dtype float64.*choose one with"):
        gda.load_tree([Scaling(np.arange(8)), Scaling(np.arange(8))], mesh, P(), read_once=True)


def fail_in_one_process() -> str:
    """Run in every process: return what each one raises."""
    sources = [Counting(batch(16, 24)) for _ in range(8)]
    for source in sources if jax.process_index() == 2 else []:
        source.before = lambda _: os.stat("/nowhere")
    try:
        gda.load_tree(sources, ordered_mesh(range(8), {"x": 8}), P(), read_once=True)
    except (OSError, gda.DisagreementError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def test_a_failure_in_one_process_ends_all() -> None:
    # A pool of its own: the collective that the others had begun holds threads of XLA for a while.
    with Pool(4, devices=2) as pool:
        said = pool.run(fail_in_one_process)
    assert said[2] == "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"
    for one in (0, 1, 3):
        assert said[one].startswith("DisagreementError: load_tree")
        assert "process 2 failed: FileNotFoundError: [Errno 2]" in said[one]

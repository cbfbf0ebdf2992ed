"""Sources in every function that saves: memory maps, zarr, h5py, TensorStore, safetensors."""

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import tensorstore as ts
import zarr
from counting import Counting
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from leaks import no_thread_is_left  # noqa: F401, of every test
from meshes import batch, cut, is_right, mesh_of
from trials import rarely

import gda
from gda.checkpoint import SaveError, restore, save, save_async, verify
from gda.checkpoint.writing import writer
from gda.storage import open_safetensors, save_safetensors

DATA = batch(60, 70)


def sources(folder: Path) -> dict[str, Any]:
    """Return sources of DATA of every library."""
    np.save(folder / "w.npy", DATA)
    mapped = np.load(folder / "w.npy", mmap_mode="r")
    save_safetensors(folder / "w.safetensors", {"w": DATA})
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/ts"}
    store = ts.open(spec, create=True, dtype=ts.float32, shape=DATA.shape).result()
    store[...].write(DATA).result()
    return {
        "map": mapped,
        "tensors": open_safetensors(folder / "w.safetensors"),
        "zarr": zarr.create_array(folder / "w.zarr", data=DATA, chunks=(7, 11)),
        "tensorstore": store,
        "own": Counting(DATA),
        "scalar": Counting(np.array(3)),
        "empty": Counting(np.zeros((0, 3), np.int8)),
    }


EXPECTED = {
    **dict.fromkeys(["map", "zarr", "tensorstore", "own"], DATA),
    "tensors": {"w": DATA},
    "scalar": np.array(3),
    "empty": np.zeros((0, 3), np.int8),
}


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are saved as large ones are."""
    monkeypatch.setattr(writer, "PACKED_BELOW", 1)


def assert_expected(tree: Any, expected: Any = EXPECTED) -> None:
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


# Checkpoints.


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_checkpoint_of_sources_is_that_of_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    tree = {**sources(tmp_path), "step": 3, "array": DATA}
    expected = {**EXPECTED, "step": 3, "array": DATA}
    run, arrays = tmp_path / "run", tmp_path / "arrays"
    if is_packed:
        save(run, tree)
    else:
        monkeypatch.setattr(writer, "PACKED_BELOW", 1)
        save_async(run, tree, max_bytes=3000, max_workers=2).result()
    save(arrays, expected)
    found, usual = gda.checkpoint.inspect(run), gda.checkpoint.inspect(arrays)
    assert found.rows == usual.rows
    assert [leaf.fingerprint for leaf in found.leaves if hasattr(leaf, "fingerprint")] == [
        leaf.fingerprint for leaf in usual.leaves if hasattr(leaf, "fingerprint")
    ]
    assert_expected(restore(run), expected)
    verify(run)
    assert gda.checkpoint.diff(run, tree).are_equal


@pytest.mark.usefixtures("unpacked")
def test_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["w"] = DATA
        save(tmp_path / "run", {"file": file, "one": file["w"]}, max_bytes=3000)
    assert_expected(restore(tmp_path / "run"), {"file": {"w": DATA}, "one": DATA})


@pytest.mark.usefixtures("unpacked")
def test_a_source_is_read_once_and_written_in_several_chunks(tmp_path: Path) -> None:
    for chunks in (None, (60, 1), (7, 11)):
        source = Counting(DATA, chunks)
        save(tmp_path, {"w": source}, max_bytes=4000, overwrite=True)
        assert source.counts.min() == source.counts.max() == 1
        (stored,) = gda.checkpoint.inspect(tmp_path).arrays
        assert 4 < stored.grid.num_chunks < 20
        assert_expected(restore(tmp_path), {"w": DATA})


@pytest.mark.usefixtures("unpacked")
def test_one_read_at_a_time_unless_threads_were_asked_for(tmp_path: Path) -> None:
    source, together, guard = Counting(DATA), [0], threading.Lock()
    meet = threading.Barrier(2, timeout=60)

    def alone(index: Any) -> None:
        with_others = not guard.acquire(blocking=False)
        together[0] += with_others
        if not with_others:
            guard.release()

    source.before = alone
    save(tmp_path / "one", {"w": source}, max_bytes=4000)
    source.before = lambda index: meet.wait()
    save(tmp_path / "two", {"w": source}, max_bytes=9000, max_workers=2)  # 4 boxes
    assert together == [0]


def test_a_read_is_tried_again(tmp_path: Path) -> None:
    source, left = Counting(DATA), iter([OSError("busy"), OSError("busy")])

    def fail(index: Any) -> None:
        if (error := next(left, None)) is not None:
            raise error

    source.before = fail
    again = gda.Retry(OSError, delay=0)
    save(tmp_path / "run", {"w": source}, retry=again)
    left = iter([OSError("busy")])
    save_safetensors(tmp_path / "files", {"w": source}, retry=again)
    left = iter([OSError("busy")])
    target = np.zeros_like(DATA)
    gda.store(source, target, retry=again)
    assert_expected(restore(tmp_path / "run"), {"w": DATA})
    np.testing.assert_array_equal(target, DATA)


# Other targets.


def test_safetensors_of_sources_are_those_of_arrays(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "a", sources(tmp_path), max_bytes=4000)
    save_safetensors(tmp_path / "b", EXPECTED)
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_store_writes_whole_chunks_of_the_target(tmp_path: Path) -> None:
    source, other = Counting(DATA, (60, 1)), Counting(DATA)
    targets = {
        "zarr": zarr.create_array(str(tmp_path / "z"), shape=(60, 70), chunks=(20, 9), dtype="f4"),
        "ts": ts.open(
            {"driver": "zarr3", "kvstore": f"file://{tmp_path}/t"},
            create=True,
            dtype=ts.float64,
            shape=(60, 70),
            chunk_layout=ts.ChunkLayout(chunk_shape=(8, 8)),
        ).result(),
    }
    tree = {"zarr": source, "ts": other}
    gda.store(tree, targets, max_bytes=6000, max_workers=3)
    assert source.counts.max() == other.counts.max() == 1
    assert_expected(
        {name: target[...] for name, target in targets.items()}, dict.fromkeys(tree, DATA)
    )


@rarely(5)
@given(st.data(), st.integers(1, 3), st.integers(1, 4000))
def test_any_source(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rank: int, max_bytes: int
) -> None:
    shapes = st.tuples(*[st.integers(1, 12)] * rank)
    shape, chunks = data.draw(shapes), data.draw(st.none() | shapes)
    dtype = data.draw(st.sampled_from(["int64", "float32", ">f2", "bool", "complex64"]))
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    folder = tmp_path_factory.mktemp("any")
    source = Counting(values, chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PACKED_BELOW", data.draw(st.sampled_from([1, 2**20])))
        save(folder / "run", {"w": source}, max_bytes=max_bytes)
    back = restore(folder / "run")["w"]
    assert back.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(back, values)
    save_safetensors(folder / "w.safetensors", {"w": source}, max_bytes=max_bytes)
    np.testing.assert_array_equal(open_safetensors(folder)["w"][...], values)
    target = np.zeros_like(values)
    gda.store(source, target, max_bytes=max_bytes)
    np.testing.assert_array_equal(target, values)


# Mistakes.


class Lying(Counting):
    """A source that returns another block than it was asked for."""

    def __init__(self, change: Callable[[np.ndarray], Any]) -> None:
        super().__init__(DATA)
        self.change = change

    def __getitem__(self, index: Any) -> Any:
        return self.change(self.data[index]) if index[0].start else self.data[index]


WRONG = {
    "shape": (
        lambda block: block[:1],
        ValueError,
        r"has shape \(1, 70\); a source of shape \(60, 70\) has \(6, 70\) there",
    ),
    "dtype": (
        lambda block: block.astype(np.float64),
        TypeError,
        "the source has dtype float32, but its block has dtype float64",
    ),
    "nothing": (lambda block: None, TypeError, r"source returned None for index"),
    "masked": (lambda block: np.ma.masked_less(block, 1e9), TypeError, "JAX has no masks"),
}


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_block_is_named_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    change, error, text = WRONG[kind]
    tree = {"layers": [Lying(change)]}
    note = r"gda: while reading index \[\d+:\d+, 0:70\] of layers/0"
    run, files, most = tmp_path / "run", tmp_path / "files", 4000
    save(run, {"w": DATA})
    for attempt in (
        lambda: save(run, tree, overwrite=True, max_bytes=most),
        lambda: save_safetensors(files, tree, max_bytes=most),
        lambda: gda.store(tree, {"layers": [np.zeros_like(DATA)]}, max_bytes=most),
    ):
        with pytest.raises(error, match=text) as caught:
            attempt()
        assert any(re.fullmatch(note, each) for each in caught.value.__notes__)
    assert_expected(restore(run), {"w": DATA})
    assert len([*run.glob("data-*")]) == 1
    assert not files.exists()


# Many processes.


@pytest.mark.processes(2, devices=4)
@pytest.mark.usefixtures("unpacked")
def test_processes_share_the_reads(shared_tmp_path: Path) -> None:
    tree = {"one": Counting(DATA), "two": Counting(DATA, (60, 1)), "small": Counting(DATA[:1, :3])}
    save(shared_tmp_path / "run", tree, max_bytes=4000)
    save_safetensors(shared_tmp_path / "files", tree, max_bytes=4000)
    targets = {
        name: np.lib.format.open_memmap(
            shared_tmp_path / f"{name}{jax.process_index()}.npy", "w+", leaf.dtype, leaf.shape
        )
        for name, leaf in tree.items()
    }
    gda.store(tree, targets, max_bytes=4000)
    expected = {name: leaf.data for name, leaf in tree.items()}
    assert_expected(restore(shared_tmp_path / "run"), expected)
    files = open_safetensors(shared_tmp_path / "files")
    assert_expected({name: files[name][...] for name in files}, expected)
    for name in ("one", "two"):
        mine = tree[name].counts
        assert 0.4 < (mine == 3).mean() < 0.6
        # Nothing that the other process reads is read or written here.
        assert ((mine == 0) | (mine == 3)).all()
        assert np.array_equal(targets[name] != 0, (mine == 3) & (DATA != 0))


@pytest.mark.processes(2, devices=4)
@pytest.mark.usefixtures("unpacked")
def test_all_processes_hear_of_a_failed_read(shared_tmp_path: Path) -> None:
    source = Counting(DATA)

    def fail(index: Any) -> None:
        raise ConnectionResetError("the bucket is gone")

    if jax.process_index() == 1:
        source.before = fail
    error = ConnectionResetError if jax.process_index() == 1 else SaveError
    with pytest.raises(error, match="the bucket is gone"):
        save(shared_tmp_path / "run", {"w": source}, max_bytes=4000)
    assert not (shared_tmp_path / "run" / "manifest.json").exists()


@pytest.mark.processes(2, devices=4)
def test_an_array_of_several_processes_is_refused_as_a_source_and_as_a_block() -> None:
    mesh, to = mesh_of({"x": 8}), P(None, "x")
    data = batch(8, 8).astype(np.uint32)
    g, lazy = cut(data, mesh, P("x")), gda.storage.lazy
    keys = jax.jit(jax.random.wrap_key_data, out_shardings=g.sharding)(g.array[:, :2])
    callback = gda.GlobalArray.from_callback
    ways: list[Callable[[], object]] = [
        *(lambda w=w: gda.load_tree({"w": w}, mesh, to) for w in (g, g.array)),
        lambda: gda.load_tree({"w": lazy(g.array)[:6]}, mesh, P()),
        lambda: gda.load_tree({"w": keys}, mesh, P()),
        lambda: gda.GlobalArray.from_source(g, mesh, to, read_once=True),
        lambda: gda.PaddedArray.from_source(g, mesh, to),
        *(
            lambda join=join: join([data, g])
            for join in (gda.storage.stack, gda.storage.concatenate)
        ),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=r"is held by processes 0, 1, so .* gda\.reshard_tree"):
            way()
    # Each process has all of a replicated array.
    replicated = g.reshard(P())
    for source in (replicated, lazy(replicated.array)):
        assert is_right(gda.load_tree(source, mesh, to), data)
    assert is_right(callback(data.shape, mesh, to, replicated.__getitem__), data)


@pytest.mark.processes(2, devices=4)
def test_a_callback_that_computes_with_an_array_of_several_processes_is_refused() -> None:
    mesh, data = mesh_of({"x": 8}), batch(8, 8)
    g, shape = cut(data, mesh, P("x")), data.shape
    callback, batched = gda.GlobalArray.from_callback, gda.GlobalArray.from_batched_callback
    computed: list[Callable[[Any], Any]] = [
        g.__getitem__,
        lambda index: g.at[index].get(),
        lambda index: (g + 1)[index],
        lambda index: g.take(0, axis=0)[index[1:]],
        lambda index: g.__jax_array__()[index],
        lambda index: g.T[index],
    ]

    def ways(to: P) -> list[Callable[[], object]]:
        return [
            *(lambda read=read: callback(shape, mesh, to, read) for read in computed),
            lambda: callback(shape, mesh, to, g.__getitem__, max_workers=2),
            lambda: batched(shape, mesh, to, lambda indices: [g[index] for index in indices]),
            lambda: batched(shape, mesh, to, lambda indices: (g[index] for index in indices)),
            lambda: gda.load_tree(Counting(g), mesh, to, max_workers=2),  # pyright: ignore
        ]

    def block(index: Any) -> Any:  # asks for what nothing is computed for
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, g.shape, strict=True)]
        return np.full(sizes, len(g) + g.itemsize + len(g.devices()), data.dtype)

    message = r"is held by processes 0, 1, so .* g\.reshard\(.* gda\.reshard_tree"
    with gda.checking_agreement(False):  # where the processes would not meet
        for to in (P("x"), P(None, "x"), P()):
            for way in ways(to):
                with pytest.raises(ValueError, match=message):
                    way()
            assert is_right(callback(shape, mesh, to, block), np.full(shape, 20, data.dtype))
    assert g[0].shape == (8,)  # outside of a callback

"""Arrays from sources, one or a tree of them, and the options of everything that loads."""

import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from leaks import no_thread_is_left  # noqa: F401, of every test
from meshes import batch, cut, mesh_of
from safetensors.numpy import save_file

import gda
from gda.arrays.construction import blocks as blocks_module
from gda.arrays.construction import pending
from gda.arrays.construction import placing as placing_module
from gda.arrays.construction.blocks import BlockReader

MESH = mesh_of({"x": 4, "y": 2})
DATA = batch(8, 6)


@pytest.fixture(params=["placed at the end", "placed early", "sent alone"])
def placing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways in which blocks come to their devices; the last two are those of accelerators."""
    is_early = request.param != "placed at the end"
    monkeypatch.setattr(placing_module, "places_early", lambda _: is_early)
    if request.param == "sent alone":
        monkeypatch.setattr(pending, "LARGE_BYTES", 0)
        monkeypatch.setattr(blocks_module, "LARGE_BYTES", 0)
    return request.param


# Sources of all kinds.


def memory_map(path: Path, data: np.ndarray) -> Any:
    np.save(path / "data.npy", data)
    return np.load(path / "data.npy", mmap_mode="r")


def zarr_array(path: Path, data: np.ndarray) -> Any:
    array = zarr.create_array(path / "data.zarr", shape=data.shape, dtype=data.dtype, chunks="auto")
    array[...] = data
    return array


def tensorstore_of(path: Path, data: np.ndarray) -> Any:
    zarr_array(path, data)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / "data.zarr")}}
    return ts.open(spec).result()


def translated_tensorstore(path: Path, data: np.ndarray) -> Any:
    store = tensorstore_of(path, data)
    return store[ts.d[:].translate_by[3]] if data.ndim else store


def hdf5(path: Path, data: np.ndarray) -> Any:
    with h5py.File(path / "data.h5", "w") as file:
        file["data"] = data
    return h5py.File(path / "data.h5")["data"]


def own_safetensors(path: Path, data: np.ndarray) -> Any:
    save_file({"data": data}, path / "data.safetensors")
    return gda.storage.open_safetensors(path)["data"]


MAKERS = [memory_map, zarr_array, hdf5, own_safetensors]
KINDS = {make.__name__: make for make in [*MAKERS, tensorstore_of, translated_tensorstore]}


@pytest.fixture(params=KINDS)
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made: list[Any] = []

    def make(data: np.ndarray) -> Any:
        made.append(KINDS[request.param](tmp_path, data))
        return made[-1]

    yield make
    for source in made:
        if isinstance(source, h5py.Dataset):
            source.file.close()


CASES = {
    "rows": (DATA, P("x")),
    "blocks": (DATA, P("x", "y")),
    "scalar": (np.array(3, np.float32), P()),
    "empty": (np.zeros((0, 4), np.float32), P("x")),
    "bool": (DATA % 3 == 0, P("y")),
    "int16": (DATA.astype(np.int16), P(("x", "y"))),
}


@pytest.mark.parametrize("case", CASES)
def test_any_source(source_of: Any, case: str) -> None:
    data, spec = CASES[case]
    source = source_of(data)
    for max_workers in (None, 3):
        g = gda.GlobalArray.from_source(source, MESH, spec, max_workers=max_workers)
        assert g.dtype == data.dtype
        assert np.array_equal(np.asarray(g), data)
        assert g.sharding == cut(data, MESH, spec).sharding


def test_bfloat16(tmp_path: Path) -> None:
    data = DATA.astype(ml_dtypes.bfloat16)
    untyped = memory_map(tmp_path, data)
    assert untyped.dtype.type is np.void
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["w"] = data.view("V2")
        for source in (own_safetensors(tmp_path, data), untyped, file["w"]):
            dtype = jnp.bfloat16 if source.dtype == np.dtype("V2") else None
            for spec in (P("x", "y"), P(None, "y")):
                g = gda.GlobalArray.from_source(source, MESH, spec, dtype=dtype)
                assert g.dtype == jnp.bfloat16
                assert np.array_equal(np.asarray(g), data)


@pytest.mark.parametrize("kind", ["tensorstore_of", "hdf5", "own_safetensors", "zarr_array"])
def test_aligned_buffers_become_the_array(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = set()
    empty = BlockReader.empty

    def recorded(reader: BlockReader, dtype: Any, index: Any = None) -> np.ndarray:
        out = empty(reader, dtype, index)
        places.add(out.ctypes.data)
        return out

    monkeypatch.setattr(BlockReader, "empty", recorded)
    source = KINDS[kind](tmp_path, batch(63, 1024)[:, 1:])
    g = gda.GlobalArray.from_source(source, mesh_of({"x": 7}), P("x"))
    # An array that the source made is adopted, if it happens to be aligned.
    is_filled = kind != "zarr_array"
    held = {shard.data.unsafe_buffer_pointer() for shard in g.local_shards}
    assert places <= held
    assert len(places) == 7 or not is_filled
    if kind == "hdf5":
        source.file.close()


@given(
    st.tuples(st.sampled_from([0, 8, 16]), st.sampled_from([0, 2, 6])),
    st.sampled_from([P(), P("x"), P("y"), P(None, "y"), P("x", "y"), P(("y", "x"))]),
    st.sampled_from(["f4", "i2", "u1", "?", "f2", "c8", ">i4", "i8", "f8"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([None, np.float32, jnp.bfloat16]),
            "max_workers": st.sampled_from([None, 1, 4]),
            "max_bytes": st.sampled_from([None, 1, 100, 10**6]),
        }
    ),
)
def test_from_source_is_from_callback(
    shape: tuple[int, int], spec: P, dtype: str, options: dict[str, Any]
) -> None:
    kind = np.dtype(dtype)
    values = np.random.default_rng(shape[0]).integers(0, 100, shape).astype(kind)
    if kind.kind == "c" and options["dtype"] is not None:
        options |= {"dtype": np.complex64}
    expected = gda.GlobalArray.from_callback(
        shape, MESH, spec, lambda index: values[index], dtype=options["dtype"]
    )
    is_taken = shape[0] and kind.itemsize < 8 and kind.isnative
    arrays = [cut(values, MESH, P("y"))] if is_taken else []
    for source in [values, ts.array(np.ascontiguousarray(values, kind.newbyteorder("="))), *arrays]:
        g = gda.GlobalArray.from_source(source, MESH, spec, **options)
        assert g.dtype == expected.dtype
        assert g.sharding == expected.sharding
        assert np.array_equal(g, expected)


# The options, by callbacks.


def called(spec: P, read: Callable[..., Any], **options: Any) -> gda.GlobalArray:
    """Return the array of the shape of ``DATA`` whose blocks a callback gives."""
    return gda.GlobalArray.from_callback(DATA.shape, MESH, spec, read, **options)


def test_reads_overlap_and_only_one_that_fails_is_tried_again(placing: str) -> None:
    together = threading.Barrier(8)
    asked = []

    def read(index: Any) -> np.ndarray:
        start = index[0].start
        asked.append(start)
        if asked.count(start) == 1:
            together.wait(60)
            if start == 3:
                raise TimeoutError("slow")
        return DATA[index]

    again = gda.Retry(TimeoutError, delay=0)
    g = called(P(("x", "y")), read, max_workers=8, retry=again)
    assert np.array_equal(g, DATA)
    assert sorted(asked) == sorted([*range(8), 3])


def test_only_so_many_bytes_are_read_at_a_time(placing: str) -> None:
    lock = threading.Lock()
    reading: list[int] = []
    most = []

    def read(index: Any) -> np.ndarray:
        with lock:
            reading.append(0)
            most.append(len(reading))
        time.sleep(0.002)
        with lock:
            reading.pop()
        return DATA[index]

    called(P(("x", "y")), read, dtype=np.float32, max_workers=8, max_bytes=3 * 24)
    assert max(most) <= 3
    most.clear()
    # Whose size nobody knows counts as of 8 bytes an element until one was read.
    called(P(("x", "y")), read, max_workers=8, max_bytes=3 * 24)
    assert most[0] == 1
    assert max(most) <= 3


# Progress.


@pytest.mark.parametrize("max_workers", [None, 4])
def test_a_function_hears_of_every_block(placing: str, max_workers: int | None) -> None:
    heard = []
    hear = lambda *state: heard.append(state)  # noqa: E731
    called(P("x"), lambda i: DATA[i], max_workers=max_workers, progress=hear)
    assert heard == [(48, 192), (96, 192), (144, 192), (192, 192)]


def test_a_bar_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    gda.GlobalArray.from_source(DATA, MESH, P("x"), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "from_source" in err
    assert "192/192 bytes" in err


def test_a_bar_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    source = Counting(DATA)
    with pytest.raises(ImportError, match=r"needs rich: pip install .*\[progress\]"):
        gda.GlobalArray.from_source(source, MESH, P("x"), progress=True)
    assert source.asked == []


# Trees.


def test_a_tree_of_sources() -> None:
    tree = {"layers": [{"w": DATA, "b": DATA[0]}, {"w": -DATA, "b": -DATA[0]}], "step": np.int32(7)}
    specs = {"layers": [{"w": P("x"), "b": P("y")}, P()], "step": P()}
    for options in [{}, {"max_workers": 4, "max_bytes": 100}]:
        loaded = gda.load_tree(tree, MESH, specs, **options)
        assert jax.tree.structure(loaded, is_leaf=_is_array) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, loaded, tree, is_leaf=_is_array)
        assert loaded["layers"][0]["b"].spec == P("y")
        assert loaded["layers"][1]["b"].spec == P()
    device = jax.devices()[2]
    assert gda.load_tree(DATA, SingleDeviceSharding(device)).devices() == {device}
    assert gda.load_tree({}, MESH, P()) == {}
    assert gda.load_tree([None, ()], MESH, [None, P()]) == [None, ()]


def _is_array(node: object) -> bool:
    return isinstance(node, gda.GlobalArray)


DTYPES = st.sampled_from([np.float32, np.float16, np.int32])


@given(
    st.lists(
        st.tuples(DTYPES, st.none() | DTYPES, st.sampled_from([P(), P("x"), P("y"), P(None, "x")])),
        min_size=2,
        max_size=6,
    ),
    st.booleans(),
)
def test_alike_tensors_of_a_file_have_each_its_own_dtype_and_layout(
    tmp_path_factory: pytest.TempPathFactory, leaves: list[Any], is_one_dtype: bool
) -> None:
    data = {str(n): (batch(8, 4) + n).astype(dtype) for n, (dtype, *_) in enumerate(leaves)}
    path = tmp_path_factory.mktemp("alike") / "a"
    save_file(data, path)
    wanted = {str(n): to for n, (_, to, _) in enumerate(leaves)}
    specs = {str(n): spec for n, (*_, spec) in enumerate(leaves)}
    given = np.float16 if is_one_dtype else wanted
    loaded = gda.load_tree(gda.storage.open_safetensors(path), MESH, specs, dtype=given)
    for name, value in data.items():
        floats = np.float16 if value.dtype.kind == "f" else None
        dtype = (floats if is_one_dtype else wanted[name]) or value.dtype
        assert loaded[name].dtype == dtype
        assert loaded[name].spec == specs[name]
        np.testing.assert_array_equal(loaded[name], value.astype(dtype))


def test_arrays_that_jax_does_not_slice_are_sources(explicit_mesh: Mesh) -> None:
    """Those over Explicit axes, and those in host memory."""
    in_host_memory = NamedSharding(MESH, P("y"), memory_kind="pinned_host")
    tree = {
        "explicit": jax.device_put(DATA, NamedSharding(explicit_mesh, P("y"))),
        "on the host": jax.device_put(DATA, in_host_memory),
    }
    loaded = gda.load_tree(tree, explicit_mesh, P("x"))
    for g in loaded.values():
        np.testing.assert_array_equal(g, DATA)
    kinds = {name: g.sharding.memory_kind for name, g in loaded.items()}
    usual = jax.devices()[0].default_memory().kind
    assert kinds == {"explicit": usual, "on the host": "pinned_host"}
    on_devices = gda.load_tree(tree, NamedSharding(MESH, P("x"), memory_kind=usual))
    assert {g.sharding.memory_kind for g in on_devices.values()} == {usual}
    view = gda.storage.lazy(tree["explicit"])[2:4].T
    np.testing.assert_array_equal(np.asarray(view), DATA[2:4].T)


def test_groups_of_hdf5_are_trees(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, data in {"a/w": DATA, "a/b/c": DATA[0], "d": DATA}.items():
            file[name] = data
        file.create_group("empty")
        loaded = gda.load_tree(file, MESH, P())
        assert type(loaded) is type(loaded["a"]["b"]) is dict
        assert np.array_equal(loaded["a"]["b"]["c"], DATA[0])
        assert np.array_equal(loaded["d"], DATA)
        assert loaded["empty"] == {}
        loaded = gda.load_tree({"h": [file["a"]], "n": DATA}, MESH, P())
    assert np.array_equal(loaded["h"][0]["b"]["c"], DATA[0])


def test_small_arrays_overlap_within_one_budget(placing: str) -> None:
    together = threading.Barrier(6)
    tree = {i: Counting(DATA[:1]) for i in range(12)}
    for source in tree.values():
        source.before = lambda _: together.wait(60)
    heard = []
    loaded = gda.load_tree(
        tree, MESH, P(), max_workers=6, progress=lambda *state: heard.append(state)
    )
    assert all(np.array_equal(leaf, DATA[:1]) for leaf in loaded.values())
    assert heard == [(24 * i, 24 * 12) for i in range(1, 13)]


def test_asynchronous_and_other_sources_in_one_tree(placing: str) -> None:
    tree = {"a": ts.array(DATA), "b": DATA, "c": ts.array(np.float32(3)), "d": ts.array(DATA[:0])}
    for options in [{"max_workers": 3}, {"max_bytes": 50}]:
        loaded = gda.load_tree(tree, MESH, P(), **options)
        assert np.array_equal(loaded["a"], DATA)
        assert np.array_equal(loaded["b"], DATA)
        assert float(loaded["c"].array) == 3
        assert loaded["d"].shape == (0, 6)


@pytest.mark.processes(2, devices=4)
def test_every_process_reads_its_own_part() -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    tree = {name: Counting(DATA) for name in "abc"}
    specs = {"a": P("x"), "b": P("y"), "c": P()}
    loaded = gda.load_tree(tree, mesh, specs, max_workers=2)
    mine = 4 * jax.process_index()
    assert tree["a"].asked == [(slice(mine, mine + 4), slice(0, 6))]
    assert len(tree["b"].asked) == 1
    assert len(tree["c"].asked) == 1
    assert np.array_equal(loaded["a"].gather(), DATA)
    assert np.array_equal(loaded["b"].gather(), DATA)


@pytest.mark.processes(2, devices=4)
def test_a_process_without_devices_knows_the_dtype() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    g = gda.GlobalArray.from_source(Counting(DATA.astype(np.float16)), mesh, P("x"), max_workers=2)
    assert g.dtype == np.float16
    assert len(g.local_shards) == (0 if jax.process_index() else 4)


# Errors.


@pytest.mark.parametrize("max_workers", [None, 4])
def test_an_error_has_a_note_of_its_index_and_path(placing: str, max_workers: int | None) -> None:
    class Bad(Counting):
        def __getitem__(self, index: Any) -> np.ndarray:
            if index[0].start <= 4 < index[0].stop:
                raise OSError("gone")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="gone") as caught:
        gda.load_tree({"a": DATA, "b": [Bad(DATA)]}, MESH, P("x"), max_workers=max_workers)
    notes = "\n".join(caught.value.__notes__)
    assert "while reading index [0:8, 0:6] of ShardGrid((8, 6)" in notes
    assert "at b/0 of the tree" in notes


def test_errors_of_a_tensorstore_have_them_too(tmp_path: Path) -> None:
    source = ts.array(np.full((8, 6), 2**40, np.int64))
    with pytest.raises(gda.DoesNotFitError) as caught:
        gda.load_tree({"w": source}, MESH, P("x"))
    notes = " ".join(caught.value.__notes__)
    # None of the blocks fits, and the one that is there first is heard of.
    assert re.search(r"while reading index \[[0246]:[2468], :\]", notes)
    assert "at w of the tree" in notes
    store = tensorstore_of(tmp_path, DATA)
    (chunk,) = (tmp_path / "data.zarr").glob("c/*/*")
    chunk.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="zarr") as caught:
        gda.load_tree({"w": store}, MESH, P("x"), retry=gda.Retry(ValueError, delay=0))
    notes = "\n".join(caught.value.__notes__)
    for said in ("while reading index [", "at w of the tree", "after attempt 3 of 3"):
        assert said in notes


def test_other_values_are_no_source() -> None:
    without_shape = Counting(DATA)
    del without_shape.shape
    for source in [3.0, [1.0, 2.0], None, without_shape, "data.npy", io.BytesIO(b"")]:
        with pytest.raises(TypeError, match=r"is not a source; a source has shape, dtype and Num"):
            gda.GlobalArray.from_source(source, MESH, P())


def with_attributes(**attributes: Any) -> Any:
    source = Counting(DATA)
    vars(source).update(attributes)
    return source


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (with_attributes(shape=3.5), TypeError, "a Counting of shape 3.5 is not a source"),
        (with_attributes(dtype="torch.float"), TypeError, "NumPy does not have that dtype"),
        (with_attributes(dtype=np.dtype("U3")), TypeError, "the Counting has dtype <U3, which J"),
        (with_attributes(dtype=np.dtype("V2")), TypeError, "name the dtype of its elements"),
        (with_attributes(shape=(16, 6)), ValueError, r"has shape \(8, 6\); a source of shape"),
        (
            with_attributes(dtype=np.dtype(np.int16)),
            TypeError,
            "has dtype int16, but its block has dtype float32, as in libraries that scale",
        ),
    ],
)
def test_sources_that_lie(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gda.GlobalArray.from_source(source, MESH, P("x"))
    if source.dtype == np.dtype("V2"):
        with pytest.raises(TypeError, match="of 2 bytes without a NumPy type .* of 4 bytes"):
            gda.GlobalArray.from_source(source, MESH, P("x"), dtype=np.float32)


def test_all_is_checked_before_anything_is_read() -> None:
    source = Counting(DATA)
    for tree, specs, message in [
        ({"a": source, "b": Counting(DATA[:3])}, P("x"), "dimension 0 of size 3 is sharded 4"),
        ({"a": source, "b": print}, P(), "a builtin_function_or_method is not"),
        ({"a": source, "b": source}, {"a": P()}, "specs must be a prefix of the tree"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            gda.load_tree(tree, MESH, specs)
        if "size 3" in message:
            assert caught.value.__notes__ == ["gda: at b of the tree"]
    with pytest.raises(ValueError, match="mesh must be a prefix of the tree"):
        gda.load_tree({"a": source, "b": source}, {"a": NamedSharding(MESH, P())})
    with pytest.raises(ValueError, match="dtype must be a prefix of the tree"):
        gda.load_tree({"a": source}, MESH, P(), dtype={"b": "int32"})
    assert source.asked == []


def test_an_error_of_the_function_for_specs_names_the_path() -> None:
    source = Counting(DATA)
    tree = {"a": DATA, "b": [source]}
    rules = {"a": P("x")}

    def fail(path: str, _: Any) -> P:
        return rules[path]

    def wrong(path: str, _: Any) -> Any:
        return rules.get(path)

    for function, error, message in [
        (fail, KeyError, "b/0"),
        (wrong, TypeError, r"specs\('b/0', leaf\) returned None, not a PartitionSpec"),
    ]:
        with pytest.raises(error, match=message) as caught:
            gda.load_tree(tree, MESH, function)
        assert caught.value.__notes__ == ["gda: at b/0 of the tree"]
    assert source.asked == []


def test_keys_of_specs_that_differ_are_named_and_no_others() -> None:
    tree = {"a": {f"layer{i}": DATA for i in range(320)}}
    specs = {"a": {f"layer{i}": P() for i in range(12, 321)}}
    with pytest.raises(ValueError, match="specs must be a prefix of the tree") as caught:
        gda.load_tree(tree, MESH, specs)
    text = str(caught.value)
    assert "specs has nothing for a/layer0; a/layer1; " in text
    assert text.endswith("; and 4 more, and the tree has no a/layer320")
    assert len(text) < 400


def test_containers_of_sources_are_named(tmp_path: Path) -> None:
    opening = ts.open({"driver": "array", "array": [1.0, 2.0], "dtype": "float32"})
    message = r"a Future is not a source; call \.result\(\) on it, and pass the result"
    with pytest.raises(TypeError, match=message):
        gda.load_tree([opening], MESH, P())
    save_file({"w": DATA}, tmp_path / "a.safetensors")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        groups = [file, file.create_group("b"), zarr.create_group(tmp_path / "z")]
        for group in [*groups, gda.storage.open_safetensors(tmp_path), {"w": DATA}]:
            with pytest.raises(TypeError, match="pick one array of it by its name, or pass a dict"):
                gda.GlobalArray.from_source(group, MESH, P())


def test_a_member_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/link"] = h5py.SoftLink("/gone")
        with pytest.raises(KeyError) as of_link:
            gda.load_tree({"a": file}, MESH, P())
        assert of_link.value.__notes__ == ["gda: at group/link of a Group"]
        with pytest.raises(KeyError) as of_save:
            gda.checkpoint.save(tmp_path / "saved", file)
        assert of_save.value.__notes__[0] == "gda: at group/link of a Group"
    np.savez(tmp_path / "a.npz", names=np.array(["a", None], object))
    with np.load(tmp_path / "a.npz") as npz, pytest.raises(ValueError, match="Object") as of_npz:
        gda.load_tree(npz, MESH, P())
    assert of_npz.value.__notes__ == ["gda: at names of a NpzFile"]


def test_a_closed_file_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("w", data=DATA)
    message = r"the file of this h5py\.{} is closed; open it again"
    with pytest.raises(ValueError, match=message.format("Dataset")) as caught:
        gda.load_tree({"w": data}, MESH, P("x"))
    assert caught.value.__notes__ == ["gda: at w of the tree"]
    with pytest.raises(ValueError, match=message.format("File")):
        gda.load_tree(file, MESH, P("x"))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("flaot32", "dtype='flaot32' is not a dtype; a dtype is such as"),
        ({"a": "int32", "b": ["flaot32"]}, r"dtype/b/0='flaot32' is not a dtype"),
        (str, "dtype=<U0, which JAX does not have; convert it to numbers first"),
        ({"a": None, "b": "M8[s]"}, r"dtype/b=datetime64\[s\], which JAX does not have"),
    ],
)
def test_dtypes_that_are_none(dtype: Any, message: str) -> None:
    source = Counting(DATA)
    with pytest.raises(TypeError, match=message):
        gda.load_tree({"a": source, "b": [source]}, MESH, P("x"), dtype=dtype)
    assert source.asked == []

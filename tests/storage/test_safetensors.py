"""Tensors of safetensors files, against those that the real package wrote and reads."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from leaks import little_memory, no_file_is_left_open  # noqa: F401, of every test
from meshes import batch, mesh_of
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

import gda
from gda.arrays.construction import reading
from gda.storage import safetensors as storage
from gda.storage.safetensors import open_safetensors

DATA = batch(8, 6)
DTYPES = [
    *["bool", "uint8", "int64", "float16", "complex64", "bfloat16"],
    *["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"],
]


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_the_package(name: str, tmp_path: Path) -> None:
    data = (DATA % 3).astype(np.dtype(getattr(ml_dtypes, name, name)))
    scalar = np.array(data[1, 1], data.dtype)
    save_file({"x": data, "scalar": scalar, "empty": data[:0]}, tmp_path / "a")
    tensors = open_safetensors(tmp_path / "a")
    assert tensors["x"].dtype == data.dtype
    assert tensors["x"].nbytes == data.nbytes
    assert tensors["x"].ndim == 2
    assert tensors["x"][...].tobytes() == data.tobytes()
    assert tensors["x"][2:4, 1:3].tobytes() == data[2:4, 1:3].tobytes()
    assert tensors["scalar"][()] == data[1, 1]
    assert tensors["empty"][...].shape == (0, 6)
    for each in tensors.values():
        whole = np.asarray(each)
        assert (whole.dtype, whole.shape) == (data.dtype, each.shape)
        assert whole.tobytes() == each[...].tobytes()


def test_numpy_and_jax_read_whole_tensors(tmp_path: Path) -> None:
    save_file({"w": DATA.astype(ml_dtypes.bfloat16)}, tmp_path / "a")
    theirs, tensors = load_file(tmp_path / "a"), open_safetensors(tmp_path / "a")
    np.testing.assert_array_equal(jnp.asarray(tensors["w"]), theirs["w"], strict=True)
    with pytest.raises(ValueError, match="is read into a new array, which copy=False forbids; use"):
        np.asarray(tensors["w"], copy=False)


def test_dtypes_that_are_packed_are_refused_when_read(tmp_path: Path) -> None:
    header = {"f4": entry([2, 3], 0, 3, "F4"), "f6": entry([4], 3, 6, "F6_E2M3")}
    path = write(tmp_path / "a", header, bytes(6))
    with safe_open(path, "numpy") as theirs:
        assert set(theirs.keys()) == {"f4", "f6"}
    tensors = open_safetensors(path)
    assert tensors["f4"].shape == (2, 3)
    for name in tensors:
        with pytest.raises(TypeError, match=f"tensor '{name}' of .*a has dtype F., with|dtype F6_"):
            gda.GlobalArray.from_source(tensors[name], mesh_of({"x": 2}), P())


def test_a_mapping_that_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": DATA, "b": DATA[0]}, path, metadata={"format": "np"})
    tensors = open_safetensors(str(path))
    assert sorted(tensors) == ["b", "w"]
    assert len(tensors) == 2
    assert tensors.nbytes == DATA.nbytes + DATA[0].nbytes
    assert repr(tensors) == "SafetensorsFiles(2 tensors, 216 bytes)"
    said = f"SafetensorsTensor('w', shape=(8, 6), dtype=F32, path={str(path)!r})"
    assert repr(tensors["w"]) == said
    assert tensors["w"].path == path
    assert ("w" in tensors, tensors.get("v")) == (True, None)


INDICES = [(), ..., 3, -1, slice(2, 4), slice(-3, None), slice(5, 2), (..., 2), (slice(None), 1)]
INDICES += [(slice(1, 7), slice(2, 5)), (np.int64(2), slice(0, 3)), (3, 4), (0, ..., slice(1, 2))]
INDICES += [slice(None, None, -3), (None, slice(1, 6, 2), None, 2)]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_part_is_that_of_numpy(index: Any, tmp_path: Path) -> None:
    save_file({"w": DATA}, tmp_path / "a")
    read = open_safetensors(tmp_path / "a")["w"][index]
    assert np.array_equal(read, DATA[index])
    assert read.shape == DATA[index].shape


@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 7), max_size=4),
    dtype=st.sampled_from(["u1", "i2", "f4", "c8"]),
    gap_bytes=st.sampled_from([1, 8, 10**6]),
    piece_bytes=st.sampled_from([1, 50, 10**6]),
)
def test_any_part_in_any_way(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: list[int],
    dtype: str,
    gap_bytes: int,
    piece_bytes: int,
) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    path = tmp_path_factory.mktemp("any") / "a"
    save_file({"before": DATA, "w": values}, path)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(*pair) for pair in ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "READ_BYTES", gap_bytes)
        patch.setattr(storage, "PIECE_BYTES", piece_bytes)
        assert np.array_equal(open_safetensors(path)["w"][index], values[index])


def test_only_the_bytes_of_the_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": np.zeros((64, 100), np.float32)}, tmp_path / "a")
    tensor = open_safetensors(tmp_path / "a")["w"]
    read = []
    preadv = os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        read.append(count := preadv(file, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    tensor[8:16]
    assert read == [8 * 400]
    read.clear()
    tensor[8:16, 50:]  # short gaps are read with the rest, at once
    assert read == [7 * 400 + 200]
    read.clear()
    monkeypatch.setattr(storage, "READ_BYTES", 200)
    tensor[8:16, 50:]
    assert read == [200] * 8


# Several files.


PART = "model-00001-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two files and their index, as published models have it."""
    names = [PART, "model-00002-of-00002.safetensors"]
    save_file({"embed.weight": DATA, "norm.weight": DATA[0]}, tmp_path / names[0])
    save_file({"lm_head.weight": -DATA}, tmp_path / names[1])
    files = {"embed.weight": names[0], "norm.weight": names[0], "lm_head.weight": names[1]}
    index = {"metadata": {"total_size": 408}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_all_ways_to_name_the_files_of_a_model(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    files = sorted(model.glob("*.safetensors"))
    for given_path in [model, str(index), index, files, map(str, files)]:
        tensors = open_safetensors(given_path)
        assert sorted(tensors) == ["embed.weight", "lm_head.weight", "norm.weight"]
        assert np.array_equal(tensors["lm_head.weight"][1:3], -DATA[1:3])
    index.unlink()
    assert len(open_safetensors(model)) == 3
    save_file({"embed.weight": DATA}, files[1])
    twice = "tensor 'embed.weight' is in .*00001.* and in .*00002.*; open only one"
    with pytest.raises(ValueError, match=twice):
        open_safetensors(files)


def test_files_that_are_links_elsewhere(model: Path, tmp_path_factory: Any) -> None:
    # As they are in the cache of a hub.
    blobs = tmp_path_factory.mktemp("blobs")
    for number, path in enumerate(sorted(model.glob("*.safetensors"))):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert np.array_equal(open_safetensors(model)["embed.weight"][...], DATA)


def rewrite_index(model: Path, change: Any) -> Path:
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))
    return index


def test_an_index_that_points_outside(model: Path) -> None:
    for file in ["../a.safetensors", "/etc/passwd", "a/../../b", "", ".", 3, None, "a\\b", "a\0b"]:
        outside = {"norm.weight": file}
        index = rewrite_index(model, lambda c, of=outside: c["weight_map"].update(of))
        with pytest.raises(ValueError, match="the file of tensor 'norm.weight' is .*; expected is"):
            open_safetensors(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["weight_map"].update(v="missing.s"), "there is no file .*missing.s"),
        (lambda c: c["weight_map"].update(v=PART), f"tensor 'v' is not in {PART}. If it is tied"),
        (lambda c: c.pop("weight_map"), "index.json has no weight_map"),
    ],
)
def test_an_index_that_is_wrong(model: Path, change: Any, message: str) -> None:
    rewrite_index(model, change)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        open_safetensors(model)


def test_an_index_that_is_broken(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    for text in ["", "[]", "\xff"]:
        index.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="index.json has a broken header"):
            open_safetensors(model)


@pytest.mark.parametrize(
    ("pointer", "command"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("/annex/objects/SHA256E-s9--0.safetensors\n", "git annex get"),
    ],
)
def test_a_pointer_in_place_of_a_file_is_told_as_one(
    pointer: str, command: str, tmp_path: Path
) -> None:
    save, data = gda.checkpoint.save, {"w": DATA}
    for name in ("manifest.json", "c.0"):
        save(tmp_path / "run", data, overwrite=True)
        next((tmp_path / "run").rglob(name)).write_text(pointer)
        with pytest.raises(gda.checkpoint.CorruptionError, match=f"is a pointer of .*{command}"):
            gda.checkpoint.restore(tmp_path / "run")
    (tmp_path / "_METADATA").write_text(pointer)
    with pytest.raises(ValueError, match=f"_METADATA is damaged: it is a pointer .*{command}"):
        gda.storage.open_orbax(tmp_path)
    for name in ("a.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(ValueError, match=f"{name} .*is a pointer of .*; run {command}"):
            open_safetensors(tmp_path / name)


def test_a_link_to_a_file_that_is_not_here_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to(".git/annex/objects/x")
    with pytest.raises(FileNotFoundError, match="is a link to .git/annex/objects/x, which is not"):
        open_safetensors(tmp_path)


def test_a_tensor_without_a_name_is_saved_again(tmp_path: Path) -> None:
    save_file({"": DATA}, tmp_path / "a")
    gda.storage.save_safetensors(tmp_path / "b.safetensors", open_safetensors(tmp_path / "a"))
    assert np.array_equal(load_file(tmp_path / "b.safetensors")[""], DATA)


@pytest.mark.parametrize("given", ["model.safetensors", ["model.safetensors"], "."])
def test_a_relative_path_is_that_of_the_call(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.arange(4.0)}, "model.safetensors")
    gda.checkpoint.save("run", {"w": np.arange(4.0)})
    tensors, tree = open_safetensors(given), gda.checkpoint.open("run")
    contents = gda.checkpoint.inspect("run")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(tensors["w"][...], np.arange(4.0))
    np.testing.assert_array_equal(tree["w"], np.arange(4.0))
    assert Path(contents.data).is_dir()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no .safetensors file and no index"):
        open_safetensors(tmp_path)
    for name in ["a.safetensors", "model.safetensors.index.json"]:
        with pytest.raises(FileNotFoundError, match=f"there is no file .*{name}"):
            open_safetensors(tmp_path / name)
    with pytest.raises(ValueError, match="no paths were given"):
        open_safetensors([])
    for name in ["a", "b"]:
        (tmp_path / f"{name}.safetensors.index.json").touch()
    with pytest.raises(ValueError, match="has more than one index: .*; pass the path of one"):
        open_safetensors(tmp_path)


TWO = r"has 2 models and no index: .*; pass the path of a file"


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (["model-00001-of-00003", "model-00003-of-00003"], ": model-00002-of-00003.s.* is missing"),
        (["w_0-of-3.fp16", "w_1-of-3.fp16"], ": w_2-of-3.fp16.safetensors is missing; copy it"),
        (["model-00002-of-99999999999999999999"], ": model-00001-of-9{20}.safetensors is missing"),
        (["consolidated", "model"], TWO),
        (["model", "model-1-of-1"], TWO),
        (["model-1-of-2", "model-2-of-2", "model.fp16-1-of-2", "model.fp16-2-of-2"], TWO),
        (["model-0-of-2", "model-1-of-2"], None),  # parts count from 0 or from 1
        (["model-1-of-2", "model-2-of-2"], None),
    ],
    ids=str,
)
def test_files_without_an_index_that_are_not_one_model(
    present: list[str], message: str | None, tmp_path: Path
) -> None:
    for name in present:
        save_file({name: DATA}, tmp_path / f"{name}.safetensors")
    if message is None:
        assert len(open_safetensors(tmp_path)) == 2
    else:
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            open_safetensors(tmp_path)
    # Files that were chosen one by one are opened.
    assert len(open_safetensors(tmp_path.glob("*.safetensors"))) == len(present)


def test_metadata_of_files(tmp_path: Path) -> None:
    for number in 1, 2:
        path = tmp_path / f"model-{number}-of-2.safetensors"
        save_file({path.name: DATA}, path, {"format": "pt", f"only {number}": "", "n": f"{number}"})
    both = {"format": "pt", "only 1": "", "only 2": "", "n": "1"}
    assert open_safetensors(tmp_path).metadata == both
    index = tmp_path / "model.safetensors.index.json"
    names = [path.name for path in tmp_path.glob("*.safetensors")]
    index.write_text(json.dumps({"weight_map": {name: name for name in names}}))
    assert open_safetensors(tmp_path).metadata == both
    save_file({"w": DATA}, tmp_path / "a")
    assert open_safetensors(tmp_path / "a").metadata == {}


# Files that are broken, or that somebody hostile made. The package refuses all of them, too, but
# for a tensor that is there twice: it takes the last.


TWICE = b'{"w":%b,"w":%b}' % ((json.dumps(entry([1], 0, 1)).encode(),) * 2)
ENTRY = "tensor 'w' of .* has a broken entry in the header, .*; expected are a dtype of"
BROKEN = {
    "empty": (b"", b"", "is truncated or not a safetensors file", 2),
    "header longer than the file": ({}, b"", "its length field gives the header 9223372", 2**63),
    "no JSON": (b"{", b"", "has a broken header, which is not JSON"),
    "no text": (b'{"\xff":3}', b"", "has a broken header, which is not JSON"),
    "not an object": ([1], b"", "list is not a JSON object"),
    "twice": (TWICE, b"1", "one object has these names twice: 'w'"),
    "no entry": ({"w": 3}, b"", ENTRY),
    "no offsets": ({"w": {"dtype": "U8", "shape": [1]}}, b"1", ENTRY),
    "dtype": ({"w": entry([1], 0, 1, "U7")}, b"1", ENTRY),
    "dtype of lists": ({"w": entry([1], 0, 1, ["U8"])}, b"1", ENTRY),
    "shape": ({"w": entry(3, 0, 3)}, b"123", ENTRY),
    "negative size": ({"w": entry([-1, -1], 0, 1)}, b"1", ENTRY),
    "size that is true": ({"w": entry([True], 0, 1)}, b"1", ENTRY),
    "huge": ({"w": entry([2**62, 2**62], 0, 1)}, b"1", ENTRY),
    "huge and consistent": ({"w": entry([2**40], 0, 2**40)}, b"1", "data, but the file has 1"),
    "huge and empty": ({"w": entry([2**40, 2**40, 0], 0, 0)}, b"", ENTRY),
    "negative offset": ({"w": entry([2], -1, 1)}, b"12", ENTRY),
    "backwards": ({"w": entry([1], 1, 0)}, b"1", ENTRY),
    "cut off": ({"w": entry([3], 0, 3)}, b"12", "ends at byte 3 .*; it is truncated"),
    "overlap": ({"v": entry([2], 0, 2), "w": entry([2], 1, 3)}, b"123", "at byte 1 .* end at 2"),
    "gap": ({"v": entry([1], 0, 1), "w": entry([1], 2, 3)}, b"123", "at byte 2 .* end at 1"),
    "surplus": ({"w": entry([1], 0, 1)}, b"12", "has 1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    header, data, message, *length = BROKEN[case]
    path = write(tmp_path / "a.safetensors", header, data, *length)
    with pytest.raises(ValueError, match=message) as caught:
        open_safetensors(path)
    assert "a.safetensors" in str(caught.value)
    if case != "twice":
        with pytest.raises(SafetensorError), safe_open(path, "numpy"):
            pass


@pytest.mark.parametrize("name", ["a.safetensors", "model.safetensors.index.json"])
def test_a_header_or_an_index_that_is_too_large_is_not_read(name: str, tmp_path: Path) -> None:
    head = b"" if name.endswith(".json") else struct.pack("<Q", 10**8)
    (tmp_path / name).write_bytes(head)
    os.truncate(tmp_path / name, len(head) + 10**8)
    with little_memory(2**24), pytest.raises(ValueError, match=rf"{name} has a header of 1000000"):
        open_safetensors(tmp_path / name)


def test_a_file_that_has_changed_is_not_read(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    message = "tensor 'w' of .*a: the file has changed since it was opened.*; open it again"

    def replaced() -> None:  # by a file of the same size and time, with other places
        save_file({"v": -DATA, "w": DATA}, other)
        os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        other.replace(path)

    def rewritten() -> None:
        path.write_bytes(path.read_bytes()[::-1])

    def truncated() -> None:
        os.truncate(path, path.stat().st_size - 4)

    for change in replaced, rewritten, truncated:
        save_file({"w": DATA, "x": -DATA}, path)
        os.utime(path, ns=(0, 0))
        tensors = open_safetensors(path)
        change()
        for read in (
            lambda of=tensors: of["w"][:4],
            lambda of=tensors: np.asarray(gda.storage.lazy(of["w"])[:, 1:2]),
            lambda of=tensors: gda.load_tree(of, mesh_of({"x": 4}), P("x")),
        ):
            with pytest.raises(ValueError, match=message):
                read()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        tensors["w"][0]


def test_a_file_that_is_written_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save_file({"w": DATA}, path)
    os.utime(path, ns=(0, 0))
    tensor, preadv = open_safetensors(path)["w"], os.preadv

    def written(file: int, buffers: Any, offset: int) -> int:
        with open(path, "r+b") as other:
            other.write(bytes(8))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(storage.os, "preadv", written)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        tensor[...]


@pytest.mark.parametrize("max_bytes", [None, 2**18])
@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 3), (99, 32)])
def test_as_many_threads_as_cores_read_large_tensors(
    max_bytes: int | None,
    cores: int,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    values = batch(1024, 1024).astype(np.float32)
    save_file({"w": values}, tmp_path / "model.safetensors")
    tensors = open_safetensors(tmp_path)
    given = []
    run = reading.run
    monkeypatch.setattr(
        reading, "run", lambda tasks, options: given.append(options) or run(tasks, options)
    )
    for source in (tensors["w"], gda.storage.lazy(tensors["w"])[...]):
        spec = P(None, "x")
        loaded = gda.load_tree([source], mesh_of({"x": 8}), spec, max_bytes=max_bytes)
        assert np.array_equal(loaded[0], values)
    assert [options.max_workers or 1 for options in given] == [threads] * 2


def test_only_a_mistake_looks_for_a_near_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"layers.0": np.zeros(1)}, tmp_path / "model.safetensors")
    tensors = open_safetensors(tmp_path)
    with pytest.raises(KeyError, match="did you mean 'layers.0'"):
        tensors["layer.0"]
    monkeypatch.setattr(storage, "near_name", None)  # of many names it takes seconds
    assert "layers.0" in tensors
    assert "layer.0" not in tensors
    assert tensors.get("layer.0") is None
    assert tensors.get("layer.0", 3) == 3
    assert tensors.get("layers.0").shape == (1,)

"""Facts about a target before anything is written to it."""

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import gda
from gda.storage.targets import check_fit, holds, target_of

bfloat16 = np.dtype(jnp.bfloat16)


def open_tensorstore(path: Path, driver: str = "zarr3", **options: Any) -> ts.TensorStore:
    options = {"create": True, "dtype": ts.float32, "shape": [8, 6]} | options
    return ts.open({"driver": driver, "kvstore": f"file://{path}/"}, **options).result()


# What is a target.


def test_arrays_of_numpy_have_no_chunks_and_import_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorstore", "h5py", "zarr"):
        monkeypatch.setitem(sys.modules, name, None)
    for array in (np.zeros((2, 3)), np.memmap(tmp_path / "a", np.float64, "w+", shape=(2, 3))):
        target = target_of(array)
        assert (target.shape, target.dtype, target.chunks) == ((2, 3), np.float64, None)
        assert not target.is_asynchronous


def test_of_zarr_the_shards_are_written_as_a_whole(tmp_path: Path) -> None:
    z = zarr.create_array(store=tmp_path / "a", shape=(8, 6), chunks=(4, 6), dtype="int16")
    target = target_of(z)
    assert (target.shape, target.dtype, target.chunks) == ((8, 6), np.int16, (4, 6))
    assert not target.allows_threads
    z = zarr.create_array(
        store=tmp_path / "b", shape=(8, 6), chunks=(2, 2), shards=(4, 6), dtype="int16"
    )
    assert target_of(z).chunks == (4, 6)


def test_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        whole = file.create_dataset("whole", (8, 6), "float32")
        cut = file.create_dataset("cut", (8, 6), "float32", chunks=(4, 3))
        assert target_of(whole).chunks is None
        assert target_of(cut).chunks == (4, 3)
        assert target_of(cut).allows_threads
        assert not target_of(cut).allows_processes


@pytest.mark.parametrize("driver", ["zarr3", "zarr", "n5"])
def test_tensorstore(tmp_path: Path, driver: str) -> None:
    layout = ts.ChunkLayout(chunk_shape=[4, 3])
    target = target_of(open_tensorstore(tmp_path, driver, chunk_layout=layout))
    assert (target.shape, target.dtype) == ((8, 6), np.float32)
    assert (target.chunks, target.origin) == ((4, 3), (0, 0))
    assert target.is_asynchronous


def test_chunks_of_a_part_of_a_tensorstore_and_of_shards(tmp_path: Path) -> None:
    whole = open_tensorstore(tmp_path, chunk_layout=ts.ChunkLayout(chunk_shape=[4, 3]))
    target = target_of(whole[3:7])
    assert target.shape == (4, 6)
    # A chunk begins at 4, which is element 1 of the part.
    assert (target.origin[0] - 1) % 4 == 0
    target.handle[0:1].write(np.ones((1, 6), np.float32)).result()
    assert whole.read().result()[:, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    layout = ts.ChunkLayout(read_chunk_shape=[2, 3], write_chunk_shape=[4, 6])
    sharded = open_tensorstore(tmp_path / "sharded", chunk_layout=layout)
    assert target_of(sharded).chunks == (4, 6)  # a whole shard is written
    assert target_of(whole[[3, 1, 2]]).chunks == (3, 3)
    assert target_of(ts.array(np.zeros((4, 4)))).chunks in ((4, 4), None)


def test_array_likes_are_targets() -> None:
    like = SimpleNamespace(shape=[2, 3], dtype="float32", chunks=NotImplemented)
    with pytest.raises(TypeError, match="a SimpleNamespace is not a target"):
        target_of(like)

    class Rows(SimpleNamespace):
        def __setitem__(self, index: Any, value: Any) -> None: ...

    target = target_of(Rows(shape=[2, 3], dtype="float32", chunks=((1, 1), (3,))))
    assert (target.shape, target.dtype, target.chunks) == ((2, 3), np.float32, None)
    assert target_of(Rows(shape=(4,), dtype="i4", chunks=[np.int64(2)])).chunks == (2,)


@pytest.mark.parametrize(
    "given",
    [None, 3, [1, 2], {"a": np.zeros(2)}, "a.npy", np.float32(1), Future()],
    ids=lambda given: type(given).__name__,
)
def test_other_values_are_no_target(given: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(given).__name__} is not a target.*TensorStore"):
        target_of(given)


def test_containers_of_targets_are_named(tmp_path: Path) -> None:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "t")}}
    opening = ts.open(spec, create=True, dtype=ts.float32, shape=(3,))
    with pytest.raises(TypeError, match=r"a Future is not a target; call \.result\(\) on it, and"):
        target_of(opening)
    assert target_of(opening.result()).shape == (3,)
    group = zarr.create_group(tmp_path / "z")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for given in (group, file):
            with pytest.raises(TypeError, match="by its name, or write a tree with gda.store"):
                target_of(given)
    with pytest.raises(TypeError, match="the target is a jax.Array, which is immutable"):
        target_of(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(2, 3\), and the target \(3, 2\); make them the"):
        check_fit(target_of(np.zeros((3, 2))), (2, 3), np.dtype(np.float64))


# What is read-only.


def test_read_only_arrays(tmp_path: Path) -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="the target, a ndarray, is read-only; pass one that"):
        target_of(array)
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ValueError, match="a memmap, is read-only; map the file with mode 'r.'"):
        target_of(np.load(tmp_path / "a.npy", mmap_mode="r"))
    with pytest.raises(ValueError, match="mode 'c', which does not write to the file"):
        target_of(np.load(tmp_path / "a.npy", mmap_mode="c"))


def test_read_only_stores(tmp_path: Path) -> None:
    zarr.create_array(store=tmp_path / "z", shape=(4,), dtype="f4")
    with pytest.raises(ValueError, match="the target, a Array, is read-only; open it with a mode"):
        target_of(zarr.open_array(tmp_path / "z", mode="r"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.zeros(3)
    with h5py.File(tmp_path / "a.h5", "r") as file:
        with pytest.raises(ValueError, match=r"a\.h5 is open with mode 'r'; open it with 'r\+'"):
            target_of(file["a"])
        data_set = file["a"]
    with pytest.raises(ValueError, match="of an HDF5 file that was closed; open it again"):
        target_of(data_set)
    open_tensorstore(tmp_path / "t")
    store = ts.open(
        {"driver": "zarr3", "kvstore": f"file://{tmp_path / 't'}/"}, read=True, write=False
    ).result()
    with pytest.raises(ValueError, match="a TensorStore, is read-only; open it with write=True"):
        target_of(store)


# Shapes and dtypes.


WIDER = [
    *(("float64", "float32"), ("float32", bfloat16), (">f4", "float32"), ("int64", "int32")),
    *(("int32", "uint16"), ("complex64", "float32"), ("float64", "int32"), ("uint8", "bool")),
    *(("float64", "uint32"), (bfloat16, ml_dtypes.float8_e4m3fn), ("int8", ml_dtypes.int4)),
    ("complex64", bfloat16),
]
NARROWER = [
    *(("float32", "float64"), (bfloat16, "float32"), ("float16", bfloat16), ("int32", "uint32")),
    *(("int32", "float32"), ("float32", "int32"), ("float64", "int64"), ("complex128", "uint64")),
    *(("float32", "complex64"), ("bool", "uint8"), ("object", "float32"), ("U20", "int32")),
    *(("m8[s]", "int32"), ("V2", bfloat16), ("int8", ml_dtypes.float8_e4m3fn)),
    (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3b11fnuz),
    (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
    (ml_dtypes.float8_e5m2, "int8"),
]


def test_dtypes_that_hold_all_values_and_others() -> None:
    for wide, narrow in WIDER:
        check_fit(target_of(np.zeros(3, wide)), (3,), np.dtype(narrow))
    for wide, narrow in NARROWER:
        with pytest.raises(ValueError, match="cannot hold all of its values; make a target of dty"):
            check_fit(target_of(np.zeros(3, wide)), (3,), np.dtype(narrow))


@pytest.fixture(params=["HDF5", "Zarr"])
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """What makes a target of the libraries that lack the numbers that NumPy has from elsewhere."""
    if request.param == "Zarr":
        yield lambda dtype: zarr.create_array(store={}, shape=(4, 2), dtype=dtype)
        return
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield lambda dtype: file.create_dataset(str(dtype), (4, 2), dtype)


@pytest.mark.parametrize(
    ("dtype", "wide", "bits"),
    [
        (ml_dtypes.bfloat16, "float32", "uint16"),
        (ml_dtypes.float8_e5m2, "float32", "uint8"),
        (ml_dtypes.int4, "int8", None),
        (ml_dtypes.uint4, "int8", None),
        (ml_dtypes.float4_e2m1fn, "float32", None),
    ],
)
def test_dtypes_missing_in_a_library_are_not_suggested(
    make_target: Any, dtype: Any, wide: str, bits: str | None
) -> None:
    dtype = np.dtype(dtype)
    with pytest.raises(ValueError, match=f"has no {dtype}, so make .* {wide}[, ]") as caught:
        check_fit(target_of(make_target("bool")), (4, 2), dtype)
    assert str(caught.value).count("write to a TensorStore, which has it") == 1
    assert ("view(" in str(caught.value)) == (bits is not None)
    check_fit(target_of(make_target(wide)), (4, 2), dtype)
    if bits is None:
        return
    assert f"or of {bits} for jax.numpy.asarray(array).view('{bits}')" in str(caught.value)
    data = np.arange(8).reshape(4, 2).astype(dtype)
    array = gda.GlobalArray.from_source(data, mesh_of({"x": 4, "y": 2}), P("x", "y"))
    target = make_target(bits)
    gda.store(jnp.asarray(array).view(bits), target)
    assert np.array_equal(target[...].view(dtype), data)


def test_raw_bytes_that_hdf5_makes_of_a_dtype_are_explained(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        target = target_of(file.create_dataset("a", (3,), bfloat16))
    with (
        h5py.File(tmp_path / "a.h5", "r+") as file,
        pytest.raises(ValueError, match=r"the target \|V2.*the library for HDF5 has no bfloat16"),
    ):
        check_fit(target._replace(handle=file["a"]), (3,), np.dtype(bfloat16))
    # For other dtypes the advice is to make a target of just that one.
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["b"] = np.zeros(3, np.float32)
        with pytest.raises(ValueError, match="make a target of dtype float64"):
            check_fit(target_of(file["b"]), (3,), np.dtype(np.float64))


SMALL = [
    *("bool", "int8", "uint8", "int16", "uint16", "float16", ml_dtypes.bfloat16, ml_dtypes.int4),
    *(ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ml_dtypes.float8_e4m3b11fnuz,
]
WIDE = [*SMALL, "int32", "uint32", "float32", "int64", "uint64", "float64", "complex64"]


@pytest.mark.parametrize("narrow", SMALL, ids=lambda dtype: np.dtype(dtype).name)
def test_every_value_of_a_dtype_that_is_held_comes_back(narrow: Any) -> None:
    narrow = np.dtype(narrow)
    bits = np.arange(2 ** (8 * narrow.itemsize)).astype(f"u{narrow.itemsize}")
    if narrow == np.bool_:
        bits = bits[:2]
    elif narrow.name.endswith("int4"):
        bits = bits[:16]
    values = bits.view(narrow)
    held = [wide for wide in map(np.dtype, WIDE) if holds(wide, narrow)]
    assert narrow in held
    for wide in held:
        with np.errstate(invalid="ignore"):
            back = values.astype(wide).real.astype(narrow)
            same = (back == values) | ((back != back) & (values != values))
        assert same.all(), f"{narrow} in {wide}"


def test_wide_integers_are_held_by_floats_that_count_as_far() -> None:
    limits = {"int16": 15, "uint16": 16, "int32": 31, "uint32": 32, "int64": 63, "uint64": 64}
    digits = {"float16": 11, "float32": 24, "float64": 53}
    for (narrow, bits), (wide, exact) in itertools.product(limits.items(), digits.items()):
        # An integer of so many bits, without its sign, is exact in a float of as many digits.
        assert holds(np.dtype(wide), np.dtype(narrow)) == (bits <= exact)

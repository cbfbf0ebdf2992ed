"""Facts about a target before anything is written to it."""

import sys
from pathlib import Path
from typing import Any

import h5py
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from gda.storage.casts import holds
from gda.storage.targets import check_fit, target_of

bfloat16 = np.dtype(jnp.bfloat16)


def open_tensorstore(path: Path, driver: str = "zarr3", **options: Any) -> ts.TensorStore:
    options = {"create": True, "dtype": ts.float32, "shape": [8, 6]} | options
    return ts.open({"driver": driver, "kvstore": f"file://{path}/"}, **options).result()


# Objects that are targets.


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


def test_other_values_are_no_target(tmp_path: Path) -> None:
    for given in (None, {"a": np.zeros(2)}, zarr.create_group(tmp_path / "z"), np.float32(1)):
        said = f"a {type(given).__name__} is not a target; a target has shape.*TensorStore"
        with pytest.raises(TypeError, match=said):
            target_of(given)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "t")}}
    opening = ts.open(spec, create=True, dtype=ts.float32, shape=(3,))
    with pytest.raises(TypeError, match=r"a Future is not a target; call \.result\(\) on it, and"):
        target_of(opening)
    assert target_of(opening.result()).shape == (3,)
    with pytest.raises(TypeError, match="the target is a jax.Array, which is immutable"):
        target_of(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(2, 3\), and the target \(3, 2\); make them the"):
        check_fit(target_of(np.zeros((3, 2))), (2, 3), np.dtype(np.float64))


# Targets that are read-only.


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
        with pytest.raises(ValueError, match="cannot hold all of its values; make a target of a d"):
            check_fit(target_of(np.zeros(3, wide)), (3,), np.dtype(narrow))


SMALL = [
    *("bool", "int8", "uint8", "int16", "uint16", "float16", ml_dtypes.bfloat16, ml_dtypes.int4),
    *(ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ml_dtypes.float8_e4m3b11fnuz,
]
WIDE = [*SMALL, "int32", "uint32", "float32", "int64", "uint64", "float64", "complex64"]


def test_every_value_of_a_dtype_that_is_held_comes_back() -> None:
    for narrow in map(np.dtype, SMALL):
        bits = np.arange(2 ** (8 * narrow.itemsize)).astype(f"u{narrow.itemsize}")
        values = bits[: {"bool": 2, "int4": 16, "uint4": 16}.get(narrow.name)].view(narrow)
        held = [wide for wide in map(np.dtype, WIDE) if holds(wide, narrow)]
        assert narrow in held
        for wide in held:
            with np.errstate(invalid="ignore"):
                back = values.astype(wide).real.astype(narrow)
                same = (back == values) | ((back != back) & (values != values))
            assert same.all(), f"{narrow} in {wide}"

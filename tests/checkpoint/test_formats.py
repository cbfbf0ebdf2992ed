"""Checkpoints on disk: every dtype, and files that other tools read."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from damaged import limit_sizes
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

from gda.checkpoint import Contents, inspect, restore, save
from gda.trees.records.recorded_tree import ArrayLeaf

KNOWN_TO_ZARR = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
OTHERS = sorted(
    name
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic) and jnp.issubdtype(kind, jnp.number)
)
# Those that TensorStore refuses: on disk they are integers of their size.
AS_INTEGERS = {
    *("int1", "uint1", "uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"),
}


def everything_of(name: str) -> np.ndarray:
    """Return elements of all bit patterns that a dtype has, NaNs and infinities among them."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if dtype.itemsize == 1 and name in OTHERS:
        # The bits above those of the element are 0, or in a signed integer its sign.
        bits = getattr(ml_dtypes, "iinfo" if "int" in name else "finfo")(dtype).bits
        patterns = np.arange(256) % 2**bits
        if name.startswith("int"):
            return (patterns - 2 ** (bits - 1)).astype(dtype)
        return patterns.astype(np.uint8).view(dtype)
    if name == "bool":
        return np.arange(256) % 3 == 0
    words = np.random.default_rng(0).integers(0, 256, 256 * dtype.itemsize, dtype=np.uint8)
    return words.view(dtype)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_sizes(monkeypatch, 256, 512, 1024)


def leaves_of(contents: Contents) -> dict[Any, ArrayLeaf]:
    """Return the arrays of a checkpoint by the first key of their paths."""
    return {leaf.path[0]: leaf for leaf in contents.leaves if isinstance(leaf, ArrayLeaf)}


# Dtypes.


def test_every_dtype_comes_back_bit_by_bit_and_other_tools_read_it(
    small: None, tmp_path: Path
) -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    tree: dict[str, Any] = {
        "cut": cut(batch(32, 16), mesh, P("x", "y")),
        "replicated": cut(batch(6, 30), mesh, P(None, "y")),
    }
    for name in [*KNOWN_TO_ZARR, *OTHERS]:
        tree[name] = everything_of(name)
        tree[f"small {name}"] = everything_of(name)[:7]
        tree[f"no {name}"] = everything_of(name)[:0]
    save(tmp_path, tree)
    restored = restore(tmp_path)
    for name, data in tree.items():
        assert restored[name].dtype == data.dtype
        assert restored[name].tobytes() == np.asarray(data).tobytes()

    manifest = inspect(tmp_path)
    known = {*KNOWN_TO_ZARR, *AS_INTEGERS}
    expected = sorted(each.name for each in manifest.arrays if each.dtype.name in known)
    assert 30 < len(expected) < len(manifest.arrays)
    for name, leaf in leaves_of(manifest).items():
        if leaf.array is None:
            assert leaf.nbytes < 256
            continue
        stored = manifest.arrays[leaf.array].name
        directory = f"{manifest.data}/{stored}"
        data = np.asarray(tree[name]).tobytes()
        spec = {"driver": "zarr3", "kvstore": f"file://{directory}/"}
        read = ts.open(spec).result().read().result()
        assert read.tobytes() == data
        assert (read.dtype == leaf.dtype) != (name in AS_INTEGERS)
        if stored in expected:
            array = zarr.open_array(directory, mode="r")
            assert array[...].tobytes() == data
            assert array.attrs.asdict() == ({"dtype": name} if name in AS_INTEGERS else {})


# Files.


def test_chunks_are_the_shards_or_equal_parts_of_them(small: None, tmp_path: Path) -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    tree = {"shards": cut(batch(32, 16), mesh, P("x", "y")), "parts": cut(batch(64, 16), mesh, P())}
    save(tmp_path, tree)
    contents = inspect(tmp_path)
    arrays = {n: contents.arrays[leaf.array or 0] for n, leaf in leaves_of(contents).items()}
    assert arrays["shards"].chunk_shape == (8, 8)
    assert arrays["parts"].chunk_shape == (8, 16)
    files = {path.name for path in Path(contents.data, arrays["shards"].name).iterdir()}
    assert files == {"zarr.json", *(f"c.{i}.{j}" for i in range(4) for j in range(2))}


def test_packed_leaves_are_read_with_zarr_and_the_manifest_alone(tmp_path: Path) -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    tree = {
        "whole": batch(3, 5),
        "cut": cut(batch(8, 6), mesh, P("x", "y")),
        "scalar": np.float32(2.5),
        "integers": np.arange(7),
    }
    save(tmp_path, tree)
    seal, body = (tmp_path / "manifest.json").read_bytes().split(b"\n", 1)
    assert json.loads(seal)["nbytes"] == len(body)
    manifest = json.loads(body)
    for leaf in manifest["leaves"]:
        out = np.empty(leaf["shape"], leaf["dtype"])
        for number, offset, start, shape in leaf["pieces"]:
            name = manifest["arrays"][number]["name"]
            packed = zarr.open_array(tmp_path / manifest["data"] / name, mode="r")
            part = np.asarray(packed[offset : offset + math.prod(shape)]).reshape(shape)
            index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            out[index] = part
        np.testing.assert_array_equal(out, tree[leaf["path"][0]])


def test_a_thousand_small_leaves_are_a_few_files(tmp_path: Path) -> None:
    mesh = mesh_of({"x": 8})
    parts = [cut(batch(8, 8) + number, mesh, P("x")) for number in range(20)]
    tree = [
        {"g": parts[number % 20], "h": np.full((4, 4), number, np.float32), "i": np.int32(number)}
        for number in range(350)
    ]
    save(tmp_path, tree)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) < 12
    restored = restore(
        tmp_path,
        mesh=mesh,
        specs=lambda path, leaf: P(None, "x") if leaf.shape == (8, 8) else P(),
    )
    for number, leaves in enumerate(restored):
        np.testing.assert_array_equal(leaves["g"], np.asarray(parts[number % 20]))
        np.testing.assert_array_equal(leaves["h"], tree[number]["h"])
        assert leaves["i"] == number
    assert inspect(tmp_path).nbytes == 20 * 256 + 350 * (16 * 4 + 4)  # tied arrays once


def test_names_on_disk_have_nothing_odd(small: None, tmp_path: Path) -> None:
    keys = ["../../x", "a/b", "", ".", "..", "ключ", "k" * 500, "con\0", "\ud800", "a b\nc"]
    tree = {key: batch(64) + number for number, key in enumerate(keys)}
    save(tmp_path / "run", tree)
    names = [array.name for array in inspect(tmp_path / "run").arrays]
    assert len(names) == len(keys)
    for name in names:
        assert set(name) <= set("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-.")
        assert not name.startswith(".")
        assert len(name) < 100
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    restored = restore(tmp_path / "run")
    for key, given in tree.items():
        np.testing.assert_array_equal(restored[key], given)

"""Every bit pattern of every narrow number stays, those of NaNs that XLA changes too.

Of the finite numbers of 16 bits it is a sample: programs for blocks of 64 KiB take long to compile.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import cut, is_right, mesh_of, ordered_mesh

import gda
from gda.checkpoint import diff, restore, save, save_async, verify
from gda.storage import open_safetensors, save_safetensors

# XLA on CPU changes NaNs of bfloat16, float8_e4m3, float8_e3m4 and float8_e5m2.
RARE = [
    *("float16", "float8_e3m4", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "uint2"),
    *("float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4", "uint4", "int8"),
]
DTYPES = [
    *("bfloat16", "float8_e4m3", "float4_e2m1fn"),
    *(pytest.param(name, marks=pytest.mark.torture) for name in RARE),
]
IN_SAFETENSORS = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8"}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.fixture(params=DTYPES)
def data(request: pytest.FixtureRequest) -> np.ndarray:
    """The bit patterns of a dtype, in two dimensions."""
    name = request.param
    dtype = dtype_of(name)
    if "int" in name:
        limits = ml_dtypes.iinfo(dtype)
        values = np.arange(limits.min, limits.max + 1).astype(dtype)
    else:
        bits = ml_dtypes.finfo(dtype).bits
        values = np.arange(1 << bits).astype(f"u{dtype.itemsize}").view(dtype)
        if bits == 16:
            with np.errstate(invalid="ignore"):  # of NaNs that signal
                values = values[(np.arange(1 << bits) % 64 == 0) | ~np.isfinite(values)]
    # Of each part of three, as of the whole, the rows are even.
    more = max(-(-values.size // 16) - 16, 0)
    return np.resize(values, (16 + 24 * -(-more // 24), 16))


@pytest.fixture
def uneven() -> Mesh:
    """A mesh that divides no dimension of the data."""
    return mesh_of({"x": 3, "y": 2})


def bits_of(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def padded(data: np.ndarray, mesh: Mesh, spec: P) -> gda.PaddedArray:
    return gda.PaddedArray.from_source(data, mesh, spec)


def test_values_without_padding_keep_bits(data: np.ndarray, uneven: Mesh) -> None:
    for spec in (P("x"), P("x", "y")):
        p = padded(data, uneven, spec)
        assert is_right(p, data)
        assert p.fingerprint() == gda.fingerprint(data)
        for value in (np.asarray(p), p.gather(), gda.to_numpy({"p": p})["p"]):
            assert bits_of(value) == bits_of(data)


def test_moves_keep_bits(data: np.ndarray, uneven: Mesh) -> None:
    even, few = mesh_of({"x": 4, "y": 2}), ordered_mesh([6, 1, 0], {"z": 3})
    g, p = cut(data, even, P("x", "y")), padded(data, uneven, P("x"))
    for moved in (
        g.reshard(P("y")),
        g.reshard(few, P()),
        g.reshard(SingleDeviceSharding(jax.devices()[5])),
        gda.constrain(g.array, P(None, "x")),
        gda.constrain(jnp.asarray(data), P("x"), mesh=even),
        p.reshard(few, P("z"), donate=True),
        *gda.reshard_tree([g, g.array], few, P("z"), pad=True),
    ):
        shards = moved.addressable_shards if isinstance(moved, jax.Array) else moved.local_shards
        assert all(bits_of(shard.data) == bits_of(data[shard.index]) for shard in shards)


def test_copies_keep_bits(data: np.ndarray, uneven: Mesh) -> None:
    p = padded(data, uneven, P("x"))
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert is_right(other, data)


def test_arrays_of_jax_arrays_keep_bits(data: np.ndarray, uneven: Mesh) -> None:
    make, spec, put = gda.PaddedArray, P("x"), jax.device_put
    over, pair = (NamedSharding(mesh_of({"x": n}), spec) for n in (4, 2))
    shape, one_device = data.shape, uneven.devices.flat[1]
    for p in (
        make.from_source(put(data, one_device), uneven, spec),
        make.from_source(put(data, over), uneven, spec),
        make.from_callback(shape, uneven, spec, lambda index: put(data[index]), fill=1),
        make.from_callback(shape, uneven, spec, lambda index: put(data[index], pair)),
        gda.load_tree({"w": put(data)}, uneven, spec, pad=True)["w"],
    ):
        assert is_right(p, data)


def test_files_keep_bits(data: np.ndarray, uneven: Mesh, tmp_path: Path) -> None:
    p = padded(data, uneven, P("x", "y"))
    tree = {"p": p, "g": cut(data, mesh_of({"x": 2}), P("x"))}
    save(tmp_path / "a", tree)
    save_async(tmp_path / "b", tree).result()
    for path in (tmp_path / "a", tmp_path / "b"):
        verify(path)
        assert not diff(path, tree)
        restored = restore(path, mesh=mesh_of({"x": 5}), specs=P("x"), pad=True)
        assert all(bits_of(np.asarray(leaf)) == bits_of(data) for leaf in restored.values())
    target = np.zeros_like(data)
    gda.store(p, target)
    assert bits_of(target) == bits_of(data)
    if data.dtype.name in IN_SAFETENSORS:
        save_safetensors(tmp_path / "model.safetensors", tree)
        file = open_safetensors(tmp_path / "model.safetensors")
        assert all(bits_of(file[name][:]) == bits_of(data) for name in tree)


@pytest.mark.processes(2, devices=4)
def test_bits_between_processes_stay() -> None:
    data = (np.arange(9 * 256, dtype=np.uint16) * 113).view(dtype_of("bfloat16")).reshape(9, 256)
    p = padded(data, ordered_mesh([0, 4, 1, 5, 2, 6, 3, 7], {"x": 4, "y": 2}), P("x", "y"))
    assert is_right(p, data)
    assert p.fingerprint() == gda.fingerprint(data)
    assert bits_of(p.gather()) == bits_of(data)
    assert is_right(p.reshard(ordered_mesh([7, 2, 3], {"z": 3}), P(None, "z")), data)

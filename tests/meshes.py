"""Meshes over virtual devices, common arrays over them, and values of every dtype."""

import math
import tempfile
from collections.abc import Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gda
from gda.multihost.allgather import all_gather

# Of the devices of all processes. With 2 processes, 0 to 3 belong to process 0.
ORDERS = {
    "contiguous": [0, 1, 2, 3, 4, 5, 6, 7],
    "interleaved": [0, 4, 1, 5, 2, 6, 3, 7],
    "reversed": [7, 6, 5, 4, 3, 2, 1, 0],
    "shuffled": [5, 2, 7, 0, 3, 6, 1, 4],
}


def mesh_of(shape: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of the first devices, in order."""
    return ordered_mesh(range(int(np.prod(list(shape.values())))), shape, kind)


def ordered_mesh(
    order: Iterable[int], shape: dict[str, int], kind: AxisType = AxisType.Auto
) -> Mesh:
    """Return a mesh of the devices of these numbers, in this order."""
    devices = np.array(jax.devices())[list(order)].reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))


def batch(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """Return an array in which every element is another."""
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def cut(data: np.ndarray, mesh: Mesh, spec: Any) -> gda.GlobalArray:
    """Return the array of this data, which every process has whole."""
    return gda.GlobalArray.from_callback(
        data.shape, mesh, spec, lambda index: data[index], dtype=data.dtype
    )


def holding(content: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Return a container of anything, as a function of trees makes it; padded if of a shape."""
    array = jax.ShapeDtypeStruct((), np.float32)
    one = gda.GlobalArray.from_array(array) if shape is None else gda.PaddedArray(array, shape)
    return jax.tree.map(lambda _: content, one)


def abstract(shape: tuple[int, ...], mesh: Mesh, *spec: Any, dtype: Any = np.float32) -> Any:
    """Return a shape on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def plain(tree: Any) -> Any:
    """Return the tree with the arrays inside the containers."""
    return gda.to_jax(tree)


def is_right(array: Any, data: np.ndarray) -> bool:
    """Return whether the shards of this process have the bits of the data."""
    return all(
        np.ascontiguousarray(shard.data).tobytes() == data[shard.index].tobytes()
        for shard in array.local_shards
    )


def total(values: Any) -> np.ndarray:
    """Return the sum over all processes."""
    mine = np.ascontiguousarray(values, np.int64)
    everybody = tuple(range(jax.process_count()))
    received = all_gather(mine.reshape(-1).view(np.uint8), everybody)
    return received.view(np.int64).sum(0).reshape(mine.shape)


def one_folder() -> str:
    """Return a new folder, the same in all processes; communicates."""
    mine = tempfile.mkdtemp() if jax.process_index() == 0 else ""
    data = np.frombuffer(mine.encode().ljust(200), np.uint8)
    return all_gather(data, tuple(range(jax.process_count())))[0].tobytes().decode().strip()


def quick_key() -> jax.Array:
    """Return a key whose programs compile in a quarter of the time."""
    return jax.random.key(0, impl="unsafe_rbg")


# Values of every dtype with every pattern of bits.

NARROW_FLOATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16)
DTYPES = [
    np.dtype(each)
    for each in (
        *(np.bool_, ml_dtypes.int4, ml_dtypes.uint4, np.int8, np.uint16, np.int32),
        *(*NARROW_FLOATS, np.float32, np.complex64),
    )
]


def random_bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of random bits, among which are NaNs of all kinds if the dtype has them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    if dtype.kind == "b":
        return rng.integers(2, size=shape).astype(bool)
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        low = -8 if dtype == ml_dtypes.int4 else 0
        return rng.integers(low, low + 16, shape).astype(dtype)
    values = rng.integers(256, size=(math.prod(shape), dtype.itemsize), dtype=np.uint8)
    return values.view(dtype).reshape(shape)


def rare_floats(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return float32 numbers that computing changes: denormals, NaNs with any payload, and -0.0."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(2**32, size=shape, dtype=np.uint32)
    kind = rng.integers(4, size=shape)
    denormals, nans, zero = bits & 0x807FFFFF, bits | 0x7F800001, np.uint32(1 << 31)
    chosen = np.select(
        [kind == 0, kind == 1, kind == 2], [denormals, nans, nans & 0xFFBFFFFF], zero
    )
    return chosen.astype(np.uint32).view(np.float32)


def normal(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return an array of a normal distribution, as weights have it."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()

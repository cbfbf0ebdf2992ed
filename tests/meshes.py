"""Meshes over virtual devices, and common arrays over them."""

import tempfile
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

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

"""Using a container: jitted calls, reading its shards, importing it."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of, unseen_mesh, unseen_shape
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, Floor, Within, Work

CALLS = 200  # of a jitted function, in one sample
_NODES = "dataclasses with an array each, registered with JAX"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@dataclass
class _Node:
    array: Any


def jitted(
    inputs: int,
    jit: Callable[..., Any] = jax.jit,
    *,
    is_padded: bool = False,
    has_nodes: bool = False,
) -> list[Side]:
    sharding = NamedSharding(mesh_of((1,), ("x",)), PartitionSpec())
    raw = [jax.device_put(np.ones((8, 8), np.float32), sharding) for _ in range(inputs)]
    wrapped: list[Any] = [gda.GlobalArray.from_array(array) for array in raw]
    rivals: list[Any] = raw
    if is_padded:
        wrapped, rivals = [gda.PaddedArray(array, (8, 7)) for array in raw], wrapped

    def side(jit: Callable[..., Any], arrays: list[Any]) -> Side:
        # A function of its own, so that neither side finds the other's compiled ones. For one
        # input, f(x); for more, one tree of all.
        function = jit(lambda tree: functools.reduce(operator.add, jax.tree.leaves(tree), 1.0))
        argument = arrays[0] if inputs == 1 else arrays

        def run() -> Any:
            for _ in range(CALLS - 1):
                function(argument)
            return function(argument).block_until_ready()

        return Side(run, calls=CALLS)

    sides = [side(jit, wrapped), side(jax.jit, rivals)]
    return [*sides, side(jax.jit, [_Node(array) for array in raw])] if has_nodes else sides


Read = Callable[[Any], list[Any]]


def described(array: Any) -> list[Any]:
    return [(s.device, s.index, s.replica_id) for s in array.addressable_shards]


def described_with_data(array: Any) -> list[Any]:
    return [(s.device, s.index, s.replica_id, s.data) for s in array.addressable_shards]


def only_data(array: Any) -> list[Any]:
    return [s.data for s in array.addressable_shards]


class _Record:
    """A plain object for a shard."""

    __slots__ = ("device", "index", "replica_id")

    def __init__(self, device: Any, index: Any, replica_id: int) -> None:
        self.device, self.index, self.replica_id = device, index, replica_id


def _only_objects(array: Any) -> list[Any]:
    """Make an object for each shard of a mesh of (8, 8) in plain Python, and read it."""
    high, wide = array.shape[0] // 8, array.shape[1] // 8
    records = []
    for position, device in enumerate(array.sharding.mesh.devices.flat):
        i, j = divmod(position, 8)
        index = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
        records.append(_Record(device, index, 0))
    return [(s.device, s.index, s.replica_id) for s in records]


def _shards(read: Read, less: Read) -> list[Side]:
    """Return the sides that read what ``read`` reads of all shards, and the way that does less."""
    sizes, devices = (8, 8), jax.devices()[:64]
    calls = 5  # arrays in one sample

    def cold_array() -> jax.Array:
        # Not from a callback, which would fill JAX's cache of indices.
        shape, sharding = unseen_shape(sizes), NamedSharding(*unseen_mesh(sizes))
        block = np.zeros((shape[0] // sizes[0], shape[1] // sizes[1]), np.float32)
        buffers: Any = jax.device_put([block] * len(devices), devices)
        array = jax.make_array_from_single_device_arrays(shape, sharding, buffers)
        return array.block_until_ready()  # or JAX's threads work on while the clock runs

    def side(read: Read) -> Side:
        def run(arrays: list[jax.Array]) -> list[list[Any]]:
            return [read(array) for array in arrays]

        return Side(run, lambda: ([cold_array() for _ in range(calls)],), calls=calls)

    def ours(array: jax.Array) -> list[Any]:
        return read(gda.GlobalArray.from_array(array))

    array = cold_array()
    assert described(gda.GlobalArray.from_array(array)) == described(array)
    assert _only_objects(array) == described(array)
    return [side(each) for each in (ours, read, less)]


_IMPORT = """
import time
import jax
start = time.perf_counter()
import gda
{use}
print(time.perf_counter() - start)
"""
_JAX_ALONE = (
    "import time; start = time.perf_counter(); import jax; print(time.perf_counter() - start)"
)


def _imported(use: str) -> list[Side]:
    def seconds(code: str) -> float:
        # With bytecode kept, as where gda is installed; the round before the first makes it.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return float(done.stdout)

    return [
        Side(partial(seconds, _IMPORT.format(use=use)), times_itself=True),
        Side(partial(seconds, _JAX_ALONE), times_itself=True),
    ]


_OBJECTS = "64 objects with slices made in a loop of plain Python"
_SPLITTING = "s.data of addressable_shards, no index, no replica id"

WORKS = [
    Work(
        "a jitted call with one GlobalArray as input, one device",
        partial(jitted, 1),
        {"the raw array": AtMost(1.06)},
        seconds=2,
    ),
    Work(
        "a jitted call with 100 GlobalArrays as input, one device",
        partial(jitted, 100, has_nodes=True),
        {"the raw arrays": AtMost(1.1), _NODES: None},
        floor=Floor("JAX opens a node for each array.", (_NODES,), 0.95),
        seconds=2,
    ),
    *[
        Work(
            f"a jitted call with {name} as input, one device",
            partial(jitted, inputs, is_padded=True),
            {"GlobalArray": AtMost(most)},
            seconds=2,
        )
        for name, inputs, most in [("one PaddedArray", 1, 1.15), ("100 PaddedArrays", 100, 1.25)]
    ],
    Work(
        "device, index and replica id of all local shards, cold, 64 devices",
        partial(_shards, described, _only_objects),
        {"addressable_shards": Faster(15), _OBJECTS: None},
        devices=64,
        floor=Floor("The answer is 64 objects.", (_OBJECTS,)),
        seconds=2,
    ),
    Work(
        "the same with data",
        partial(_shards, described_with_data, only_data),
        {"addressable_shards": Faster(1.5), _SPLITTING: None},
        devices=64,
        floor=Floor("JAX splits the array into shards, and gda waits for it.", (_SPLITTING,)),
        seconds=2,
    ),
    Work(
        "import gda, after import jax",
        partial(_imported, ""),
        {"import jax": None},
        Within(20),
    ),
    Work(
        "import gda and the first use of gda.GlobalArray and gda.jit, after import jax",
        partial(_imported, "gda.GlobalArray; gda.jit"),
        {"import jax": None},
        Within(20),
    ),
    # For information.
    Work(
        "gda.jit: GlobalArray in and out, one device",
        partial(jitted, 1, gda.jit),
        {"jax.jit of the raw array": None},
    ),
]

"""Reading from a store that takes its time: many requests at once, and each block once.

The store is a callback that sleeps as long as a request to an object store in the same region
takes; the blocks are small, so that it is the waiting that counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.work import Faster, Work

SECONDS_PER_REQUEST = 0.02
DEVICES = 64


def _slow_store(blocks: int, workers: int) -> Sequence[Side]:
    """Return gda with so many workers, and JAX, which reads one block for every device."""
    mesh = mesh_of((blocks, DEVICES // blocks), ("data", "replica"))
    spec = PartitionSpec("data")
    data = np.arange(blocks * 1024, dtype=np.float32).reshape(blocks, 1024)

    def read(index: Any) -> np.ndarray[Any, Any]:
        time.sleep(SECONDS_PER_REQUEST)
        return data[index]

    def ours() -> jax.Array:
        built = gda.GlobalArray.from_callback(data.shape, mesh, spec, read, max_workers=workers)
        return built.block_until_ready().array

    def rival() -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(data.shape, sharding, read).block_until_ready()

    assert np.array_equal(np.asarray(ours()), np.asarray(rival()))
    return [Side(ours), Side(rival)]


WORKS = [
    Work(
        f"read {blocks} blocks{replicas} from a store with 20 ms per request, {workers} workers, "
        f"{DEVICES} devices",
        partial(_slow_store, blocks, workers),
        {"make_array_from_callback, same callback": Faster(times)},
        devices=DEVICES,
    )
    for blocks, replicas, workers, times in [
        (64, "", 16, 14),
        (64, "", 64, 40),
        (8, " with 8 replicas each", 8, 50),
    ]
]

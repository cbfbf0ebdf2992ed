"""Reading from a store that takes its time: many requests at once, and each block once.

The store is a callback that sleeps as long as a request to an object store in the same region
takes; the blocks are small, so that it is the waiting that counts. Several processes are real, and
share this machine's cores. Each times its own part; the slowest counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.work import Faster, Work
from gda.testing.pool import Pool

SECONDS_PER_REQUEST = 0.02
DEVICES = 64
PROCESSES = 4


def _slow_store(blocks: int, workers: int) -> Sequence[Side]:
    """Return gda with so many workers, JAX, which reads a block for every device, and a pool."""
    mesh = mesh_of((blocks, DEVICES // blocks), ("data", "replica"))
    spec = PartitionSpec("data")
    data = np.arange(blocks * 1024, dtype=np.float32).reshape(blocks, 1024)

    def read(index: Any) -> np.ndarray[Any, Any]:
        time.sleep(SECONDS_PER_REQUEST)
        return data[index]

    def ours() -> jax.Array:
        built = gda.GlobalArray.from_callback(data.shape, mesh, spec, read, max_workers=workers)
        return built.block_until_ready().array

    sharding = NamedSharding(mesh, spec)

    def rival() -> jax.Array:
        return jax.make_array_from_callback(data.shape, sharding, read).block_until_ready()

    def pooled() -> jax.Array:
        indices = sharding.devices_indices_map(data.shape).values()
        distinct = {index[0].start: index for index in indices if index}
        with ThreadPoolExecutor(workers) as pool:
            known = dict(zip(distinct, pool.map(read, distinct.values()), strict=True))

        def block(index: Any) -> np.ndarray[Any, Any]:
            return known[index[0].start]

        return jax.make_array_from_callback(data.shape, sharding, block).block_until_ready()

    for each in (rival, pooled):
        assert np.array_equal(np.asarray(ours()), np.asarray(each()))
    return [Side(ours), Side(rival), Side(pooled)]


# In several processes, which read what they share once, or each for itself.


class _Store:
    """A source whose reads take as long as a request."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        time.sleep(SECONDS_PER_REQUEST)
        return self.data[index]


@cache
def _pool() -> Pool:
    return Pool(PROCESSES, devices=8 // PROCESSES)


def seconds_from_a_slow_store(workers: int | None, once: bool) -> float:
    sources = [_Store(np.full((64, 256), n, np.float32)) for n in range(64)]
    mesh, spec = mesh_of((8,), ("replica",)), PartitionSpec()
    start = time.perf_counter()
    jax.block_until_ready(gda.load_tree(sources, mesh, spec, read_once=once, max_workers=workers))
    return time.perf_counter() - start


def _from_slow_store(workers: int | None) -> Sequence[Side]:
    pool = _pool()
    return [
        Side(
            lambda once=once: max(pool.run(seconds_from_a_slow_store, workers, once)),
            times_itself=True,
        )
        for once in (True, False)
    ]


_POOLED = "make_array_from_callback of blocks that a pool of as many threads has read"
_ALONE, _ONCE = "each process reads for itself", "read_once=True"

WORKS = [
    *[
        Work(
            f"read {blocks} blocks{replicas} from a store with 20 ms per request, {workers} "
            f"workers, {DEVICES} devices",
            partial(_slow_store, blocks, workers),
            {"make_array_from_callback, same callback": Faster(times), _POOLED: None},
            devices=DEVICES,
            seconds=3,
        )
        for blocks, replicas, workers, times in [
            (64, "", 16, 14),
            (64, "", 64, 40),
            (8, " with 8 replicas each", 8, 50),
        ]
    ],
    *[
        Work(
            f"load 64 replicated arrays from a store with 20 ms per request, {reads} at a time, "
            f"{PROCESSES} processes",
            partial(_from_slow_store, workers),
            {_ALONE: Faster(3)},
            ours=_ONCE,
            seconds=seconds,
        )
        for reads, workers, seconds in [("one", None, 8), ("8", 8, 2)]
    ],
]

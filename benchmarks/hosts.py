"""Many processes: a batch of every host to one array per leaf, and views of hosts that are not there.

The processes are real, on this machine, and share its cores. Each times its own steps; the slowest
counts, as it does in a training step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Within, Work
from gda.testing.pool import Pool

DEVICES = 8  # in all processes together
STEPS = 20  # in one sample
DATA = PartitionSpec("data")


# In every process.


@cache
def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


@cache
def _batch() -> dict[str, np.ndarray[Any, Any]]:
    """Return what a host reads for a step: images, tokens and what belongs to them, 3.3 MiB."""
    rng = np.random.default_rng(jax.process_index())
    shapes = {
        "image": ((64, 64, 64, 3), np.uint8),
        "mask": ((64, 64, 64), np.bool_),
        "tokens": ((64, 1024), np.int32),
        "targets": ((64, 1024), np.int32),
        "weights": ((64, 1024), np.float32),
        "features": ((64, 5120), np.float32),
        "label": ((64,), np.int32),
        "id": ((64,), np.uint32),
    }
    return {name: (rng.random(shape) * 2).astype(kind) for name, (shape, kind) in shapes.items()}


def gda_step() -> Any:
    mesh = _mesh()
    return {
        name: gda.GlobalArray.from_process_local(leaf, mesh, DATA)
        for name, leaf in _batch().items()
    }


def jax_step() -> Any:
    sharding = NamedSharding(_mesh(), DATA)
    return {
        name: jax.make_array_from_process_local_data(sharding, leaf)
        for name, leaf in _batch().items()
    }


def multihost_step() -> Any:
    return multihost_utils.host_local_array_to_global_array(_batch(), _mesh(), DATA)


def seconds(step: Callable[[], Any]) -> float:
    """Return how long this process takes for some steps, each of which waits for its arrays."""
    with gda.checking_agreement(False):  # the pool switches it on; a training run would not
        start = time.perf_counter()
        for _ in range(STEPS):
            jax.block_until_ready(step())
        return time.perf_counter() - start


def same_values() -> bool:
    ours, theirs, others = gda_step(), jax_step(), multihost_step()
    return all(
        np.array_equal(a.data, b.data) and np.array_equal(a.data, c.data)
        for name in ours
        for a, b, c in zip(
            ours[name].addressable_shards,
            theirs[name].addressable_shards,
            others[name].addressable_shards,
            strict=True,
        )
    )


# Here.


@cache
def _pool(processes: int) -> Pool:
    return Pool(processes, devices=DEVICES // processes)


def _batches(processes: int, rival: Callable[[], Any]) -> Sequence[Side]:
    pool = _pool(processes)
    assert all(pool.run(same_values))

    def side(step: Callable[[], Any]) -> Side:
        return Side(lambda: max(pool.run(seconds, step)), calls=STEPS, times_itself=True)

    return [side(gda_step), side(rival)]


def _views(spec: tuple[str, ...]) -> Sequence[Side]:
    processes, devices = 10_000, 8
    process_of = np.arange(processes * devices) // devices
    columns = itertools.count(16)  # a shape that was not seen before, so nothing is known of it

    def ask() -> Any:
        mesh_shape = {"data": processes, "model": devices}
        shape = (processes * devices, next(columns) * devices)
        grid = gda.ShardGrid(shape, mesh_shape, spec, process_of=process_of)
        for process in range(0, processes, 10):
            view = grid.view(process)
            view.indices, view.rows, view.nbytes(4), view.written_blocks()  # noqa: B018
        return None

    return [Side(ask, calls=processes // 10)]


WORKS = [
    *[
        Work(
            f"from_process_local of a batch of 8 leaves, a step, {processes} "
            f"process{'es' if processes > 1 else ''}",
            partial(_batches, processes, rival),
            name,
            AtMost(1.05),
            rounds=40,
        )
        for processes in (1, 2, 4)
        for rival, name in [
            (jax_step, "jax.make_array_from_process_local_data"),
            (multihost_step, "multihost_utils.host_local_array_to_global_array"),
        ]
    ],
    *[
        Work(
            "the view of one of 10,000 processes of 8 devices: indices, rows, bytes and what it "
            f"writes, P({', '.join(map(repr, spec))})",
            partial(_views, spec),
            target=Within(1),
            rounds=10,
        )
        for spec in [("data",), ("model",), ()]
    ],
]

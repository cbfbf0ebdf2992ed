"""Many hosts: the batch of each to one array per leaf, and views of hosts that are not there.

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
from benchmarks.work import AtMost, Floor, Within, Work
from gda.testing.pool import Pool

DEVICES = 8  # in all processes together
STEPS = 20  # in one sample
DATA = PartitionSpec("data")


# In every process.


@cache
def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


@cache
def _batch(is_aligned: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Return what a host reads for a step: images, tokens and what belongs to them, 3.3 MiB.

    Where its memory begins decides: JAX takes over what is aligned to 64 bytes, so that writing to
    it later changes the array, and copies the rest. NumPy aligns to 16.
    """
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
    batch = {}
    for name, (shape, kind) in shapes.items():
        size = int(np.prod(shape))
        start = 0 if is_aligned else 16 // np.dtype(kind).itemsize
        batch[name] = gda.aligned_empty(start + size, kind)[start:].reshape(shape)
        batch[name][...] = rng.random(shape) * 2
    return batch


def gda_each(is_aligned: bool) -> Any:
    mesh = _mesh()
    # JAX never copies what is aligned; without a copy it is the caller's promise here too.
    copy = False if is_aligned else None
    return {
        name: gda.GlobalArray.from_process_local(leaf, mesh, DATA, copy=copy)
        for name, leaf in _batch(is_aligned).items()
    }


def gda_each_copied(is_aligned: bool) -> Any:
    mesh = _mesh()
    return {
        name: gda.GlobalArray.from_process_local(leaf, mesh, DATA)
        for name, leaf in _batch(is_aligned).items()
    }


def gda_tree(is_aligned: bool) -> Any:
    return gda.compat.host_local_array_to_global_array(_batch(is_aligned), _mesh(), DATA)


def jax_each(is_aligned: bool) -> Any:
    sharding = NamedSharding(_mesh(), DATA)
    return {
        name: jax.make_array_from_process_local_data(sharding, leaf)
        for name, leaf in _batch(is_aligned).items()
    }


def multihost_tree(is_aligned: bool) -> Any:
    return multihost_utils.host_local_array_to_global_array(_batch(is_aligned), _mesh(), DATA)


def public_each(is_aligned: bool) -> Any:
    """Place blocks that are known as the fastest public function of JAX does."""
    sharding = NamedSharding(_mesh(), DATA)

    def place(leaf: np.ndarray[Any, Any]) -> jax.Array:
        start = len(leaf) * jax.process_index()
        shape = (len(leaf) * jax.process_count(), *leaf.shape[1:])

        def block(index: Any) -> np.ndarray[Any, Any]:
            return leaf[index[0].start - start : index[0].stop - start]

        return jax.make_array_from_callback(shape, sharding, block)

    return {name: place(leaf) for name, leaf in _batch(is_aligned).items()}


def seconds(step: Callable[[bool], Any], is_aligned: bool) -> float:
    """Return how long this process takes for some steps, each of which waits for its arrays."""
    with gda.checking_agreement(False):  # the pool switches it on; a training run would not
        start = time.perf_counter()
        for _ in range(STEPS):
            jax.block_until_ready(step(is_aligned))
        return time.perf_counter() - start


def same_values(ours: Callable[[bool], Any], rival: Callable[[bool], Any], aligned: bool) -> bool:
    a, b = ours(aligned), rival(aligned)
    return all(
        np.array_equal(x.data, y.data)
        for name in a
        for x, y in zip(a[name].addressable_shards, b[name].addressable_shards, strict=True)
    )


# Here.


@cache
def _pool(processes: int) -> Pool:
    return Pool(processes, devices=DEVICES // processes)


def _batches(
    processes: int,
    ours: Callable[[bool], Any],
    *rivals: Callable[[bool], Any],
    is_aligned: bool = False,
) -> Sequence[Side]:
    pool = _pool(processes)
    for rival in rivals:
        assert all(pool.run(same_values, ours, rival, is_aligned))

    def side(step: Callable[[bool], Any]) -> Side:
        return Side(
            lambda: max(pool.run(seconds, step, is_aligned)), calls=STEPS, times_itself=True
        )

    return [side(step) for step in (ours, *rivals)]


def _views(spec: tuple[str, ...]) -> Sequence[Side]:
    processes, devices = 10_000, 8
    process_of = np.arange(processes * devices) // devices
    columns = itertools.count(16)  # a shape that was not seen before, over a mesh that was

    def ask() -> list[Any]:
        mesh_shape = {"data": processes, "model": devices}
        shape = (processes * devices, next(columns) * devices)
        grid = gda.ShardGrid(shape, mesh_shape, spec, process_of=process_of)
        views = map(grid.view, range(0, processes, 10))
        return [(v.indices, v.rows, v.size, v.written_blocks()) for v in views]

    return [Side(ask, calls=processes // 10)]


_MAPL = "jax.make_array_from_process_local_data"
_MULTIHOST = "multihost_utils.host_local_array_to_global_array"
_PUBLIC = "make_array_from_callback of blocks that are known"
_FLOOR = Floor("JAX must place each block.")


def _in(processes: int) -> str:
    return f"a step, {processes} process{'es' if processes > 1 else ''}"


WORKS = [
    *[
        Work(
            f"from_process_local of a batch of 8 leaves, {_in(processes)}",
            partial(_batches, processes, gda_each, jax_each, multihost_tree, public_each),
            {_MAPL: AtMost(1.05), _MULTIHOST: AtMost(1.05), _PUBLIC: None},
            floor=_FLOOR,
            seconds=2,
        )
        for processes in (1, 4)
    ],
    *[
        Work(
            f"host_local_array_to_global_array of the same batch, {_in(processes)}",
            partial(_batches, processes, gda_tree, multihost_tree, public_each),
            {_MULTIHOST: AtMost(1.05), _PUBLIC: None},
            floor=_FLOOR,
            seconds=2,
        )
        for processes in (1, 4)
    ],
    *[
        Work(
            f"from_process_local with copy=False of a batch in aligned memory, {_in(processes)}",
            partial(
                _batches, processes, gda_each, multihost_tree, gda_each_copied, is_aligned=True
            ),
            {_MULTIHOST: AtMost(1.05), "from_process_local, which copies": None},
            seconds=2,
        )
        for processes in (1, 4)
    ],
    *[
        Work(
            "the view of one of 10,000 processes of 8 devices: indices, rows, bytes and what it "
            f"writes, P({', '.join(map(repr, spec))})",
            partial(_views, spec),
            limit=Within(1),
        )
        for spec in [("data",), ("model",), ()]
    ],
]

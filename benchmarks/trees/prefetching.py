"""A training loop whose batches take time to load, in one process.

The step only waits, as a host does whose accelerators compute. The first batch is there before the
clock starts, for every side: a loop is many steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Full, Queue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.layout.index_math import mesh_of
from benchmarks.pairs import Side
from benchmarks.work import Faster, Floor, Within, Work

STEPS = 30  # in one sample
STEP_SECONDS, LOADING_SECONDS = 0.02, 0.015
DATA = PartitionSpec("data")

Batch = dict[str, Any]
Loader = Callable[[], Iterator[Batch]]


def waiting() -> Iterator[Batch]:
    """Yield batches, each after the time that a slow disk takes."""
    batch = {"image": np.zeros((64, 64, 64, 3), np.uint8), "label": np.zeros(64, np.int32)}
    while True:
        time.sleep(LOADING_SECONDS)
        yield batch


def computing() -> Iterator[Batch]:
    """Yield batches that NumPy crops, flips and scales, in about as much time."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(64, 160, 160, 3), dtype=np.uint8)
    label = np.zeros(64, np.int32)
    scratch = np.empty((64, 128, 128, 3), np.float32)
    while True:
        y, x = rng.integers(32, size=2)
        cropped = images[:, y : y + 128, x : x + 128]
        np.multiply(cropped[:, :, ::-1], np.float32(1 / 255), out=scratch)
        yield {"image": scratch, "label": label}


def ours(loader: Loader, mesh: Mesh) -> Iterator[Batch]:
    with gda.prefetch(loader(), mesh, DATA) as batches:
        yield from batches


def in_turns(loader: Loader, mesh: Mesh) -> Iterator[Batch]:
    for batch in loader():
        yield gda.compat.host_local_array_to_global_array(batch, mesh, DATA)


def placed_ahead(loader: Loader, mesh: Mesh) -> Iterator[Batch]:
    """Yield batches as ``flax.jax_utils.prefetch_to_device`` does, but over a mesh."""
    ahead: deque[Batch] = deque()
    for batch in loader():
        ahead.append(_placed(batch, mesh))
        if len(ahead) == 2:
            yield ahead.popleft()


def by_thread(loader: Loader, mesh: Mesh) -> Iterator[Batch]:
    """Yield batches that a thread has placed, with no thought of errors or of memory used again."""
    ahead: Queue[Batch] = Queue(2)
    is_over = threading.Event()

    def place() -> None:
        for batch in loader():
            placed = _placed(batch, mesh)
            while not is_over.is_set():
                with contextlib.suppress(Full):
                    ahead.put(placed, timeout=0.1)
                    break
            else:
                return

    thread = threading.Thread(target=place, daemon=True)
    thread.start()
    try:
        while True:
            yield ahead.get()
    finally:
        is_over.set()
        thread.join()


def _placed(batch: Batch, mesh: Mesh) -> Batch:
    sharding = NamedSharding(mesh, DATA)
    return {
        name: jax.make_array_from_process_local_data(sharding, leaf) for name, leaf in batch.items()
    }


def no_batches(loader: Loader, mesh: Mesh) -> Iterator[None]:
    while True:
        yield None


def _loop(loader: Loader) -> Sequence[Side]:
    mesh = mesh_of((8,), ("data",))

    def side(way: Callable[[Loader, Mesh], Iterator[Any]]) -> Side:
        def seconds() -> float:
            batches = way(loader, mesh)
            next(batches)
            start = time.perf_counter()
            for _ in range(STEPS):
                time.sleep(STEP_SECONDS)
                jax.block_until_ready(next(batches))
            taken = time.perf_counter() - start
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]
            return taken

        return Side(seconds, calls=STEPS, times_itself=True)

    return [side(each) for each in (ours, in_turns, placed_ahead, by_thread, no_batches)]


_ALONE = "the step alone"

WORKS = [
    Work(
        f"a step of 20 ms with 15 ms of {name}",
        partial(_loop, loader),
        {
            "the same loop without prefetch": Faster(1.5),
            "two batches placed ahead without a thread, as flax does": None,
            "a thread and a queue of two batches": None,
            _ALONE: None,
        },
        limit=Within(21),
        floor=Floor("A step waits for itself.", (_ALONE,), share=0.95),
        ours="prefetch",
        seconds=6,
    )
    for name, loader in [
        ("loading", waiting),
        ("loading by NumPy", computing),
    ]
]

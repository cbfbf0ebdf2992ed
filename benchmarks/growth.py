"""The growth of gda's time with the number of leaves, devices, steps and objects.

Each line has a call beside the same call on a tenth, an eighth or a sixteenth of them. The limit is
linear growth, and a factor of 1.3 for what grows with the tables of the processor and of Python.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks import fresh
from benchmarks.checkpoint.checkpoints import Scratch, delete
from benchmarks.layout.resharding import ALL_TO_ALL, TRANSPOSED, plan_of, summary_of
from benchmarks.pairs import Side
from benchmarks.work import Growth, Work
from gda import checkpoint
from gda.multihost.agreement import check_same_call
from gda.testing.pool import Pool

P = PartitionSpec
SHARES = {8: "an eighth of them", 10: "a tenth of them", 16: "a sixteenth of them"}
LINEAR = 1.3
Prepare = Callable[[int], Side]


def _sides(prepare: Prepare, numbers: Sequence[int]) -> list[Side]:
    return [prepare(number) for number in numbers]


# Leaves.


def _sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))


def _tree(leaves: int) -> dict[str, jax.Array]:
    values = [np.zeros((8, 16), np.float32)] * leaves
    arrays = jax.block_until_ready(jax.device_put(values, _sharding()))
    return {f"layer{number}": array for number, array in enumerate(arrays)}


def _like(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    leaf = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=_sharding())
    return {f"layer{number}": leaf for number in range(leaves)}


def _saving(leaves: int) -> Side:
    tree, scratch = _tree(leaves), Scratch()
    return Side(lambda path: checkpoint.save(path, tree), scratch.fresh)


def _saved(leaves: int) -> tuple[Scratch, Path]:
    scratch = Scratch()
    path, tree = scratch.another(), _tree(leaves)
    checkpoint.save(path, tree)
    delete(tree)
    return scratch, path


def _restoring(leaves: int) -> Side:
    scratch, path = _saved(leaves)
    like = _like(leaves)
    return Side(lambda: checkpoint.restore(path, like=like), scratch.keep, done=delete)


def _inspecting(leaves: int) -> Side:
    scratch, path = _saved(leaves)
    return Side(lambda: checkpoint.inspect(path), scratch.keep)


def _listing_layouts(leaves: int) -> Side:
    like = _like(leaves)
    return Side(lambda: gda.layouts(like))


@cache
def _pool() -> Pool:
    return Pool(2, devices=4)


def seconds_to_agree(leaves: int) -> float:
    """Return how long this process compares a call with the others."""
    like = _like(leaves)
    check_same_call("ready", {}, {})
    start = time.perf_counter()
    check_same_call("grown", like, {})
    return time.perf_counter() - start


def _agreeing(leaves: int) -> Side:
    return Side(lambda: max(_pool().run(seconds_to_agree, leaves)), times_itself=True)


# Devices.


def loading(devices: int) -> Callable[[], Any]:
    """Prepare to load a tree of 8 leaves of a row for each device."""
    values = {f"layer{number}": np.zeros((devices, 16), np.float32) for number in range(8)}
    load = partial(gda.load_tree, values, _sharding())
    jax.block_until_ready(load())
    return load


def saving(devices: int, path: Path) -> Callable[[], Any]:
    """Prepare to save that tree."""
    tree = loading(devices)()
    checkpoint.save(path.with_name("before"), tree)
    return partial(checkpoint.save, path, tree)


def _in_a_process(prepare: Callable[..., Callable[[], Any]], devices: int) -> Side:
    scratch, takes_path = Scratch(), prepare is saving
    paths = scratch.fresh if takes_path else scratch.keep
    return fresh.side(partial(prepare, devices), paths, devices=devices)


def _planning(specs: tuple[PartitionSpec, PartitionSpec], devices: int) -> Side:
    return Side(lambda: summary_of(plan_of(devices, specs, per_process=64)))


# Steps in a folder, and objects in a bucket.


def _with_steps(steps: int) -> tuple[Scratch, Path]:
    scratch = Scratch()
    folder = scratch.another()
    with checkpoint.Run(folder, every=1) as run:
        run.save(1, _state())
        run.wait()
    (name,) = (each.name for each in folder.iterdir() if each.name.isdigit())
    for step in range(2, steps + 1):
        shutil.copytree(folder / name, folder / f"{step:0{len(name)}}")
    return scratch, folder


def _state() -> dict[str, Any]:
    return {"w": jax.device_put(np.zeros((8, 16), np.float32), _sharding()), "step": 0}


def _bucket_with_steps(steps: int) -> tuple[Scratch, Any]:
    """Return a bucket in memory, where the requests take no time of their own."""
    import tensorstore

    bucket = tensorstore.KvStore.open({"driver": "memory", "path": "run/"}).result()
    scratch, folder = _with_steps(1)
    (step,) = (each for each in folder.iterdir() if each.name.isdigit())
    files = [
        (each.relative_to(step), each.read_bytes()) for each in step.rglob("*") if each.is_file()
    ]
    for number in range(1, steps + 1):
        for path, data in files:
            bucket[f"{number:0{len(step.name)}}/{path}"] = data
    return scratch, bucket


def _asking_steps(with_steps: Callable[[int], tuple[Scratch, Any]], steps: int) -> Side:
    scratch, place = with_steps(steps)
    run = checkpoint.Run(place, every=1)
    assert run.steps() == [*range(1, steps + 1)]
    return Side(run.steps, scratch.keep)


def _resuming(with_steps: Callable[[int], tuple[Scratch, Any]], steps: int) -> Side:
    scratch, place = with_steps(steps)
    state = _state()

    def resume() -> int:
        return checkpoint.Run(place, every=1).resume(state)[1]

    assert resume() == steps
    return Side(resume, scratch.keep)


def _saving_a_step(with_steps: Callable[[int], tuple[Scratch, Any]], steps: int) -> Side:
    scratch, place = with_steps(steps)
    run, numbers = checkpoint.Run(place, every=1), itertools.count(steps + 1)
    state = run.resume(_state())[0]

    def save(number: int) -> None:
        run.save(number, state)
        run.wait()

    return Side(save, lambda: (*scratch.keep(), next(numbers)))


def _grows(
    name: str,
    prepare: Prepare,
    numbers: Sequence[int],
    by: int = 10,
    seconds: float = 1,
    quick: bool = False,
) -> list[Work]:
    """Return a work for each number, beside that divided by ``by``."""
    return [
        Work(
            name.format(f"{number:,}"),
            partial(_sides, prepare, [16 * by, 16] if quick else [number, number // by]),
            {SHARES[by]: Growth(by * LINEAR)},
            seconds=seconds,
        )
        for number in (numbers[:1] if quick else numbers)
    ]


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small numbers, only to see that everything runs."""
    grows = partial(_grows, quick=quick)
    return [
        *grows("save {} arrays of 8 x 16", _saving, [1_000, 10_000], seconds=6),
        *grows("restore {} arrays of 8 x 16", _restoring, [1_000, 10_000], seconds=3),
        *grows("inspect a checkpoint of {} arrays", _inspecting, [1_000, 10_000]),
        *grows("list the layouts of {} leaves", _listing_layouts, [1_000, 10_000, 100_000]),
        *grows("compare a call on {} leaves in 2 processes", _agreeing, [1_000, 10_000, 100_000]),
        *[
            work
            for what, prepare in [("load", loading), ("save", saving)]
            for work in _grows(
                f"{what} 8 arrays of a row for each of {{}} devices",
                partial(_in_a_process, prepare),
                [8] if quick else [64, 512],
                by=8,
                seconds=4,
            )
        ],
        *[
            work
            for specs, name in [(TRANSPOSED, "transposed"), (ALL_TO_ALL, "rows to columns")]
            for work in _grows(
                f"totals of a plan, {name}, {{}} devices in processes of 64",
                partial(_planning, specs),
                [65_536] if quick else [65_536, 1_048_576],
                by=16,
            )
        ],
        *[
            work
            for place, with_steps in [("folder", _with_steps), ("bucket", _bucket_with_steps)]
            for what, prepare in [
                (f"ask for the steps of a {place} with {{}} steps", _asking_steps),
                (f"resume in a {place} with {{}} steps", _resuming),
                (f"save a step in a {place} with {{}} steps", _saving_a_step),
            ]
            for work in grows(what, partial(prepare, with_steps), [100, 1_000])
        ],
    ]

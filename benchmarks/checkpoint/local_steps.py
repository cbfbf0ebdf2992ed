"""Local steps of a run beside steps in a shared folder: held, complete, and resumed after a loss.

Two processes stand for two hosts on this machine, and share its cores. Each works in a folder of
its own in memory, and has its local steps there; the shared folder is on the disk.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import gda
from benchmarks.arrays.building import MIB
from benchmarks.checkpoint.checkpoints import MEDIUM, ROWS, Scratch, arrays_of
from benchmarks.pairs import Side
from benchmarks.work import Work
from gda.checkpoint import Run
from gda.testing.pool import Pool

LOCAL, SHARED = "gda, local step", "gda, step in a shared folder"
HOSTS, DEVICES = 2, 2
_LOCAL = "/proc/self/cwd/local"  # a folder for each process


# In every process.


class _Training:
    """A training of one array whose steps are local ones, or in the shared folder."""

    def __init__(self, path: str, nbytes: int, is_local: bool) -> None:
        local: dict[str, Any] = {"local": _LOCAL, "local_every": 1, "local_keep": 1}
        self._begin = partial(
            Run, path, every=10**9 if is_local else 1, keep=1, **(local if is_local else {})
        )
        mesh = Mesh(np.array(jax.devices()), ("x",))
        rows = jax.device_count()
        zeros = np.zeros((rows, nbytes * jax.process_count() // 4 // rows), np.float32)
        self._state = gda.GlobalArray.from_source(zeros, mesh, PartitionSpec("x"))
        self._step = 0
        self._run = self._begin()
        self._run.resume(self._state)

    def save(self) -> float:
        """Save a new state, and return the seconds until the step is complete."""
        self._state = jax.block_until_ready(self._state + 1)
        self._step += 1
        begun = time.perf_counter()
        assert self._run.save(self._step, self._state)
        self._run.wait()
        return time.perf_counter() - begun

    def resume(self, loses_host: bool) -> float:
        """Return the seconds in which a new start resumes, if one host has lost its folder."""
        self._run.close()
        if loses_host and jax.process_index() == 1:
            shutil.rmtree(_LOCAL)
        run = self._begin()
        begun = time.perf_counter()
        state, step = run.resume(self._state)
        seconds = time.perf_counter() - begun
        assert step == self._step
        assert np.array_equal(state.addressable_shards[0].data[0, :3], [step] * 3)
        run.close()
        self._run = self._begin()
        self._run.resume(self._state)
        self.save()
        return seconds


@cache
def _training(memory: str, folder: str, nbytes: int, is_local: bool) -> _Training:
    os.chdir(Path(memory, str(jax.process_index())))
    return _Training(f"{folder}/{'of_local' if is_local else 'shared'}", nbytes, is_local)


def _saved(is_local: bool, *given: Any) -> float:
    return _training(*given, is_local).save()


def _resumed(is_local: bool, *given: Any) -> float:
    return _training(*given, is_local).resume(loses_host=is_local)


# Here.


def _each(call: Callable[..., float], nbytes: int) -> list[Side]:
    pool, scratch = Pool(HOSTS, devices=DEVICES), Scratch()
    memory = tempfile.TemporaryDirectory(dir="/dev/shm")
    for host in range(HOSTS):
        Path(memory.name, str(host)).mkdir()
    weakref.finalize(scratch, pool.close)
    given = memory.name, str(scratch.folder), nbytes

    def side(is_local: bool) -> Side:
        pool.run(_saved, is_local, *given)

        def fresh() -> tuple[Any, ...]:
            return memory and scratch.keep()

        return Side(lambda: max(pool.run(call, is_local, *given)), fresh, times_itself=True)

    return [side(True), side(False)]


def _holding(quick: bool) -> list[Side]:
    scratch, tree = Scratch(), arrays_of(MEDIUM.smaller() if quick else MEDIUM, ROWS)

    def side(is_local: bool) -> Side:
        path, numbers = scratch.another(), itertools.count(1)
        local: dict[str, Any] = {"local": path / "local", "local_every": 1} if is_local else {}
        run = Run(path / "run", every=10**9 if is_local else 1, keep=2, **local)
        run.resume(dict.fromkeys(tree))

        def fresh() -> tuple[int, Any]:
            run.wait()
            scratch.keep()
            number = next(numbers)
            changed = {name: each + number for name, each in tree.items()}
            return number, jax.block_until_ready(changed)

        return Side(run.save, fresh)

    return [side(True), side(False)]


def works(quick: bool) -> list[Work]:
    """Return the works; if ``quick``, with small arrays."""
    nbytes, name = (MIB, "1 MiB") if quick else (1024 * MIB, "1 GiB")
    size = MEDIUM.smaller().name if quick else MEDIUM.name
    what = f"a step of {name} for each of {HOSTS} hosts"
    rivals = {SHARED: None}
    return [
        Work(
            f"how long the loop is held by a local step of {size}",
            partial(_holding, quick),
            rivals,
            ours=LOCAL,
            seconds=8,
        ),
        *[
            Work(name, partial(_each, call, nbytes), rivals, ours=LOCAL, seconds=20)
            for name, call in [
                (f"save {what}, until it is complete", _saved),
                (f"resume at {what}, of which one is lost", _resumed),
            ]
        ],
    ]

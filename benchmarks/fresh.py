"""Ways that are measured in new processes, one for each run, as a program loads a model once.

Before the time counts, the process has imported what the way needs and has started JAX; all that
the first call starts or compiles counts. The processes are forked from one that has imported these
modules and has no devices and no threads, because their imports would take most of the minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.pairs import Side

Clock = Literal["perf_counter", "process_time"]
_IMPORTED = ["benchmarks.growth", "benchmarks.checkpoint.first_calls", "benchmarks.trees.models_in"]


def side(
    prepare: Callable[..., Callable[[], Any]],
    fresh: Callable[[], tuple[Any, ...]] = tuple,
    *,
    devices: int = 8,
    cold: Path | None = None,
    clock: Clock = "perf_counter",
) -> Side:
    """Return a side whose every run is a new process.

    Args:
      prepare: called in the process, with the arguments that ``fresh`` makes, before the time
        counts; returns the function that is timed. A function of a module, or a partial of one.
      devices: virtual devices of the process.
      cold: a folder of files that the page cache shall not hold.
      clock: ``'process_time'`` counts seconds of the CPU, of all threads.
    """

    def run(*arguments: Any) -> float:
        if cold is not None:
            drop_from_page_cache(cold)
        answers, answer = multiprocessing.Pipe(duplex=False)
        work = partial(prepare, *arguments), clock, devices, answer
        process = _context().Process(target=_measure, args=work)
        process.start()
        answer.close()
        try:
            return answers.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"a fresh process exited with code {process.exitcode}") from None
        finally:
            process.join()

    return Side(run, fresh, times_itself=True)


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _measure(
    prepare: Callable[[], Callable[[], Any]], clock: Clock, devices: int, answer: Connection
) -> None:
    # Read when JAX makes its devices; the last flag counts.
    flags = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    now = getattr(time, clock)
    run = prepare()
    start = now()
    jax.block_until_ready(run())
    answer.send(now() - start)


def drop_from_page_cache(folder: Path) -> None:
    """Let the next read of each file in a folder come from the disk, as far as this system can."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # or its pages would be kept until they are written
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

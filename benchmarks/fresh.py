"""Ways that are measured in new processes, one for each run, as a program loads a model once.

Before the time counts, the process has imported what the way needs and has started JAX; all that
the first call starts or compiles counts. Run as a program, the module is such a process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.pairs import Side

ROOT = Path(__file__).parents[1]
Clock = Literal["perf_counter", "process_time"]


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
        message = pickle.dumps((partial(prepare, *arguments), clock))
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        }
        command = [sys.executable, "-m", "benchmarks.fresh"]
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "check": True}
        done = subprocess.run(command, input=message, stdout=subprocess.PIPE, **options)
        return float(done.stdout.split()[-1])

    return Side(run, fresh, times_itself=True)


def drop_from_page_cache(folder: Path) -> None:
    """Let the next read of each file in a folder come from the disk, as far as this system can."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # or its pages would be kept until they are written
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def main() -> None:
    prepare, clock = pickle.loads(sys.stdin.buffer.read())
    now = getattr(time, clock)
    run = prepare()
    start = now()
    jax.block_until_ready(run())
    print(now() - start)


if __name__ == "__main__":
    main()

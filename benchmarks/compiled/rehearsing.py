"""Rehearsals: the training step of a transformer, compiled for TPUs that are not here.

Each run is a process of its own, from its start to its end. A work measures its time, another the
part of it that is gda's, and a third its memory; all have the same runs.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.pairs import Side
from benchmarks.work import Within, WithinMiB, Work

_EXAMPLE = Path(__file__).parents[2] / "examples" / "rehearse_transformer.py"
# gda's part begins after JAX is imported, and has no tracing, lowering or compiling.
_PROGRAM = """
import json, resource, runpy, sys, time
import jax
topology, data, example = sys.argv[1:]
begun = time.perf_counter()
import gda
mesh = gda.rehearsal_mesh(topology, {"data": int(data), "model": 4})
program, args = runpy.run_path(example)["step"](mesh)
rehearsal = gda.rehearse(program, *args)
str(rehearsal)
own = time.perf_counter() - begun - rehearsal.compile_seconds
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([own, memory]))
"""


class _Run(NamedTuple):
    seconds: float
    own_seconds: float
    mebibytes: float


@cache
def _run(topology: str, data: int, number: int) -> _Run:
    command = [sys.executable, "-c", _PROGRAM, topology, str(data), str(_EXAMPLE)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return _Run(time.perf_counter() - start, *json.loads(done.stdout))


def _sides(topology: str, data: int, field: str) -> list[Side]:
    # The round before the first warms nothing here, so the first has its run.
    numbers = itertools.chain([0], itertools.count())

    def measured() -> float:
        return getattr(_run(topology, data, next(numbers)), field)

    return [Side(measured, times_itself=True)]


def works(quick: bool) -> list[Work]:
    """Return the works. In a quick run the program does not fit."""
    topology, data = ("v5e:4x4", 4) if quick else ("v5e:16x16", 64)
    of = f"rehearse a step of 7 billion parameters on {4 * data} devices"
    sides = partial(partial, _sides, topology, data)
    return [
        Work(f"{of}, a process", sides("seconds"), limit=Within(60_000), seconds=0, needs="libtpu"),
        Work(
            f"{of}, gda's part", sides("own_seconds"), limit=Within(2000), seconds=0, needs="libtpu"
        ),
        Work(
            f"{of}, memory",
            sides("mebibytes"),
            limit=WithinMiB(4096),
            seconds=0,
            unit="MiB",
            needs="libtpu",
        ),
    ]

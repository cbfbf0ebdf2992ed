"""The figures that were measured: ``results.json``, of which a run of some works changes a part."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np

PATH = Path(__file__).with_name("results.json")
ON_ACCELERATOR = Path(__file__).with_name("accelerator.json")

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "jax-gda", "orbax-checkpoint", "tensorstore", "fastcrc"),
    *("safetensors", "torch", "fastsafetensors", "rich", "libtpu"),
)
_FOR_ACCELERATORS = ("flax", "jax-cuda13-plugin", "jax-cuda12-plugin")


class Stats(NamedTuple):
    """The median and the quartiles of one way, in the unit of its work."""

    median: float
    q1: float
    q3: float


class Measured(NamedTuple):
    """A work that was measured: on which day and machine, in how many rounds, by which ways.

    Without any, ``reason`` says why it could not be measured.
    """

    machine: str
    rounds: int
    ways: dict[str, Stats]
    reason: str = ""

    def of(self, ways: Sequence[str]) -> Measured:
        """Return it without the ways that are no longer measured."""
        return self._replace(ways={way: self.ways[way] for way in ways if way in self.ways})


Results = Mapping[str, Measured]
"""The figures of each work, by its name."""


def stats_of(samples: Sequence[float]) -> Stats:
    return Stats(*(float(f"{each:.4g}") for each in np.quantile(samples, [0.5, 0.25, 0.75])))


def machines_of(results: Results) -> list[str]:
    """Return the days and machines, each once, the last day first."""
    return sorted({work.machine for work in results.values()}, reverse=True)


def load(path: Path = PATH) -> Results:
    """Return the results in a file; none without the file."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Measured(
            saved["machines"][machine],
            rounds,
            {way: Stats(*each) for way, each in ways.items()},
            *reason,
        )
        for name, (machine, rounds, ways, *reason) in saved["works"].items()
    }


def save(results: Results, path: Path = PATH) -> None:
    machines = machines_of(results)
    works = {
        name: [machines.index(work.machine), work.rounds, work.ways, *filter(None, [work.reason])]
        for name, work in results.items()
    }
    # A line for each work, so that a change of one is a change of one line.
    lines = ",\n".join(f"{_json(name)}: {_json(work)}" for name, work in works.items())
    text = f'{{"machines": {_json(machines)},\n"works": {{\n{lines}\n}}}}\n'
    path.write_text(text, encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def copied_per_second(nbytes: int = 256 * 2**20) -> float:
    """Return how many bytes one thread copies in a second, from memory to memory."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds)


def here(accelerator: str = "") -> str:
    """Return this day and this machine, with its accelerator if one is measured."""
    about = Path("/proc/cpuinfo").read_text()
    cpu = re.search("model name\\s*: (.*)", about)
    vectors = "AVX-512" if "avx512f" in about else "AVX2" if "avx2" in about else "no AVX2"
    packages = []
    for package in (*_PACKAGES, *(_FOR_ACCELERATORS if accelerator else ())):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"no {package}")
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {accelerator}{', ' * bool(accelerator)}"
        f"{os.cpu_count()} cores, {cpu[1] if cpu else 'CPU'} with {vectors}, "
        f"memory copied at {copied_per_second() / 1e9:.0f} GB/s; "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )

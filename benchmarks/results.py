"""The figures that were measured: ``results.json``, of which a run of some works changes a part."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("results.json")

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "gda", "orbax-checkpoint", "tensorstore", "google-crc32c"),
    *("safetensors", "torch", "rich", "libtpu"),
)


class Stats(NamedTuple):
    """The median and the quartiles of one way, in the unit of its work."""

    median: float
    q1: float
    q3: float


class Measured(NamedTuple):
    """A work that was measured: on which day and machine, in how many rounds, by which ways."""

    machine: str
    rounds: int
    ways: dict[str, Stats]


Results = Mapping[str, Measured]
"""What was measured of each work, by its name."""


def results_of(runs: Iterable[Mapping[str, Any]]) -> Results:
    """Return the figures of what pytest-benchmark saved."""
    results: dict[str, Measured] = {}
    for run in runs:
        for bench in run["benchmarks"]:
            info, stats = bench["extra_info"], bench["stats"]
            machine = _here(run["machine_info"]["cpu"].get("brand_raw", "CPU"))
            work = results.setdefault(info["work"], Measured(machine, stats["rounds"], {}))
            figures = (float(f"{stats[key]:.4g}") for key in Stats._fields)
            work.ways[info["way"]] = Stats(*figures)
    return results


def machines_of(results: Results) -> list[str]:
    """Return the days and machines, each once, the last day first."""
    return sorted({work.machine for work in results.values()}, reverse=True)


def load(path: Path = PATH) -> Results:
    saved = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Measured(
            saved["machines"][machine], rounds, {way: Stats(*each) for way, each in ways.items()}
        )
        for name, (machine, rounds, ways) in saved["works"].items()
    }


def save(results: Results, path: Path = PATH) -> None:
    machines = machines_of(results)
    # A line for each work, so that a change of one is a change of one line.
    lines = ",\n".join(
        f"{_json(name)}: {_json([machines.index(work.machine), *work[1:]])}"
        for name, work in results.items()
    )
    text = f'{{"machines": {_json(machines)},\n"works": {{\n{lines}\n}}}}\n'
    path.write_text(text, encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _here(cpu: str) -> str:
    packages = []
    for package in _PACKAGES:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"no {package}")
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {cpu}; "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )

"""The figures that were measured: ``results.json``, which a run of some works changes in part."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")

_PACKAGES = {
    "JAX": "jax",
    "jaxlib": "jaxlib",
    "NumPy": "numpy",
    "gda": "gda",
    "Orbax": "orbax-checkpoint",
    "TensorStore": "tensorstore",
    "google-crc32c": "google-crc32c",
    "safetensors": "safetensors",
    "PyTorch": "torch",
    "rich": "rich",
    "libtpu (for the section Rehearsing)": "libtpu",
}


@dataclass(frozen=True)
class Stats:
    """The median of the rounds of one way, and the quartiles, in the unit of its work."""

    median: float
    q1: float
    q3: float


@dataclass(frozen=True)
class Measured:
    """A work that was measured.

    Attributes:
      machine: the day, the machine and the versions of packages.
      rounds: how many there were.
      ways: the figures of each way, gda's first.
    """

    machine: str
    rounds: int
    ways: Mapping[str, Stats]


@dataclass(frozen=True)
class Results:
    """All works that were measured, by name."""

    works: Mapping[str, Measured] = field(default_factory=dict)

    @staticmethod
    def of(runs: Iterable[Mapping[str, Any]]) -> Results:
        """Return the figures of what pytest-benchmark saved."""
        ways: dict[str, dict[str, Stats]] = {}
        rounds: dict[str, int] = {}
        machine = "CPU"
        for run in runs:
            if "machine_info" in run:
                machine = run["machine_info"]["cpu"].get("brand_raw", machine)
            for bench in run["benchmarks"]:
                info, stats = bench["extra_info"], bench["stats"]
                figures = (float(f"{stats[key]:.4g}") for key in ("median", "q1", "q3"))
                ways.setdefault(info["work"], {})[info["way"]] = Stats(*figures)
                rounds[info["work"]] = stats["rounds"]
        here = _here(machine)
        return Results({name: Measured(here, rounds[name], each) for name, each in ways.items()})

    @staticmethod
    def load(path: Path = PATH) -> Results:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Results(
            {
                name: Measured(
                    saved["machines"][machine],
                    rounds,
                    {way: Stats(*figures) for way, figures in ways.items()},
                )
                for name, (machine, rounds, ways) in saved["works"].items()
            }
        )

    def save(self, path: Path = PATH) -> None:
        machines = self.machines
        rows = {
            name: [
                machines.index(work.machine),
                work.rounds,
                {way: [one.median, one.q1, one.q3] for way, one in work.ways.items()},
            ]
            for name, work in self.works.items()
        }
        # A line for each work, so that a change of one is a change of one line.
        lines = ",\n".join(f"{_json(name)}: {_json(row)}" for name, row in rows.items())
        text = f'{{"machines": {_json(machines)},\n"works": {{\n{lines}\n}}}}\n'
        path.write_text(text, encoding="utf-8")

    @property
    def machines(self) -> Sequence[str]:
        """The days and machines of all works, each once, the last day first."""
        return sorted({work.machine for work in self.works.values()}, reverse=True)

    def updated(self, newer: Results) -> Results:
        """Return all figures, the newer ones of each work."""
        return Results({**self.works, **newer.works})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _here(cpu: str) -> str:
    packages = []
    for name, package in _PACKAGES.items():
        try:
            packages.append(f"{name} {version(package)}")
        except PackageNotFoundError:
            packages.append(f"no {name}")
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {cpu}; "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )

"""Measures everything and writes ``RESULTS.md``: ``python -m benchmarks.report [--smoke]``.

The number of virtual devices is fixed when JAX starts, so every count is a pytest run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.pairs import measure
from benchmarks.work import AtMost, Within, Work
from benchmarks.works import DEVICE_COUNTS, WORKS

FOLDER = Path(__file__).parent

_INTRODUCTION = """\
# Results

Written by `python -m benchmarks.report`; what each line does stands in `benchmarks/`. Both sides of
a line ran in turns in one process on virtual CPU devices. Times are medians, with the quartiles in
brackets, and the ratios are those of the medians. Memory is the highest that a process of its own
held beyond the arrays that it saved or got.
"""

_SMOKE = """
**A smoke run: few rounds, only to see that everything runs. The figures say nothing.**
"""

_INFORMATION = """
## For information

Stricter rivals, floors, and the facts that comments in the code rely on.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few rounds; prints, writes no file")
    parser.add_argument(
        "--output", type=Path, help="where to write (default: benchmarks/RESULTS.md)"
    )
    options = parser.parse_args(arguments)
    output = options.output or (None if options.smoke else FOLDER / "RESULTS.md")

    console = Console()
    runs = measure_all(options.smoke, console)
    text = render(runs, options.smoke)
    if output is None:
        console.print(Markdown(text))
    else:
        output.write_text(text, encoding="utf-8")
        console.print(f"wrote {output}")
    return 0 if all(run["complete"] for run in runs) else 1


def measure_all(smoke: bool, console: Console) -> list[dict[str, Any]]:
    """Run pytest once for each device count and return what pytest-benchmark saved."""
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        for count in DEVICE_COUNTS:
            tests = sum(1 + bool(work.rival) for work in WORKS if work.devices == count)
            task = progress.add_task(f"{count:>5,} virtual devices", total=tests)
            saved = Path(folder) / f"{count}.json"
            seen = []
            for line in _pytest(count, smoke, saved):
                seen.append(line)
                # Only verbose lines of single tests have a percentage.
                if line.startswith("benchmarks/") and line.endswith("%]"):
                    progress.advance(task)
            run: dict[str, Any] = {"benchmarks": []}
            if saved.exists() and saved.stat().st_size:  # empty where pytest died
                run = json.loads(saved.read_text())
            run["complete"] = len(run["benchmarks"]) == tests
            if not run["complete"]:
                console.print("\n".join(seen[-60:]), markup=False, highlight=False)
            runs.append(run)
    return runs


def _pytest(count: int, smoke: bool, saved: Path) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "pytest", "benchmarks/test_speed.py", "-v", "--color=no"),
        *(f"--virtual-devices={count}", f"--benchmark-json={saved}", "-p", "no:cacheprovider"),
        *(["--smoke"] if smoke else []),
    ]
    with subprocess.Popen(
        command,
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()


def render(runs: Sequence[dict[str, Any]], smoke: bool) -> str:
    """Return the page."""
    stats: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        for bench in sorted(run["benchmarks"], key=lambda b: b["extra_info"]["side"]):
            stats.setdefault(bench["extra_info"]["work"], []).append(bench["stats"])
    aims = [work for work in WORKS if work.target]
    others = [work for work in WORKS if not work.target]
    reached = [_is_reached(work, stats.get(work.key, [])) for work in aims]
    lines = [
        _INTRODUCTION,
        *_machine(runs),
        *([_SMOKE] if smoke else []),
        f"\n## Targets: {reached.count(True)} of {len(aims)} reached\n",
        *_TARGETS_HEAD,
        *[_target_row(work, stats) for work in aims],
        _INFORMATION,
        "| work | by | time | against | time | the first is |",
        "| --- | --- | --- | --- | --- | --- |",
        *[
            row(
                work.name,
                work.ours,
                *_ours_and_rival(work, stats),
                _result(work, stats.get(work.key, [])),
            )
            for work in others
        ],
    ]
    return "\n".join(lines) + "\n"


_TARGETS_HEAD = [
    "| work | gda | rival | its time | gda is | must be | reached |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]


def _target_row(work: Work, stats: dict[str, list[dict[str, float]]]) -> str:
    is_reached = _is_reached(work, stats.get(work.key, []))
    return row(
        work.name,
        *_ours_and_rival(work, stats),
        _result(work, stats.get(work.key, [])),
        str(work.target or ""),
        {True: "yes", False: "**no**", None: "failed"}[is_reached] if work.target else "",
    )


def measured_here(works: Iterable[Work], smoke: bool) -> Iterator[str]:
    """Measure works in this process, which has their devices; yield the lines of their table."""
    yield from _TARGETS_HEAD
    for work in works:
        yield _target_row(work, {work.key: _stats_here(work, smoke)})


def times_here(work: Work, smoke: bool) -> list[str]:
    """Measure a work in this process; return the time of each side."""
    return [_time(side) for side in _stats_here(work, smoke)]


def _stats_here(work: Work, smoke: bool) -> list[dict[str, float]]:
    everyone = measure(work.prepare(), min(work.rounds, 3) if smoke else work.rounds)
    sides = [everyone[0], everyone[work.against]] if work.rival else everyone[:1]
    return [dict(zip(["q1", "median", "q3"], _quartiles(side), strict=True)) for side in sides]


def _quartiles(samples: list[float]) -> list[float]:
    return samples * 3 if len(samples) == 1 else quantiles(samples, method="inclusive")


def _machine(runs: Sequence[dict[str, Any]]) -> list[str]:
    machines = [run["machine_info"]["cpu"] for run in runs if "machine_info" in run]
    return versions(machines[0].get("brand_raw", "CPU") if machines else "CPU")


def versions(cpu: str = "CPU") -> list[str]:
    """Return the day, the machine and the versions that figures are from."""
    packages = [f"{name} {version(package)}" for name, package in _PACKAGES.items()]
    return [
        f"- {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {cpu}",
        f"- Python {platform.python_version()}, {', '.join(packages)}",
    ]


_PACKAGES = {"JAX": "jax", "jaxlib": "jaxlib", "NumPy": "numpy", "gda": "gda"}


def row(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _ours_and_rival(work: Work, stats: dict[str, list[dict[str, float]]]) -> tuple[str, str, str]:
    times = [_amount(of_side, work.unit) for of_side in stats.get(work.key, [])]
    ours, rival = [*times, "", ""][:2]
    return ours, work.rival, rival


def _is_reached(work: Work, sides: Sequence[dict[str, float]]) -> bool | None:
    if work.target is None or len(sides) != 1 + bool(work.rival):
        return None
    return work.target.is_reached(sides[0]["median"], sides[-1]["median"])


def _result(work: Work, sides: Sequence[dict[str, float]]) -> str:
    if not sides:
        return ""
    if len(sides) == 1 or isinstance(work.target, Within):
        return _amount(sides[0], work.unit)
    ours, rival = (side["median"] for side in sides)
    if work.unit == "MiB":
        return f"{_three(abs(rival - ours))} MiB {'less' if rival >= ours else 'more'}"
    if isinstance(work.target, AtMost):
        return f"{ours / rival:.3f} of its time"
    word, times = ("faster", rival / ours) if rival >= ours else ("slower", ours / rival)
    return f"{times:,.0f} times {word}" if times >= 100 else f"{times:.2f} times {word}"


def _amount(side: dict[str, float], unit: str) -> str:
    return _time(side) if unit == "s" else f"{_three(side['median'])} {unit}"


def _time(side: dict[str, float]) -> str:
    for unit, seconds in [("s", 1), ("ms", 1e-3), ("µs", 1e-6)]:
        if side["median"] >= seconds or unit == "µs":
            median, low, high = (_three(side[key] / seconds) for key in ("median", "q1", "q3"))
            return f"{median} {unit} ({low} to {high})"
    raise AssertionError("unreachable")


def _three(number: float) -> str:
    """Write three digits."""
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())

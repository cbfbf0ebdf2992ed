"""Measure all works, and write the results and all pages and pictures that show them.

``python -m benchmarks --only restore --only save`` prints some works. With ``--write`` it puts
their figures among the results. The number of virtual devices is fixed when JAX starts, so every
count is a pytest run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.pages import pages
from benchmarks.report import render
from benchmarks.results import Results, load, results_of, save
from benchmarks.work import Work
from benchmarks.works import sections

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="print the works that have this in section or name; repeatable",
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, small checkpoints")
    parser.add_argument("--write", action="store_true", help="write what --only measured")
    parser.add_argument("--pages", action="store_true", help="measure nothing, only write pages")
    options = parser.parse_args(arguments)
    if options.quick and (options.write or options.pages):
        parser.error("the figures of --quick say nothing, so they are not written")
    chosen = sections(options.only, options.quick)
    if not chosen:
        parser.error(f"no work has {options.only!r} in its section or name")
    if options.pages:
        write(load())
        return 0
    console = Console()
    runs = _measure(chosen, options.only, options.quick, console)
    results = results_of(runs)
    if options.quick or (options.only and not options.write):
        console.print(Markdown(render(results, chosen, quick=options.quick)))
    else:
        write({**load(), **results})
    return 0 if all(run["complete"] for run in runs) else 1


def write(results: Results) -> None:
    names = [work.name for each in sections().values() for work in each]
    results = {name: results[name] for name in names if name in results}
    save(results)
    for path, text in pages(results, sections()).items():
        path.write_text(text, encoding="utf-8")


def _measure(
    chosen: Mapping[str, Sequence[Work]], only: Sequence[str], quick: bool, console: Console
) -> list[dict[str, Any]]:
    """Run pytest once for each device count and return what pytest-benchmark saved."""
    works = [work for each in chosen.values() for work in each if work.can_be_measured]
    counts = sorted({work.devices for work in works})
    names = {c: [w.name for w in works if w.devices == c for _ in w.ways] for c in counts}
    runs = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, TextColumn("{task.fields[now]}"), console=console) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        task = progress.add_task("", total=sum(map(len, names.values())), now="")
        for count in counts:
            saved = Path(folder) / f"{count}.json"
            remaining = iter(names[count])
            progress.update(task, now=next(remaining, ""))
            seen = []
            for line in _pytest(count, only, quick, saved):
                seen.append(line)
                # Only verbose lines of single tests have a percentage.
                if line.startswith("benchmarks/") and line.endswith("%]"):
                    progress.update(task, advance=1, now=next(remaining, ""))
            progress.update(task, completed=sum(len(names[c]) for c in counts if c <= count))
            run: dict[str, Any] = {"benchmarks": []}
            if saved.exists() and saved.stat().st_size:  # empty where pytest died
                run = json.loads(saved.read_text())
            run["complete"] = len(run["benchmarks"]) == len(names[count])
            if not run["complete"]:
                console.print("\n".join(seen[-60:]), markup=False, highlight=False)
            runs.append(run)
    return runs


def _pytest(count: int, only: Sequence[str], quick: bool, saved: Path) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "pytest", "benchmarks/test_speed.py", "-v", "--color=no"),
        *(
            f"--virtual-devices={count}",
            *(f"--only={text}" for text in only),
            *(["--quick"] if quick else []),
        ),
        *(f"--benchmark-json={saved}", "-n", "0", "-p", "no:cacheprovider"),
    ]
    # A run of pytest around this one is another.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    with subprocess.Popen(
        command,
        cwd=FOLDER.parent,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()


if __name__ == "__main__":
    sys.exit(main())

"""Measure everything and write ``RESULTS.md``: ``python -m benchmarks [--only TEXT] [--quick]``.

The number of virtual devices is fixed when JAX starts, so every count is a pytest run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import render
from benchmarks.works import sections

FOLDER = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", help="the works that have this in section or name")
    parser.add_argument("--quick", action="store_true", help="two rounds, small checkpoints")
    parser.add_argument(
        "--output",
        type=Path,
        help="where to write; by default benchmarks/RESULTS.md, and with --only or --quick no file",
    )
    options = parser.parse_args(arguments)
    output = options.output
    if output is None and not (options.only or options.quick):
        output = FOLDER / "RESULTS.md"

    console = Console()
    runs = _measure(options.only, options.quick, console)
    if not runs:
        parser.error(f"no work has {options.only!r} in its section or name")
    text = render(runs, sections(options.only, options.quick), options.quick)
    if output is None:
        console.print(Markdown(text))
    else:
        output.write_text(text, encoding="utf-8")
        console.print(f"wrote {output}")
    return 0 if all(run["complete"] for run in runs) else 1


def _measure(only: str, quick: bool, console: Console) -> list[dict[str, Any]]:
    """Run pytest once for each device count and return what pytest-benchmark saved."""
    works = [work for each in sections(only, quick).values() for work in each]
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


def _pytest(count: int, only: str, quick: bool, saved: Path) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "pytest", "benchmarks/test_speed.py", "-v", "--color=no"),
        *(f"--virtual-devices={count}", f"--only={only}", *(["--quick"] if quick else [])),
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

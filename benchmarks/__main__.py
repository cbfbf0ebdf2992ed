"""Measure all works, and write the results and all pages and pictures that show them.

``python -m benchmarks --only restore --only save`` prints some works. With ``--write`` it puts
their figures among the results. ``--accelerator`` measures other works, on one accelerator.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measuring import Measuring, is_stand_in
from benchmarks.pages import pages
from benchmarks.report import line, render, render_accelerator
from benchmarks.results import ON_ACCELERATOR, Measured, Results, here, load, save, stats_of
from benchmarks.works import on_accelerator, sections


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
    parser.add_argument(
        "--accelerator",
        action="store_true",
        help="measure on an accelerator, in 4 minutes; with GDA_ACCELERATOR=cpu on CPU devices",
    )
    options = parser.parse_args(arguments)
    if options.quick and (options.write or options.pages):
        parser.error("the figures of --quick say nothing, so they are not written")
    chosen = (on_accelerator if options.accelerator else sections)(options.only, options.quick)
    if not chosen:
        parser.error(f"no work has {options.only!r} in its section or name")
    if options.pages:
        write(load())
        return 0
    accelerator = accelerator_here() if options.accelerator else ""
    if accelerator is None:
        parser.error("JAX finds no accelerator; GDA_ACCELERATOR=cpu takes CPU devices in its place")
    console = Console()
    works, machine = [work for each in chosen.values() for work in each], here(accelerator)
    with Measuring(
        [work for work in works if work.can_be_measured],
        quick=options.quick,
        on_accelerator=options.accelerator,
    ) as measuring:
        results = measure(measuring, machine, console)
    missing = {
        work.name: Measured(machine, 0, {}, f"{work.needs} is not installed")
        for work in works
        if not work.can_be_measured
    }
    is_printed = options.quick or (options.only and not options.write)
    if options.accelerator:
        found = {**missing, **results}
        if is_printed or is_stand_in():
            console.print(Markdown(render_accelerator(found, works)))
        else:
            save({**missing, **load(ON_ACCELERATOR), **results}, ON_ACCELERATOR)
            write(load())
    elif is_printed:
        console.print(Markdown(render({**missing, **results}, chosen, quick=options.quick)))
    else:
        write({**missing, **load(), **results})
    return 1 if any(work.reason for work in results.values()) else 0


def accelerator_here() -> str | None:
    """Return the kind of the accelerator that JAX finds, and None if it finds none.

    Another process looks, because JAX holds an accelerator until the end of the process.
    """
    if is_stand_in():
        return "CPU devices in place of an accelerator"
    code = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    platform, kind = done.stdout.splitlines()[-1].split(maxsplit=1)
    return None if platform == "cpu" else kind


def write(results: Results) -> None:
    works = [work for each in sections().values() for work in each if work.name in results]
    results = {work.name: results[work.name].of(work.ways) for work in works}
    save(results)
    for path, text in pages(results, sections()).items():
        path.write_text(text, encoding="utf-8")


def measure(measuring: Measuring, machine: str, console: Console) -> Results:
    """Measure the works that can be measured, and print the line of each as soon as it is there."""
    results = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    now = TextColumn("{task.fields[now]}")
    with Progress(*columns, now, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(measuring.works), now="")
        for work in measuring.works:
            progress.update(task, now=work.name)
            found = measuring.measure(work)
            if isinstance(found, str):
                print(measuring.log, file=sys.stderr)
                one = Measured(machine, 0, {}, found)
            else:
                ways = zip(work.ways, map(stats_of, found), strict=True)
                one = Measured(machine, len(found[0]), dict(ways))
            results[work.name] = one
            console.print(line(work, one), markup=False, highlight=False, soft_wrap=True)
            progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    # As an exception, which removes what was written on its way: up to 6 GiB.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

"""A run for people: its steps, their sizes and metrics, and the program that writes."""

from __future__ import annotations

import calendar
import os
import time
from typing import Any

from gda.checkpoint.inspecting import inspect, verify
from gda.checkpoint.step_folders.folder import RunFolder, StepFolder, below
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes
from gda.storage.options import ProgressLike
from gda.storage.stores.errors import CorruptionError


def is_run(path: Any, timeout: float) -> bool:
    """Return True if a path is the folder of a run, and no checkpoint itself."""
    folder = RunFolder(path, timeout)
    return not folder.is_checkpoint() and folder.owner() is not None


def lines_of(path: Any, timeout: float) -> list[str]:
    """Return the contents of the folder of a run for people; reads the manifests."""
    folder = RunFolder(path, timeout)
    owner, complete = folder.owner(), folder.complete()
    assert owner is not None
    rows = [("step", "age", "size", "shared", "metrics", "held")]
    rows += [_row(folder, number, step) for number, step in complete.items()]
    lines = table(rows, right={*rows[0][:4]}) if complete else ["no complete step"]
    others = [step for number, step in folder.listed().items() if number not in complete]
    if unfinished := [step.name for step in others if not step.is_of_orbax]:
        lines.append(f"not complete: {', '.join(unfinished)}")
    since = f"since {owner.since}, program {owner.generation} of this run"
    lines.append(f"written by {owner.where}, {since}")
    if owner.ends is not None:
        lines.append(f"a rollback to step {owner.ends} was begun; the next resume ends it")
    return lines


def _row(folder: RunFolder, number: int, step: StepFolder) -> tuple[str, ...]:
    """Return a step: its bytes are those of all files, shared those that other steps link to."""
    path = below(folder.path, step.name)
    contents = inspect(path, timeout=folder.timeout)
    nbytes = contents.nbytes
    if not folder.store().is_remote:
        nbytes = sum(
            os.stat(os.path.join(at, name)).st_size
            for at, _, names in os.walk(path)
            for name in names
        )
    metrics = folder.metrics(step.name).items()
    return (
        str(number),
        _age(contents.about.get("saved", "")),
        format_bytes(nbytes),
        format_bytes(contents.shared_nbytes),
        ", ".join(f"{name} {value:g}" for name, value in metrics),
        "yes" if step.is_held else "",
    )


def verify_run(path: Any, timeout: float, progress: ProgressLike) -> str:
    """Read all data of all steps; return a line for people.

    Raises ``CorruptionError`` with a line for each problem, of whatever step.
    """
    folder = RunFolder(path, timeout)
    problems, nbytes, complete = [], 0, folder.complete()
    for number, each in complete.items():
        place = below(folder.path, each.name)
        try:
            contents = verify(place, timeout=timeout, progress=progress)
            nbytes += contents.nbytes
        except CorruptionError as error:
            problems += [f"step {number}: {problem}" for problem in error.problems]
    if problems:
        raise CorruptionError(f"{folder.url} is damaged", problems)
    if not complete:
        return f"{folder.url} has no complete step"
    return f"{folder.url} is whole: {counted(len(complete), 'step')}, {format_bytes(nbytes)}"


def _age(saved: str) -> str:
    """Return the time since a moment, such as ``3 h``."""
    seconds = time.time() - calendar.timegm(time.strptime(saved, "%Y-%m-%dT%H:%M:%SZ"))
    for unit, length in [("d", 86400), ("h", 3600), ("min", 60)]:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

"""A run as lines for people: its steps, their sizes and metrics, and the program that writes."""

from __future__ import annotations

import calendar
import os
import time
from dataclasses import dataclass
from typing import Any

from gda.checkpoint.inspecting import inspect, verify
from gda.checkpoint.step_folders.folder import Owner, RunFolder, StepFolder, below
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes
from gda.storage.options import ProgressLike
from gda.storage.stores.errors import CorruptionError


@dataclass(frozen=True)
class StepSummary:
    """A complete step.

    ``nbytes`` are those of its files, and ``shared_nbytes`` of those that other steps link to; on
    an object store there are none of these.
    """

    step: int
    saved: str
    nbytes: int
    shared_nbytes: int
    metrics: dict[str, float]
    is_held: bool


@dataclass(frozen=True)
class RunSummary:
    """The contents of the folder of a run."""

    url: str
    owner: Owner
    steps: list[StepSummary]
    unfinished: list[str]  # folders that are no complete steps

    def __str__(self) -> str:
        rows = [("step", "age", "size", "shared", "metrics", "kept by")]
        for each in self.steps:
            metrics = ", ".join(f"{name} {value:g}" for name, value in each.metrics.items())
            shared = format_bytes(each.shared_nbytes) if each.shared_nbytes else ""
            mark = "hold" if each.is_held else ""
            size = format_bytes(each.nbytes)
            rows.append((str(each.step), _age(each.saved), size, shared, metrics, mark))
        lines = (
            table(rows, right={"step", "age", "size", "shared"})
            if self.steps
            else ["no complete step"]
        )
        if self.unfinished:
            lines += [f"not complete: {', '.join(self.unfinished)}"]
        owner = self.owner
        by = f"{owner.where}, since {owner.since}, program {owner.generation} of this run"
        if owner.ends is not None:
            by += f"; a rollback to step {owner.ends} was begun, and the next resume ends it"
        return "\n".join([*lines, f"written by {by}"])

    def to_dict(self) -> dict[str, Any]:
        """Return values of JSON."""
        return {
            "path": self.url,
            "owner": vars(self.owner),
            "steps": [vars(each) for each in self.steps],
            "unfinished": self.unfinished,
        }


def is_run(path: Any, timeout: float) -> bool:
    """Return True if a path is the folder of a run."""
    return RunFolder(path, timeout).owner() is not None


def summary(path: Any, timeout: float) -> RunSummary:
    """Return the contents of the folder of a run; reads the manifests."""
    folder = RunFolder(path, timeout)
    owner, complete = folder.owner(), folder.complete()
    assert owner is not None
    steps = [_summary(folder, number, each) for number, each in complete.items()]
    unfinished = [each.name for n, each in folder.listed().items() if n not in complete]
    return RunSummary(folder.url, owner, steps, unfinished)


def _summary(folder: RunFolder, number: int, step: StepFolder) -> StepSummary:
    path = below(folder.path, step.name)
    contents = inspect(path, timeout=folder.timeout)
    saved, nbytes, shared = str(contents.about.get("saved", "")), contents.nbytes, 0
    if not folder.store().is_remote:
        nbytes, shared = _bytes_below(str(path))
    return StepSummary(number, saved, nbytes, shared, folder.metrics(step.name), step.is_held)


def _bytes_below(path: str) -> tuple[int, int]:
    """Return the bytes of all files of a step, and of those that other steps share."""
    found = [os.stat(os.path.join(at, name)) for at, _, names in os.walk(path) for name in names]
    return sum(each.st_size for each in found), sum(
        each.st_size for each in found if each.st_nlink > 1
    )


def verify_run(path: Any, timeout: float, progress: ProgressLike, *, fingerprints: bool) -> str:
    """Read all data of all steps; return a line for people.

    Raises ``CorruptionError`` with a line for each problem, of whatever step.
    """
    folder = RunFolder(path, timeout)
    problems: list[str] = []
    nbytes = 0
    complete = folder.complete()
    for number, each in complete.items():
        place = below(folder.path, each.name)
        try:
            contents = verify(place, fingerprints=fingerprints, timeout=timeout, progress=progress)
            nbytes += contents.nbytes
        except CorruptionError as error:
            problems += [f"step {number}: {problem}" for problem in error.problems]
    if problems:
        raise CorruptionError(f"{folder.url} is damaged", problems)
    return f"{folder.url} is whole: {counted(len(complete), 'step')}, {format_bytes(nbytes)}"


def _age(saved: str) -> str:
    """Return the time since a moment, such as ``3 h``."""
    try:
        seconds = time.time() - calendar.timegm(time.strptime(saved, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return ""
    for unit, length in [("d", 86400), ("h", 3600), ("min", 60)]:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

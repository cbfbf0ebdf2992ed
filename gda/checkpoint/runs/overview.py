"""A run for people: its steps, their sizes and metrics, and the program that writes."""

from __future__ import annotations

import calendar
import os
import threading
import time
from typing import Any

from gda.checkpoint.inspecting import inspect, verify
from gda.checkpoint.runs.keeper import Keeper
from gda.checkpoint.runs.keeping import Keeping
from gda.checkpoint.step_folders.folder import RunFolder, StepFolder, below, checked_step
from gda.layout.tables import table
from gda.layout.text import counted, format_bytes
from gda.storage.options import ProgressLike
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, NewerFormatError


def is_run(path: Any, timeout: float) -> bool:
    """Return True if a path is the folder of a run, and no checkpoint itself."""
    folder = RunFolder(path, timeout)
    return not folder.is_checkpoint() and folder.owner() is not None


def lines_of(path: Any, timeout: float) -> tuple[list[str], list[str]]:
    """Return the contents of the folder of a run for people, and the problems of its steps.

    Reads the manifests. A step that the training removes meanwhile is omitted.
    """
    folder = RunFolder(path, timeout)
    owner, complete = folder.owner(), folder.complete()
    assert owner is not None
    head = ("step", "age", "size", "shared", "metrics", "held")
    rows: list[tuple[str, ...]] = [head]
    problems: list[str] = []
    for number, step in complete.items():
        try:
            rows.append(_row(folder, number, step))
        except FileNotFoundError:
            continue
        except (CorruptionError, NewerFormatError) as error:
            rows.append((str(number), "", "not readable", "", "", "yes" if step.is_held else ""))
            problems.append(f"step {number}: {error}")
    lines = table(rows, right={*head[:4]}) if rows[1:] else ["no complete step"]
    others = [step for number, step in folder.listed().items() if number not in complete]
    if unfinished := [step.name for step in others if not step.is_of_orbax]:
        lines.append(f"not complete: {', '.join(unfinished)}")
    since = f"since {owner.since}, program {owner.generation} of this run"
    lines.append(f"written by {owner.where}, {since}")
    if owner.ends is not None:
        lines.append(f"a rollback to step {owner.ends} was begun; the next resume ends it")
    return lines, problems


def roll_back(path: Any, step: int, timeout: float) -> list[int]:
    """Remove the steps of a run after one, and return them; without any, write nothing.

    Raises ``CheckpointNotFoundError`` if the run has no such step, ``ValueError`` if a later one is
    held.
    """
    keeper = Keeper(RunFolder(path, timeout), Keeping.of(None, None, None))
    removed = keeper.roll_back(checked_step(step))
    keeper.wait(threading.TIMEOUT_MAX)
    return removed


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
    """Read all data of all steps; return lines for people.

    A step that the training removes meanwhile is named. Raises ``CorruptionError`` with a line for
    each problem, of whatever step.
    """
    folder = RunFolder(path, timeout)
    problems, nbytes, complete, removed = list[str](), 0, folder.complete(), list[int]()
    for number, each in complete.items():
        place = below(folder.path, each.name)
        try:
            nbytes += verify(place, timeout=timeout, progress=progress).nbytes
            folder.metrics(each.name)
        except CheckpointNotFoundError:
            removed.append(number)
        except CorruptionError as error:
            problems += [f"step {number}: {problem}" for problem in error.problems]
        except NewerFormatError as error:
            problems.append(f"step {number}: {error}")
    if problems:
        raise CorruptionError(f"{folder.url} is damaged", problems)
    count = len(complete) - len(removed)
    whole = f"is whole: {counted(count, 'step')}, {format_bytes(nbytes)}"
    lines = [f"{folder.url} {whole if count else 'has no complete step'}"]
    lines += [f"step {number} was removed while it was read" for number in removed]
    return "\n".join(lines)


def _age(saved: str) -> str:
    """Return the time since a moment, such as ``3 h``."""
    seconds = time.time() - calendar.timegm(time.strptime(saved, "%Y-%m-%dT%H:%M:%SZ"))
    for unit, length in [("d", 86400), ("h", 3600), ("min", 60)]:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

"""A run for people: its steps, their sizes and metrics, and the program that writes."""

from __future__ import annotations

import calendar
import os
import time
from dataclasses import asdict
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


def document_of(path: Any, timeout: float) -> dict[str, Any]:
    """Return the contents of the folder of a run as JSON; reads the manifests."""
    folder = RunFolder(path, timeout)
    owner, complete = folder.owner(), folder.complete()
    assert owner is not None
    return {
        "path": folder.url,
        "owner": asdict(owner),
        "steps": [_step(folder, number, each) for number, each in complete.items()],
        "unfinished": [
            each.name
            for n, each in folder.listed().items()
            if n not in complete and not each.is_of_orbax
        ],
    }


def _step(folder: RunFolder, number: int, step: StepFolder) -> dict[str, Any]:
    """Return a step: its bytes are those of all files, shared those that other steps link to."""
    path = below(folder.path, step.name)
    contents = inspect(path, timeout=folder.timeout)
    nbytes, shared = contents.nbytes, contents.shared_nbytes
    if not folder.store().is_remote:
        nbytes = sum(
            os.stat(os.path.join(at, name)).st_size
            for at, _, names in os.walk(path)
            for name in names
        )
    return {
        "step": number,
        "saved": contents.about.get("saved", ""),
        "nbytes": nbytes,
        "shared_nbytes": shared,
        "metrics": folder.metrics(step.name),
        "is_held": step.is_held,
    }


def lines_of(document: dict[str, Any]) -> list[str]:
    """Return the contents of the folder of a run for people."""
    rows = [("step", "age", "size", "shared", "metrics", "held")]
    for each in document["steps"]:
        size, shared = format_bytes(each["nbytes"]), format_bytes(each["shared_nbytes"])
        metrics = ", ".join(f"{name} {value:g}" for name, value in each["metrics"].items())
        held = "yes" if each["is_held"] else ""
        rows.append((str(each["step"]), _age(each["saved"]), size, shared, metrics, held))
    lines = table(rows, right={*rows[0][:4]}) if rows[1:] else ["no complete step"]
    if document["unfinished"]:
        lines.append(f"not complete: {', '.join(document['unfinished'])}")
    owner = document["owner"]
    since = f"since {owner['since']}, program {owner['generation']} of this run"
    lines.append(f"written by {owner['where']}, {since}")
    if owner["ends"] is not None:
        lines.append(f"a rollback to step {owner['ends']} was begun; the next resume ends it")
    return lines


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

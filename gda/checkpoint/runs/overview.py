"""A report on a run: its steps, their sizes and metrics, and the program that writes."""

from __future__ import annotations

import calendar
import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gda.checkpoint.inspecting import JSON_VERSION, inspect, verify
from gda.checkpoint.local_steps.host_folder import nbytes_in
from gda.checkpoint.runs.keeper import Keeper
from gda.checkpoint.step_folders.folder import Owner, RunFolder, StepFolder, below, checked_step
from gda.checkpoint.step_folders.rules import Rules
from gda.layout.text import counted, format_bytes
from gda.show.report import Report, Table
from gda.storage.options import ProgressLike
from gda.storage.orbax_runs.open_orbax import open_orbax
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, NewerFormatError
from gda.trees.files.step_names import has_marks

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_HEAD = ("step", "age", "size", "shared", "metrics", "held")


def is_run(path: Any, timeout: float) -> bool:
    """Return True if a path is the folder of a run, and no checkpoint itself."""
    folder = RunFolder(path, timeout)
    return not has_marks(folder.store()) and folder.owner() is not None


class _StepRow(NamedTuple):
    """A complete step; ``None`` for facts that are unknown."""

    step: int
    name: str
    kind: str = "checkpoint"
    saved: str | None = None
    nbytes: int | None = None  # of all files
    nbytes_shared: int | None = None  # of those that other steps link to
    metrics: Mapping[str, float] = {}
    is_held: bool = False
    problem: str | None = None  # of a damaged step

    def to_dict(self) -> dict[str, Any]:
        known = {name: x if math.isfinite(x) else repr(x) for name, x in self.metrics.items()}
        return {**self._asdict(), "metrics": known}

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = [self.nbytes, self.nbytes_shared]
        return (
            str(self.step),
            age(self.saved) if self.saved else "",
            *("" if each is None else format_bytes(each) for each in sizes),
            "not readable"
            if self.problem
            else ", ".join(f"{name} {value:g}" for name, value in self.metrics.items()),
            "yes" if self.is_held else "",
        )


@dataclass(frozen=True, repr=False)
class Overview(Report):
    """The complete steps in a folder, of gda and Orbax, ascending, and the program that writes."""

    path: str
    steps: Sequence[_StepRow]
    unfinished: Sequence[str]  # names of folders
    set_aside: Sequence[str]  # those of damaged steps
    owner: Owner | None  # of a run of gda

    @property
    def problems(self) -> list[str]:
        """The problems of its steps, a line for each."""
        return [f"step {each.step}: {each.problem}" for each in self.steps if each.problem]

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        names = ("where", "since", "generation", "ends")
        return {
            "version": JSON_VERSION,
            "kind": "run",
            "path": self.path,
            "steps": [each.to_dict() for each in self.steps],
            "unfinished": [*self.unfinished],
            "set_aside": [*self.set_aside],
            "owner": self.owner and {name: getattr(self.owner, name) for name in names},
        }

    def _parts(self) -> list[str | Table]:
        table = Table([_HEAD, *(each.cells for each in self.steps)], _HEAD[:4])
        of_orbax = [str(each.step) for each in self.steps if each.kind == "orbax"]
        lists = {
            "steps of Orbax": of_orbax,
            "not complete": self.unfinished,
            "damaged and set aside": self.set_aside,
        }
        parts: list[str | Table] = [table if self.steps else "no complete step"]
        parts += [f"{name}: {', '.join(some)}" for name, some in lists.items() if some]
        if (owner := self.owner) is not None:
            since = f"since {owner.since}, program {owner.generation} of this run"
            parts.append(f"written by {owner.where}, {since}")
            if (ends := owner.ends) is not None:
                parts.append(f"a rollback to step {ends} was begun; the next resume ends it")
        return parts


def overview_of(path: Any, timeout: float) -> Overview | None:
    """Return the steps in a folder, from their manifests; ``None`` without steps or a run."""
    folder = RunFolder(path, timeout)
    if has_marks(folder.store()):
        return None
    owner, complete, of_orbax = folder.owner(), folder.complete(), dict(folder.of_orbax())
    if owner is None and not complete and not of_orbax:
        return None
    steps = [_of_orbax(folder, *each) for each in of_orbax.items()]
    for number, step in complete.items():
        with contextlib.suppress(FileNotFoundError):
            steps.append(_of_gda(folder, number, step))
    aside = folder.aside()
    others = [each for number, each in folder.listed().items() if number not in complete]
    unfinished = [x.name for x in others if not x.is_of_orbax and x.name not in aside]
    return Overview(folder.url, sorted(steps), unfinished, aside, owner)


def _of_gda(folder: RunFolder, number: int, step: StepFolder) -> _StepRow:
    found, place = _StepRow(number, step.name, is_held=step.is_held), below(folder.path, step.name)
    try:
        contents = inspect(place, timeout=folder.timeout)
        metrics = folder.metrics(step.name)
    except (CorruptionError, NewerFormatError) as error:
        return found._replace(problem=str(error))
    nbytes = contents.nbytes if folder.store().is_remote else nbytes_in(place)
    return found._replace(
        saved=contents.about.get("saved"),
        nbytes=nbytes,
        nbytes_shared=contents.shared_nbytes,
        metrics=metrics,
    )


def _of_orbax(folder: RunFolder, number: int, name: str) -> _StepRow:
    found, place = _StepRow(number, name, "orbax"), below(folder.path, name)
    with contextlib.suppress(OSError, ValueError):  # mostly there are none
        values = open_orbax(below(place, "metrics")).items()
        found = found._replace(metrics={k: x for k, x in values if isinstance(x, int | float)})
    if folder.store().is_remote:
        return found
    saved = time.strftime(_TIME, time.gmtime(os.stat(place).st_mtime))
    return found._replace(saved=saved, nbytes=nbytes_in(place))


def roll_back(path: Any, step: int, timeout: float) -> list[int]:
    """Remove the steps of a run after one, and return them; without any, write nothing.

    Raises ``CheckpointNotFoundError`` if the run has no such step, ``ValueError`` if a later one is
    held.
    """
    keeper = Keeper(RunFolder(path, timeout), Rules())
    removed = keeper.roll_back(checked_step(step))
    keeper.wait(threading.TIMEOUT_MAX)
    return removed


def verify_run(path: Any, timeout: float, progress: ProgressLike) -> str:
    """Read all data of all steps; return lines for people.

    A step that the training removes meanwhile is named. Raises ``CorruptionError`` with a line for
    each problem of any step.
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


def age(saved: str) -> str:
    """Return the time since a step was saved, as ``3 min``."""
    seconds = time.time() - calendar.timegm(time.strptime(saved, _TIME))
    for unit, length in [("d", 86400), ("h", 3600), ("min", 60)]:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

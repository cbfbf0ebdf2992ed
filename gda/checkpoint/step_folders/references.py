"""The step of a run that a path such as ``runs/a@latest`` names."""

from __future__ import annotations

import os
import re
from typing import Any

from gda.checkpoint.step_folders.folder import RunFolder, below
from gda.storage.stores.errors import CheckpointNotFoundError

_REFERENCE = re.compile(r"(.+)@(latest|best|\d+)", re.DOTALL)


def path_of(path: Any, timeout: float) -> Any:
    """Return the path of the step that ``path`` names with ``@``; any other path as it is.

    Raises:
      CheckpointNotFoundError: the run has no such step.
      ValueError: ``@best``, and the run has no rule for the best.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    found = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    if found is None or os.path.lexists(text):  # the name of a file may have an @
        return path
    folder, which = RunFolder(found[1], timeout), found[2]
    if which == "latest":
        step = max(folder.complete(), default=-1)
    else:
        step = _best(folder) if which == "best" else int(which)
    if step < 0:
        what = "complete step" if which == "latest" else "step with the metric of keep_best"
        raise CheckpointNotFoundError(f"{text}: {folder.url} has no {what}")
    return below(folder.path, folder.step(step).name)


def _best(folder: RunFolder) -> int:
    owner = folder.owner()
    if owner is None or owner.best is None:
        raise ValueError(
            f"{folder.url}@best: the run has no metric by which a step is best; name the step, or "
            "give its Run keep_best=(1, 'loss')"
        )
    metric, is_highest = owner.best
    return next(iter(folder.best_first(metric, is_highest=is_highest)), -1)

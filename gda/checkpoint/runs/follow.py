"""The steps of a run as they become complete, for a program beside the training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from gda.checkpoint.step_folders.folder import RunFolder
from gda.layout.boundary import public, set_module
from gda.multihost.steps import all_do
from gda.storage.options import check_seconds

_BETWEEN_LOOKS = 1.0  # seconds
_AT_A_TIME = 30.0  # seconds that process 0 looks while the others wait


@set_module("gda.checkpoint")
@public
def follow(path: Any, *, timeout: float | None = None) -> Iterator[int]:
    """Yield the complete steps of a run, ascending, and each new one when it is complete.

    Steps that were removed meanwhile are skipped. Writes nothing. Communicates in a program of
    several processes: all must go on together, and get the same steps.

    Args:
      path: the folder of the run, as for ``Run``. It need not exist yet.
      timeout: end after so many seconds without a new step; by default never.

    >>> import gda, jax.numpy as jnp, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gda.checkpoint.Run(folder, every=10) as run:
    ...         for step in range(31):
    ...             _ = run.save(step, {'w': jnp.zeros(4)})
    ...     for step in gda.checkpoint.follow(folder, timeout=0.1):
    ...         print(step, gda.checkpoint.restore(run.path(step))['w'].sum())
    10 0.0
    20 0.0
    30 0.0
    """
    if timeout is not None:
        check_seconds(timeout, "timeout")
    return _steps(RunFolder(path, 600), timeout)


def _steps(folder: RunFolder, timeout: float | None) -> Iterator[int]:
    seen: set[int] = set()
    while (step := _next(folder, seen, timeout)) is not None:
        yield step


def _next(folder: RunFolder, seen: set[int], timeout: float | None) -> int | None:
    """Return the next step that was not seen; communicates."""
    limit = math.inf if timeout is None else time.monotonic() + timeout

    def decide(_: object) -> tuple[int | None, bool]:
        """Return the step, and True if this was the last look."""
        until = min(limit, time.monotonic() + _AT_A_TIME)
        while True:
            steps = folder.complete()
            seen.intersection_update(steps)  # a step that was rolled back may come again
            if new := [step for step in steps if step not in seen]:
                seen.add(new[0])
                return new[0], True
            if (left := until - time.monotonic()) <= 0:
                return None, until == limit
            time.sleep(min(left, _BETWEEN_LOOKS))

    what = f"the next step of {folder.url}"
    while True:  # in short steps, so that a process that has ended is named
        step, is_last = all_do(
            lambda: None, decide=decide, what=what, timeout=folder.timeout, deciding=_AT_A_TIME
        ).decision
        if is_last:
            return step

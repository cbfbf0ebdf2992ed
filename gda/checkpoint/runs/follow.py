"""The steps of a run as they become complete, for a program beside the training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gda.checkpoint.step_folders.folder import RunFolder
from gda.layout.boundary import public, set_module
from gda.multihost.steps import all_do

_BETWEEN_LOOKS = 1.0  # seconds
_LONG_SECONDS = 1e6


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
    return _steps(RunFolder(path, 600), timeout)


def _steps(folder: RunFolder, timeout: float | None) -> Iterator[int]:
    seen: set[int] = set()
    while (step := _next(folder, seen, timeout)) is not None:
        yield step


def _next(folder: RunFolder, seen: set[int], timeout: float | None) -> int | None:
    """Return the next step that was not seen; communicates."""
    limit = None if timeout is None else time.monotonic() + timeout

    def decide(_: object) -> int | None:
        while True:
            steps = folder.complete()
            seen.intersection_update(steps)  # a step that was rolled back may come again
            if new := [step for step in steps if step not in seen]:
                seen.add(new[0])
                return new[0]
            left = _BETWEEN_LOOKS if limit is None else limit - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _BETWEEN_LOOKS))

    # The others wait for process 0 as long as it looks.
    seconds = _LONG_SECONDS if timeout is None else timeout + 600
    what = f"the next step of {folder.url}"
    return all_do(lambda: None, decide=decide, what=what, timeout=seconds).decision

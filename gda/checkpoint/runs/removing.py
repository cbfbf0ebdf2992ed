"""The removal of steps: at once they are no longer complete, and a thread removes their files.

Process 0 does it, and looks first if the run is still its own. A failure is only logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from gda.checkpoint.step_folders.folder import Owner, RunFolder, StepFolder
from gda.layout.text import counted, format_numbers
from gda.multihost.background import in_thread

log = logging.getLogger("gda")


class Removals:
    """The folders of one run that a thread removes, one after the other."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._last: Future[Any] | None = None
        self._waiting: set[str] = set()

    def remove(self, steps: dict[int, StepFolder], owner: Owner) -> None:
        """Make steps incomplete now, and remove their files in the background."""
        removed = []
        for number, folder in steps.items():
            try:
                self._folder.check_owner(owner)
                self._folder.remove_manifest(folder.name)
            except (OSError, RuntimeError, ValueError) as error:
                log.warning("step %d of %s was not removed: %s", number, self._folder.url, error)
                continue
            removed.append(number)
            self.begin(folder.name)
        if removed:
            log.info("removed %s of %s", _steps(removed), self._folder.url)

    def begin(self, name: str) -> None:
        """Begin to remove the files of an incomplete step."""
        self._waiting.add(name)
        self._last = in_thread("gda-remove", partial(self._remove_rest, name), self._last)

    def _remove_rest(self, name: str) -> None:
        try:
            self._folder.remove_rest(name)
        except Exception as error:
            log.warning(
                "%s/%s is no longer used and could not be removed: %s; the next resume tries again",
                self._folder.url,
                name,
                error,
            )
        self._waiting.discard(name)

    def wait(self, seconds: float) -> None:
        """Wait until all is removed, or so long; log what is left."""
        if self._last is not None:
            wait([self._last], seconds)
        if left := [*self._waiting]:
            log.warning(
                "%s of %s are still being removed; the next resume removes what is left",
                counted(len(left), "folder"),
                self._folder.url,
            )


def remove_left_over(folder: RunFolder, owner: Owner) -> None:
    """Remove what saves and removals of former programs have left, now: the disk may be full."""
    listed = folder.listed()
    left = [each for each in listed.values() if folder.is_left_over(each, owner)]
    for each in left:
        try:
            folder.remove_rest(each.name)
        except OSError as error:
            log.warning("%s/%s could not be removed: %s", folder.url, each.name, error)


def remove_later(folder: RunFolder, owner: Owner, last: int) -> None:
    """Remove the steps after ``last``; a kill at any moment leaves them removed, or the intent."""
    later = {n: each for n, each in folder.listed().items() if n > last and each.is_complete}
    begun = time.monotonic()
    folder.set_ends(owner, last)
    for each in later.values():
        folder.remove_manifest(each.name)
    folder.set_ends(owner, None)
    for each in later.values():
        folder.remove_rest(each.name)
    log.info(
        "rolled %s back to step %d: removed %s, in %.1f s",
        folder.url,
        last,
        _steps(later) if later else "no step",
        time.monotonic() - begun,
    )


def _steps(numbers: Iterable[int]) -> str:
    numbers = [*numbers]
    return f"{'step' if len(numbers) == 1 else 'steps'} {format_numbers(numbers)}"

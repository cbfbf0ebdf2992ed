"""The save that a run has in flight: at most one, whose end all processes hear together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gda.checkpoint.pending import Pending
from gda.checkpoint.saving import CommittedSave, Save, in_background
from gda.layout.text import format_processes
from gda.multihost.steps import Done
from gda.storage.stores.errors import SaveError
from gda.storage.stores.opening import Store


@dataclass
class SaveInFlight:
    """The save of a run that goes on in the background, if there is one.

    In the meeting of the next save, or of ``finish``, process 0 learns if it failed anywhere. Then
    all processes raise once, or log it and go on.

    Attributes:
      meet: ``all_do`` with the timeout and the errors of the run.
      store_of: opens the step of a name.
      not_saved: the rest of a message that begins with a step.
      failed: as for ``in_background``.
      is_complete: called in process 0 after a failure; True if the step is complete nevertheless.
      steps: those that are saved, ascending; the last one may be in flight.
    """

    meet: Callable[..., Done[Any]]
    store_of: Callable[[str], Store]
    not_saved: str
    failed: Callable[[], None]
    is_complete: Callable[[int], bool] = lambda step: False
    steps: list[int] = field(default_factory=list)
    pending: Pending | None = None

    def failure(self) -> Exception | None:
        """Wait for the save; return its error in this process."""
        try:
            if self.pending is not None:
                self.pending.result()
        except Exception as error:
            return error
        return None

    def begin(
        self,
        step: int,
        save: Save,
        state: Any,
        logs_errors: bool,
        completed: Callable[[CommittedSave, float], None],
        decide: Callable[[int | None], tuple[bool, str | None]] = lambda newest: (True, None),
    ) -> bool:
        """Begin the save of a step, unless the one before has failed, and that is raised.

        ``decide`` is called in process 0 with the newest step. It returns False to begin nothing,
        and the name of the step to link to.
        """
        failure = self.failure()

        def decide_all(have_failed: list[bool]) -> tuple[bool, dict[str, Any]]:
            end = self._end(have_failed)
            if end and not logs_errors:
                return False, {"end": end}
            before = self.steps[:-1] if end and not end["is_complete"] else self.steps
            begins, base = decide(before[-1] if before else None)
            return begins, {"end": end, "base": base}

        with save:
            begun, told = save.begin_if(decide_all, failure is not None, state, self.meet)
            self._hear(told["end"], failure, logs_errors)
            if begun is None:
                return False
            if told["base"] is not None:
                begun = replace(begun, base=self.store_of(told["base"]))
            self.pending = in_background(save, begun, completed, self.failed)
        self.steps.append(step)
        return True

    def finish(self, what: str, logs_errors: bool) -> None:
        """Wait for the save; if it failed in any process, all raise, or log."""
        if self.pending is not None:
            failure = self.failure()
            done = self.meet(
                lambda: failure is not None,
                what=what,
                decide=lambda parts: self._end([*parts.values()]),
            )
            self._hear(done.decision, failure, logs_errors)

    def _end(self, have_failed: list[bool]) -> dict[str, Any] | None:
        failed = [process for process, has_failed in enumerate(have_failed) if has_failed]
        if self.pending is None or not failed:
            return None
        return {"failed": failed, "is_complete": self.is_complete(self.steps[-1])}

    def _hear(
        self, end: dict[str, Any] | None, failure: Exception | None, logs_errors: bool
    ) -> None:
        pending, self.pending = self.pending, None
        if pending is None or end is None:
            return
        message = f"step {self.steps[-1]} {self.not_saved}"
        if not end["is_complete"]:
            self.steps.pop()
        if not logs_errors:
            raise failure or SaveError(f"{message}: {format_processes(end['failed'])} failed")
        logging.getLogger("gda").error("%s; the training goes on", message)

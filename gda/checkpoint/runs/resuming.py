"""The newest step that all processes can read: damage is decided together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from gda.checkpoint.format import manifest_json
from gda.checkpoint.reading.checked_files import MissingFileError
from gda.checkpoint.step_folders.folder import RunFolder
from gda.layout.text import join_some
from gda.multihost.places import one_line
from gda.multihost.shared_folders import LATE_SECONDS
from gda.multihost.steps import all_do
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, SaveError

_BETWEEN_LOOKS = 0.5

log = logging.getLogger("gda")


class StepToRead(NamedTuple):
    """A step that may be resumed: its number, its place for messages, and what reads its state.

    ``name`` is that of its folder in the run; ``None`` for a local step, whose files are not late.
    """

    number: int
    place: str
    read: Callable[[], Any]
    name: str | None = None


class Resumed(NamedTuple):
    """A step that all processes have read, and newer ones that are damaged, with the damage."""

    state: Any
    step: StepToRead
    damaged: list[tuple[StepToRead, str]]


def read_newest(
    folder: RunFolder,
    steps: Sequence[StepToRead],
    *,
    damaged: Literal["set aside", "raise"],
    reads_together: bool,
) -> Resumed:
    """Read the newest step that no process finds damaged; communicates.

    A file that is missing is waited for once, unless no other machine and no other process can
    write there. Then it is damage.

    Args:
      steps: the newest first.
      reads_together: True if they are read together, so that all read again if one must.

    Raises:
      CorruptionError: all are damaged; or one is, with ``damaged="raise"``.
      Exception: any error of ``read`` that is not damage; in the other processes ``SaveError``.
    """
    found: list[tuple[StepToRead, str]] = []
    late = _Late(folder)
    for step in steps:
        state, damage = _read_step(folder, step, reads_together, late)
        if not damage:
            return Resumed(state, step, found)
        found.append((step, damage))
        if damaged == "raise":
            break
    lines = [f"step {step.number}: {damage}" for step, damage in found]
    what = "is damaged" if damaged == "raise" else "has no step that can be read"
    raise CorruptionError(f"{folder.url} {what}: {join_some(lines)}", lines)


class _Late:
    """The wait of a resume for files that a network file system shows late: only one in all."""

    def __init__(self, folder: RunFolder) -> None:
        self._seconds = min(folder.timeout, LATE_SECONDS)
        self._limit: float | None = None
        if jax.process_count() == 1 and folder.store().is_local:
            self._limit = 0.0  # a missing file will not come

    def may_come(self, text: str) -> bool:
        """Return True if a missing file may still come; log the first, with its ``text``."""
        if self._limit is None:
            self._limit = time.monotonic() + self._seconds
            log.warning("%s; waiting %.0f s for it, because it may be late", text, self._seconds)
        return time.monotonic() < self._limit


def _read_step(
    folder: RunFolder, step: StepToRead, reads_together: bool, late: _Late
) -> tuple[Any, str]:
    """Return the state, or the damage that some process finds."""
    what = f"reading {step.place}"
    state: Any = None
    is_read = False

    def work() -> dict[str, str]:
        nonlocal state, is_read
        if is_read and not reads_together:
            return {"kind": "read"}
        try:
            state, is_read = step.read(), True
        except CheckpointNotFoundError:
            return {"kind": "missing", "text": f"{step.place} has no {manifest_json.NAME}"}
        except MissingFileError as error:
            return {"kind": "missing", "text": str(error)}
        except CorruptionError as error:
            return {"kind": "damaged", "text": str(error)}
        except Exception as error:
            if not reads_together:
                raise
            # It may be a consequence of damage that another process has found.
            errors.append(error)
            return {"kind": "failed", "text": one_line(error)}
        return {"kind": "read"}

    def decide(parts: dict[int, dict[str, str]]) -> dict[str, str]:
        for kind in ("damaged", "missing", "failed"):
            for process, part in parts.items():
                if part["kind"] == kind:
                    text = part["text"] if len(parts) == 1 else f"process {process}: {part['text']}"
                    may_be_late = kind == "missing" and step.name is not None
                    is_late = may_be_late and late.may_come(text)
                    return {"kind": "late" if is_late else kind, "text": text}
        return {"kind": "read", "text": ""}

    while True:
        errors: list[Exception] = []
        found = all_do(
            work,
            decide=decide,
            what=what,
            timeout=folder.timeout,
            failed=SaveError,
            shared=(ValueError, TypeError, PermissionError),
        ).decision
        if found["kind"] == "late":
            time.sleep(_BETWEEN_LOOKS)
            continue
        if found["kind"] == "failed":
            raise errors[0] if errors else SaveError(f"{what}: {found['text']}")
        return state, found["text"]

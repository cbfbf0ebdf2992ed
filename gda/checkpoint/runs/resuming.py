"""The newest step that all processes can read: damage is decided together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from gda.checkpoint.reading.checked_files import MissingFileError
from gda.checkpoint.step_folders.folder import RunFolder
from gda.layout.text import join_some
from gda.multihost.places import one_line
from gda.multihost.steps import all_do
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, SaveError

LATE_SECONDS = 60.0  # that another process may take to see a file which process 0 has named
_BETWEEN_LOOKS = 0.5

log = logging.getLogger("gda")


class Resumed(NamedTuple):
    """A step that all processes have read, and the damage of newer ones, by step."""

    state: Any
    step: int
    damage: Mapping[int, str]


def read_newest(
    folder: RunFolder,
    names: Mapping[int, str],
    read: Callable[[str], Any],
    *,
    damaged: Literal["set aside", "raise"],
    reads_together: bool,
) -> Resumed:
    """Read the newest step that no process finds damaged; communicates.

    Args:
      names: the folders of the steps, by number.
      read: returns the state in a folder.
      reads_together: True if ``read`` communicates, so that all call it again if one must.

    Raises:
      CorruptionError: all are damaged; or one is, with ``damaged="raise"``.
      Exception: any error of ``read`` that is not damage; in the other processes ``SaveError``.
    """
    damage: dict[int, str] = {}
    for step in sorted(names, reverse=True):
        state, found = _read_step(folder, names[step], read, reads_together)
        if not found:
            return Resumed(state, step, damage)
        damage[step] = found
        if damaged == "raise":
            break
    lines = [f"step {step}: {found}" for step, found in damage.items()]
    what = "is damaged" if damaged == "raise" else "has no step that can be read"
    raise CorruptionError(f"{folder.url} {what}: {join_some(lines)}", lines)


def _read_step(
    folder: RunFolder, name: str, read: Callable[[str], Any], reads_together: bool
) -> tuple[Any, str]:
    """Return the state, or the damage that some process finds."""
    what = f"reading {folder.url}/{name}"
    limit = time.monotonic() + min(folder.timeout, LATE_SECONDS)
    state: Any = None
    is_read = False

    def work() -> dict[str, str]:
        nonlocal state, is_read
        if is_read and not reads_together:
            return {"kind": "read"}
        try:
            state, is_read = read(name), True
        except (MissingFileError, CheckpointNotFoundError) as error:
            return {"kind": "missing", "text": str(error)}
        except CorruptionError as error:
            return {"kind": "damaged", "text": str(error)}
        except Exception as error:
            if not reads_together:
                raise
            # It may only follow from the damage that another process has found.
            errors.append(error)
            return {"kind": "failed", "text": one_line(error)}
        return {"kind": "read"}

    def decide(parts: dict[int, dict[str, str]]) -> dict[str, str]:
        for kind in ("damaged", "missing", "failed"):
            for process, part in parts.items():
                if part["kind"] == kind:
                    is_late = kind == "missing" and time.monotonic() < limit
                    text = part["text"] if len(parts) == 1 else f"process {process}: {part['text']}"
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

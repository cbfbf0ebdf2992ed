"""A check that a folder is the same for all processes: each sees the files of the others.

A network file system may show them late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

import jax

from gda.layout.text import format_processes
from gda.multihost import coordination
from gda.multihost.steps import all_do

LATE_SECONDS = 60.0  # that another process may take to see a new file of process 0
_BETWEEN_LOOKS = 0.2

_INSTEAD = "Use a file system that all share, or an object store"
_known: set[str] = set()


def is_known(url: str) -> bool:
    """Return True if all processes have seen this folder, or one beside it."""
    return not _known.isdisjoint(_with_parent(url))


def sees(look: Callable[[], bool]) -> bool:
    """Return True as soon as ``look`` does; False if a file is later than it may be."""
    limit = time.monotonic() + LATE_SECONDS
    while not look():
        if time.monotonic() > limit:
            return False
        time.sleep(_BETWEEN_LOOKS)
    return True


def check_is_one_folder(url: str, look: Callable[[], bool], timeout: float) -> None:
    """Raise ``OSError`` in all processes unless each sees the new file of process 0.

    Communicates. ``look`` returns True if this process sees it. A process waits ``timeout`` seconds
    for the others, and as long as a file may be late.
    """
    blind = all_do(
        lambda: sees(look),
        decide=lambda parts: [process for process, sees_it in parts.items() if not sees_it],
        what=f"a look at {url}",
        timeout=timeout + LATE_SECONDS,
    ).decision
    check_all_see(url, blind)


def check_all_see(url: str, blind: Collection[int]) -> None:
    """Raise ``OSError`` if some processes do not see the new file of process 0 in a folder."""
    if blind:
        raise OSError(
            f"{url} is not one folder for all processes: {format_processes(blind)} cannot see what "
            f"process 0 wrote there. {_INSTEAD}"
        )
    _known.update(_with_parent(url))


def advice_if_not_shared(url: str) -> str:
    """Return a likely reason why one of several processes does not find a folder, else nothing."""
    if not coordination.has_backends() or jax.process_count() == 1:
        return ""
    me = jax.process_index()
    return f". If others than process {me} find it, {url} is not one folder for all. {_INSTEAD}"


def _with_parent(url: str) -> tuple[str, str]:
    path = os.path.abspath(url)
    return path, os.path.dirname(path)

"""Calls of the system that read, write, send or receive, and may stop before the end of memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

# Takes the memory that is left and the bytes done before, and returns the bytes that it did.
Call = Callable[[memoryview, int], int]


def in_calls(call: Call, memory: Any) -> int:
    """Call, for at most 2 GiB each, until all is done or a call does nothing; return the bytes."""
    view, done = memoryview(memory), 0
    if view.nbytes:  # or it has no cast
        view = view.cast("B")
    while done < len(view) and (count := call(view[done:], done)):
        done += count
    return done


def write_all(write: Call, memory: Any) -> None:
    """Write memory; ``OSError`` if a call writes nothing."""
    if (done := in_calls(write, memory)) < (nbytes := memoryview(memory).nbytes):
        raise OSError(errno.EIO, f"the file took {done} of {nbytes} bytes and no more")

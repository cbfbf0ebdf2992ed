"""Calls of the system on files: all bytes, though a call may do fewer; errors name the file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_into(file: int, memory: Any, at: int | None = None) -> int:
    """Fill contiguous memory from a byte of a file, or from its position; return the bytes.

    They are fewer if the file ends before.
    """
    view, done = _bytes_of(memory), 0
    while done < len(view):
        rest = [view[done:]]
        count = os.readv(file, rest) if at is None else os.preadv(file, rest, at + done)
        if not count:
            break
        done += count
    return done


def write_all(file: int, memory: Any, at: int | None = None) -> None:
    """Write contiguous memory to a byte of a file, or to its position.

    Raises ``OSError`` if a call writes nothing.
    """
    view, done = _bytes_of(memory), 0
    while done < len(view):
        rest = view[done:]
        count = os.writev(file, [rest]) if at is None else os.pwrite(file, rest, at + done)
        if not count:
            raise OSError(errno.EIO, f"the file took {done} of {len(view)} bytes and no more")
        done += count


def _bytes_of(memory: Any) -> memoryview:
    view = memoryview(memory)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty memory has no cast


def begin_to_sync(file: int, first: int = 0, nbytes: int = 0) -> None:
    """Begin to sync bytes that were written, all if ``nbytes`` is 0, without waiting."""
    # This advice makes Linux begin. Elsewhere it has no effect.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, first, nbytes, os.POSIX_FADV_DONTNEED)


def sync_file(path: Path) -> None:
    """Sync a file, also the bytes that were written before."""
    with about(path):
        handle = os.open(path, os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_folder(folder: str | Path) -> None:
    """Make the entries of a folder durable, where the file system can."""
    with about(folder):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return  # writable, but not readable; PostgreSQL ignores these cases too
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):  # not on this file system
                raise
        finally:
            os.close(handle)


@contextlib.contextmanager
def about(path: str | Path) -> Iterator[None]:
    """Add the file name to errors of the operating system."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not os.path.isabs(error.filename):
            error.filename = os.fspath(path)
        raise

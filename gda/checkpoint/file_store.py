"""A directory as a store: files written and read in place.

TensorStore's file driver takes bytes, which would be a copy each way, and writes each file under
another name first, which a save into a directory of its own does not need.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gda.checkpoint.errors import SaveError
from gda.checkpoint.stores import LOCK, Bytes


class FileStore:
    """A directory; see ``gda.checkpoint.stores.Store`` for what its methods do."""

    is_remote = False

    def __init__(self, root: str) -> None:
        if not root:
            raise ValueError("the path of a checkpoint is empty")
        self.url = root
        self._root = os.path.abspath(root)
        self._guard = threading.Lock()
        self._to_sync: set[str] = set()

    def join(self, name: str) -> str:
        return os.path.join(self.url, name)

    def write(self, name: str, parts: Sequence[Any]) -> None:
        path = self._inside(name)
        self._make_directory(os.path.dirname(path))
        with _about(path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            try:
                _write_all(handle, parts)
                os.fsync(handle)
            finally:
                os.close(handle)

    def flush(self) -> None:
        with self._guard:
            directories, self._to_sync = sorted(self._to_sync, key=len, reverse=True), set()
        for directory in directories:
            _sync_directory(directory)

    def replace(self, name: str, data: bytes) -> None:
        path = self._inside(name)
        beside = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        self.write(f"{name}.new", [data])
        with _about(path):
            os.replace(beside, path)
        self.flush()

    def read(self, name: str, most_bytes: int) -> bytes:
        path = self._inside(name)
        with _about(path), _opened(path) as handle:
            size = os.fstat(handle).st_size
            if size > most_bytes:
                raise ValueError(f"{path} has {size} bytes; at most {most_bytes} make sense")
            buffer = np.empty(size, np.uint8)
            return buffer[: _read_all(handle, [buffer])].tobytes()

    def read_into(self, name: str, payload: Bytes, tail: Bytes) -> int:
        path = self._inside(name)
        with _about(path), _opened(path) as handle:
            size = os.fstat(handle).st_size
            if size != payload.nbytes + tail.nbytes:
                return size
            return _read_all(handle, [payload, tail])

    def size(self, name: str) -> int | None:
        path = self._inside(name)
        with _about(path):
            found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file")
        return found.st_size

    def entries(self) -> list[str]:
        return sorted(os.listdir(self._root))

    def remove(self, name: str) -> None:
        path = self._inside(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        import fcntl

        self._make_directory(self._root)
        path = os.path.join(self._root, LOCK)
        with _about(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            yield _try_lock(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB), self.url)
        finally:
            os.close(handle)  # which unlocks, as the end of the process does

    def _inside(self, name: str) -> str:
        return os.path.join(self._root, *name.split("/"))

    def _make_directory(self, directory: str) -> None:
        with self._guard:
            if directory in self._to_sync:
                return
            missing, parent = [], directory
            while not os.path.isdir(parent):
                missing.append(parent)
                parent = os.path.dirname(parent)
            for each in reversed(missing):
                with _about(each), contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                if not os.path.isdir(each):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), each)
            # The entry of a new directory is durable when its parent is.
            self._to_sync.update([directory, *map(os.path.dirname, missing)])


def _try_lock(lock: Callable[[], object], url: str) -> bool:
    try:
        lock()
    except BlockingIOError:
        raise SaveError(
            f"another save into {url} is running, in this process or in another one"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False  # a file system without locks
    return True


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
    """Make errors of the operating system name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # A pipe would be waited for, and a link may lead anywhere.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a regular file")
        yield handle
    finally:
        os.close(handle)


def _write_all(handle: int, parts: Sequence[Any]) -> None:
    # One call writes at most 2 GiB, and may always write less than it was given.
    rest = [memoryview(part).cast("B") for part in parts if len(part)]
    while rest:
        written = os.writev(handle, rest)
        rest = _after(rest, written)


def _read_all(handle: int, buffers: Sequence[Any]) -> int:
    rest = [memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes]
    total = 0
    while rest:
        count = os.readv(handle, rest)
        if not count:
            break
        total += count
        rest = _after(rest, count)
    return total


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of some buffers after so many bytes of them."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def _sync_directory(directory: str) -> None:
    with _about(directory):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

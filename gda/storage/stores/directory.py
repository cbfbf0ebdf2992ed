"""A directory as a store: files written and read in place.

Names are relative, their parts separated by ``/``. Errors name the file, and keep their class; the
message of a ``ValueError`` omits the name, which the caller adds.

TensorStore's file driver takes bytes, which costs a copy each way, and writes each file under
another name first, which a save into a new directory does not need.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from gda.storage.new_files import about as _about
from gda.storage.new_files import begin_to_sync
from gda.storage.stores.checksums import Bytes
from gda.storage.stores.errors import SaveError

LOCK = ".lock"  # at the top level; held while a save runs

_VERSION_BYTES = 200  # the first line of a manifest, with the checksum of the rest
# Small enough for a part to be still in the processor's cache when its checksum is computed: a
# restore takes a third less. Large enough for google-crc32c to let other threads run.
_PART_BYTES = 2**20
_READ = os.O_RDONLY | os.O_NONBLOCK
# A handle that can open files, also in a directory that may not be listed.
_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY


class FileStore:
    """A directory. ``KvStore`` has the same methods, which are described here.

    Files and directories may be symbolic links, as in the cache of a hub: reads follow them. Writes
    and removals replace and remove the link itself.
    """

    is_remote = False  # True: requests are slow, and their answers are in new memory

    def __init__(self, root: str) -> None:
        if not root:
            raise ValueError("the path of a checkpoint is empty; pass a directory or a URL")
        if "\0" in root:
            raise ValueError(f"the path of a checkpoint has a NUL character: {root!r}")
        self.url = root
        self._root = os.path.abspath(root)
        self._guard = threading.Lock()
        self._to_sync: set[str] = set()
        self._known: set[str] = set()
        self._kept = _Kept()

    def spec(self) -> dict[str, Any]:
        """Return the spec by which TensorStore opens the same place."""
        return {"driver": "file", "path": os.path.join(self._root, "")}

    def join(self, name: str) -> str:
        """Return the path or URL of a file, for the user."""
        return os.path.join(self.url, name)

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a new file from some buffers; it is durable after the next ``flush``.

        The disk begins with a buffer before the next one is asked for.
        """
        path = self._inside(name)
        self._make_directory(os.path.dirname(path))
        _write_new(path, parts)

    def flush(self) -> None:
        """Make everything durable that was written through this object."""
        with self._guard:
            directories, self._to_sync = sorted(self._to_sync, reverse=True), set()
        for directory in directories:
            _sync_directory(directory)

    def version(self, name: str) -> bytes:
        """Return a version that changes with the content of a file."""
        try:
            return self.head(name, _VERSION_BYTES)
        except (FileNotFoundError, ValueError):
            return b""

    def head(self, name: str, nbytes: int) -> bytes:
        """Return so many first bytes of a file, or all if it has less."""
        with self._opened(name) as (handle, _):
            return os.read(handle, nbytes)

    def replace(
        self, name: str, data: bytes, version: bytes | None, check: Callable[[], None]
    ) -> None:
        """Call ``check``; then write or replace a file of the top level: durable and atomic.

        Raises ``SaveError`` if the file no longer has ``version``: nothing was or will be written.
        After another error it may still be written.
        """
        path = self._inside(name)
        beside = f"{path}.new"
        # Not with write(), which would make a directory again that was removed meanwhile. The file
        # must be new: without locks, only one save at a time gets past this.
        try:
            _write_new(beside, [data])
        except FileExistsError:
            raise SaveError(
                f"another save into {self.url} is committing: {beside} exists; wait for it"
            ) from None
        try:
            self._check_version(name, version)
            check()
            with _about(path):
                os.replace(beside, path)
        except BaseException:
            _remove_again(beside)
            raise
        _sync_directory(os.path.dirname(path))

    def _check_version(self, name: str, version: bytes | None) -> None:
        now = self.version(name)
        if version is None or now == version:
            return
        if not now:
            path = self._inside(name)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        raise SaveError(f"another save into {self.url} committed before this one; save again")

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a file; raise ``ValueError`` if it is larger than ``most_bytes``."""
        with self._opened(name) as (handle, size):
            if size > most_bytes:
                raise ValueError(f"has {size} bytes; expected are at most {most_bytes}")
            parts = []
            while size and (part := os.read(handle, size)):
                parts.append(part)
                size -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(
        self, name: str, payload: Bytes, tail: Bytes, note: Callable[[Bytes], object]
    ) -> int:
        """Read a file that fills both buffers; return its size, also if it differs.

        Calls ``note`` with each part of the payload, in order, when it has been read.
        """
        with self._opened(name) as (handle, size):
            if size != payload.nbytes + tail.nbytes:
                return size
            total = 0
            for start in range(0, max(payload.nbytes, 1), _PART_BYTES):
                part = payload[start : start + _PART_BYTES]
                is_last = start + part.nbytes == payload.nbytes
                count = _read_all(handle, [part, tail] if is_last else [part])
                total += count
                if count < part.nbytes:
                    break  # the file has become shorter
                note(part)
            return total

    def size(self, name: str) -> int | None:
        """Return the size of a file, or ``None`` if that costs as much as reading it."""
        with _opening() as handles, _about(self._inside(name)):
            directory, file = self._directory_of(name, handles)
            return _size_at(file, directory)

    def entries(self, directory: str = "", known: str = "") -> list[str]:
        """Return the names in a directory, by default at the top level.

        An object store does not list the keys within ``known``, a directory that is there.
        """
        return sorted(os.listdir(self._inside(directory) if directory else self._root))

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all files; no error if there is none."""
        path = self._inside(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                with _about(path):
                    _remove_directory(path)
            else:
                os.unlink(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Keep other saves out; give True if the store has locks."""
        import fcntl

        self._make_directory(self._root)
        # If a save that died made it, its entry may not be durable yet.
        self._to_sync.add(os.path.dirname(self._root))
        path = os.path.join(self._root, LOCK)
        with _opening() as handles:
            with _about(path):
                if os.path.islink(path):  # to a file of a cache, which other checkpoints share
                    os.unlink(path)
                handle = handles.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                is_locked = _try_lock(
                    lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB), self.url
                )
                if not is_locked:
                    _warn_of_no_locks(os.fstat(handle).st_dev, self.url)
                yield is_locked
            finally:
                # The end of the process unlocks it too. Closing it is not enough: a process forked
                # meanwhile has the handle too.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def within(self, directory: str) -> Iterator[None]:
        """Keep a directory open for the files that this thread reads there meanwhile."""
        kept = self._kept
        with _opening() as handles:
            kept.name, kept.handles, kept.handle = directory, handles, None
            try:
                yield
            finally:
                kept.name = None

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """Open a file for reading; give its handle and its size."""
        with _opening() as handles, _about(self._inside(name)):
            directory, file = self._directory_of(name, handles)
            # Checked first: opening a pipe would block, and opening a device may do anything.
            _size_at(file, directory)
            handle = handles.open(file, _READ, directory)
            yield handle, _size(os.fstat(handle))

    def _directory_of(self, name: str, handles: _Handles) -> tuple[int, str]:
        """Return a handle of the directory of a file, and the name of the file there."""
        directory, _, file = name.rpartition("/")
        kept = self._kept
        if directory != kept.name:
            return handles.open(self._inside(directory), _DIRECTORY), file
        if kept.handle is None:
            kept.handle = kept.handles.open(self._inside(directory), _DIRECTORY)
        return kept.handle, file

    def _inside(self, name: str) -> str:
        return os.path.join(self._root, *name.split("/"))

    def _make_directory(self, directory: str) -> None:
        with self._guard:
            self._to_sync.add(directory)
            if directory in self._known:
                return
            missing, parent = [], directory
            while not os.path.isdir(parent):
                missing.append(parent)
                parent = os.path.dirname(parent)
            # A known directory, or the root, which lock() makes, was removed meanwhile. A new one
            # would lack the files that were written before.
            is_gone = self._known | ({self._root} - {directory})
            for each in missing:
                if each in is_gone:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), each)
            for each in reversed(missing):
                with _about(each), contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                if not os.path.isdir(each):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), each)
            # The entry of a new directory is durable when its parent is.
            self._to_sync.update(map(os.path.dirname, missing))
            self._known.update([directory, *missing])


def _try_lock(lock: Callable[[], object], url: str) -> bool:
    try:
        lock()
    except BlockingIOError:
        raise SaveError(
            f"another save into {url} is running, in this process or in another one; wait for it, "
            "with pending.result() if it is one of save_async"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False  # a file system without locks
    return True


def _warn_of_no_locks(device: int, url: str) -> None:
    """Warn once for each file system without locks."""
    if device not in without_locks:
        without_locks.add(device)
        logging.getLogger("gda").warning(
            "the file system of %s has no locks: if two programs save into one path at the same "
            "time, one fails, but only when it commits. Save from one program at a time",
            url,
        )


without_locks: set[int] = set()


class _Kept(threading.local):
    """The directory that a thread keeps open."""

    name: str | None = None
    handles: _Handles
    handle: int | None = None  # of the directory, after the first file


class _Handles(list[int]):
    """Handles of files, opened by path, flags and directory."""

    def open(self, path: str, flags: int, directory: int | None = None) -> int:
        self.extend(map(partial(os.open, mode=0o666, dir_fd=directory), [path], [flags]))
        return self[-1]


@contextlib.contextmanager
def _opening() -> Iterator[_Handles]:
    """Give a list that opens files; all of them are closed at the end.

    Python checks for Ctrl-C when a call returns, and drops the result: a handle of ``os.open``
    would stay open. So one call of C code opens a file and keeps its handle, and another one closes
    all of them.
    """
    handles = _Handles()
    closed = map(os.close, handles)
    try:
        yield handles
    finally:
        deque(closed, maxlen=0)


def _size_at(file: str, directory: int) -> int:
    """Return the size of a regular file; a link is followed, and its target must be there."""
    try:
        return _size(os.stat(file, dir_fd=directory))
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            target = os.readlink(file, dir_fd=directory)
            raise ValueError(f"is a link to {target}, which is missing; fetch it") from None
        raise


def _size(found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is not a regular file")
    return found.st_size


def _write_new(path: str, parts: Iterable[Any]) -> None:
    with _about(path), _opening() as handles:
        try:
            handle = handles.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            for part in parts:
                _write_all(handle, part)
            os.fsync(handle)
        except BaseException:
            if handles:
                _remove_again(path)
            raise


def _remove_directory(path: str, parent: int | None = None) -> None:
    """Remove a directory with all files: ``shutil.rmtree``, but Ctrl-C leaves no handle open."""
    with _opening() as handles:
        here = handles.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, parent)
        for name in os.listdir(here):
            if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                _remove_directory(name, here)
            else:
                os.unlink(name, dir_fd=here)
    os.rmdir(path, dir_fd=parent)


def _remove_again(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _write_all(handle: int, part: Any) -> None:
    # One call writes at most 2 GiB, and may write less than it was given.
    rest = memoryview(part).cast("B")
    while rest:
        rest = rest[os.writev(handle, [rest]) :]
    begin_to_sync(handle)


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
    """Return the rest of some buffers after so many bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def _sync_directory(directory: str) -> None:
    with _about(directory), _opening() as handles:
        try:
            handle = handles.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return  # writable, but not readable; PostgreSQL ignores these cases too
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):  # not on this file system
                raise

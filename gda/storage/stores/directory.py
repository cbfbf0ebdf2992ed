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
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from gda.storage.stores.checksums import CRC_BYTES, Bytes, crc32c
from gda.storage.stores.errors import SaveError
from gda.storage.system_calls import about, begin_to_sync, read_into, sync_folder, write_all

LOCK = ".lock"  # at the top level; held while a save runs

_VERSION_BYTES = 200  # the first line of a manifest, with the checksum of the rest
# Small enough for a part to be still in the processor's cache when its checksum is computed: a
# restore takes a third less.
_PART_BYTES = 2**20
_READ = os.O_RDONLY | os.O_NONBLOCK
_LOCAL_FILE_SYSTEMS = {*("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay")}


class FileStore:
    """A directory. ``KvStore`` has the same methods, which are described here.

    Files and directories may be symbolic links, as in the cache of a hub: reads follow them. Writes
    and removals replace and remove the link itself. Without ``syncs``, what is written survives the
    program, and not the machine.
    """

    is_remote = False  # True: requests are slow, and their answers are in new memory

    def __init__(self, root: str, syncs: bool = True) -> None:
        if not root:
            raise ValueError("the path of a checkpoint is empty; pass a directory or a URL")
        if "\0" in root:
            raise ValueError(f"the path of a checkpoint has a NUL character: {root!r}")
        self.url = root
        self._root = os.path.abspath(root)
        self._syncs = syncs
        self._guard = threading.Lock()
        self._to_sync: set[str] = set()
        self._known: set[str] = set()

    @property
    def is_local(self) -> bool:
        """True if no other machine writes there, as far as that is known."""
        return _file_system_of(self._root) in _LOCAL_FILE_SYSTEMS

    def spec(self) -> dict[str, Any]:
        """Return the spec by which TensorStore opens the same place."""
        return {"driver": "file", "path": os.path.join(self._root, "")}

    def join(self, name: str) -> str:
        """Return the path or URL of a file, for the user."""
        return os.path.join(self.url, name)

    def write(self, name: str, data: bytes | Bytes) -> None:
        """Write a new file; it is durable after the next ``flush``."""
        with self._created(name) as handle:
            write_all(handle, data)

    def write_sealed(self, name: str, payload: Bytes) -> int:
        """Write a file as ``write``, with the payload's CRC-32C after it; return the CRC-32C."""
        with self._created(name) as handle:
            write_all(handle, payload)
            if self._syncs:
                begin_to_sync(handle)  # takes time for every page, so it is not called again
            crc = crc32c(payload)  # the disk is at work meanwhile
            write_all(handle, crc.to_bytes(CRC_BYTES, "little"))
        return crc

    def make(self, name: str) -> None:
        """Make a directory, if it is not there."""
        self._make_directory(self._inside(name))

    def link(self, name: str, base: FileStore, source: str, nbytes: int, before: str) -> bool:
        """Make a new file a hard link to ``source`` of another store; return False if that fails.

        The source must have its size, and must not have changed after ``before``, another file of
        that store, was written.
        """
        path, at = self._inside(name), base._inside(source)
        self._make_directory(os.path.dirname(path))
        try:
            found = os.lstat(at)  # a link to a symbolic link would depend on where it is
            is_same = stat.S_ISREG(found.st_mode) and found.st_size == nbytes
            if not is_same or found.st_mtime_ns > os.stat(base._inside(before)).st_mtime_ns:
                return False
            # May fail for many reasons: EMLINK, EPERM, EXDEV, ENOSYS, EOPNOTSUPP.
            os.link(at, path)
        except OSError:
            return False
        return True

    def flush(self) -> None:
        """Make everything durable that was written through this object."""
        with self._guard:
            directories, self._to_sync = sorted(self._to_sync, reverse=True), set()
        for directory in directories if self._syncs else ():
            sync_folder(directory)

    def version(self, name: str) -> bytes:
        """Return a version that changes with the content of a file."""
        try:
            return self.head(name, _VERSION_BYTES)
        except (FileNotFoundError, ValueError):
            return b""

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first ``nbytes`` of a file, or all if it has fewer."""
        with self._opened(name) as (handle, _):
            return _read(handle, nbytes)

    @contextlib.contextmanager
    def replacing(self, name: str, data: bytes, version: bytes | None) -> Iterator[None]:
        """Write or replace a file of the top level when the block ends: durable and atomic.

        Raises ``SaveError`` if the file no longer has ``version``: nothing was or will be written,
        as after an error in the block. After another error it may still be written.
        """
        path = self._inside(name)
        beside = f"{path}.new"
        # Not with write(), which would make a directory again that was removed meanwhile. The file
        # must be new: without locks, only one save at a time gets past this.
        try:
            with _new_file(beside, self._syncs) as handle:
                write_all(handle, data)
        except FileExistsError:
            raise SaveError(
                f"another save into {self.url} is committing: {beside} exists; wait for it"
            ) from None
        try:
            self._check_version(name, version)
            yield
            with about(path):
                os.replace(beside, path)
        except BaseException:
            _remove_again(beside)
            raise
        if self._syncs:
            sync_folder(os.path.dirname(path))

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
            return _read(handle, size)

    def read_into(self, name: str, payload: Bytes, tail: Bytes) -> tuple[int, int]:
        """Read a file that fills both buffers; return its size and the CRC-32C of the payload.

        If its size differs, the buffers and the checksum have no meaning.
        """
        with self._opened(name) as (handle, size):
            if size != payload.nbytes + tail.nbytes:
                return size, 0
            count = crc = 0
            for start in range(0, payload.nbytes, _PART_BYTES):
                part = payload[start : start + _PART_BYTES]
                count += read_into(handle, part)
                crc = crc32c(part, crc)
            return count + read_into(handle, tail), crc

    def size(self, name: str) -> int | None:
        """Return the size of a file, or ``None`` if that costs as much as reading it."""
        path = self._inside(name)
        with about(path):
            return _size_at(path)

    def num_links(self, name: str) -> int:
        """Return the number of hard links of a file, 0 if there is none; an object store has 1."""
        try:
            return os.stat(self._inside(name)).st_nlink
        except OSError:
            return 0

    def entries(self, directory: str = "", known: Collection[str] = ()) -> list[str]:
        """Return the names in a directory, by default at the top level.

        ``known`` are checkpoints at the top level, whose data an object store need not list.
        """
        return sorted(os.listdir(self._inside(directory) if directory else self._root))

    def numbered(
        self, known: Collection[str] = (), numbers: Collection[int] | None = None
    ) -> dict[str, list[str]]:
        """Return the names in each directory of the top level whose name is a number.

        Args:
          known: checkpoints whose data an object store need not list.
          numbers: those to list, by default all.
        """
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in filter(str.isdecimal, self.entries()):
                if numbers is not None and int(name) not in numbers:
                    continue
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found[name] = self.entries(name)
        return found

    def rename(self, name: str, new: str) -> None:
        """Rename a file or a directory of the top level; durable."""
        path = self._inside(name)
        with about(path):
            os.rename(path, self._inside(new))
        sync_folder(self._root)

    def replace(self, name: str, data: bytes, version: bytes | None = None) -> None:
        """Write or replace a small file: durable, and whole at any moment.

        A store without locks raises ``SaveError`` if the file no longer has ``version``.
        """
        beside = f"{name}.{uuid.uuid4().hex[:8]}.new"
        self.write(beside, data)
        with about(self._inside(name)):
            os.replace(self._inside(beside), self._inside(name))
        self.flush()

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all files; no error if there is none."""
        path = self._inside(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                with about(path):
                    shutil.rmtree(path)
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
        with about(path):
            if os.path.islink(path):  # to a file of a cache, which other checkpoints share
                os.unlink(path)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            yield _try_lock(handle, self.url)
        finally:
            # The end of the process unlocks it too. Closing it is not enough: a process forked
            # meanwhile has the handle too.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """Open a file for reading; give its handle and its size."""
        path = self._inside(name)
        with about(path):
            # Checked first: opening a pipe would block, and opening a device may do anything.
            _size_at(path)
            handle = os.open(path, _READ)
            try:
                yield handle, _size(os.fstat(handle))
            finally:
                os.close(handle)

    def _created(self, name: str) -> contextlib.AbstractContextManager[int]:
        """Make a file and missing directories; give its handle."""
        path = self._inside(name)
        self._make_directory(os.path.dirname(path))
        return _new_file(path, self._syncs)

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
                with about(each), contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                if not os.path.isdir(each):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), each)
            # The entry of a new directory is durable when its parent is.
            self._to_sync.update(map(os.path.dirname, missing))
            self._known.update([directory, *missing])


def _try_lock(handle: int, url: str) -> bool:
    """Lock a file; return False, and warn once, if the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SaveError(
            f"another save into {url} is running, in this process or in another one; wait for it, "
            "with pending.result() if it is one of save_async"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    else:
        return True
    device = os.fstat(handle).st_dev
    if device not in without_locks:
        without_locks.add(device)
        logging.getLogger("gda").warning(
            "the file system of %s has no locks: if two programs save into one path at the same "
            "time, one fails, but only when it commits. Save from one program at a time",
            url,
        )
    return False


without_locks: set[int] = set()


def _file_system_of(path: str) -> str | None:
    """Return the kind of file system of a directory, such as ``ext4``; None if it is not known."""
    longest, found = -1, None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, place, kind, *_ = line.split(" ")
                place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)
                is_above = os.path.commonpath([place, os.path.realpath(path)]) == place
                if is_above and len(place) >= longest:
                    longest, found = len(place), kind
    except OSError:  # not on Linux
        pass
    return found


def _size_at(path: str) -> int:
    """Return the size of a regular file; a link is followed, and its target must be there."""
    try:
        return _size(os.stat(path))
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            raise ValueError(f"is a link to {target}, which is missing; fetch it") from None
        raise


def _size(found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is not a regular file")
    return found.st_size


@contextlib.contextmanager
def _new_file(path: str, syncs: bool) -> Iterator[int]:
    """Make a file; it is durable at the end if it is synced, and removed after an error."""
    with about(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            yield handle
            if syncs:
                os.fsync(handle)
        except BaseException:
            _remove_again(path)
            raise
        finally:
            os.close(handle)


def _remove_again(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _read(handle: int, nbytes: int) -> bytes:
    with open(handle, "rb", closefd=False) as file:  # repeats short reads
        return file.read(nbytes)

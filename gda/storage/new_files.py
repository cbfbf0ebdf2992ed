"""New files, written by several processes beside the place where they will be, and put there whole.

No JAX, and no format: blocks of arrays that lie in C order in a file, and folders.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gda.layout.spec import Index, Shape

# Blocks that are not contiguous in memory are copied in parts of so many bytes.
PART_BYTES = 4 * 1024 * 1024


# Not by memory maps, which are faster for short runs: of one page that two hosts change, each on a
# shared file system, one change may be lost; and a full disk ends the process.
def write_block(
    file: int, first: int, shape: Shape, index: Index, data: np.ndarray[Any, Any]
) -> None:
    """Write the block at an index of an array of a shape, whose first byte is at ``first``."""
    if not data.size:
        return
    if not data.flags.c_contiguous:
        rows = max(1, PART_BYTES * len(data) // data.nbytes)
        for row in range(0, len(data), rows):
            part = np.ascontiguousarray(data[row : row + rows])
            begin = (index[0].start or 0) + row
            write_block(file, first, shape, (slice(begin, begin + len(part)), *index[1:]), part)
        return
    whole = data.ndim
    while whole and data.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    run = max(whole - 1, 0)  # the dimension of the runs, and those after it, are contiguous
    strides = [math.prod(shape[each + 1 :]) * data.itemsize for each in range(data.ndim)]
    starts = [s.start or 0 for s in index]
    first += sum(start * stride for start, stride in zip(starts, strides, strict=True))
    view, position = memoryview(data.reshape(-1).view(np.uint8).data), 0
    run_bytes = math.prod(data.shape[run:]) * data.itemsize
    count, stride = (data.shape[run - 1], strides[run - 1]) if run else (1, 0)
    for place in np.ndindex(data.shape[: max(run - 1, 0)]):
        at = first + sum(number * each for number, each in zip(place, strides, strict=False))
        for _ in range(count):
            _write(file, view[position : position + run_bytes], at)
            position += run_bytes
            at += stride


def _write(file: int, view: memoryview, position: int) -> None:
    # One call writes at most 2 GiB, and may write less than it was given.
    while written := os.pwrite(file, view, position):
        if written == len(view):
            return
        view, position = view[written:], position + written


def create(path: Path, head: bytes, nbytes: int) -> None:
    """Make a file of a size; durable, with its first bytes."""
    with open(path, "xb") as file:
        file.write(head)
        file.truncate(nbytes)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def folder_beside(folder: Path, name: str) -> Iterator[Path]:
    """Make a new folder, for files of a save called ``name``; remove it at the end.

    What is missing of ``folder`` is made too, and removed again if it is empty at the end. Folders
    of saves of this name that were killed are removed, where the file system has locks.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f".{name}.*.partial"):
        with contextlib.suppress(OSError), _locked(old):
            shutil.rmtree(old)
    partial = folder / f".{name}.{uuid.uuid4().hex[:16]}.partial"
    try:
        partial.mkdir()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks
                stack.enter_context(_locked(partial))
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, until the end at the latest of the process; ``OSError`` if it is locked."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def replace_files(new: Sequence[Path], folder: Path, obsolete: Collection[str]) -> None:
    """Move files into a folder, in order, after the ``obsolete`` ones and their like are gone.

    The first is moved before anything is removed. So an index that comes first, or a file that is
    the only one, takes the place of the old one; and while files are missing, the index says so:
    at no time files of the old and of the new are read together.
    """
    first, *others = new
    os.replace(first, folder / first.name)
    for name in {*obsolete, *(path.name for path in others)} - {first.name}:
        (folder / name).unlink(missing_ok=True)
    if others:
        sync_folder(folder)
    for path in others:
        os.replace(path, folder / path.name)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

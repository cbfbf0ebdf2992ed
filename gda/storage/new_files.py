"""New files: written by several processes beside their final place, and moved there whole.

No JAX, and no format: blocks of arrays that lie in C order in a file, and folders.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gda.layout.cover import boxes_of_chunks, move_of
from gda.layout.indices import hull_of, sizes_of, start_of
from gda.layout.spec import Index, Shape
from gda.storage.system_calls import about, begin_to_sync, sync_folder, write_all

# Blocks that are joined, or not contiguous in memory, are copied in parts of so many bytes.
PART_BYTES = 4 * 1024 * 1024

# Shorter runs of several processes share pages, which would be flushed more than once.
_LONG_RUN = 2**20  # bytes


# Not by memory maps, which are faster for short runs: of one page that two hosts change, each on a
# shared file system, one change may be lost; and a full disk ends the process.
def write_blocks(
    file: int,
    first: int,
    shape: Shape,
    boxes: Mapping[int, Index],
    blocks: Mapping[int, np.ndarray[Any, Any]],
) -> None:
    """Write blocks that fill a box into the data of an array in C order.

    The array, of ``shape``, begins at the byte ``first`` of the file. ``boxes`` are the places of
    the blocks in it, by number, with every start and stop.
    """
    whole, (one, *others) = hull_of(boxes.values()), blocks.values()
    if not others and one.flags.c_contiguous:
        _write_runs(file, first, shape, start_of(whole), one)
        return
    most = max(PART_BYTES // one.itemsize, 1)
    for box in boxes_of_chunks(whole, (1,) * len(shape), most):
        data = np.empty(sizes_of(box), one.dtype)
        for part in move_of(boxes, box).parts:
            data[part.in_box] = blocks[part.block][part.in_block]
        _write_runs(file, first, shape, start_of(box), data)


def _write_runs(
    file: int, first: int, shape: Shape, start: Shape, data: np.ndarray[Any, Any]
) -> None:
    if not data.size:
        return
    run = axis_of_runs(shape, data.shape)
    strides = [math.prod(shape[each + 1 :]) * data.itemsize for each in range(data.ndim)]
    first += sum(number * stride for number, stride in zip(start, strides, strict=True))
    run_bytes = math.prod(data.shape[run:]) * data.itemsize
    view, position = memoryview(data.reshape(-1).view(np.uint8).data), 0
    count, stride = (data.shape[run - 1], strides[run - 1]) if run else (1, 0)
    for place in np.ndindex(data.shape[: max(run - 1, 0)]):
        at = first + sum(number * each for number, each in zip(place, strides, strict=False))
        for _ in range(count):
            write_all(file, view[position : position + run_bytes], at)
            position += run_bytes
            at += stride
    if run_bytes >= _LONG_RUN:
        begin_to_sync(file, first, data.nbytes)


def axis_of_runs(shape: Shape, block: Shape) -> int:
    """Return the dimension of a block's runs: from it on, the block is contiguous in the array.

    >>> axis_of_runs((8, 6, 4), (2, 3, 4)), axis_of_runs((8, 4), (8, 4)), axis_of_runs((), ())
    (1, 0, 0)
    """
    cut = [axis for axis, size in enumerate(shape) if block[axis] != size]
    return cut[-1] if cut else 0


def create(path: Path, head: bytes, nbytes: int) -> None:
    """Make a file of a size; durable, with its first bytes."""
    with about(path), open(path, "xb") as file:
        # The size first: NFS clients keep a page that ends with the file as if they knew all of it,
        # and would later write it whole, over bytes that other hosts wrote after the first ones.
        file.truncate(nbytes)
        file.write(head)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def folder_beside(folder: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder in ``folder`` for the new files of a save; remove it at the end.

    Makes missing parts of ``folder`` too, and removes those that are empty at the end. Also removes
    the hidden folders of saves of this name that were killed, where the file system has locks.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f".{glob.escape(name)}.{'[0-9a-f]' * 16}.partial"):
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
    """Lock a folder for the block, or until the process ends; ``OSError`` if it is locked."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def move(path: Path, place: Path) -> None:
    """Move a file over the one at a place; durable."""
    os.replace(path, place)
    sync_folder(place.parent)

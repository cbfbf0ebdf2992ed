"""Blocks of arrays and sources, written into files in C order, neighbours together."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gda.arrays.transport.source_blocks import SourceArray
from gda.arrays.transport.to_host import BlockData, HostBlock, host_blocks
from gda.layout.indices import shape_at, start_of
from gda.layout.spec import Index
from gda.storage.new_files import PART_BYTES, axis_of_runs, write_blocks
from gda.storage.options import Options
from gda.storage.system_calls import about, sync_file
from gda.storage.tasks import Task, run
from gda.trees.leaves import note_writing
from gda.trees.written_blocks import WrittenArray

# Some threads wait for the disk while others copy or read.
_WORKERS = 4
_LONG_RUN = 64 * 2**10  # bytes
_AT_A_TIME = 2**20  # bytes; to hand a small block to a thread takes longer than to write it
_FILES_AT_A_TIME = 64


class _Stripe(NamedTuple):
    """Blocks of a leaf side by side, by their numbers."""

    number: int  # of the leaf
    leaf: WrittenArray
    blocks: Sequence[int]
    file: int
    first: int  # the first byte of the leaf in the file

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.leaf, self.blocks)


def options_for_files(options: Options) -> Options:
    """Return options for writes, less the memory of the parts that ``write_blocks`` joins."""
    workers = options.max_workers or _WORKERS
    parts = min(workers, _WORKERS) * PART_BYTES
    max_bytes = max((options.max_bytes or 0) - parts, 1)
    return replace(options, max_workers=workers, max_bytes=max_bytes)


def write_leaves(
    tree: Any,
    leaves: Mapping[int, WrittenArray],
    places: Sequence[tuple[int, int]],
    paths: Sequence[Path],
    options: Options,
    add: Callable[[int], object],
) -> set[Path]:
    """Write the blocks of this process into the files at ``paths``; return those to be synced.

    ``leaves`` are some of the tree, by number. The place of a leaf is the number of its file and
    its first byte there. ``add`` is told the bytes that were written.
    """
    max_bytes = options.max_bytes or 1
    stripes = sorted(
        (
            _Stripe(number, leaf, blocks, *places[number])
            for number, leaf in leaves.items()
            for blocks in _side_by_side(leaf, max_bytes)
        ),
        key=lambda stripe: (stripe.file, stripe.first),
    )
    groups = itertools.groupby(stripes, key=lambda stripe: stripe.file // _FILES_AT_A_TIME)
    for _, group in groups:
        in_files = list(group)
        with contextlib.ExitStack() as stack:
            files = {}
            for number in sorted({stripe.file for stripe in in_files}):
                files[number] = os.open(paths[number], os.O_WRONLY)
                stack.callback(os.close, files[number])
            hosts = iter(host_blocks(_data(in_files), max_bytes))
            writes = (
                (stripe, list(itertools.islice(hosts, len(stripe.blocks)))) for stripe in in_files
            )
            run((_task(tree, some, files, paths, add) for some in _together(writes)), options)
    return {paths[stripe.file] for stripe in stripes}


def nbytes_of(leaf: WrittenArray, numbers: Iterable[int]) -> int:
    """Return the bytes of some blocks of an array."""
    shapes = [shape_at(leaf.own[number].box, leaf.shape) for number in numbers]
    return sum(map(math.prod, shapes)) * leaf.array.dtype.itemsize


def sync_files(paths: Iterable[Path]) -> None:
    """Sync files; errors name the file."""
    run((Task(0, partial(sync_file, path)) for path in sorted(paths)), Options(_WORKERS))


def _is_copied(leaf: WrittenArray) -> bool:
    """Return True if blocks of an array are copied or read before they are written."""
    if isinstance(leaf.array, np.ndarray):
        return False
    if isinstance(leaf.array, SourceArray):
        return True
    is_padded = leaf.grid is not None and leaf.grid.is_padded
    return is_padded or any(each.platform != "cpu" for each in leaf.array.devices())


def _side_by_side(leaf: WrittenArray, max_bytes: int) -> Iterator[list[int]]:
    """Yield the numbers of blocks, in groups that are better written together."""
    if isinstance(leaf.array, SourceArray):  # its blocks are large
        yield from ([number] for number in leaf.own)
        return
    # A write costs as much as copying some thousand bytes, so short runs are joined.
    # Blocks on the host take no memory.
    most = max_bytes if _is_copied(leaf) else None
    stripe: list[int] = []
    for number in sorted(leaf.own, key=lambda each: leaf.own[each].start):
        if stripe and not _continues(leaf, stripe, leaf.own[number].box, most):
            yield stripe
            stripe = []
        stripe.append(number)
    if stripe:
        yield stripe


def _continues(
    leaf: WrittenArray, stripe: Sequence[int], index: Index, most_bytes: int | None
) -> bool:
    """Return True if the block at an index follows those of a stripe, and is to join them."""
    first, last = leaf.own[stripe[0]].box, leaf.own[stripe[-1]].box
    block, itemsize = shape_at(first, leaf.shape), leaf.array.dtype.itemsize
    axis = axis_of_runs(leaf.shape, block)
    if not axis or math.prod(block[axis:]) * itemsize * len(stripe) >= _LONG_RUN:
        return False
    nbytes = math.prod(block) * itemsize * (len(stripe) + 1)
    if most_bytes is not None and nbytes > most_bytes:
        return False
    beside = (*first[:axis], slice(last[axis].stop, index[axis].stop), *first[axis + 1 :])
    return index == beside


def _data(stripes: Sequence[_Stripe]) -> Iterator[tuple[None, BlockData, int]]:
    for _, group in itertools.groupby(stripes, key=lambda stripe: stripe.number):
        first, *others = group
        blocks, is_copied = first.leaf.blocks(), _is_copied(first.leaf)
        for number in itertools.chain(*[stripe.blocks for stripe in (first, *others)]):
            data = blocks[number]
            # Memory on the host is taken as it is.
            yield (None, data, data.nbytes) if is_copied else (None, np.asarray(data), 0)


_Write: TypeAlias = tuple[_Stripe, list[HostBlock[None]]]


def _together(writes: Iterable[_Write]) -> Iterator[list[_Write]]:
    """Yield writes for one thread at a time: alone, or many small ones that need no copy."""
    some: list[_Write] = []
    nbytes = 0
    for stripe, hosts in writes:
        some.append((stripe, hosts))
        nbytes += stripe.nbytes
        if nbytes >= _AT_A_TIME or any(host.nbytes for host in hosts):
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _task(
    tree: Any,
    writes: Sequence[_Write],
    files: Mapping[int, int],
    paths: Sequence[Path],
    add: Callable[[int], object],
) -> Task:
    def work() -> None:
        for (number, leaf, numbers, file, first), hosts in writes:
            index = leaf.own[numbers[0]].box
            dtype = np.dtype(leaf.array.dtype).newbyteorder("<")
            try:
                values = [host.values().astype(dtype, copy=False) for host in hosts]
                with about(paths[file]):
                    write_blocks(files[file], first, leaf.shape, start_of(index), values)
            except Exception as error:
                note_writing(error, tree, number, index)
                raise

    blocks = [host for _, hosts in writes for host in hosts]
    written = sum(stripe.nbytes for stripe, _ in writes)

    def finish(_: object) -> None:
        add(written)
        for host in blocks:
            host.release()

    return Task(sum(host.nbytes for host in blocks), work, finish)

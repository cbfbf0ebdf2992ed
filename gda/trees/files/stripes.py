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
from gda.layout.indices import shape_at
from gda.layout.spec import Shape
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
    sizes, itemsize, most = leaf.block_shape, leaf.array.dtype.itemsize, 1
    axis = axis_of_runs(leaf.shape, sizes)
    if axis and leaf.own and not isinstance(leaf.array, SourceArray):  # whose blocks are large
        # A write costs as much as copying some thousand bytes, so short runs are joined.
        most = -(-_LONG_RUN // (math.prod(sizes[axis:]) * itemsize))
        if _is_copied(leaf):  # blocks on the host take no memory
            most = min(most, max_bytes // (math.prod(sizes) * itemsize))
    if most < 2:
        yield from ([number] for number in leaf.own)
        return
    stripe: list[int] = []
    end: tuple[Shape, int] | None = None  # of the last block: where the next one begins
    for number, (box, start, _) in sorted(leaf.own.items(), key=lambda each: each[1].start):
        others = start[:axis] + start[axis + 1 :]
        if stripe and (len(stripe) == most or end != (others, start[axis])):
            yield stripe
            stripe = []
        stripe.append(number)
        end = others, box[axis].stop
    if stripe:
        yield stripe


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
            boxes = {each: leaf.own[each].box for each in numbers}
            dtype = np.dtype(leaf.array.dtype).newbyteorder("<")
            try:
                values = [host.values().astype(dtype, copy=False) for host in hosts]
                blocks = dict(zip(numbers, values, strict=True))
                with about(paths[file]):
                    write_blocks(files[file], first, leaf.shape, boxes, blocks)
            except Exception as error:
                note_writing(error, tree, number, boxes[numbers[0]])
                raise

    blocks = [host for _, hosts in writes for host in hosts]
    written = sum(stripe.nbytes for stripe, _ in writes)

    def finish(_: object) -> None:
        add(written)
        for host in blocks:
            host.release()

    return Task(sum(host.nbytes for host in blocks), work, finish)

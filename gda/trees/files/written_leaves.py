"""The arrays of a tree, and the blocks of them that this process writes into files in C order."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gda.arrays.dtypes import is_extended
from gda.arrays.process_local import distinct_shards
from gda.arrays.transport.to_host import BlockData, HostBlock, HostBlocks
from gda.layout.processes import turns_of
from gda.layout.spec import Index, Shape, shape_at, start_of
from gda.layout.text import format_index
from gda.storage.new_files import about, axis_of_runs, write_blocks
from gda.storage.options import Options
from gda.storage.safetensors_format import dtype_name
from gda.storage.tasks import Task, run
from gda.trees.leaves import (
    array_of,
    blocks_to_write,
    grid_of_leaf,
    is_container,
    path_of,
    with_paths,
)

# With the parts that ``write_blocks`` joins in each thread, copies take 64 MiB. Some threads wait
# for the disk while others copy.
_MAX_BYTES = 48 * 2**20
_OPTIONS = Options(max_workers=4, max_bytes=_MAX_BYTES)
_LONG_RUN = 64 * 2**10  # bytes
_AT_A_TIME = 2**20  # bytes; to hand a small block to a thread takes longer than to write it
_FILES_AT_A_TIME = 64


@dataclass(frozen=True)
class Leaf:
    """An array of the tree, and the blocks of it that this process writes.

    Attributes:
      dtype: in the byte order of the files.
      own: the data, if every process has the whole array.
      is_copied: True if its blocks have to be copied before they are written.
      indices: of the blocks that this process writes.
      blocks: returns their data.
    """

    shape: Shape
    dtype: np.dtype[Any]
    own: Any
    is_copied: bool
    indices: Sequence[Index]
    blocks: Callable[[], Sequence[BlockData]]


def leaves_of(tree: Any) -> list[Leaf]:
    """Return the arrays of a tree; copies nothing.

    Raises:
      TypeError: a leaf is not an array, or of a dtype that safetensors files do not have.
      RuntimeError: an array was deleted or donated.
    """
    given = jax.tree.leaves(tree, is_leaf=is_container)
    arrays = with_paths(tree, _array_of, given)
    shardings = [getattr(array, "sharding", None) for array in arrays]
    # All processes have the same mesh; an array without one is local to its process.
    layouts = [each if isinstance(each, NamedSharding) else None for each in shardings]
    turns = turns_of([array.nbytes for array in arrays], layouts)
    return with_paths(tree, _leaf, given, arrays, turns)


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; save its data and its mask")
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
    else:
        array = array_of(leaf, "or a NumPy array, such as numpy.asarray(number)")
    if is_extended(array.dtype):
        raise TypeError(
            f"no file holds {array.dtype}; save the numbers of the keys: jax.random.key_data(array)"
        )
    dtype_name(np.dtype(array.dtype))
    return array


def _leaf(given: Any, array: Any, turn: int) -> Leaf:
    dtype = np.dtype(array.dtype).newbyteorder("<")
    on_devices = isinstance(array, jax.Array)
    is_copied = on_devices and any(each.platform != "cpu" for each in array.devices())
    is_local = on_devices and not isinstance(array.sharding, NamedSharding)
    if not on_devices or (is_local and jax.process_count() > 1):
        has_turn = turn % jax.process_count() == jax.process_index()
        indices = [tuple([slice(0, size) for size in array.shape])] if has_turn else []
        return Leaf(array.shape, dtype, array, is_copied, indices, lambda: [array])
    grid = grid_of_leaf(given)
    numbers = blocks_to_write(array, grid, turn)

    def blocks() -> Sequence[BlockData]:
        data_of = distinct_shards(array, grid) if numbers else {}
        return [data_of[number] for number in numbers]

    indices = [_bounds(grid.block_index(number), grid.global_shape) for number in numbers]
    # A block at the edge is copied without its padding.
    return Leaf(grid.global_shape, dtype, None, is_copied or grid.is_padded, indices, blocks)


def _bounds(index: Index, shape: Shape) -> Index:
    """Return an index with every start and stop."""
    return tuple([slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True)])


# Writing.


class _Stripe(NamedTuple):
    """Blocks of a leaf side by side, by their numbers among those that this process writes.

    Attributes:
      file, first: the file, and the first byte of the leaf there.
    """

    leaf: int
    numbers: Sequence[int]
    file: int
    first: int


def write_leaves(
    tree: Any, leaves: Sequence[Leaf], places: Sequence[tuple[int, int]], paths: Sequence[Path]
) -> None:
    """Write the blocks of this process into files; return when they are on disk.

    Args:
      leaves: of ``tree``.
      places: of each leaf, the number of its file and its first byte there.
      paths: of the files.
    """
    given = [
        _Stripe(number, blocks, *place)
        for number, (leaf, place) in enumerate(zip(leaves, places, strict=True))
        for blocks in _side_by_side(leaf)
    ]
    stripes = sorted(given, key=lambda stripe: (stripe.file, stripe.first))
    groups = itertools.groupby(stripes, key=lambda stripe: stripe.file // _FILES_AT_A_TIME)
    for _, group in groups:
        in_files = list(group)
        with contextlib.ExitStack() as stack:
            files = {}
            for number in sorted({stripe.file for stripe in in_files}):
                files[number] = os.open(paths[number], os.O_WRONLY)
                stack.callback(os.close, files[number])
            hosts = iter(HostBlocks(_data(leaves, in_files), _MAX_BYTES))
            writes = (
                _Write(stripe, list(itertools.islice(hosts, len(stripe.numbers))))
                for stripe in in_files
            )
            tasks = (_task(tree, leaves, some, files, paths) for some in _together(writes, leaves))
            run(tasks, _OPTIONS)
            syncs = (partial(_sync, file, paths[number]) for number, file in files.items())
            run((Task(0, sync) for sync in syncs), _OPTIONS)


def _sync(file: int, path: Path) -> None:
    with about(path):
        os.fsync(file)


def _side_by_side(leaf: Leaf) -> list[list[int]]:
    """Return the blocks by number, with those together that are better written together.

    A write costs as much as copying some thousand bytes, so short runs are joined.
    """
    stripes: list[list[int]] = []
    for number in sorted(range(len(leaf.indices)), key=lambda each: start_of(leaf.indices[each])):
        if stripes and _continues(leaf, stripes[-1], leaf.indices[number]):
            stripes[-1].append(number)
        else:
            stripes.append([number])
    return stripes


def _continues(leaf: Leaf, stripe: Sequence[int], index: Index) -> bool:
    """Return True if the block at an index comes after those of a stripe, and is to join them."""
    first, last = leaf.indices[stripe[0]], leaf.indices[stripe[-1]]
    block = shape_at(first, leaf.shape)
    axis = axis_of_runs(leaf.shape, block)
    run_bytes = math.prod(block[axis:]) * leaf.dtype.itemsize
    if not axis or run_bytes * len(stripe) >= _LONG_RUN:
        return False
    # Blocks on the host take no memory.
    nbytes = math.prod(block) * leaf.dtype.itemsize * (len(stripe) + 1)
    if leaf.is_copied and nbytes > _MAX_BYTES:
        return False
    beside = (*first[:axis], slice(last[axis].stop, index[axis].stop), *first[axis + 1 :])
    return index == beside


def _data(
    leaves: Sequence[Leaf], stripes: Sequence[_Stripe]
) -> Iterator[tuple[None, BlockData, int]]:
    for number, group in itertools.groupby(stripes, key=lambda stripe: stripe.leaf):
        leaf = leaves[number]
        blocks = leaf.blocks()
        for stripe in group:
            for each in stripe.numbers:
                data = blocks[each]
                # Memory on the host is taken as it is.
                yield (None, data, data.nbytes) if leaf.is_copied else (None, np.asarray(data), 0)


class _Write(NamedTuple):
    """A stripe with its blocks."""

    stripe: _Stripe
    hosts: list[HostBlock[None]]


def _together(writes: Iterable[_Write], leaves: Sequence[Leaf]) -> Iterator[list[_Write]]:
    """Yield writes for one thread at a time: alone, or many small ones that need no copy."""
    some: list[_Write] = []
    nbytes = 0
    for write in writes:
        stripe, leaf = write.stripe, leaves[write.stripe.leaf]
        some.append(write)
        block = shape_at(leaf.indices[stripe.numbers[0]], leaf.shape)
        nbytes += math.prod(block) * leaf.dtype.itemsize * len(stripe.numbers)
        if leaf.is_copied or nbytes >= _AT_A_TIME:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _task(
    tree: Any,
    leaves: Sequence[Leaf],
    writes: Sequence[_Write],
    files: Mapping[int, int],
    paths: Sequence[Path],
) -> Task:
    def work() -> None:
        for stripe, hosts in writes:
            leaf = leaves[stripe.leaf]
            index = leaf.indices[stripe.numbers[0]]
            start = tuple([s.start for s in index])
            try:
                blocks = [host.values().astype(leaf.dtype, copy=False) for host in hosts]
                with about(paths[stripe.file]):
                    write_blocks(files[stripe.file], stripe.first, leaf.shape, start, blocks)
            except Exception as error:
                path = path_of(tree, stripe.leaf)
                error.add_note(f"gda: while writing index {format_index(index)} of {path}")
                raise

    def finish(_: object) -> None:
        for write in writes:
            for host in write.hosts:
                host.release()

    return Task(sum(host.nbytes for write in writes for host in write.hosts), work, finish)

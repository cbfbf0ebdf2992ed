"""Arrays out to storage: every distinct block written once, by one of the processes that hold it.

A target is anything that takes slices: a memory map, a Zarr array, an HDF5 data set, a TensorStore.
``gda.storage.targets`` finds its properties before anything is written, and
``gda.storage.chunk_conflicts`` the chunks that two blocks share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from gda.arrays.dtypes import is_extended
from gda.arrays.transport.source_blocks import SourceArray, SourceBlock, one_at_a_time
from gda.arrays.transport.to_host import MAX_BYTES, HostBlock, host_blocks
from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import native
from gda.layout.grid import ShardGrid
from gda.layout.indices import shape_at
from gda.layout.spec import Index
from gda.layout.text import format_processes
from gda.storage.chunk_conflicts import are_aligned, first_conflict
from gda.storage.options import Options, Retry
from gda.storage.sources import source_of
from gda.storage.targets import Target, check_fit, target_of
from gda.storage.tasks import AsyncTask, Task, run
from gda.trees.leaves import (
    Tree,
    array_of,
    as_dicts,
    grid_of_leaf,
    held_by,
    is_container,
    is_source,
    note_writing,
    path_of,
    with_paths,
)
from gda.trees.matching import targets_for
from gda.trees.written_blocks import WrittenArray, written_arrays

_OTHERWISE = "for a NumPy array that every process has, let one process assign it to the target"


@set_module("gda")
@public
def store(
    tree: Tree,
    targets: Tree,
    *,
    max_workers: int | None = None,
    max_bytes: int | None = None,
    retry: Retry | None = None,
) -> None:
    """Write an array, or every array of a tree, to its target: each block once, by one process.

    All leaves are checked before the first is written. Processes share replicated blocks out by
    their bytes, and only the blocks that this process writes are copied to its host. All processes
    that hold a part of an array must call this. An array that only this process holds is written by
    this process. Returns when the blocks of this process are in the targets: durable in a
    TensorStore, or in its transaction if it has one. In other targets they are as after an
    assignment; call ``target.flush()`` yourself.

    Never communicates, so other processes may still be writing when it returns. Before a target is
    read, in process 0 for instance, let all processes call ``gda.check_processes_agree({})``.

    Args:
      tree: an array, with a mesh and a spec or on one device, or a pytree of them, the same in
        every process. Of a ``PaddedArray`` the elements without the padding are written. Or
        sources, as in ``gda.checkpoint.save``: all processes of the program share their blocks out,
        which consist of whole chunks of the target.
      targets: a target, or a tree of them of the same structure. A target has the shape of the
        array, and its dtype or one that holds each of its values exactly: anything with ``shape``,
        ``dtype`` and NumPy's slice assignment, such as ``numpy.memmap``, ``zarr.Array`` or
        ``h5py.Dataset``; or a TensorStore. Each process opens its own.
      max_workers: number of threads that write. By default the caller's thread alone writes block
        after block, because not every library is thread-safe. A TensorStore writes concurrently by
        itself.
      max_bytes: the most host memory for copies of blocks, and for blocks of sources, 256 MiB by
        default. A larger block is copied alone. Within the bound, copies are begun ahead of the
        writing.
      retry: the errors after which a block is read and written again, and how often; see
        ``gda.Retry``. By default none is.

    Raises, before anything is written, with a note of the leaf's path:
      TypeError: a leaf is not an array or a source, is traced or has PRNG keys, or something is not
        a target.
      RuntimeError: an array was deleted or donated.
      ValueError: targets are missing or surplus, or one is for two leaves; shapes differ, the dtype
        of a target cannot hold the values, it is read-only, or several processes, or threads, would
        write into one of its chunks. The message has a shape of chunks that fits.

    Raises, afterwards:
      Exception: any error of a target or a source, with a note of path and index. No block is begun
        after it, and no thread is left.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> data = np.arange(16, dtype=np.float32).reshape(8, 2)
    >>> g = gda.GlobalArray.from_source(data, mesh, P('x'))
    >>> target = np.empty((8, 2), np.float32)
    >>> gda.store(g, target)
    >>> np.array_equal(target, data)
    True
    >>> targets = {'w': target, 'step': np.empty((), int)}
    >>> gda.store({'w': g + 1, 'step': jax.numpy.int32(3)}, targets)
    >>> targets['w'][:2].tolist(), targets['step']
    ([[1.0, 2.0], [3.0, 4.0]], array(3))
    """
    options = Options(max_workers, max_bytes, retry=retry)
    tree = as_dicts(tree)
    leaves = jax.tree.leaves(tree, is_leaf=is_container)
    jobs = _jobs(tree, leaves, targets_for(tree, targets), options)
    blocks = host_blocks(_blocks(tree, jobs), max_bytes or MAX_BYTES)
    tasks = (_task(block, options) for block in blocks)
    run(tasks, replace(options, max_bytes=max_bytes or MAX_BYTES))


# The arrays.


class _Job(NamedTuple):
    """One array with the blocks that this process writes, and its target."""

    leaf: WrittenArray
    target: Target

    def nbytes_of(self, block: int) -> int:
        """Return the bytes of a block's copy on the host, if it must be copied."""
        itemsize = max(self.leaf.array.dtype.itemsize, self.target.dtype.itemsize)
        return math.prod(shape_at(self.leaf.own[block].box, self.leaf.shape)) * itemsize


def _jobs(tree: Any, leaves: Sequence[Any], targets: Sequence[Any], options: Options) -> list[_Job]:
    """Return the blocks to write and their targets, checked."""
    reading = one_at_a_time(options)

    def array_of_leaf(number: int, leaf: Any, target: Any) -> Any:
        if not is_source(leaf):
            return _array_of(leaf)
        target = target_of(held_by(target))
        source = source_of(leaf)
        check_fit(target, source.shape, native(source.dtype))
        most = options.max_bytes or MAX_BYTES
        return SourceArray.of(leaf, path_of(tree, number), most, reading, written=target.chunks)

    def grid_of(leaf: Any) -> ShardGrid | None:
        return None if is_source(leaf) else grid_of_leaf(leaf)

    def job(leaf: WrittenArray, target: Any) -> _Job:
        # jax.tree.map over a tree with containers puts each target into a container.
        target = target_of(held_by(target))
        check_fit(target, leaf.shape, np.dtype(leaf.array.dtype))
        _check_chunks(leaf, target, options)
        return _Job(leaf, target)

    arrays = with_paths(tree, array_of_leaf, range(len(leaves)), leaves, targets)
    grids = with_paths(tree, grid_of, leaves)
    written = written_arrays(arrays, grids, are_copies=False)
    return with_paths(tree, job, written, targets)


def _array_of(leaf: Any) -> jax.Array:
    array = array_of(leaf, _OTHERWISE)
    if is_extended(array.dtype):
        raise TypeError(
            f"no target holds {array.dtype}; store the numbers of the keys: "
            "jax.random.key_data(array)"
        )
    return array


def _check_chunks(leaf: WrittenArray, target: Target, options: Options) -> None:
    """Raise unless every chunk has one writer: a process, or a thread if several threads write."""
    if 0 in leaf.shape or not (leaf.has_several_writers or options.are_for_threads):
        return
    if not target.allows_processes and len(processes := {*leaf.writers().ravel().tolist()}) > 1:
        raise ValueError(
            "the target is in an HDF5 file, which only one process at a time may write, but "
            f"{format_processes(processes)} have blocks to write; gather the array with "
            "g.gather(process=0), write a file for each process, or use a Zarr array"
        )
    if target.chunks is None:
        return
    if are_aligned(leaf.block_shape, leaf.parts, target.chunks, target.origin):
        return
    writers = leaf.writers()
    by_threads = options.are_for_threads and not target.allows_threads
    if by_threads:  # any of several may write any block
        writers = np.arange(writers.size).reshape(writers.shape)
    two = first_conflict(writers, leaf.block_shape, target.chunks, target.origin)
    if two is not None:
        who = "two threads" if by_threads else format_processes(two)
        begins = ", the first at the first element of the target" if any(target.origin) else ""
        alone = ", or max_workers=1" if by_threads and not leaf.has_several_writers else ""
        raise ValueError(
            f"the target has chunks of shape {target.chunks}, and the blocks have shape "
            f"{leaf.block_shape}, so that {who} would write one chunk at the same time, and data "
            f"could be lost; use chunks of {leaf.block_shape}{begins}{alone}"
        )


# Writing.


@dataclass(frozen=True)
class _Destination:
    """The index of the target of a leaf at which a block is written."""

    index: Index
    target: Target
    is_read: bool  # the block is one of a source
    note: Callable[[Exception], None]  # adds the leaf and the index to an error


_Block: TypeAlias = HostBlock[_Destination]


def _blocks(tree: Any, jobs: Sequence[_Job]) -> Iterator[tuple[_Destination, Any, int]]:
    for number, job in enumerate(jobs):
        for block, data in job.leaf.blocks().items():
            index = job.leaf.index(block)
            note = partial(note_writing, tree=tree, number=number, index=index)
            is_read = isinstance(data, SourceBlock)
            yield _Destination(index, job.target, is_read, note), data, job.nbytes_of(block)


def _task(block: _Block, options: Options) -> Task | AsyncTask:
    to = block.key

    def finish(_: object) -> None:
        block.release()

    def work() -> None:
        try:
            to.target.handle[to.index] = block.values().astype(to.target.dtype, copy=False)
        except Exception as error:
            to.note(error)
            raise

    # An AsyncTask begins in the caller's thread, and would read there.
    if to.target.is_asynchronous and not (to.is_read and options.are_for_threads):
        return AsyncTask(block.nbytes, lambda: _Commit(block), finish, to.note)
    return Task(block.nbytes, work, finish)


class _Commit:
    """A block that TensorStore is writing; its ``Future``."""

    def __init__(self, block: _Block) -> None:
        target, index = block.key.target, block.key.index
        values = block.values().astype(target.dtype, copy=False)
        # Neither a jax.Array nor its cast changes, so no copy is needed.
        written = target.handle[index].write(values, can_reference_source_data_indefinitely=True)
        self.add_done_callback = written.commit.add_done_callback
        self.result = written.commit.result

    def cancel(self) -> None:
        """Wait for it: a write that goes on after the error could collide with the next attempt."""
        with suppress(Exception):
            self.result()

"""Arrays whose blocks are read once by all processes together, and not once by each.

A block that several processes need is divided into parts, one for each of them where it is large.
Each process reads its parts into the memory of the blocks, which the exchange completes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from gda.arrays.construction.from_sources import PendingArray, read_all, reporter
from gda.arrays.transport.exchanging import Part, exchange
from gda.layout.dtype_names import native
from gda.layout.sharing import holders_of, parts_of, readers_of
from gda.layout.spec import Index, shape_at, start_of
from gda.layout.text import format_index
from gda.mesh import devices_of, mesh_of_all, processes_of
from gda.multihost.agreement import watching
from gda.multihost.descriptions import Description
from gda.storage.options import Options
from gda.storage.progress import shown
from gda.storage.sources import AsyncSource, Source, as_numpy
from gda.storage.tasks import AsyncTask, Task, run

# A smaller part would not be read in much less time: a request takes as long as so many bytes.
_LEAST_BYTES_OF_A_PART = 4 * 2**20


def reads_wanted(pending: Sequence[PendingArray], options: Options) -> Description:
    """Return what decides which process reads and sends which part, if reads are shared."""
    if not options.read_once:
        return {}
    sources = {
        ("", f"source {number}"): str((each.plan.grid.global_shape, source.dtype, source.chunks))
        for number, each in enumerate(pending)
        if (source := each.source)
    }
    return {("", "read_once"): "True"} | sources


def read_builds(pending: Sequence[PendingArray], options: Options, name: str) -> None:
    """Read the blocks of all arrays, with ``read_once`` by all processes together.

    Communicates then, after all processes have compared ``reads_wanted``. ``name`` is the function
    that the user called.
    """
    mesh = mesh_of_several(each.plan.sharding for each in pending) if options.read_once else None
    if mesh is None:
        read_all(pending, options, name)
        return
    with shown(options.progress, name) as show:
        report = reporter(pending, show)
        shared = [SharedBlocks(each, each.source, report) for each in pending if each.source]
        parts = [(blocks, part) for blocks in shared for part in blocks.parts]
        each = [part for _, part in parts]
        readers = readers_of([part.holders for part in each], [part.nbytes for part in each])

        def tasks() -> Iterator[Task | AsyncTask]:
            for one, blocks in zip(pending, shared, strict=True):
                yield from one.tasks(report, blocks.numbers)
            for reader, (blocks, part) in zip(readers, parts, strict=True):
                if reader == jax.process_index():
                    yield blocks.task(part)

        pairs = zip(readers, each, strict=True)
        sent = [Part(reader, part.holders, part.nbytes) for reader, part in pairs]
        with watching(name, processes_of(mesh).numbers) as watch:
            run(tasks(), options)
            exchange(sent, lambda n: parts[n][0].memory(parts[n][1]), watch)
        for blocks in shared:
            blocks.settle()


def mesh_of_several(shardings: Iterable[Any]) -> Mesh | None:
    """Return a mesh of all devices, if they are of several processes and also of this one."""
    meshes = {sharding.mesh for sharding in shardings}
    mesh = mesh_of_all(device for each in meshes for device in devices_of(each))
    is_shared = mesh is not None and mesh.local_devices and processes_of(mesh).numbers[1:]
    return mesh if is_shared else None


class _BlockPart(NamedTuple):
    """A part of a block that several processes need."""

    block: Index
    within: Index  # of the part, within the block
    holders: tuple[int, ...]  # the processes, ascending
    nbytes: int


class SharedBlocks:
    """The blocks of one array that several processes need, and their memory in this one.

    Parts are read with the dtype that the source has, and the blocks are cast when they are whole.
    ``parts`` are the same in every process; ``numbers`` are the blocks in this one.
    """

    def __init__(
        self, pending: PendingArray, source: Source, report: Callable[[int], object]
    ) -> None:
        self._pending, self._source, self._report = pending, source, report
        self.parts = list(self._parts())
        numbers = {pending.plan.number_of(part.block) for part in self.parts}
        self.numbers = numbers - {None}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}

    def _parts(self) -> Iterator[_BlockPart]:
        grid, dtype = self._pending.plan.grid, self._source.dtype
        if dtype.hasobject or not math.prod(grid.shard_shape):
            return
        mesh: Any = self._pending.plan.sharding.mesh
        for block, holders in enumerate(holders_of(grid, processes_of(mesh))):
            index = grid.block_index(block)
            sizes = shape_at(index, grid.shard_shape)
            nbytes = math.prod(sizes) * dtype.itemsize
            if len(holders) < 2 or not nbytes:  # of a padded grid, some have no elements
                continue
            count = min(len(holders), nbytes // _LEAST_BYTES_OF_A_PART)
            for within in parts_of(start_of(index), sizes, count, self._source.chunks):
                nbytes = math.prod(shape_at(within, sizes)) * dtype.itemsize
                yield _BlockPart(index, within, holders, nbytes)

    def memory(self, part: _BlockPart) -> np.ndarray[Any, Any]:
        """Return the memory of a part, of a block that this process has."""
        number: Any = self._pending.plan.number_of(part.block)
        if number not in self._memory:
            dtype = native(self._source.dtype)
            self._memory[number] = self._pending.reader.empty(dtype, part.block)
        return self._memory[number][(*part.within, ...)]  # with the dots, also of a scalar a view

    def task(self, part: _BlockPart) -> Task | AsyncTask:
        """Return the task that reads a part into its memory."""
        index = tuple(
            slice(first + along.start, first + along.stop)
            for first, along in zip(start_of(part.block), part.within, strict=True)
        )
        out, nbytes, source = self.memory(part), part.nbytes, self._source
        if isinstance(source, AsyncSource):
            note = partial(self._pending.note_where, index)
            return AsyncTask(nbytes, lambda: source.begin(index, out), note=note)
        return Task(nbytes, partial(self._read, index, out))

    def _read(self, index: Index, out: np.ndarray[Any, Any]) -> None:
        def empty(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
            fits = dtype == out.dtype and out.flags.c_contiguous
            return out if fits else np.empty(out.shape, dtype)

        try:
            block = as_numpy(self._source.read(index, empty), index)
            if block is out:
                return
            if block.shape != out.shape or native(block.dtype) != out.dtype:
                raise TypeError(
                    f"the block at index {format_index(index)} has shape {block.shape} and dtype "
                    f"{block.dtype}, but the source says {out.shape} and {out.dtype}; omit "
                    "read_once for a source that converts its data"
                )
            out[...] = block
        except Exception as error:
            self._pending.note_where(index, error)
            raise

    def settle(self) -> None:
        """Make blocks of the array of the memory, which is complete."""
        pending = self._pending
        for number in sorted(self._memory):
            index, memory = pending.plan.distinct[number], self._memory.pop(number)
            pending.settle_own(number, index, self._report, memory)

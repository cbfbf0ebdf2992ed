"""Arrays whose blocks are read once by all processes together, and not once by each.

Each process reads its parts of what several need into the memory of the blocks, or into memory that
it keeps until the exchange, which completes the blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from gda.arrays.construction.from_sources import (
    PendingArray,
    groups_of,
    read_all,
    reporter,
    with_workers,
)
from gda.arrays.construction.reading_by_boxes import BoxTasks
from gda.arrays.transport.exchanging import Part, exchange
from gda.layout.dtype_names import native
from gda.layout.indices import bounded, hull_of, sizes_of, start_of, within
from gda.layout.sharing import boxes_of_chunks, holders_of, parts_in_boxes, readers_of
from gda.layout.spec import Index, Shape
from gda.mesh import devices_of, mesh_of_all, processes_of
from gda.multihost.agreement import watching
from gda.multihost.descriptions import Description
from gda.storage.options import Options, shown
from gda.storage.read_boxes import READ_BYTES
from gda.storage.sources import Source
from gda.storage.tasks import AsyncTask, Task, Transfer, groups_within, run

# A smaller part would not be read in much less time: a request takes as long as so many bytes.
_LEAST_BYTES_OF_A_PART = 4 * 2**20
# Of parts that a process reads for others, without max_bytes.
_STAGED_BYTES = 256 * 2**20


def reads_wanted(pending: Sequence[PendingArray], options: Options) -> Description:
    """Return what decides which process reads and sends which part, if reads are shared."""
    if not options.read_once:
        return {}
    sources = {
        ("", f"source {number}"): str((each.plan.grid.global_shape, source.dtype, source.chunks))
        for number, each in enumerate(pending)
        if (source := each.source)
    }
    # It decides what is read before an exchange.
    return {("", "read_once"): "True", ("", "max_bytes"): str(options.max_bytes)} | sources


def read_builds(pending: Sequence[PendingArray], options: Options, name: str) -> None:
    """Read the blocks of all arrays, with ``read_once`` by all processes together.

    Communicates then, after all processes have compared ``reads_wanted``. ``name`` is the function
    that the user called.
    """
    mesh = mesh_of_several(each.plan.sharding for each in pending) if options.read_once else None
    if mesh is None:
        read_all(pending, options, name)
        return
    me, options = jax.process_index(), with_workers(options, pending)
    with shown(options.progress, name) as show:
        report = reporter(pending, show)
        shared = [
            SharedBlocks(each, each.source, report, options.max_bytes)
            for each in pending
            if each.source
        ]
        alone = itertools.chain.from_iterable(
            one.tasks(report, blocks.numbers) for one, blocks in zip(pending, shared, strict=True)
        )
        with watching(name, processes_of(mesh).numbers) as watch:
            for parts in _rounds_of(shared, options.max_bytes):
                own = (blocks.task(part) for reader, blocks, part in parts if reader == me)
                run(itertools.chain(alone, own), options)
                pieces = [
                    (reader, blocks, piece)
                    for reader, blocks, part in parts
                    for piece in part.pieces
                ]
                sent = [
                    Part(reader, tuple(sorted({reader, *piece.holders})), piece.nbytes)
                    for reader, _, piece in pieces
                ]
                exchange(sent, lambda n, pieces=pieces: pieces[n][1].memory(pieces[n][2]), watch)
                for blocks in shared:
                    blocks.drop_staged()
        settling = itertools.chain.from_iterable(blocks.settling() for blocks in shared)
        run(settling, Options(max_bytes=options.max_bytes))


def mesh_of_several(shardings: Iterable[Any]) -> Mesh | None:
    """Return a mesh of all devices, if they are of several processes and also of this one."""
    meshes = {sharding.mesh for sharding in shardings}
    mesh = mesh_of_all(device for each in meshes for device in devices_of(each))
    is_shared = mesh is not None and mesh.local_devices and processes_of(mesh).numbers[1:]
    return mesh if is_shared else None


class _PartOfBlock(NamedTuple):
    block: Index
    place: Index  # with every start and stop
    holders: tuple[int, ...]  # the processes that need the block, ascending
    nbytes: int


class _SharedPart(NamedTuple):
    """A part of the array that one process reads, and others need too."""

    pieces: list[_PartOfBlock]
    holders: tuple[int, ...]  # the processes that need any of it, ascending
    nbytes: int


def _rounds_of(
    shared: Sequence[SharedBlocks], max_bytes: int | None
) -> list[tuple[tuple[int, SharedBlocks, _SharedPart], ...]]:
    """Return reader, array and part, in rounds: each ends with an exchange.

    In a round a process reads at most ``max_bytes`` for others alone, or one part. There is at
    least one round. All processes get the same.
    """
    parts = [(blocks, part) for blocks in shared for part in blocks.parts]
    each = [part for _, part in parts]
    readers = readers_of([part.holders for part in each], [part.nbytes for part in each])
    of_reader: dict[int, list[tuple[int, SharedBlocks, _SharedPart]]] = {}
    for reader, (blocks, part) in zip(readers, parts, strict=True):
        of_reader.setdefault(reader, []).append((reader, blocks, part))
    rounds: list[Iterator[list[tuple[int, SharedBlocks, _SharedPart]]]] = []
    for reader, own in of_reader.items():
        staged = [
            sum(piece.nbytes for piece in part.pieces if reader not in piece.holders)
            for _, _, part in own
        ]
        rounds.append(groups_within(own, staged, max_bytes or _STAGED_BYTES))
    together = itertools.zip_longest(*rounds, fillvalue=[])
    return [tuple(itertools.chain(*some)) for some in together] or [()]


class SharedBlocks:
    """The blocks of one array that several processes need, and their memory in this one.

    Parts are read with the dtype that the source has, and the blocks are cast when they are whole.
    ``parts`` are the same in every process; ``numbers`` are the blocks in this one.
    """

    def __init__(
        self,
        pending: PendingArray,
        source: Source,
        report: Callable[[int], object],
        max_bytes: int | None,
    ) -> None:
        self._pending, self._source, self._report = pending, source, report
        self._itemsize = source.dtype.itemsize
        most = _LEAST_BYTES_OF_A_PART
        self._most_bytes = most if max_bytes is None else min(most, max(max_bytes, READ_BYTES))
        self.parts = list(self._parts())
        pieces = [piece for part in self.parts for piece in part.pieces]
        self.numbers = {pending.plan.number_of(piece.block) for piece in pieces} - {None}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        # Of pieces that this process reads for others alone, by block and index of the piece.
        self._staged: dict[tuple[Shape, Shape], np.ndarray[Any, Any]] = {}

    def _parts(self) -> Iterator[_SharedPart]:
        grid, source = self._pending.plan.grid, self._source
        if source.dtype.hasobject or not math.prod(grid.shard_shape):
            return
        mesh: Any = self._pending.plan.sharding.mesh
        holders = holders_of(grid, processes_of(mesh))
        indices = [grid.block_index(number) for number in range(len(holders))]
        blocks = {n: bounded(index, source.shape) for n, index in enumerate(indices)}
        # Of a padded grid, some have no elements.
        filled = {n: index for n, index in blocks.items() if math.prod(sizes_of(index))}
        for group in groups_of(filled, source.shape, source.chunks, source.dtype.itemsize):
            among = {process for number in group for process in holders[number]}
            if len(among) < 2:
                continue
            own = {number: blocks[number] for number in group}
            for parts in parts_in_boxes(own, self._boxes_of([*own.values()], len(among))):
                pieces = [
                    _PartOfBlock(indices[number], index, holders[number], self._nbytes(index))
                    for number, index in parts
                ]
                needed_by = sorted({process for each in pieces for process in each.holders})
                nbytes = self._nbytes(hull_of([piece.place for piece in pieces]))
                yield _SharedPart(pieces, tuple(needed_by), nbytes)

    def _boxes_of(self, group: list[Index], processes: int) -> Iterator[Index]:
        """Yield the boxes of a group of blocks: of one block, about one for each process."""
        whole, most_bytes = hull_of(group), self._most_bytes
        if len(group) == 1:
            most_bytes = max(-(-self._nbytes(whole) // processes), _LEAST_BYTES_OF_A_PART)
        chunks = self._source.chunks or (1,) * len(whole)
        return boxes_of_chunks(whole, chunks, max(most_bytes // self._itemsize, 1))

    def _nbytes(self, index: Index) -> int:
        return math.prod(sizes_of(index)) * self._itemsize

    def memory(self, piece: _PartOfBlock) -> np.ndarray[Any, Any]:
        """Return the memory of a piece, of a block that this process has or reads for others."""
        number = self._pending.plan.number_of(piece.block)
        dtype = native(self._source.dtype)
        if number is None:
            key = (start_of(piece.block), start_of(piece.place))
            if key not in self._staged:
                self._staged[key] = np.empty(sizes_of(piece.place), dtype)
            return self._staged[key]
        if number not in self._memory:
            self._memory[number] = self._pending.reader.empty(dtype, piece.block)
        return self._memory[number][(*within(piece.place, start_of(piece.block)), ...)]

    def drop_staged(self) -> None:
        self._staged.clear()

    def task(self, part: _SharedPart) -> Task | AsyncTask:
        pieces = part.pieces

        def note(_: object, index: Index, error: Exception) -> None:
            self._pending.note_where(index, error)

        tasks = BoxTasks(
            self._source,
            native(self._source.dtype),
            part=lambda number, _: self.memory(pieces[number]),
            write=lambda out, block, _: np.copyto(out, block),
            note=note,
        )
        needed = [(number, piece.place) for number, piece in enumerate(pieces)]
        # The memory is made here, in the thread of the caller.
        nbytes = [self.memory(piece).nbytes for piece in pieces]
        return tasks.task([needed], lambda: None, sum(nbytes) if nbytes[1:] else 0)

    def settling(self) -> Iterator[Task]:
        for number in sorted(self._memory):
            yield Task(self._memory[number].nbytes, lambda: None, partial(self._settle, number))

    def _settle(self, number: int, _: None) -> Transfer | None:
        index, memory = self._pending.plan.distinct[number], self._memory.pop(number)
        return self._pending.settle_own(number, index, self._report, memory)

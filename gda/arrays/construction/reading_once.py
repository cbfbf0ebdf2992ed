"""Arrays whose blocks all processes together read once.

Each process reads some moves of the blocks that several need, into the blocks or into memory for
other processes. Then an exchange brings the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from gda.arrays.construction.filling import Filling
from gda.arrays.construction.pending import PendingArray
from gda.arrays.construction.reading import nbytes_of, read_all, tasks_of, with_workers
from gda.arrays.transport.exchanging import Sent, exchange
from gda.layout.cover import (
    READ_BYTES,
    BoxMove,
    Part,
    cover,
    groups_within,
    readers_of,
)
from gda.layout.indices import sizes_of
from gda.mesh import devices_of, mesh_of_all, processes_of
from gda.multihost.agreement import watching
from gda.multihost.descriptions import Description
from gda.storage.options import Options, counting
from gda.storage.tasks import AsyncTask, Task, run

# A request takes as long as reading so many bytes, so smaller boxes would not be quicker.
_BOX_BYTES = 4 * 2**20
# Of parts that a process reads for others, without max_bytes.
_STAGED_BYTES = 256 * 2**20


def reads_wanted(pending: Sequence[PendingArray], options: Options) -> Description:
    """Return all that decides which process reads and sends each part; empty if none is shared."""
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

    It then communicates, for the function ``name``, after a comparison of ``reads_wanted``.
    """
    mesh = mesh_of_several(each.plan.sharding for each in pending) if options.read_once else None
    if mesh is None:
        read_all(pending, options, name)
        return
    with counting(options.progress, name, lambda: nbytes_of(pending)) as report:
        shared = [_SharedArray(each, options, report) for each in pending]
        alone = itertools.chain.from_iterable(
            tasks_of(each.pending, report, each.numbers) for each in shared
        )
        options = with_workers(options, pending)
        with watching(name, processes_of(mesh).numbers) as watch:
            for of_round in _rounds_of(shared, options.max_bytes):
                own = (read.task() for read in of_round if read.reader == jax.process_index())
                run(itertools.chain(alone, own), options)
                sent = [(read, part) for read in of_round for part in read.move.parts]
                exchange(
                    [read.sent(part) for read, part in sent],
                    lambda number, sent=sent: sent[number][0].memory_of(sent[number][1]),
                    watch,
                )
                keeping = itertools.chain.from_iterable(read.keeping() for read in of_round)
                # Within the bound until they are on their devices.
                run(keeping, Options(max_bytes=options.max_bytes))


def mesh_of_several(shardings: Iterable[Any]) -> Mesh | None:
    """Return a mesh of all devices, if this process and others have some of them."""
    meshes = {sharding.mesh for sharding in shardings}
    mesh = mesh_of_all(device for each in meshes for device in devices_of(each))
    is_shared = mesh is not None and mesh.local_devices and processes_of(mesh).numbers[1:]
    return mesh if is_shared else None


class _SharedArray:
    """An array, its shared blocks of this process by ``numbers``, and the moves that fill them."""

    def __init__(
        self, pending: PendingArray, options: Options, report: Callable[[int], object]
    ) -> None:
        self.pending = pending
        self.moves: list[BoxMove] = []
        self.numbers: set[int] = set()
        plan, source = pending.plan, pending.source
        if source is None or source.dtype.hasobject or not math.prod(pending.reader.shape):
            return
        self.filling = Filling(pending, source, options, report, is_shared=True)
        self.itemsize = source.dtype.itemsize
        blocks, self.holders = plan.of_all
        most = options.max_bytes
        groups = cover(
            blocks,
            source.shape,
            source.chunks,
            self.itemsize,
            box_bytes=_BOX_BYTES if most is None else min(_BOX_BYTES, max(most, READ_BYTES)),
            holders=self.holders,
        )
        self.moves = [*itertools.chain.from_iterable(groups)]
        filled = {part.block for move in self.moves for part in move.parts}
        self.numbers = filled.intersection(range(len(plan.distinct)))


class _SharedRead(NamedTuple):
    """A move that one process reads, for itself or for others."""

    reader: int
    array: _SharedArray
    move: BoxMove

    def task(self) -> Task | AsyncTask:
        # Here, because the caller's thread allocates the memory.
        nbytes = [self.memory_of(part).nbytes for part in self.move.parts]
        return self.array.filling.task([self.move], held=sum(nbytes) if nbytes[1:] else 0)

    def memory_of(self, part: Part) -> Any:
        return self.array.filling.memory_of(part)

    def sent(self, part: Part) -> Sent:
        nbytes = math.prod(part.shape) * self.array.itemsize
        return Sent.to_holders(self.reader, self.array.holders[part.block], nbytes)

    @property
    def staged_bytes(self) -> int:
        """Bytes of parts that the reader keeps only for other processes."""
        return sum(
            math.prod(part.shape) * self.array.itemsize
            for part in self.move.parts
            if self.reader not in self.array.holders[part.block]
        )

    def keeping(self) -> Iterator[Task]:
        """Yield tasks that place complete blocks, and release the memory for other processes."""
        filling = self.array.filling
        filling.drop_staged()
        for number in filling.arrived([self.move]):
            nbytes = self.array.pending.block_bytes
            yield Task(nbytes, lambda number=number: number, filling.keep)


def _rounds_of(
    shared: Sequence[_SharedArray], max_bytes: int | None
) -> list[tuple[_SharedRead, ...]]:
    """Return the reads in rounds, each followed by an exchange; equal in all processes.

    In a round a process reads at most ``max_bytes``, or one box, only for other processes. There
    is at least one round.
    """
    every = [(array, move) for array in shared for move in array.moves]
    needed_by = [
        tuple(sorted({process for part in move.parts for process in array.holders[part.block]}))
        for array, move in every
    ]
    nbytes = [math.prod(sizes_of(move.box)) * array.itemsize for array, move in every]
    of_reader: dict[int, list[_SharedRead]] = {}
    for reader, (array, move) in zip(readers_of(needed_by, nbytes), every, strict=True):
        of_reader.setdefault(reader, []).append(_SharedRead(reader, array, move))
    rounds = [
        groups_within(own, [read.staged_bytes for read in own], max_bytes or _STAGED_BYTES)
        for own in of_reader.values()
    ]
    together = itertools.zip_longest(*rounds, fillvalue=[])
    return [tuple(itertools.chain(*some)) for some in together] or [()]

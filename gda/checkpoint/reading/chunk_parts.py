"""The chunks that arrays on their way need, and the read of a chunk into their blocks.

A chunk that is one contiguous part of a block is read into the memory that becomes the array, and
small blocks stay in the memory of the chunk that they share. Other chunks go through a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import ALIGNMENT, Buffers
from gda.arrays.construction.reading_once import mesh_of_several
from gda.arrays.transport.exchanging import Sent
from gda.checkpoint.format.manifest import Chunk, ChunkGrid, Manifest, StoredArray
from gda.checkpoint.reading.checked_files import Files
from gda.layout.cover import BoxMove, Part, groups_within, move_of, readers_of
from gda.layout.indices import index_at, sizes_of, start_of
from gda.layout.spec import Index, Shape
from gda.mesh import processes_of
from gda.storage import tasks
from gda.storage.options import Options
from gda.trees.records.arrivals import Arrival
from gda.trees.records.recorded_tree import Piece

_MOST_BYTES_IN_A_TASK = 16 * 2**20
_LEAST_OF_A_CHUNK = 0.75  # that blocks must need to stay in its memory


@dataclass(eq=False, slots=True)
class Use:
    """The parts of a chunk that the blocks of an array need."""

    arrival: Arrival
    move: BoxMove  # from the chunk, or from its piece of a pack
    piece: Piece | None = None
    # By block, the first element in the piece of each part that is a whole block and contiguous.
    firsts: Mapping[int, int] = field(default_factory=dict)
    staged: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # read for others only

    def memory(self, part: Part) -> np.ndarray[Any, Any]:
        """Return the memory of a part in this process."""
        if part.block < len(self.arrival.blocks):
            # The dots make it a view also without dimensions.
            return self.arrival.blocks[part.block][(*part.in_block, ...)]
        if part.block not in self.staged:
            self.staged[part.block] = np.empty(part.shape, self.arrival.record.dtype)
        return self.staged[part.block]


def uses_of(
    arrivals: Iterable[Arrival], manifest: Manifest, *, are_shared: bool = False
) -> dict[Chunk, list[Use]]:
    """Return the chunks that this process needs, or all processes do, each with its uses."""
    uses: dict[Chunk, list[Use]] = {}
    known: dict[Any, Any] = {}  # by shape and layout, in memory and in the files
    for arrival in arrivals:
        plan, leaf = arrival.plan, arrival.record
        boxes = arrival.boxes_of_all if are_shared else arrival.boxes
        if leaf.array is not None:
            grid = manifest.arrays[leaf.array].grid
            if (moves := known.get((plan, grid))) is None:
                moves = known[plan, grid] = _moves_of_chunks(grid, boxes)
            for chunk, move in moves.items():
                uses.setdefault((leaf.array, chunk), []).append(Use(arrival, move))
            continue
        key = plan, leaf.shape, tuple([(piece.start, piece.shape) for piece in leaf.pieces])
        if key not in known:
            moves = [move_of(boxes, index_at(each.start, each.shape)) for each in leaf.pieces]
            firsts = [_firsts_of(move, arrival.block_shape) for move in moves]
            known[key] = moves, firsts, set().union(*firsts)
        moves, firsts, arrival.made_of_chunks = known[key]
        for piece, move, of_piece in zip(leaf.pieces, moves, firsts, strict=True):
            if move.parts:
                use = Use(arrival, move, piece, of_piece)
                uses.setdefault(manifest.chunk_of(piece), []).append(use)
    return uses


def _moves_of_chunks(grid: ChunkGrid, boxes: Mapping[int, Index]) -> dict[int, BoxMove]:
    parts: dict[int, list[Part]] = {}
    for block, box in boxes.items():
        for chunk, in_chunk, in_block, _ in grid.overlaps(start_of(box), sizes_of(box)):
            parts.setdefault(chunk, []).append(Part(block, in_chunk, in_block))
    return {chunk: BoxMove(grid.index(chunk), tuple(each)) for chunk, each in parts.items()}


def _firsts_of(move: BoxMove, block_shape: Shape) -> dict[int, int]:
    """Return the ``firsts`` of a ``Use``."""
    shape = sizes_of(move.box)
    whole = [part for part in move.parts if part.shape == block_shape]
    firsts = {part.block: _first_of(part.in_box, shape) for part in whole}
    return {block: first for block, first in firsts.items() if first is not None}


def _first_of(within: Index, shape: Shape) -> int | None:
    """Return the number of the first element of a part; ``None`` unless it is contiguous."""
    first = last = 0
    for along, n in zip(within, shape, strict=True):
        first, last = first * n + along.start, last * n + along.stop - 1
    size = math.prod([along.stop - along.start for along in within])
    return first if last - first + 1 == size else None


@dataclass
class ArrivedChunks:
    """Adds the bytes of chunks to a progress: of those that this process needs, each once."""

    manifest: Manifest
    missing: set[Chunk]
    add: Callable[[int], object]

    def __call__(self, *chunks: Chunk) -> None:
        for chunk in self.missing.intersection(chunks):
            self.missing.remove(chunk)
            self.add(self.manifest.arrays[chunk[0]].nbytes_per_chunk)


def read_chunks(
    files: Files, uses: dict[Chunk, list[Use]], options: Options, arrived: ArrivedChunks
) -> None:
    reads = [_ChunkRead(files, chunk, of_chunk) for chunk, of_chunk in sorted(uses.items())]
    sizes = [read.array.nbytes_per_chunk for read in reads]
    # A thread waits for Python between two tasks, so a task reads several chunks. Requests to an
    # object store take long, so as many as possible are sent at a time.
    most = min(_MOST_BYTES_IN_A_TASK, sum(sizes) // (8 * (options.max_workers or 1)))
    groups = groups_within(reads, sizes, 0 if files.store.is_remote else most)
    tasks.run((_task(group, arrived) for group in groups), options)


def _task(reads: Sequence[_ChunkRead], arrived: ArrivedChunks) -> tasks.Task:
    def work() -> None:
        for read in reads:
            read.fill_blocks()

    nbytes = max([read.buffered_bytes for read in reads])
    return tasks.Task(nbytes, work, lambda _: arrived(*[read.where for read in reads]))


@dataclass(eq=False)
class _ChunkRead:
    """The read of a chunk into the blocks that need parts of it."""

    files: Files
    where: Chunk
    uses: list[Use]

    @property
    def array(self) -> StoredArray:
        return self.files.manifest.arrays[self.where[0]]

    @property
    def _memory(self) -> np.ndarray[Any, Any] | None:
        """The memory to read the chunk into, if it is a contiguous part of one block."""
        if len(self.uses) != 1 or self.uses[0].piece is not None:
            return None
        use = self.uses[0]
        if len(use.move.parts) != 1 or use.move.parts[0].shape != self.array.chunk_shape:
            return None
        memory = use.memory(use.move.parts[0])
        return memory if memory.flags.c_contiguous else None

    @cached_property
    def _becomes_blocks(self) -> bool:
        """True if blocks stay in the memory of the chunk, because they need most of it."""
        needed = sum([len(use.firsts) * use.arrival.block_nbytes for use in self.uses])
        return needed >= _LEAST_OF_A_CHUNK * self.array.nbytes_per_chunk

    @property
    def buffered_bytes(self) -> int:
        is_kept = self._memory is not None or self._becomes_blocks
        nbytes = 0 if is_kept else self.array.nbytes_per_chunk
        return self.files.loading_bytes(self.where) + nbytes

    def fill_blocks(self) -> None:
        if (memory := self._memory) is not None:
            self.files.load(self.where, memory.reshape(-1).view(np.uint8))
            return
        data, dtype = self.files.loaded(self.where), self.array.dtype
        # JAX would copy an unaligned block once for each device.
        step = ALIGNMENT // dtype.itemsize if self._becomes_blocks else 0
        buffers = Buffers(sum([len(use.move.parts) for use in self.uses]))
        for use in self.uses:
            blocks, firsts, shape = use.arrival.blocks, use.firsts, use.arrival.block_shape
            begin = 0 if use.piece is None else use.piece.offset % len(data)
            whole = data if use.piece is None else use.piece.of_chunk(data)
            for part in use.move.parts:
                block, in_piece, _ = part
                values, first = whole[(*in_piece, ...)], firsts.get(block)
                if first is None or block >= len(blocks) or blocks[block] is not None:
                    use.memory(part)[...] = values
                elif step and (begin + first) % step == 0:
                    blocks[block] = values
                else:
                    blocks[block] = buffers.empty(shape, dtype)
                    blocks[block][...] = values


# Chunks that several processes need, each read by one of them and sent to the others.


class SharedReads(NamedTuple):
    """The reads of this process, for itself and for others, and the parts that are sent then."""

    own: dict[Chunk, list[Use]]
    sent: list[Sent]
    parts: list[tuple[Use, Part]]  # each that is sent

    def memory(self, number: int) -> np.ndarray[Any, Any]:
        """Return the memory of a part that is sent."""
        use, part = self.parts[number]
        return use.memory(part)


def processes_together(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Return the processes of all meshes of several devices; without a mesh, all; or none."""
    plans = [arrival.plan for arrival in arrivals if arrival.plan is not None]
    if plans:
        mesh = mesh_of_several(plan.sharding for plan in plans if plan.sharding.mesh.size > 1)
        return () if mesh is None else processes_of(mesh).numbers
    return tuple(range(jax.process_count())) if jax.process_count() > 1 else ()


def _is_on_one_device(arrival: Arrival) -> bool:
    """Return True for an array that each process may have on a device of its own."""
    return arrival.plan is not None and arrival.plan.sharding.mesh.size == 1


def shared_reads(
    manifest: Manifest, arrivals: Sequence[Arrival], processes: tuple[int, ...]
) -> SharedReads:
    """Divide the chunks of arrays between processes; one that needs a chunk reads it."""
    own = uses_of([each for each in arrivals if _is_on_one_device(each)], manifest)
    together = [each for each in arrivals if not _is_on_one_device(each)]

    def holders_of(use: Use, part: Part) -> tuple[int, ...]:
        holders = use.arrival.holders
        return processes if holders is None else holders[part.block]

    shared: list[tuple[Chunk, tuple[int, ...], list[Use]]] = []
    for chunk, uses in sorted(uses_of(together, manifest, are_shared=True).items()):
        parts = [(use, part) for use in uses for part in use.move.parts]
        holders = tuple(sorted(set().union(*[holders_of(*each) for each in parts])))
        if holders[1:]:
            shared.append((chunk, holders, uses))
        elif holders == (jax.process_index(),):
            own.setdefault(chunk, []).extend(uses)
    sizes = [manifest.arrays[array].nbytes_per_chunk for (array, _), _, _ in shared]
    readers = readers_of([holders for _, holders, _ in shared], sizes)
    sent: list[Sent] = []
    sent_parts: list[tuple[Use, Part]] = []
    for reader, (chunk, _, uses) in zip(readers, shared, strict=True):
        if reader == jax.process_index():
            own.setdefault(chunk, []).extend(uses)
        itemsize = manifest.arrays[chunk[0]].dtype.itemsize
        for use in uses:
            for part in use.move.parts:
                nbytes = math.prod(part.shape) * itemsize
                sent.append(Sent.to_holders(reader, holders_of(use, part), nbytes))
                sent_parts.append((use, part))
    return SharedReads(own, sent, sent_parts)

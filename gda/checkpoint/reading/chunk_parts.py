"""The chunks that have parts of arrays on their way, and the read of a chunk into their blocks.

A chunk that is one contiguous part of a block is read into the memory that becomes the array, and
small blocks stay in the memory of the chunk that they share. Other chunks go through a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import ALIGNMENT, Buffers
from gda.arrays.construction.reading_once import mesh_of_several
from gda.arrays.transport.exchanging import Sent
from gda.checkpoint.format.manifest import Chunk, ChunkGrid, Manifest, StoredArray
from gda.checkpoint.reading.checked_files import Files
from gda.layout.cover import groups_within, readers_of
from gda.layout.indices import common_box, index_at, shape_at, within
from gda.layout.spec import Index, Shape
from gda.mesh import processes_of
from gda.storage import tasks
from gda.storage.options import Options
from gda.trees.records.arrivals import Arrival, NeededBlock
from gda.trees.records.recorded_tree import Piece

_MOST_BYTES_IN_A_TASK = 16 * 2**20
_LEAST_OF_A_CHUNK = 0.75  # that must be needed for the others to stay in memory with it


class Cut(NamedTuple):
    """The common part of a chunk and a block: ``block[in_block] = chunk[in_chunk]``."""

    block: NeededBlock
    in_block: Index
    in_chunk: Index  # in a chunk of a pack: in the piece
    is_whole: bool = False  # True if it is the whole chunk
    first: int | None = None  # if it is a whole block and contiguous in a piece: where it begins

    @property
    def shape(self) -> Shape:
        return shape_at(self.in_block, self.block.shape)


class Cuts(NamedTuple):
    """The common parts of a chunk and the blocks of an array: equal for all arrays of a layout."""

    each: Sequence[Cut]
    whole_blocks: int = 0  # the elements of those that are whole blocks, contiguous in a piece


@dataclass(eq=False, slots=True)
class Use:
    """The parts of a chunk that the blocks of an array need."""

    arrival: Arrival
    cuts: Cuts
    piece: Piece | None = None  # in a chunk of a pack
    staged: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # read for others only

    def memory(self, number: int) -> np.ndarray[Any, Any]:
        """The memory of a part in this process."""
        cut = self.cuts.each[number]
        if cut.block.number is not None:
            # The dots make it a view also without dimensions.
            return self.arrival.blocks[cut.block.number][(*cut.in_block, ...)]
        if number not in self.staged:
            self.staged[number] = np.empty(cut.shape, self.arrival.record.dtype)
        return self.staged[number]


def uses_of(
    arrivals: Iterable[Arrival], manifest: Manifest, processes: tuple[int, ...] = ()
) -> dict[Chunk, list[Use]]:
    """Return the chunks that this process needs, or all of ``processes``, each with its uses."""

    def needed(arrival: Arrival) -> Iterable[NeededBlock]:
        return arrival.needed_by(processes) if processes else arrival.needed

    uses: dict[Chunk, list[Use]] = {}
    known: dict[Any, Any] = {}  # by shape and layout, in memory and in the files
    for arrival in arrivals:
        plan, leaf = arrival.plan, arrival.record
        if leaf.array is not None:
            grid = manifest.arrays[leaf.array].grid
            if (cuts_of := known.get((plan, grid))) is None:
                cuts_of = known[plan, grid] = _cuts_of_chunks(grid, needed(arrival))
            for chunk, cuts in cuts_of.items():
                uses.setdefault((leaf.array, chunk), []).append(Use(arrival, cuts))
            continue
        key = plan, leaf.shape, tuple([(piece.start, piece.shape) for piece in leaf.pieces])
        if key not in known:
            blocks, shape = [*needed(arrival)], arrival.block_shape
            of_pieces = [_cuts_of_piece(piece, blocks, shape) for piece in leaf.pieces]
            whole = [cut for cuts in of_pieces for cut in cuts.each if cut.first is not None]
            known[key] = of_pieces, {cut.block.number for cut in whole}
        of_pieces, arrival.made_of_chunks = known[key]
        for piece, cuts in zip(leaf.pieces, of_pieces, strict=True):
            if cuts.each:
                uses.setdefault(manifest.chunk_of(piece), []).append(Use(arrival, cuts, piece))
    return uses


def _cuts_of_chunks(grid: ChunkGrid, blocks: Iterable[NeededBlock]) -> dict[int, Cuts]:
    cuts: dict[int, list[Cut]] = {}
    for block in blocks:
        for chunk, in_chunk, in_block, is_whole in grid.overlaps(block.start, block.shape):
            cuts.setdefault(chunk, []).append(Cut(block, in_block, in_chunk, is_whole))
    return {chunk: Cuts(of_chunk) for chunk, of_chunk in cuts.items()}


def _cuts_of_piece(piece: Piece, blocks: Iterable[NeededBlock], block_shape: Shape) -> Cuts:
    """Return the common parts of a piece and blocks, which have one shape with their padding."""
    cuts: list[Cut] = []
    whole = index_at(piece.start, piece.shape)
    for block in blocks:
        common = common_box(index_at(block.start, block.shape), whole)
        if common is None:
            continue
        cut = Cut(block, within(common, block.start), within(common, piece.start))
        if cut.shape == block_shape:
            cut = cut._replace(first=_first_of(cut.in_chunk, piece.shape))
        cuts.append(cut)
    block_size = math.prod(block_shape)
    return Cuts(cuts, sum(block_size for cut in cuts if cut.first is not None))


def _first_of(within: Index, shape: Shape) -> int | None:
    """Return where a part of an array begins, in elements; ``None`` unless it is contiguous."""
    first = last = 0
    for along, n in zip(within, shape, strict=True):
        first, last = first * n + along.start, last * n + along.stop - 1
    size = math.prod([along.stop - along.start for along in within])
    return first if last - first + 1 == size else None


def _direct(uses: list[Use]) -> np.ndarray[Any, Any] | None:
    """Return the memory to read a chunk into, if the chunk is a contiguous part of one block."""
    if len(uses) != 1 or len(uses[0].cuts.each) != 1 or not uses[0].cuts.each[0].is_whole:
        return None
    memory = uses[0].memory(0)
    return memory if memory.flags.c_contiguous else None


def _becomes_blocks(chunk: StoredArray, uses: list[Use]) -> bool:
    """Return True if blocks may stay in the memory of a chunk: they need most of it."""
    needed = sum([use.cuts.whole_blocks for use in uses]) * chunk.dtype.itemsize
    return needed >= _LEAST_OF_A_CHUNK * chunk.nbytes_per_chunk


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
    chunks = sorted(uses)
    sizes = [files.manifest.arrays[array].nbytes_per_chunk for array, _ in chunks]
    # A thread waits for Python between two tasks, so it reads several chunks in one. Requests to an
    # object store take long, and are to be as many at a time as they can be.
    most = min(_MOST_BYTES_IN_A_TASK, sum(sizes) // (8 * (options.max_workers or 1)))
    each = (
        tasks.Task(
            max([_buffered_bytes(files, chunk, uses[chunk]) for chunk in group]),
            partial(_read_in_order, files, {chunk: uses[chunk] for chunk in group}),
            lambda _, group=group: arrived(*group),
        )
        for group in groups_within(chunks, sizes, 0 if files.store.is_remote else most)
    )
    tasks.run(each, options)


def _buffered_bytes(files: Files, where: Chunk, uses: list[Use]) -> int:
    array = files.manifest.arrays[where[0]]
    is_kept = _direct(uses) is not None or _becomes_blocks(array, uses)
    return files.loading_bytes(where) + (0 if is_kept else array.nbytes_per_chunk)


def _read_in_order(files: Files, uses: dict[Chunk, list[Use]]) -> None:
    for chunk, of_chunk in uses.items():
        _read_chunk(files, chunk, of_chunk)


def _read_chunk(files: Files, where: Chunk, uses: list[Use]) -> None:
    destination = _direct(uses)
    if destination is not None:
        files.load(where, destination.reshape(-1).view(np.uint8))
        return
    data = files.loaded(where)
    array = files.manifest.arrays[where[0]]
    # JAX would copy a block that is not aligned once for each device.
    step = ALIGNMENT // array.dtype.itemsize if _becomes_blocks(array, uses) else 0
    buffers = Buffers(sum([len(use.cuts.each) for use in uses]))
    for use in uses:
        blocks, shape = use.arrival.blocks, use.arrival.block_shape
        begin = 0 if use.piece is None else use.piece.offset % len(data)
        whole = data if use.piece is None else use.piece.of_chunk(data)
        for number, cut in enumerate(use.cuts.each):
            part, block = whole[(*cut.in_chunk, ...)], cut.block.number
            if block is None or cut.first is None or blocks[block] is not None:
                use.memory(number)[...] = part
            elif step and (begin + cut.first) % step == 0:
                blocks[block] = part
            else:
                blocks[block] = buffers.empty(shape, array.dtype)
                blocks[block][...] = part


# Chunks that several processes need, each read by one of them and sent to the others.


class SharedReads(NamedTuple):
    """The reads of this process, for itself and for others, and the parts that are sent then."""

    own: dict[Chunk, list[Use]]
    sent: list[Sent]
    uses: list[tuple[Use, int]]  # of each part that is sent

    def memory(self, number: int) -> np.ndarray[Any, Any]:
        """Return the memory of a part that is sent."""
        use, cut = self.uses[number]
        return use.memory(cut)


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
    """Divide the chunks of some arrays between processes: each is read in one that needs it."""
    own = uses_of([each for each in arrivals if _is_on_one_device(each)], manifest)
    together = [each for each in arrivals if not _is_on_one_device(each)]
    shared: list[tuple[Chunk, tuple[int, ...], list[Use]]] = []
    for chunk, uses in sorted(uses_of(together, manifest, processes).items()):
        cuts = [cut for use in uses for cut in use.cuts.each]
        holders = tuple(sorted({process for cut in cuts for process in cut.block.holders}))
        if holders[1:]:
            shared.append((chunk, holders, uses))
        elif holders == (jax.process_index(),):
            own.setdefault(chunk, []).extend(uses)
    sizes = [manifest.arrays[array].nbytes_per_chunk for (array, _), _, _ in shared]
    readers = readers_of([holders for _, holders, _ in shared], sizes)
    sent: list[Sent] = []
    sent_uses: list[tuple[Use, int]] = []
    for reader, (chunk, _, uses) in zip(readers, shared, strict=True):
        if reader == jax.process_index():
            own.setdefault(chunk, []).extend(uses)
        itemsize = manifest.arrays[chunk[0]].dtype.itemsize
        for use in uses:
            for number, cut in enumerate(use.cuts.each):
                nbytes = math.prod(cut.shape) * itemsize
                sent.append(Sent.to_holders(reader, cut.block.holders, nbytes))
                sent_uses.append((use, number))
    return SharedReads(own, sent, sent_uses)

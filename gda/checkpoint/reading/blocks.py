"""Arrays that are being read: their blocks on the host, and the chunks that have parts of them.

A chunk that is one contiguous part of a block is read straight into the memory that becomes the
array. The blocks of small arrays that share a chunk stay in the memory that the chunk was read
into. Other chunks go through a buffer. The chunks are computed from integers, once for all arrays
of one shape and layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.buffers import ALIGNMENT, Buffers
from gda.arrays.construction.placing import LocalBlocks
from gda.checkpoint.format.chunks import ChunkGrid
from gda.checkpoint.format.manifest import Chunk, Manifest, StoredArray
from gda.checkpoint.reading.files import Files
from gda.layout.indices import common_box, index_at, shape_at, start_of, within
from gda.layout.sharing import holders_of
from gda.layout.spec import Index, Shape
from gda.mesh import processes_of
from gda.trees.records.recorded_leaves import Piece
from gda.trees.records.restored_leaves import RestoredLeaf

_LEAST_OF_A_CHUNK = 0.75  # that must be needed for the others to stay in memory with it


class Box(NamedTuple):
    """A block of an array, without its padding."""

    block: int | None  # its number in this process; None if this process does not need it
    start: Shape
    shape: Shape
    holders: tuple[int, ...] = ()  # that need it, if the blocks of all processes are asked for


class Cut(NamedTuple):
    """The common part of a chunk and a block: ``block[in_block] = chunk[in_chunk]``."""

    box: Box
    in_block: Index
    in_chunk: Index  # in a chunk of a pack: in the piece
    is_whole: bool = False  # True if it is the whole chunk
    first: int | None = None  # if it is a whole block and contiguous in a piece: where it begins

    @property
    def shape(self) -> Shape:
        """The sizes of the part."""
        return shape_at(self.in_block, self.box.shape)


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
        if cut.box.block is not None:
            # The dots make it a view also without dimensions.
            return self.arrival.blocks[cut.box.block][(*cut.in_block, ...)]
        if number not in self.staged:
            self.staged[number] = np.empty(cut.shape, self.arrival.leaf.saved.dtype)
        return self.staged[number]


@dataclass(eq=False, slots=True)
class Arrival:
    """An array that is being read: its blocks on the host, and in the end its value."""

    leaf: RestoredLeaf
    blocks: list[Any] = field(default_factory=list)  # None until the chunk of the block is read
    made_of_chunks: Container[int | None] = ()  # the blocks that a piece of a chunk is or fills
    value: Any = None

    @property
    def block_shape(self) -> Shape:
        plan = self.leaf.plan
        return self.leaf.saved.shape if plan is None else plan.grid.shard_shape

    @property
    def boxes(self) -> Sequence[Box]:
        """Its blocks in this process."""
        plan = self.leaf.plan
        if plan is None:
            return [Box(0, (0,) * len(self.block_shape), self.block_shape)]
        return _boxes_of(plan)

    def boxes_of(self, processes: tuple[int, ...]) -> Iterator[Box]:
        """Yield its blocks in all processes; each of ``processes`` has all of a NumPy array."""
        plan = self.leaf.plan
        if plan is None:
            yield self.boxes[0]._replace(holders=processes)
            return
        mesh: Any = plan.sharding.mesh
        for block, holders in enumerate(holders_of(plan.grid, processes_of(mesh))):
            index = plan.grid.block_index(block)
            box = _box(plan, plan.number_of(index), index, holders)
            if math.prod(box.shape):
                yield box

    @property
    def block_nbytes(self) -> int:
        return math.prod(self.block_shape) * self.leaf.saved.dtype.itemsize

    @property
    def passing_nbytes(self) -> int:
        """Bytes of its blocks that only pass through the host in this process."""
        return 0 if self.stays_on_host else self.block_nbytes * len(self.boxes)

    @property
    def most_passing_nbytes(self) -> int:
        """As ``passing_nbytes``, in the process with most of its blocks: the same in all."""
        plan = self.leaf.plan
        if plan is None or next(iter(plan.sharding.device_set)).platform == "cpu":
            return 0
        counts = Counter(process for box in self.boxes_of((0,)) for process in box.holders)
        return self.block_nbytes * max(counts.values(), default=0)

    @property
    def stays_on_host(self) -> bool:
        plan = self.leaf.plan
        return plan is None or not plan.places_early

    def allocate(self, buffers: Buffers, but: Container[int | None] = ()) -> None:
        """Allocate the blocks but some."""
        boxes, shape, dtype = self.boxes, self.block_shape, self.leaf.saved.dtype
        self.blocks = [None] * len(boxes)
        for number, box in enumerate(boxes):
            if number not in but:
                self.blocks[number] = block = buffers.empty(shape, dtype)
                if box.shape != shape:
                    block[...] = 0

    def finish(self) -> None:
        """Make the value from the blocks."""
        blocks, self.blocks = self.blocks, []
        self.value = self.leaf.value_of(blocks)


@lru_cache(maxsize=256)
def _boxes_of(plan: LocalBlocks) -> list[Box]:
    return [_box(plan, number, index) for number, index in enumerate(plan.distinct)]


def _box(plan: LocalBlocks, block: int | None, index: Index, holders: tuple[int, ...] = ()) -> Box:
    return Box(block, start_of(index), shape_at(index, plan.grid.shard_shape), holders)


def uses_of(
    arrivals: Iterable[Arrival],
    manifest: Manifest,
    boxes_of: Callable[[Arrival], Iterable[Box]] = lambda arrival: arrival.boxes,
) -> dict[Chunk, list[Use]]:
    """Return the chunks that are needed, each with its uses: by default, in this process."""
    uses: dict[Chunk, list[Use]] = {}
    known: dict[Any, Any] = {}  # by shape and layout, in memory and in the files
    for arrival in arrivals:
        plan, leaf = arrival.leaf.plan, arrival.leaf.saved
        if leaf.array is not None:
            grid = manifest.arrays[leaf.array].grid
            if (cuts_of := known.get((plan, grid))) is None:
                cuts_of = known[plan, grid] = _cuts_of_chunks(grid, boxes_of(arrival))
            for chunk, cuts in cuts_of.items():
                uses.setdefault((leaf.array, chunk), []).append(Use(arrival, cuts))
            continue
        key = plan, leaf.shape, tuple([(piece.start, piece.shape) for piece in leaf.pieces])
        if key not in known:
            boxes, shape = [*boxes_of(arrival)], arrival.block_shape
            of_pieces = [_cuts_of_piece(piece, boxes, shape) for piece in leaf.pieces]
            whole = [cut for cuts in of_pieces for cut in cuts.each if cut.first is not None]
            known[key] = of_pieces, {cut.box.block for cut in whole}
        of_pieces, arrival.made_of_chunks = known[key]
        for piece, cuts in zip(leaf.pieces, of_pieces, strict=True):
            if cuts.each:
                uses.setdefault(manifest.chunk_of(piece), []).append(Use(arrival, cuts, piece))
    return uses


def _cuts_of_chunks(grid: ChunkGrid, boxes: Iterable[Box]) -> dict[int, Cuts]:
    cuts: dict[int, list[Cut]] = {}
    for box in boxes:
        for chunk, in_chunk, in_block, is_whole in grid.overlaps(box.start, box.shape):
            cuts.setdefault(chunk, []).append(Cut(box, in_block, in_chunk, is_whole))
    return {chunk: Cuts(of_chunk) for chunk, of_chunk in cuts.items()}


def _cuts_of_piece(piece: Piece, boxes: Iterable[Box], block_shape: Shape) -> Cuts:
    """Return the common parts of a piece and blocks, which have one shape with their padding."""
    cuts: list[Cut] = []
    whole = index_at(piece.start, piece.shape)
    for box in boxes:
        common = common_box(index_at(box.start, box.shape), whole)
        if common is None:
            continue
        cut = Cut(box, within(common, box.start), within(common, piece.start))
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


def buffered_bytes(files: Files, where: Chunk, uses: list[Use]) -> int:
    """Return the memory, beside the blocks, that reading a chunk takes."""
    array = files.manifest.arrays[where[0]]
    is_kept = _direct(uses) is not None or _becomes_blocks(array, uses)
    return files.loading_bytes(where) + (0 if is_kept else array.nbytes_per_chunk)


def read_chunk(files: Files, where: Chunk, uses: list[Use]) -> None:
    """Read a chunk, check it, and give every block its part."""
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
            part, block = whole[(*cut.in_chunk, ...)], cut.box.block
            if block is None or cut.first is None or blocks[block] is not None:
                use.memory(number)[...] = part
            elif step and (begin + cut.first) % step == 0:
                blocks[block] = part
            else:
                blocks[block] = buffers.empty(shape, array.dtype)
                blocks[block][...] = part

"""Arrays that are being read: their blocks on the host, and the chunks that have parts of them.

A chunk that is one contiguous part of a block is read straight into the memory that becomes the
array; others go through a buffer. The chunks are computed from integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.buffers import Buffers
from gda.checkpoint.format.manifest import Chunk, Manifest, Piece
from gda.checkpoint.reading.files import Files
from gda.checkpoint.reading.restored_leaves import RestoredLeaf
from gda.layout.sharing import holders_of
from gda.layout.spec import Index, Shape, shape_at, start_of
from gda.mesh import processes_of


class Box(NamedTuple):
    """A block of an array, without its padding."""

    block: int | None  # its number in this process; None if this process does not need it
    start: Shape
    shape: Shape
    holders: tuple[int, ...] = ()  # that need it, if the blocks of all processes are asked for


@dataclass(eq=False, slots=True)
class Use:
    """A part of a chunk that a block needs: ``block[in_block] = chunk[in_chunk]``."""

    arrival: Arrival
    box: Box
    in_block: Index
    in_chunk: Index
    is_whole: bool = False  # True if it is the whole chunk
    piece: Piece | None = None  # in a chunk of a pack, which in_chunk is a part of
    staged: np.ndarray[Any, Any] | None = None  # its memory, if it is read for others only

    @property
    def shape(self) -> Shape:
        """The sizes of the part."""
        return shape_at(self.in_block, self.box.shape)

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        """The memory of the part in this process."""
        if self.box.block is not None:
            # The dots make it a view also without dimensions.
            return self.arrival.blocks[self.box.block][(*self.in_block, ...)]
        if self.staged is None:
            self.staged = np.empty(self.shape, self.arrival.leaf.saved.dtype)
        return self.staged


@dataclass(eq=False)
class Arrival:
    """An array that is being read: its blocks on the host, and in the end its value."""

    leaf: RestoredLeaf
    blocks: list[np.ndarray[Any, Any]] = field(default_factory=list)
    value: Any = None

    @property
    def block_shape(self) -> Shape:
        plan = self.leaf.plan
        return self.leaf.saved.shape if plan is None else plan.grid.shard_shape

    @property
    def boxes(self) -> list[Box]:
        """Its blocks in this process."""
        plan = self.leaf.plan
        if plan is None:
            return [Box(0, (0,) * len(self.block_shape), self.block_shape)]
        return [self._box(number, index) for number, index in enumerate(plan.distinct)]

    def boxes_of(self, processes: tuple[int, ...]) -> Iterator[Box]:
        """Yield its blocks in all processes; each of ``processes`` has all of a NumPy array."""
        plan = self.leaf.plan
        if plan is None:
            yield self.boxes[0]._replace(holders=processes)
            return
        mesh: Any = plan.sharding.mesh
        for block, holders in enumerate(holders_of(plan.grid, processes_of(mesh))):
            index = plan.grid.block_index(block)
            box = self._box(plan.number_of(index), index, holders)
            if math.prod(box.shape):
                yield box

    def _box(self, block: int | None, index: Index, holders: tuple[int, ...] = ()) -> Box:
        return Box(block, start_of(index), shape_at(index, self.block_shape), holders)

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

    def allocate(self, buffers: Buffers) -> None:
        boxes = self.boxes
        self.blocks = [buffers.empty(self.block_shape, self.leaf.saved.dtype) for _ in boxes]
        for block, box in zip(self.blocks, boxes, strict=True):
            if box.shape != self.block_shape:
                block[...] = 0

    def finish(self) -> None:
        """Make the value from the blocks."""
        leaf, blocks = self.leaf, self.blocks
        self.blocks = []
        if leaf.dtype != leaf.saved.dtype:
            blocks = [block.astype(leaf.dtype) for block in blocks]
        if leaf.plan is None:
            self.value = leaf.wrap(blocks[0])
        else:
            array = leaf.plan.place(
                blocks, leaf.dtype, lambda: np.zeros(self.block_shape, leaf.dtype)
            )
            self.value = leaf.wrap(array)


def uses_of(
    arrivals: Iterable[Arrival],
    manifest: Manifest,
    boxes_of: Callable[[Arrival], Iterable[Box]] = lambda arrival: arrival.boxes,
) -> dict[Chunk, list[Use]]:
    """Return the chunks that are needed, each with its uses: by default, in this process."""
    uses: dict[Chunk, list[Use]] = {}
    for arrival in arrivals:
        leaf = arrival.leaf.saved
        for box in boxes_of(arrival):
            if leaf.array is not None:
                grid = manifest.arrays[leaf.array].grid
                for chunk, in_chunk, in_block, is_whole in grid.overlaps(box.start, box.shape):
                    use = Use(arrival, box, in_block, in_chunk, is_whole)
                    uses.setdefault((leaf.array, chunk), []).append(use)
                continue
            for piece in leaf.pieces:
                if (common := _common(box.start, box.shape, piece)) is not None:
                    use = Use(arrival, box, *common, piece=piece)
                    uses.setdefault(manifest.chunk_of(piece), []).append(use)
    return uses


def _common(start: Shape, shape: Shape, piece: Piece) -> tuple[Index, Index] | None:
    """Return the common part of a block and a piece, as an index of each."""
    if start == piece.start and shape == piece.shape:
        whole = tuple([slice(0, size) for size in shape])
        return whole, whole
    in_block, in_piece = [], []
    for a, n, b, m in zip(start, shape, piece.start, piece.shape, strict=True):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        in_block.append(slice(first - a, last - a))
        in_piece.append(slice(first - b, last - b))
    return tuple(in_block), tuple(in_piece)


def _direct(uses: list[Use]) -> np.ndarray[Any, Any] | None:
    """Return the memory to read a chunk into, if the chunk is a contiguous part of one block."""
    if len(uses) != 1 or not uses[0].is_whole:
        return None
    memory = uses[0].memory
    return memory if memory.flags.c_contiguous else None


def buffered_bytes(files: Files, where: Chunk, uses: list[Use]) -> int:
    """Return the memory, beside the blocks, that reading a chunk takes."""
    buffer = 0 if _direct(uses) is not None else files.manifest.arrays[where[0]].nbytes_per_chunk
    return buffer + files.loading_bytes(where)


def read_chunk(files: Files, where: Chunk, uses: list[Use]) -> None:
    """Read a chunk, check it, and give every block its part."""
    destination = _direct(uses)
    if destination is not None:
        files.load(where, destination.reshape(-1).view(np.uint8))
        return
    data = files.loaded(where)
    for use in uses:
        part = data if use.piece is None else use.piece.of_chunk(data)
        use.memory[...] = part[use.in_chunk]

"""The reads of a restore: each chunk that this process needs is read once, and checked.

A chunk that is one contiguous part of a block is read straight into the memory that becomes the
array; others go through a buffer. The chunks are computed from integers, and compared with the
sizes of the files, before memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import Buffers
from gda.checkpoint.files import Chunk, Files
from gda.checkpoint.format.errors import CorruptionError
from gda.checkpoint.format.manifest import Manifest, Piece, StoredArray
from gda.checkpoint.format.structure import noting_path
from gda.checkpoint.found import check_not_replaced
from gda.checkpoint.leaves_to_restore import Target
from gda.checkpoint.stores.opening import options_for
from gda.checkpoint.stores.protocol import Store
from gda.layout.spec import Index, Shape, shape_at
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.progress import shown


def read_arrays(
    store: Store, manifest: Manifest, targets: Sequence[Target], options: Options
) -> list[Any]:
    """Return the value of each target.

    Raises:
      CorruptionError: something is damaged or missing.
      RuntimeError: another checkpoint replaced it meanwhile.
      OSError: reading failed for another reason; the message names the file.
    """
    options = options_for(store, options)
    files = Files(store, manifest)
    arrivals = [_Arrival(target) for target in targets]
    groups = [
        (group, _uses(group, manifest.arrays)) for group in _groups(arrivals, options.max_bytes)
    ]
    chunks = [chunk for _, uses in groups for chunk in uses]
    try:
        for chunk in chunks:
            files.check_size(chunk)
        # Concurrently, because on an object store each is a request.
        tasks.run(
            [
                tasks.Task(2**20, lambda array=array: files.check_metadata(array))
                for array in sorted({array for array, _ in chunks})
            ],
            options,
        )
        with shown(options.progress, "restore") as show:
            report = _report(manifest.arrays, chunks, show)
            for group, uses in groups:
                _read_group(files, group, uses, options, report)
    except CorruptionError:
        check_not_replaced(store, manifest)
        raise
    return [arrival.value for arrival in arrivals]


def _report(
    arrays: Sequence[StoredArray], chunks: Iterable[Chunk], show: Callable[[int, int], object]
) -> Callable[[Chunk], None]:
    """Return the function to call after every chunk that was read."""
    total = sum(arrays[array].nbytes_per_chunk for array, _ in chunks)
    done = 0

    def report(chunk: Chunk) -> None:
        nonlocal done
        done += arrays[chunk[0]].nbytes_per_chunk
        show(done, total)

    return report


class _Use(NamedTuple):
    """A part of a chunk that a block needs: ``block[in_block] = chunk[in_chunk]``.

    Attributes:
      arrival, block: the array, and the number of its block.
      is_whole: True if it is the whole chunk.
      piece: in a chunk of a pack, the piece that ``in_chunk`` is a part of.
    """

    arrival: _Arrival
    block: int
    in_block: Index
    in_chunk: Index
    is_whole: bool = False
    piece: Piece | None = None


@dataclass(eq=False)
class _Arrival:
    """An array that is being read: its blocks on the host, and in the end its value."""

    target: Target
    blocks: list[np.ndarray[Any, Any]] = field(default_factory=list)
    value: Any = None

    @property
    def block_shape(self) -> Shape:
        plan = self.target.plan
        return self.target.leaf.shape if plan is None else plan.grid.shard_shape

    @property
    def boxes(self) -> list[tuple[Shape, Shape]]:
        """The first element and the shape, without padding, of each of its blocks."""
        plan = self.target.plan
        if plan is None:
            return [((0,) * len(self.target.leaf.shape), self.block_shape)]
        return [
            (tuple([s.start or 0 for s in index]), shape_at(index, self.block_shape))
            for index in plan.distinct
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks on the host."""
        plan = self.target.plan
        count = 1 if plan is None else len(plan.distinct)
        return count * math.prod(self.block_shape) * self.target.leaf.dtype.itemsize

    @property
    def stays_on_host(self) -> bool:
        plan = self.target.plan
        return plan is None or not plan.places_early

    def allocate(self) -> None:
        boxes = self.boxes
        buffers = Buffers(self.target.leaf.dtype, len(boxes))
        self.blocks = [buffers.empty(self.block_shape) for _ in boxes]
        for block, (_, shape) in zip(self.blocks, boxes, strict=True):
            if shape != self.block_shape:
                block[...] = 0

    def finish(self) -> None:
        """Make the value from the blocks."""
        target, blocks = self.target, self.blocks
        self.blocks = []
        if target.dtype != target.leaf.dtype:
            blocks = [block.astype(target.dtype) for block in blocks]
        if target.plan is None:
            self.value = target.wrap(blocks[0])
        else:
            array = target.plan.place(blocks, target.dtype, self._padding)
            self.value = target.wrap(array)

    def _padding(self) -> np.ndarray[Any, Any]:
        return np.zeros(self.block_shape, self.target.dtype)


def _uses(arrivals: Iterable[_Arrival], arrays: Sequence[StoredArray]) -> dict[Chunk, list[_Use]]:
    """Return the chunks that are needed, each with its uses."""
    uses: dict[Chunk, list[_Use]] = {}
    for arrival in arrivals:
        leaf = arrival.target.leaf
        for block, (start, shape) in enumerate(arrival.boxes):
            if leaf.array is not None:
                for overlap in arrays[leaf.array].grid.overlaps(start, shape):
                    use = _Use(
                        arrival,
                        block,
                        in_block=overlap.in_block,
                        in_chunk=overlap.in_chunk,
                        is_whole=overlap.is_whole,
                    )
                    uses.setdefault((leaf.array, overlap.chunk), []).append(use)
                continue
            for piece in leaf.pieces:
                if (common := _common(start, shape, piece)) is not None:
                    chunk = piece.offset // arrays[piece.array].chunk_shape[0]
                    in_block, in_chunk = common
                    use = _Use(arrival, block, in_block=in_block, in_chunk=in_chunk, piece=piece)
                    uses.setdefault((piece.array, chunk), []).append(use)
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


def _groups(arrivals: Iterable[_Arrival], max_bytes: int | None) -> Iterator[list[_Arrival]]:
    """Yield groups of arrays to read together.

    Memory that becomes the array needs no bound. Blocks that only pass through the host are bounded
    by ``max_bytes``: a group has as many arrays as that allows, at least one.
    """
    group, held = [], 0
    for arrival in arrivals:
        nbytes = 0 if arrival.stays_on_host else arrival.nbytes
        if group and max_bytes is not None and held + nbytes > max_bytes:
            yield group
            group, held = [], 0
        group.append(arrival)
        held += nbytes
    if group:
        yield group


def _read_group(
    files: Files,
    group: list[_Arrival],
    uses: dict[Chunk, list[_Use]],
    options: Options,
    report: Callable[[Chunk], None],
) -> None:
    for arrival in group:
        with noting_path(arrival.target.leaf.path):
            arrival.allocate()
    each = [
        tasks.Task(
            _buffered_bytes(files, chunk, uses[chunk]),
            lambda chunk=chunk: read_chunk(files, chunk, uses[chunk]),
            lambda _, chunk=chunk: report(chunk),
        )
        for chunk in sorted(uses)
    ]
    tasks.run(each, options)
    with jax.transfer_guard("allow"):  # whatever the user has set
        for arrival in group:
            with noting_path(arrival.target.leaf.path):
                arrival.finish()
    # The blocks on the host must live until they are transferred.
    jax.block_until_ready([arrival.value for arrival in group if not arrival.stays_on_host])


def _direct(uses: list[_Use]) -> np.ndarray[Any, Any] | None:
    """Return the memory to read a chunk into, if the chunk is a contiguous part of one block."""
    if len(uses) != 1 or not uses[0].is_whole:
        return None
    # The dots make it a view also without dimensions.
    view = uses[0].arrival.blocks[uses[0].block][(*uses[0].in_block, ...)]
    return view if view.flags.c_contiguous else None


def _buffered_bytes(files: Files, where: Chunk, uses: list[_Use]) -> int:
    """Return the memory, beside the blocks, that reading a chunk takes."""
    buffer = 0 if _direct(uses) is not None else files.manifest.arrays[where[0]].nbytes_per_chunk
    return buffer + files.loading_bytes(where, has_out=True)


def read_chunk(files: Files, where: Chunk, uses: list[_Use]) -> None:
    """Read a chunk, check it, and give every block its part."""
    destination = _direct(uses)
    if destination is not None:
        files.load(where, destination.reshape(-1).view(np.uint8))
        return
    data = files.loaded(where)
    for use in uses:
        part = data
        if use.piece is not None:
            part = use.piece.of_chunk(data)
        use.arrival.blocks[use.block][use.in_block] = part[use.in_chunk]

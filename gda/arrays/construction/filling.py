"""The blocks of one array while moves fill them: each box of a source is read once, and split.

Block by block, columns of a file of 64 MiB over 8 devices took reads of 510 MiB.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import HUGE_PAGE_BYTES, aligned_empty
from gda.arrays.construction.pending import PendingArray
from gda.arrays.liveness import calls_back
from gda.layout.cover import READ_BYTES, BoxMove, Part, cover, groups_within
from gda.layout.dtype_names import native
from gda.layout.indices import sizes_of, start_of
from gda.layout.spec import Shape
from gda.storage.options import Options
from gda.storage.sources import AsyncSource, Source, checked_block
from gda.storage.tasks import AsyncTask, Future, JoinedFutures, Task, Transfer

_Memory = np.ndarray[Any, Any]

_SMALL_BYTES = 2**16  # of a box that is read once and copied: a read takes 0.2 ms
_COPIES = 2  # of a chunk that is read: as it is stored, and decoded


class _BegunRead(NamedTuple):
    """A read that has begun: its future, and its buffer if it is not read into a block."""

    future: Future
    move: BoxMove
    buffer: _Memory | None


class Filling:
    """The blocks of an array while they are filled, and parts that are read for other processes.

    Blocks of this process are numbered as in ``LocalBlocks``, those of others by larger numbers.

    Args:
      options: of the reads.
      report: is told the bytes of each part of a block of this process that has arrived.
      is_shared: True if parts go to other processes. Blocks then have the dtype of the source until
        they are whole.
    """

    def __init__(
        self,
        pending: PendingArray,
        source: Source,
        options: Options,
        report: Callable[[int], object],
        *,
        is_shared: bool = False,
    ) -> None:
        self._pending, self._source, self._options, self._report = pending, source, options, report
        self._reader, self._indices = pending.reader, pending.plan.distinct
        read = native(source.dtype)
        self._dtype = read if is_shared else np.dtype(pending.reader.dtype)
        self._is_shared = is_shared
        self._is_cast = self._dtype != read
        # Blocks that went on to their devices need room while others are filled.
        self._has_rounds = options.max_bytes is not None and pending.plan.places_early
        self._memory: dict[int, _Memory] = {}
        self._staged: dict[tuple[int, Shape], _Memory] = {}  # parts of blocks of others
        self._left: dict[int, int] = {}  # elements that a block lacks
        self._guard = threading.Lock()  # of the memory, which threads fill
        self._buffers: list[_Memory] = []  # of boxes that are split, kept for later ones
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def tasks(self, numbers: Iterable[int]) -> Iterator[Task | AsyncTask]:
        """Yield the tasks that read some blocks of this process alone, and place them."""
        options, source = self._options, self._source
        box_bytes, group_bytes = source.read_bytes, None
        if options.max_bytes is not None and not isinstance(source, AsyncSource):
            # Most of a round's memory is for the blocks.
            parts = 8 if self._has_rounds else options.max_workers or source.workers
            box_bytes = min(box_bytes, max(options.max_bytes // parts, READ_BYTES))
        if options.max_bytes is not None and self._has_rounds:
            scale = source.dtype.itemsize / self._dtype.itemsize
            group_bytes = int(max(options.max_bytes - box_bytes, 0) * scale)
        groups = cover(
            {number: self._pending.plan.boxes[number] for number in numbers},
            source.shape,
            source.chunks,
            source.dtype.itemsize,
            box_bytes=box_bytes,
            # A library reads few chunks at a time.
            splits_blocks=isinstance(source, AsyncSource),
            group_bytes=group_bytes,
        )
        for moves in groups:
            blocks = {part.block for move in moves for part in move.parts}
            if options.max_bytes is None:
                # Here: a thread that allocates waits for the page faults of the others.
                for number in sorted(blocks):
                    self._block(number)
            if self._has_rounds:
                held = sum(self._size(number) for number in blocks) * self._dtype.itemsize
                yield self.task(moves, partial(self._finish, moves), held)
                continue
            # Several threads may share the reads of a group. A thread fills huge
            # pages alone: two that touch one first would both clear it.
            most = len(blocks) * HUGE_PAGE_BYTES if source.is_local else 0
            for some in groups_within(moves, map(self._nbytes_of_parts, moves), most):
                yield self.task(some, partial(self._finish, some))

    def task(
        self,
        moves: Sequence[BoxMove],
        finish: Callable[[], Transfer | None] = lambda: None,
        held: int = 0,
    ) -> Task | AsyncTask:
        """Return the task that reads some boxes; it needs ``held`` bytes beside them."""
        itemsize, beside = self._source.dtype.itemsize, self._source.buffer_bytes
        boxes_bytes = [math.prod(sizes_of(move.box)) * itemsize for move in moves]
        if not isinstance(self._source, AsyncSource):
            if held and not self._is_cast and not any(move.parts[1:] for move in moves):
                boxes_bytes = [0]  # they are read into the blocks
            nbytes = max(boxes_bytes) + held + beside
            return Task(nbytes, partial(self._read, moves), lambda _: finish())
        begun: list[_BegunRead] = []
        return AsyncTask(
            beside + (held or sum(map(self._nbytes_of_parts, moves))),
            partial(self._begin, self._source, moves, begun),
            lambda _: self._copy(begun) or finish(),
            partial(self._note_failed, begun),
            library_bytes=_COPIES * sum(boxes_bytes),
        )

    def _nbytes_of_parts(self, move: BoxMove) -> int:
        return move.num_elements * self._source.dtype.itemsize

    # Methods for any thread.

    def memory_of(self, part: Part) -> _Memory:
        if part.block < len(self._indices):
            return self._block(part.block)[(*part.in_block, ...)]
        key = part.block, start_of(part.in_block)
        if key not in self._staged:
            self._staged[key] = np.empty(part.shape, self._dtype)
        return self._staged[key]

    def _block(self, number: int) -> _Memory:
        if (memory := self._memory.get(number)) is not None:
            return memory
        index = self._indices[number]
        with self._guard:
            if number not in self._memory:
                try:
                    self._memory[number] = self._reader.empty(self._dtype, index)
                except Exception as error:
                    self._pending.note_where(index, error)
                    raise
            return self._memory[number]

    def _read(self, moves: Sequence[BoxMove]) -> None:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        with jax.enable_x64(self._x64):  # it belongs to a thread, as the mark of a callback does
            for move in moves:
                buffer = self._read_box(move, buffer)
        self._buffers.append(buffer)

    @calls_back
    def _read_box(self, move: BoxMove, buffer: _Memory) -> _Memory:
        """Read a box and split it; return the buffer, or a larger one."""
        sizes = sizes_of(move.box)
        out: _Memory | None = None

        def empty(dtype: np.dtype[Any]) -> _Memory:
            nonlocal buffer
            if out is not None and out.flags.c_contiguous and dtype == out.dtype:
                return out
            nbytes = math.prod(sizes) * dtype.itemsize
            if buffer.nbytes < nbytes:
                buffer = aligned_empty(nbytes, np.uint8)
            return buffer[:nbytes].view(dtype).reshape(sizes)

        try:
            if not self._is_cast and len(move.parts) == 1:
                out = self.memory_of(move.parts[0])
            read = self._source.read(move.box, empty)
            if read is out and out is not None:
                return buffer
            # If the user asked for a dtype, that of the source does not matter.
            any_dtype = self._is_cast or self._reader.wanted_dtype is not None
            block = checked_block(self._source, move.box, read, any_dtype)
        except Exception as error:
            self._pending.note_where(move.box, error)
            raise
        self._split(move, block)
        return buffer

    def _split(self, move: BoxMove, box: _Memory) -> None:
        """Copy the elements of a box into the blocks."""
        first = move.parts[0]
        is_block = not move.parts[1:] and first.shape == self._reader.shape
        if is_block and not self._is_shared and self._pending.send_if_possible(first.block, box):
            self._memory.pop(first.block, None)
            return
        for part in move.parts:
            values = box[(*part.in_box, ...)]
            try:
                self._reader.write(self.memory_of(part), values, move.index_of(part))
            except Exception as error:
                self._note_block(part, error)
                raise

    def _note_block(self, part: Part, error: Exception) -> None:
        if part.block < len(self._indices):
            self._pending.note_where(self._indices[part.block], error)

    # Reads in threads of a library, begun and finished in the caller's thread.

    def _begin(
        self, source: AsyncSource, moves: Sequence[BoxMove], begun: list[_BegunRead]
    ) -> JoinedFutures:
        begun.clear()
        for move in moves:
            nbytes = math.prod(sizes_of(move.box)) * source.dtype.itemsize
            # A view has buffers for each read; a small read costs more than a copy.
            has_one = source.buffer_bytes or nbytes <= _SMALL_BYTES
            if (move.parts[1:] and has_one) or self._is_cast:
                buffer = np.empty(sizes_of(move.box), source.dtype)
                begun.append(_BegunRead(source.begin(move.box, buffer), move, buffer))
                continue
            # The library decodes a chunk once for all reads of it at the same time.
            for part in move.parts:
                future = source.begin(move.index_of(part), self.memory_of(part))
                begun.append(_BegunRead(future, move, None))
        return JoinedFutures([read.future for read in begun])

    def _copy(self, begun: list[_BegunRead]) -> None:
        for read in begun:
            if read.buffer is not None:
                self._split(read.move, read.buffer)
        begun.clear()

    def _note_failed(self, begun: list[_BegunRead], error: Exception) -> None:
        for read in begun:
            future: Any = read.future
            if future.done() and future.exception() is not None:
                self._note_block(read.move.parts[0], error)
                return

    # Methods for the caller's thread.

    def drop_staged(self) -> None:
        """Release the memory of parts that were read for other processes."""
        self._staged.clear()

    def _size(self, number: int) -> int:
        return math.prod(sizes_of(self._pending.plan.boxes[number]))

    def arrived(self, moves: Iterable[BoxMove]) -> list[int]:
        """Count the elements that moves have read; return the blocks that are complete now."""
        whole: list[int] = []
        itemsize = self._source.dtype.itemsize
        for part in [part for move in moves for part in move.parts]:
            number = part.block
            if number >= len(self._indices):
                continue
            size, elements = self._size(number), math.prod(part.shape)
            self._left[number] = self._left.get(number, size) - elements
            self._report(elements * itemsize)
            if not self._left[number]:
                if padding := self._pending.block_bytes - size * itemsize:
                    self._report(padding)
                whole.append(number)
        return whole

    def keep(self, number: int) -> Transfer | None:
        """Place a complete block, unless it was sent from the memory of the source."""
        memory = self._memory.pop(number, None)
        return None if memory is None else self._pending.keep_filled(number, memory)

    def _finish(self, moves: Sequence[BoxMove]) -> Transfer | None:
        transfers = [each for each in map(self.keep, self.arrived(moves)) if each is not None]
        if not transfers:
            return None
        return Transfer(
            lambda: all(transfer.is_done() for transfer in transfers),
            lambda: [transfer.wait() for transfer in transfers],
        )

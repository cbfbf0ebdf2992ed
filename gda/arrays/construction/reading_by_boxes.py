"""Blocks of one array that are read together: each box of the source once, and split in memory.

Block by block, columns of a file of 64 MiB over 8 devices took reads of 510 MiB.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import HUGE_PAGE_BYTES, aligned_empty
from gda.arrays.construction.blocks import Block, BlockReader
from gda.arrays.liveness import called_for_data
from gda.layout.dtype_names import native
from gda.layout.indices import bounded, hull_of, sizes_of, start_of, within
from gda.layout.sharing import boxes_of_chunks, parts_in_boxes
from gda.layout.spec import Index
from gda.storage.options import Options
from gda.storage.read_boxes import READ_BYTES
from gda.storage.sources import AsyncSource, Source, checked_block
from gda.storage.tasks import AsyncTask, Future, JoinedFutures, Task, Transfer, groups_within

_Memory = np.ndarray[Any, Any]
Needed = list[tuple[int, Index]]  # numbers of blocks, and the elements of each

_SMALL_BYTES = 2**16  # of a box that is read once and copied: a read takes 0.2 ms
_COPIES = 2  # of a chunk that is read: as it is stored, and decoded


class _BegunRead(NamedTuple):
    """A read that has begun: its future, and its buffer if it is not read into a block."""

    future: Future
    box: Index
    buffer: _Memory | None
    needed: Needed


class BoxTasks:
    """The tasks that read boxes of a source, each split into the memory of some blocks.

    Args:
      dtype: of the blocks.
      part: returns the memory of the elements at an index of the array, in a block.
      write: copies elements at an index of the array into such memory.
      note: adds to an error where it happened: in a block, or, with ``None``, in a box.
      any_dtype: True if what was read may have another dtype than the source.

    Attributes:
      buffers: of reads that are split, kept for later ones.
    """

    def __init__(
        self,
        source: Source,
        dtype: np.dtype[Any],
        part: Callable[[int, Index], _Memory],
        write: Callable[[_Memory, _Memory, Index], object],
        note: Callable[[int | None, Index, Exception], object],
        any_dtype: bool = False,
    ) -> None:
        self._source, self._is_cast = source, native(source.dtype) != dtype
        self._part, self._write, self._note, self._any_dtype = part, write, note, any_dtype
        self.buffers: list[_Memory] = []
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def task(
        self, boxes: list[Needed], finish: Callable[[], Transfer | None], held: int = 0
    ) -> Task | AsyncTask:
        boxes_bytes = [self.nbytes(_hull(needed)) for needed in boxes]
        beside = self._source.buffer_bytes
        if not isinstance(self._source, AsyncSource):
            nbytes = max(boxes_bytes) + held + beside
            return Task(nbytes, partial(self._read, boxes), lambda _: finish())
        begun: list[_BegunRead] = []
        return AsyncTask(
            beside + (held or sum(self.nbytes(index) for each in boxes for _, index in each)),
            partial(self._begin, self._source, boxes, begun),
            lambda _: self._copy(begun) or finish(),
            partial(self._note_failed, begun),
            library_bytes=_COPIES * sum(boxes_bytes),
        )

    def nbytes(self, index: Index) -> int:
        """Return the bytes of the elements at an index, as the source has them."""
        return math.prod(sizes_of(index)) * self._source.dtype.itemsize

    def _read(self, boxes: list[Needed]) -> None:
        try:
            buffer = self.buffers.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        with jax.enable_x64(self._x64):  # it belongs to a thread, as the mark of a callback does
            for needed in boxes:
                buffer = called_for_data(self._read_box, needed, buffer)
        self.buffers.append(buffer)

    def _read_box(self, needed: Needed, buffer: _Memory) -> _Memory:
        """Read a box and split it; return the buffer, or a larger one."""
        box = _hull(needed)
        sizes = sizes_of(box)
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
            if not self._is_cast and len(needed) == 1:
                out = self._part(*needed[0])
            read = self._source.read(box, empty)
            if read is out and out is not None:
                return buffer
            block = checked_block(self._source, box, read, self._any_dtype)
        except Exception as error:
            self._note(None, box, error)
            raise
        self._split(block, box, needed)
        return buffer

    def _split(self, block: _Memory, box: Index, needed: Needed) -> None:
        start = start_of(box)
        for number, index in needed:
            try:
                self._write(self._part(number, index), block[(*within(index, start), ...)], index)
            except Exception as error:
                self._note(number, box, error)
                raise

    def _begin(
        self, source: AsyncSource, boxes: list[Needed], begun: list[_BegunRead]
    ) -> JoinedFutures:
        begun.clear()
        for needed in boxes:
            box = _hull(needed)
            # A view has buffers for each read; a small read costs more than a copy.
            has_one = source.buffer_bytes or self.nbytes(box) <= _SMALL_BYTES
            if (len(needed) > 1 and has_one) or self._is_cast:
                buffer = np.empty(sizes_of(box), source.dtype)
                begun.append(_BegunRead(source.begin(box, buffer), box, buffer, needed))
                continue
            # The library decodes a chunk once for all reads of it at the same time.
            for number, index in needed:
                future = source.begin(index, self._part(number, index))
                begun.append(_BegunRead(future, index, None, [(number, index)]))
        return JoinedFutures([read.future for read in begun])

    def _copy(self, begun: list[_BegunRead]) -> None:
        for read in begun:
            if read.buffer is not None:
                self._split(read.buffer, read.box, read.needed)
        begun.clear()

    def _note_failed(self, begun: list[_BegunRead], error: Exception) -> None:
        for read in begun:
            future: Any = read.future
            if future.done() and future.exception() is not None:
                self._note(read.needed[0][0], read.box, error)
                return


class BoxReads:
    """The reads of some blocks by boxes, each split into the memory of the blocks that need it.

    Args:
      indices: of all blocks.
      groups: the numbers of the blocks of each group; no box has parts of two groups.
      has_rounds: under ``max_bytes``, read as one task so many blocks of a group as fit, at least
        one: where blocks that are complete go on to their devices.
      done: is called with number and block when it is complete.
      report: is called with the bytes of each part of a block that was read.
      note: adds an index of the array to an error.

    Attributes:
      numbers: of the blocks that are read.
    """

    def __init__(
        self,
        source: Source,
        reader: BlockReader,
        indices: Sequence[Index],
        groups: Sequence[Sequence[int]],
        options: Options,
        done: Callable[[int, Block], Transfer | None],
        report: Callable[[int], object],
        note: Callable[[Index, Exception], object],
        *,
        has_rounds: bool,
    ) -> None:
        self._source, self._reader, self._groups = source, reader, groups
        self._blocks = {n: bounded(indices[n], source.shape) for group in groups for n in group}
        self._done, self._report, self._note = done, report, note
        self._has_rounds, self._max_bytes = has_rounds, options.max_bytes
        self._itemsize = source.dtype.itemsize
        self._most_bytes = source.read_bytes
        if options.max_bytes is not None and not isinstance(source, AsyncSource):
            # Of a round, most is for the blocks.
            parts = 8 if has_rounds else options.max_workers or source.workers
            self._most_bytes = min(self._most_bytes, max(options.max_bytes // parts, READ_BYTES))
        self._starts = {n: start_of(index) for n, index in self._blocks.items()}
        self._left = {n: math.prod(sizes_of(index)) for n, index in self._blocks.items()}
        self.numbers = {*self._left}
        self._memory: dict[int, _Memory] = {}
        self._guard = threading.Lock()  # of the memory, which threads fill
        self._tasks = BoxTasks(
            source,
            self._dtype,
            part=self._part,
            write=reader.write,
            note=lambda number, box, error: note(box if number is None else indices[number], error),
            any_dtype=reader.wanted_dtype is not None,
        )

    def tasks(self) -> Iterator[Task | AsyncTask]:
        """Yield the tasks of each group: one for each box, or for all boxes of a round."""
        for group in self._groups:
            if self._max_bytes is None:
                # Here: a thread that allocates waits for the page faults of the others.
                for number in group:
                    self._made(number)
            # Without a limit, several threads or reads of a library can have part in a group.
            if self._max_bytes is None or not self._has_rounds:
                boxes = [*self._boxes_of(group)]
                nbytes = [sum(self._tasks.nbytes(index) for _, index in box) for box in boxes]
                # A thread fills huge pages alone: two that touch one first would both clear it.
                most = len(group) * HUGE_PAGE_BYTES if self._source.is_local else 0
                for some in groups_within(boxes, nbytes, most):
                    yield self._tasks.task(some, partial(self._finish, some))
                continue
            nbytes = [self._left[number] * self._dtype.itemsize for number in group]
            for some in groups_within(group, nbytes, self._max_bytes - self._most_bytes):
                held = sum(self._left[number] for number in some) * self._dtype.itemsize
                boxes = [*self._boxes_of(some)]
                yield self._tasks.task(boxes, partial(self._finish, boxes), held)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self._reader.dtype)

    def _boxes_of(self, group: Sequence[int]) -> Iterator[Needed]:
        blocks = {number: self._blocks[number] for number in group}
        chunks = self._source.chunks or (1,) * len(self._source.shape)
        most_elements = max(self._most_bytes // self._itemsize, 1)
        boxes = boxes_of_chunks(hull_of(blocks.values()), chunks, most_elements)
        return parts_in_boxes(blocks, boxes)

    def _part(self, number: int, index: Index) -> _Memory:
        memory = self._memory.get(number)
        if memory is None:
            memory = self._made(number)
        return memory[(*within(index, self._starts[number]), ...)]

    def _made(self, number: int) -> _Memory:
        reader, index = self._reader, self._blocks[number]
        with self._guard:
            if number not in self._memory:
                is_whole = sizes_of(index) == reader.shape
                try:
                    made: Any = reader.empty(self._dtype) if is_whole else reader.padding()
                except Exception as error:
                    self._note(index, error)
                    raise
                self._memory[number] = made
            return self._memory[number]

    def _finish(self, boxes: list[Needed]) -> Transfer | None:
        """Count what was read, and hand on the blocks that are complete."""
        transfers: list[Transfer] = []
        for number, index in [each for needed in boxes for each in needed]:
            elements = math.prod(sizes_of(index))
            self._left[number] -= elements
            self._report(elements * self._itemsize)
            if not self._left[number]:
                del self._left[number]
                transfer = self._done(number, self._memory.pop(number))
                transfers += [] if transfer is None else [transfer]
        if not self._left:
            self._tasks.buffers.clear()
        if not transfers:
            return None
        return Transfer(
            lambda: all(transfer.is_done() for transfer in transfers),
            lambda: [transfer.wait() for transfer in transfers],
        )


def _hull(needed: Needed) -> Index:
    return hull_of([index for _, index in needed])

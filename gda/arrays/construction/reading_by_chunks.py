"""The blocks of one array, read chunk by chunk: each chunk is decoded once, and few are held.

Read block by block, a chunk that several blocks need is decoded for each of them, or held until all
are read: 512 MiB from an Orbax run onto another layout held 260 to 410 MiB beyond the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gda.layout.sharing import boxes_of_chunks, common_box
from gda.layout.spec import Index, bounded
from gda.storage.sources import AsyncSource
from gda.storage.tasks import AsyncTask, Future, JoinedFutures

if TYPE_CHECKING:
    from gda.arrays.construction.from_sources import PendingArray

_BOX_BYTES = 4 * 2**20  # of small chunks that are read together
_COPIES = 2  # of a chunk that is read: as it is stored, and decoded


class ChunkReads:
    """The reads of an array by chunks; their memory is that of the blocks.

    Attributes:
      numbers: of the blocks that are read.
    """

    def __init__(
        self, pending: PendingArray, source: AsyncSource, others: Collection[int | None]
    ) -> None:
        self._pending, self._source = pending, source
        shape, distinct = source.shape, pending.plan.distinct
        indices = {
            number: bounded(index, shape)
            for number, index in enumerate(distinct)
            if number not in others
        }
        most_elements = max(_BOX_BYTES // source.dtype.itemsize, 1)
        self._boxes: list[tuple[Index, list[tuple[int, Index]]]] = []
        for box in boxes_of_chunks(shape, source.chunks or shape, most_elements):
            common = [(number, common_box(box, index)) for number, index in indices.items()]
            if needed := [(number, index) for number, index in common if index is not None]:
                self._boxes.append((box, needed))
        self._left = Counter(number for _, needed in self._boxes for number, _ in needed)
        self.numbers = {*self._left}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}

    def tasks(self, report: Callable[[int], object]) -> Iterator[AsyncTask]:
        """Yield a task for each box, which is read into all blocks that need a part of it."""
        itemsize = self._source.dtype.itemsize
        for box, needed in self._boxes:
            futures: list[tuple[int, Future]] = []
            yield AsyncTask(
                sum(map(_size, (index for _, index in needed))) * itemsize,
                partial(self._begin, needed, futures),
                partial(self._finish, needed, report),
                partial(self._note, needed, futures),
                library_bytes=_COPIES * _size(box) * itemsize,
            )

    def _begin(
        self, needed: list[tuple[int, Index]], futures: list[tuple[int, Future]]
    ) -> JoinedFutures:
        futures.clear()
        for number, index in needed:
            out = self._part(number, index)
            futures.append((number, self._source.begin(index, out)))
        return JoinedFutures([future for _, future in futures])

    def _part(self, number: int, index: Index) -> np.ndarray[Any, Any]:
        """Return the memory of the elements at an index of the array, in a block."""
        block = self._pending.plan.distinct[number]
        if number not in self._memory:
            self._memory[number] = self._pending.reader.empty(self._source.dtype, block)
        within = [
            slice(part.start - (whole.start or 0), part.stop - (whole.start or 0))
            for part, whole in zip(index, block, strict=True)
        ]
        return self._memory[number][(*within, ...)]

    def _finish(
        self, needed: list[tuple[int, Index]], report: Callable[[int], object], _: object
    ) -> None:
        pending = self._pending
        for number, _ in needed:
            self._left[number] -= 1
            if not self._left[number]:
                block, memory = pending.plan.distinct[number], self._memory.pop(number)
                pending.keep(number, block, report, pending.reader.settle_own, memory)

    def _note(
        self,
        needed: list[tuple[int, Index]],
        futures: list[tuple[int, Future]],
        error: Exception,
    ) -> None:
        failed = [number for number, future in futures if _has_failed(future)]
        number = next(iter(failed), needed[0][0])
        self._pending.note_where(self._pending.plan.distinct[number], error)


def _has_failed(future: Any) -> bool:
    return future.done() and future.exception() is not None


def _size(index: Index) -> int:
    size = 1
    for s in index:
        size *= s.stop - s.start
    return size

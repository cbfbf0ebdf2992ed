"""The blocks of one array, read chunk by chunk: each chunk is decoded once, and few are held.

Read block by block, a chunk that several blocks need is decoded for each of them, or held until all
are read: 512 MiB from an Orbax run onto another layout held 260 to 410 MiB beyond the arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from gda.layout.sharing import boxes_of_chunks, common_box
from gda.layout.spec import Index, bounded, start_of
from gda.storage.sources import AsyncSource
from gda.storage.tasks import AsyncTask, Future, JoinedFutures

_Memory = np.ndarray[Any, Any]
_Needed = list[tuple[int, Index]]  # numbers of blocks, and the elements of each

_BOX_BYTES = 4 * 2**20  # of small chunks that are read together
_SMALL_BYTES = 2**16  # of a box that is read once and copied: a read takes 0.2 ms
_COPIES = 2  # of a chunk that is read: as it is stored, and decoded


class ChunkReads:
    """The reads of some blocks by chunks, each into the memory of the blocks that need it.

    Args:
      indices: those of the blocks, by the numbers of the blocks.
      empty: returns the memory of the block at an index.
      done: is called with number, index and memory of a block when it is complete.
      note: adds the index of a block to an error.

    Attributes:
      numbers: of the blocks that are read.
    """

    def __init__(
        self,
        source: AsyncSource,
        indices: Mapping[int, Index],
        empty: Callable[[Index], _Memory],
        done: Callable[[int, Index, _Memory], object],
        note: Callable[[Index, Exception], object],
    ) -> None:
        self._source, self._indices = source, indices
        self._empty, self._done, self._note_index = empty, done, note
        shape = source.shape
        bounds = {number: bounded(index, shape) for number, index in indices.items()}
        most_elements = max(_BOX_BYTES // source.dtype.itemsize, 1)
        self._boxes: list[tuple[Index, _Needed]] = []
        for box in boxes_of_chunks(shape, source.chunks or shape, most_elements):
            common = [(number, common_box(box, index)) for number, index in bounds.items()]
            if needed := [(number, index) for number, index in common if index is not None]:
                self._boxes.append((box, needed))
        self._left = Counter(number for _, needed in self._boxes for number, _ in needed)
        self.numbers = {*self._left}
        self._memory: dict[int, _Memory] = {}

    def tasks(self) -> Iterator[AsyncTask]:
        """Yield a task for each box of chunks."""
        itemsize = self._source.dtype.itemsize
        for box, needed in self._boxes:
            futures: list[tuple[int, Future]] = []
            whole: list[_Memory] = []
            yield AsyncTask(
                sum(_size(index) for _, index in needed) * itemsize,
                partial(self._begin, box, needed, futures, whole),
                partial(self._finish, box, needed, whole),
                partial(self._note, futures),
                library_bytes=_COPIES * _size(box) * itemsize,
            )

    def _begin(
        self,
        box: Index,
        needed: _Needed,
        futures: list[tuple[int, Future]],
        whole: list[_Memory],
    ) -> JoinedFutures:
        futures.clear()
        if len(needed) > 1 and _size(box) * self._source.dtype.itemsize <= _SMALL_BYTES:
            whole[:] = [np.empty([s.stop - s.start for s in box], self._source.dtype)]
            futures.append((needed[0][0], self._source.begin(box, whole[0])))
            return JoinedFutures([futures[0][1]])
        for number, index in needed:
            out = self._part(number, index)
            futures.append((number, self._source.begin(index, out)))
        return JoinedFutures([future for _, future in futures])

    def _part(self, number: int, index: Index) -> _Memory:
        """Return the memory of the elements at an index of the array, in a block."""
        block = self._indices[number]
        if number not in self._memory:
            self._memory[number] = self._empty(block)
        return self._memory[number][_within(index, block)]

    def _finish(self, box: Index, needed: _Needed, whole: list[_Memory], _: object) -> None:
        for number, index in needed:
            if whole:
                self._part(number, index)[...] = whole[0][_within(index, box)]
            self._left[number] -= 1
            if not self._left[number]:
                self._done(number, self._indices[number], self._memory.pop(number))
        whole.clear()

    def _note(self, futures: list[tuple[int, Future]], error: Exception) -> None:
        for number, future in futures:
            if _has_failed(future):
                self._note_index(self._indices[number], error)
                return


def _within(index: Index, box: Index) -> tuple[Any, ...]:
    """Return the place of an index in a box, with dots, also of a scalar a view."""
    sides = zip(index, start_of(box), strict=True)
    return (*[slice(s.start - first, s.stop - first) for s, first in sides], ...)


def _has_failed(future: Any) -> bool:
    return future.done() and future.exception() is not None


def _size(index: Index) -> int:
    return math.prod(s.stop - s.start for s in index)

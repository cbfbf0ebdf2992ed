"""Blocks of sources that are written: the thread that writes a block reads it."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gda.arrays.buffers import aligned_empty
from gda.layout.dtype_names import native
from gda.layout.indices import Tiling, bounded, sizes_of
from gda.layout.spec import Index, Shape
from gda.layout.text import format_index
from gda.storage.options import Options
from gda.storage.read_boxes import box_shape_of
from gda.storage.sources import AsyncSource, Source, checked_block, source_of
from gda.storage.tasks import Future

_Memory = np.ndarray[Any, Any]

_ALONE_FROM = 2**20  # bytes


def one_at_a_time(options: Options) -> AbstractContextManager[Any]:
    """Return the context of each read: a lock, unless the user asked for several at a time."""
    return nullcontext() if options.are_for_threads else threading.Lock()


@dataclass(frozen=True, eq=False)
class SourceArray:
    """A source to be written, in blocks of one shape; those at the edge are smaller."""

    source: Source
    block_shape: Shape
    path: str  # of the leaf, for errors
    reading: AbstractContextManager[Any]  # see one_at_a_time

    @classmethod
    def of(
        cls,
        value: Any,
        path: str,
        max_bytes: int,
        reading: AbstractContextManager[Any],
        written: Shape | None = None,
    ) -> SourceArray:
        """Return the blocks of a source, of whole ``written`` chunks; errors as ``source_of``."""
        source = source_of(value)
        block_shape = source.shape
        if 0 not in source.shape:
            block_shape = box_shape_of(
                source.shape,
                source.dtype.itemsize,
                max_bytes,
                read=source.chunks,
                written=written,
                order=_order_of(value),
            )
        return cls(source, block_shape, path, reading)

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return native(self.source.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling.of_blocks(self.shape, self.block_shape)

    @property
    def parts(self) -> tuple[int, ...]:
        return self.tiling.parts

    @property
    def num_blocks(self) -> int:
        return math.prod(self.parts)

    def index(self, number: int) -> Index:
        return bounded(self.tiling.index(number), self.shape)

    def block(self, number: int) -> SourceBlock:
        return SourceBlock(self, self.index(number))

    def __str__(self) -> str:
        # Compared between processes.
        return f"a source of {self.dtype}{list(self.shape)} in blocks of {self.block_shape}"


def _order_of(value: Any) -> Sequence[int] | None:
    """Return the dimensions of a memory map by the distance of neighbours; None if unknown."""
    if not isinstance(value, np.ndarray):
        return None
    return sorted(range(value.ndim), key=lambda axis: (abs(value.strides[axis]), -axis))


class SourceBlock:
    """A block of a source that is read when it is needed, into memory that JAX may keep."""

    def __init__(self, array: SourceArray, index: Index) -> None:
        self._array, self._index = array, index
        self.shape: Shape = sizes_of(index)
        self.dtype = array.dtype
        self._out: _Memory | None = None
        self._begun: Future | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def begin(self) -> None:
        """Begin to read it, if its library reads in threads of its own."""
        if isinstance(self._array.source, AsyncSource):
            with suppress(Exception):  # which read raises, where it is tried again
                self._begun = self._array.source.begin(self._index, self._empty(self.dtype))

    def read(self) -> _Memory:
        """Return its data in new memory; a second call tries again."""
        begun, self._begun = self._begun, None
        try:
            if begun is not None:
                begun.result()
            else:
                self._read()
        except Exception as error:
            self._note(error)
            raise
        out, self._out = self._out, None
        assert out is not None
        return out

    def _read(self) -> None:
        source = self._array.source
        with self._array.reading:
            block: Any = source.read(self._index, self._empty)
            if block is not None and block is self._out:
                return
            # A source may return its own memory, and change it before this is written.
            block = checked_block(source, self._index, block)
            np.copyto(self._empty(self.dtype), block)

    def _empty(self, dtype: np.dtype[Any]) -> _Memory:
        self._out = _empty(self.shape, dtype)
        return self._out

    def _note(self, error: Exception) -> None:
        of_leaf = f" of {self._array.path}" if self._array.path else ""
        error.add_note(f"gda: while reading index {format_index(self._index)}{of_leaf}")


def _empty(shape: Shape, dtype: np.dtype[Any]) -> _Memory:
    """Return aligned memory that goes back to the system when it is freed.

    The allocator would keep that of freed blocks, for each thread: 100 MiB more for 4 threads.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _ALONE_FROM or not hasattr(mmap, "MAP_PRIVATE"):
        return aligned_empty(shape, dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)

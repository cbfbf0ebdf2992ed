"""Tensors of files that a process reads by rows: many with one request; JAX divides each.

The tasks and blocks of a tensor of 64 KiB took six times as long as its placement, and those of one
of 8 MiB in 8 blocks of rows as long as its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import ALIGNMENT, Buffers, aligned_empty
from gda.arrays.construction.blocks import LARGE_BYTES
from gda.arrays.construction.from_sources import PendingArray, are_sent
from gda.layout.dtype_names import native
from gda.layout.indices import bounded, hull_of, sizes_of, start_of, within
from gda.layout.spec import Index, Shape
from gda.multihost.settings import own_settings
from gda.storage.read_boxes import READ_BYTES
from gda.storage.safetensors import SafetensorsTensor, place_of, read_together
from gda.storage.tasks import Task, Transfer, groups_within

_Memory = np.ndarray[Any, Any]

# Of one task and one allocation, if one tensor is not larger. From 4 MiB on memory has huge pages,
# which NumPy asks for; all but the last have as much, where nothing is cast.
_AT_A_TIME = 4 * 2**20 + LARGE_BYTES
# One thread reads a tensor: a larger one is read block by block, by several.
_MOST_BYTES = 128 * 2**20


class RowsKind(NamedTuple):
    """The tensors of one shape, dtype and layout."""

    build: PendingArray  # of one of them
    rows: Index  # all of the tensor that this process reads
    shape: Shape  # of the rows
    cuts: list[Index]  # the blocks in the rows
    held_bytes: int  # of the rows as they are read, and of their copy if they have to be cast

    @classmethod
    def of(cls, build: PendingArray, max_bytes: int | None) -> RowsKind | None:
        """Return the kind of a tensor; ``None`` if it is read better block by block."""
        plan, source = build.plan, build.source
        if source is None or plan.grid.is_padded or not plan.distinct:
            return None
        whole = plan.grid.global_shape
        blocks = [bounded(index, whole) for index in plan.distinct]
        hull = hull_of(blocks)
        rows = (*hull[:1], *[slice(0, size) for size in whole[1:]])
        shape = sizes_of(rows)
        read, dtype = source.dtype, np.dtype(build.reader.dtype)
        itemsize = read.itemsize + (0 if native(read) == dtype else dtype.itemsize)
        held_bytes = math.prod(shape) * itemsize
        block_size = math.prod(build.reader.shape)
        has_all_rows = block_size * len(blocks) == math.prod(shape)
        are_rows = has_all_rows and all(block[1:] == rows[1:] for block in blocks)
        # On CPU JAX takes aligned blocks as they are, and copies others.
        is_aligned = block_size * dtype.itemsize % ALIGNMENT == 0
        most = LARGE_BYTES
        if are_rows and is_aligned and not plan.places_early:
            most = max(most, min(_MOST_BYTES, max_bytes or _MOST_BYTES))
        if not 0 < held_bytes < most:
            return None
        if rows != hull and held_bytes // shape[0] > READ_BYTES:
            return None
        cuts = [within(block, start_of(rows)) for block in blocks]
        return cls(build, rows, shape, cuts, held_bytes)


class TensorByRows:
    """A tensor, and its array when it was read."""

    def __init__(
        self, kind: RowsKind, tensor: SafetensorsTensor, note: Callable[[Exception], object]
    ) -> None:
        self.kind, self.tensor, self.note = kind, tensor, note
        self.plan = kind.build.plan
        self.placed: jax.Array | None = None

    def wanted(self) -> jax.ShapeDtypeStruct:
        return self.kind.build.wanted()

    def array(self) -> jax.Array:
        """Return the array, after all tasks are done."""
        assert self.placed is not None
        return self.placed


class TensorsByRows:
    """Tensors that are read by one task; ``is_limited`` if the memory has a bound."""

    def __init__(self, tensors: Sequence[TensorByRows], is_limited: bool) -> None:
        self._tensors, self._is_limited = tensors, is_limited
        self.builds = [each.kind.build for each in tensors]
        self.nbytes = sum(build.nbytes for build in self.builds)

    @classmethod
    def of_each_task(
        cls, tensors: Sequence[TensorByRows], max_bytes: int | None
    ) -> list[TensorsByRows]:
        """Return the tensors in groups, in the order of the files."""
        ordered = sorted(tensors, key=lambda each: place_of(each.tensor))
        sizes = [each.kind.held_bytes for each in ordered]
        most = min(_AT_A_TIME, max_bytes or _AT_A_TIME)
        return [cls(group, max_bytes is not None) for group in groups_within(ordered, sizes, most)]

    def tasks(self, report: Callable[[int], object]) -> list[Task]:
        nbytes = sum(each.kind.held_bytes for each in self._tensors)
        # Threads that make memory while others fill some wait for them. Here malloc may touch more.
        memory = None if self._is_limited else _memory_for(self._tensors)
        return [Task(nbytes, partial(self._read, memory), partial(self._place, report))]

    def _read(self, memory: Sequence[_Memory] | None) -> list[_Memory]:
        """Return the rows of each tensor in the dtype of its array."""
        memory = memory or _memory_for(self._tensors)
        buffers = Buffers(len(self._tensors))
        parts = [
            (each.tensor, each.kind.rows, out)
            for each, out in zip(self._tensors, memory, strict=True)
        ]
        try:
            read_together(parts)
        except Exception:
            for each, part in zip(self._tensors, parts, strict=True):
                self._noted(each, partial(part[0].read_direct, part[2], part[1]))
        return [
            self._noted(each, partial(_as_wanted, each.kind, out, buffers))
            for each, out in zip(self._tensors, memory, strict=True)
        ]

    def _noted(self, tensor: TensorByRows, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            tensor.kind.build.reader.note(error, tensor.kind.rows)
            tensor.note(error)
            raise

    def _place(self, report: Callable[[int], object], memory: Sequence[_Memory]) -> Transfer:
        shardings: list[Any] = [each.plan.sharding for each in self._tensors]
        with own_settings():
            if all(sharding.is_fully_addressable for sharding in shardings):
                # A third faster than placing blocks. With devices of several processes it would
                # compare all values.
                arrays = jax.device_put([*memory], shardings)
            else:
                arrays = [
                    each.plan.place([rows[cut] for cut in each.kind.cuts], rows.dtype)
                    for each, rows in zip(self._tensors, memory, strict=True)
                ]
        for each, array in zip(self._tensors, arrays, strict=True):
            each.placed = array
        report(self.nbytes)
        return Transfer(lambda: are_sent(arrays), lambda: jax.block_until_ready(arrays))


def _memory_for(tensors: Sequence[TensorByRows]) -> list[_Memory]:
    """Return aligned memory for the rows of each tensor, all of one allocation."""
    dtypes = [native(each.tensor.dtype) for each in tensors]
    sizes = [
        math.prod(each.kind.shape) * dtype.itemsize
        for each, dtype in zip(tensors, dtypes, strict=True)
    ]
    *starts, end = itertools.accumulate(
        [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], initial=0
    )
    slab = aligned_empty(end, np.uint8)
    return [
        np.ndarray(each.kind.shape, dtype, slab, start)
        for each, dtype, start in zip(tensors, dtypes, starts, strict=True)
    ]


def _as_wanted(kind: RowsKind, rows: _Memory, buffers: Buffers) -> _Memory:
    dtype = np.dtype(kind.build.reader.dtype)
    if rows.dtype == dtype:
        return rows
    out = buffers.empty(kind.shape, dtype)
    kind.build.reader.write(out, rows, kind.rows)
    return out

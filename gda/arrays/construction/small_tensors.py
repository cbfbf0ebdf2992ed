"""Small tensors of files: many are read at a time, and JAX divides each.

The tasks and blocks of a tensor of 64 KiB took six times as long as its placement.
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

# Of one task and one allocation. From 4 MiB on memory has huge pages, which NumPy asks for; all but
# the last have as much, where nothing is cast.
_AT_A_TIME = 4 * 2**20 + LARGE_BYTES


class SmallKind(NamedTuple):
    """The small tensors of one shape, dtype and layout."""

    build: PendingArray  # of one of them
    rows: Index  # all of the tensor that this process reads
    shape: Shape  # of the rows
    cuts: list[Index]  # the blocks in the rows

    @classmethod
    def of(cls, build: PendingArray) -> SmallKind | None:
        """Return the kind of a tensor; ``None`` if it is large, or read better block by block."""
        plan, source = build.plan, build.source
        if source is None or plan.grid.is_padded or not plan.distinct:
            return None
        shape = plan.grid.global_shape
        whole_bytes = math.prod(shape) * source.dtype.itemsize
        if not 0 < whole_bytes < LARGE_BYTES:
            return None
        blocks = [bounded(index, shape) for index in plan.distinct]
        hull = hull_of(blocks)
        rows = (*hull[:1], *[slice(0, size) for size in shape[1:]])
        if rows != hull and whole_bytes // shape[0] > READ_BYTES:
            return None
        cuts = [within(block, start_of(rows)) for block in blocks]
        return cls(build, rows, sizes_of(rows), cuts)


class SmallTensor:
    """A small tensor, and its array when it was read."""

    def __init__(
        self, kind: SmallKind, tensor: SafetensorsTensor, note: Callable[[Exception], object]
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


class SmallTensors:
    """Small tensors that are read by one task."""

    def __init__(self, tensors: Sequence[SmallTensor]) -> None:
        self._tensors = tensors
        self.nbytes = sum(each.kind.build.nbytes for each in tensors)

    @classmethod
    def of_each_task(
        cls, tensors: Sequence[SmallTensor], max_bytes: int | None
    ) -> list[SmallTensors]:
        """Return the tensors in groups, in the order of the files."""
        ordered = sorted(tensors, key=lambda each: place_of(each.tensor))
        sizes = [_held_bytes(each) for each in ordered]
        most = min(_AT_A_TIME, max_bytes or _AT_A_TIME)
        return [cls(group) for group in groups_within(ordered, sizes, most)]

    def tasks(self, report: Callable[[int], object]) -> list[Task]:
        nbytes = sum(map(_held_bytes, self._tensors))
        return [Task(nbytes, self._read, partial(self._place, report))]

    def _read(self) -> list[_Memory]:
        """Return the rows of each tensor in the dtype of its array."""
        memory = _memory_for(self._tensors)
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

    def _noted(self, tensor: SmallTensor, function: Callable[[], Any]) -> Any:
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


def _memory_for(tensors: Sequence[SmallTensor]) -> list[_Memory]:
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


def _held_bytes(tensor: SmallTensor) -> int:
    """Bytes of the rows as they are read, and of their copy if they have to be cast."""
    kind = tensor.kind
    read, dtype = tensor.tensor.dtype, np.dtype(kind.build.reader.dtype)
    itemsize = read.itemsize + (0 if native(read) == dtype else dtype.itemsize)
    return math.prod(kind.shape) * itemsize


def _as_wanted(kind: SmallKind, rows: _Memory, buffers: Buffers) -> _Memory:
    dtype = np.dtype(kind.build.reader.dtype)
    if rows.dtype == dtype:
        return rows
    out = buffers.empty(kind.shape, dtype)
    kind.build.reader.write(out, rows, kind.rows)
    return out

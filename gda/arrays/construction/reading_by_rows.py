"""Tensors of files that are read as one run of rows each, which JAX divides into blocks.

Many small ones are read with one request. A task for each block of a tensor of 64 KiB took six
times as long as its placement, and that of 8 MiB in 8 blocks as long as reading its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import ALIGNMENT, Buffers, aligned_empty
from gda.arrays.construction.blocks import LARGE_BYTES
from gda.arrays.construction.pending import PendingArray, are_sent
from gda.arrays.construction.placing import LocalBlocks
from gda.layout.cover import READ_BYTES, groups_within
from gda.layout.dtype_names import native
from gda.layout.indices import bounded, hull_of, sizes_of, start_of, within
from gda.layout.spec import Index, Shape
from gda.mesh import own_settings
from gda.multihost.descriptions import leaf_path, note_path
from gda.storage.options import Options
from gda.storage.safetensors import SafetensorsTensor, place_of, read_together
from gda.storage.tasks import Task, Transfer

_Memory = np.ndarray[Any, Any]

# The bytes of one task, with one allocation, for small tensors. NumPy asks for huge pages from
# 4 MiB on; all tasks but the last have as much, where nothing is cast.
_AT_A_TIME = 4 * 2**20 + LARGE_BYTES
# The most bytes of a tensor that one thread reads; a larger one is read block by block.
_MOST_BYTES = 128 * 2**20


class RowsKind(NamedTuple):
    """The tensors of one shape, dtype and layout."""

    build: PendingArray  # of one of them
    rows: Index  # that this process reads
    shape: Shape  # of the rows
    cuts: list[Index]  # the blocks in the rows
    held_bytes: int  # of the rows as they are read, and of a copy that is cast
    is_large: bool

    @classmethod
    def of(cls, build: PendingArray, options: Options) -> RowsKind | None:
        """Return the kind of a tensor; ``None`` if it is better read block by block."""
        plan, source = build.plan, build.source
        if source is None or plan.grid.is_padded or not plan.distinct:
            return None
        whole = plan.grid.global_shape
        whole_bytes = math.prod(whole) * source.dtype.itemsize
        is_large = whole_bytes >= LARGE_BYTES
        if not whole_bytes or (is_large and not _is_adopted(build, options)):
            return None
        blocks = [bounded(index, whole) for index in plan.distinct]
        hull = hull_of(blocks)
        rows = (*hull[:1], *[slice(0, size) for size in whole[1:]])
        if rows != hull and whole_bytes // whole[0] > READ_BYTES:
            return None
        shape = sizes_of(rows)
        read, dtype = native(source.dtype), np.dtype(build.reader.dtype)
        itemsize = read.itemsize + (0 if read == dtype else dtype.itemsize)
        held_bytes = math.prod(shape) * itemsize
        if is_large and held_bytes > build.nbytes:  # rows of other processes lie between
            return None
        cuts = [within(block, start_of(rows)) for block in blocks]
        return cls(build, rows, shape, cuts, held_bytes, is_large)


def _is_adopted(build: PendingArray, options: Options) -> bool:
    """Return True if JAX divides the rows without a copy, and no option bounds the memory."""
    return (
        options.max_workers is None
        and options.max_bytes is None
        and not build.plan.places_early  # on CPU
        and build.dtype == build.reader.dtype
        and build.reader.shape[1:] == build.plan.grid.global_shape[1:]
        and build.block_bytes % ALIGNMENT == 0
        and build.nbytes <= _MOST_BYTES
    )


@dataclass(eq=False)
class TensorByRows:
    """A tensor at ``keys`` of its tree, and its array after the read."""

    kind: RowsKind
    tensor: SafetensorsTensor
    keys: Sequence[Any]
    placed: jax.Array | None = None

    @property
    def plan(self) -> LocalBlocks:
        return self.kind.build.plan

    @property
    def nbytes(self) -> int:
        return self.kind.build.nbytes

    def wanted(self) -> jax.ShapeDtypeStruct:
        return self.kind.build.wanted()

    def array(self) -> jax.Array:
        """Return the array, when all tasks are done."""
        assert self.placed is not None
        return self.placed

    def noted(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function, or add index and path to its error."""
        try:
            return function()
        except Exception as error:
            self.kind.build.reader.note(error, self.kind.rows)
            note_path(error, leaf_path(self.keys))
            raise


def tasks_by_rows(
    tensors: Sequence[TensorByRows], max_bytes: int | None, report: Callable[[int], object]
) -> Iterator[Task]:
    """Yield the tasks in the order of the files: large tensors alone, then small ones together."""
    ordered = sorted(tensors, key=lambda each: place_of(each.tensor))
    for tensor in ordered:
        if tensor.kind.is_large:
            # Here: a thread that allocates waits for the page faults of the others.
            memory = tensor.noted(partial(_memory_for, [tensor]))
            yield _task([tensor], partial(_read, [tensor], memory), report)
    small = [each for each in ordered if not each.kind.is_large]
    most = min(_AT_A_TIME, max_bytes or _AT_A_TIME)
    for some in groups_within(small, [each.kind.held_bytes for each in small], most):
        yield _task(some, partial(_read, some), report)


def _task(
    tensors: Sequence[TensorByRows],
    read: Callable[[], list[_Memory]],
    report: Callable[[int], object],
) -> Task:
    nbytes = sum(each.kind.held_bytes for each in tensors)
    return Task(nbytes, read, partial(_place, tensors, report))


def _read(
    tensors: Sequence[TensorByRows], memory: Sequence[_Memory] | None = None
) -> list[_Memory]:
    """Return the rows of each tensor in the dtype of its array."""
    memory = memory or _memory_for(tensors)
    buffers = Buffers(len(tensors))
    pairs = [*zip(tensors, memory, strict=True)]
    try:
        read_together([(each.tensor, each.kind.rows, out) for each, out in pairs])
    except Exception:
        for each, out in pairs:
            each.noted(partial(each.tensor.read_direct, out, each.kind.rows))
    return [each.noted(partial(_as_wanted, each.kind, out, buffers)) for each, out in pairs]


def _place(
    tensors: Sequence[TensorByRows], report: Callable[[int], object], memory: Sequence[_Memory]
) -> Transfer:
    shardings: list[Any] = [each.plan.sharding for each in tensors]
    with own_settings():
        if all(sharding.is_fully_addressable for sharding in shardings):
            # A third faster than placing blocks. With devices of several processes it would
            # compare all values.
            arrays = jax.device_put([*memory], shardings)
        else:
            arrays = [
                each.plan.place([rows[cut] for cut in each.kind.cuts], rows.dtype)
                for each, rows in zip(tensors, memory, strict=True)
            ]
    for each, array in zip(tensors, arrays, strict=True):
        each.placed = array
    report(sum(each.nbytes for each in tensors))
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

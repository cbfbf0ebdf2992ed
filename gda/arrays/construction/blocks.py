"""The step from the result of a callback to a block that JAX may keep: ownership and alignment.

JAX takes a NumPy array whose memory is 64-byte aligned as the device buffer itself on CPU, and some
versions copy the others after the placing call has returned. So a block is *adopted*, that is
handed over without a copy, only when it owns its memory and gda holds the only reference to it;
anything else is copied at once into an aligned buffer of gda's, which JAX then adopts. Accelerators
adopt nothing, so a large block for them is *borrowed*: sent from the memory that it is in, and
waited for, in a quarter of the time of a copy and a transfer. A ``jax.Array`` that other code
refers to is copied: deleting or donating it would delete the shard. On CPU every one is: its memory
may be that of a NumPy array, and no public function tells.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import getweakrefcount

import jax
import numpy as np

from gda.arrays.bits import padded
from gda.arrays.buffers import ALIGNMENT, Buffers, OwnedMemory
from gda.arrays.construction.placing import Block, LocalBlocks
from gda.arrays.dtypes import (
    fill_of,
    is_extended,
    is_weak,
    jax_dtype,
    requested_dtype,
    weakly_typed,
)
from gda.arrays.liveness import calls_back, deleted_error, traced_error
from gda.layout.dtype_names import is_raw, native
from gda.layout.indices import shape_at, start_of
from gda.layout.spec import Index, Shape
from gda.layout.text import format_index
from gda.mesh import Device, is_tracer, own_settings
from gda.storage.casts import Origin, cast_into, check_holds, holds
from gda.storage.sources import (
    Source,
    apart,
    array_here,
    as_numpy,
    check_not_awaitable,
    held_by_several_error,
    settled,
)

# Blocks from this size on go to an accelerator one by one, and smaller ones together: for each, the
# calls of JAX take as long as a transfer of this size.
LARGE_BYTES = 2**20


class BorrowedBlock(np.ndarray[Any, Any]):
    """A block in memory that other code can change, so it is sent before that code runs."""


def check_in_callback(array: Any) -> None:
    """Raise ``ValueError`` for an array of several processes, whose slices they would mix."""
    if not isinstance(array, jax.Array) or is_tracer(array):
        return
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise held_by_several_error(
            array,
            "a data callback, which each process calls for blocks of its own, cannot compute with "
            "it. Move it to its new layout with g.reshard(mesh, spec) or "
            "gda.reshard_tree(tree, mesh, specs), which all of them call",
        )


class BlockReader:
    """Turns results of callbacks into blocks of one shape and one dtype that JAX may keep.

    A block of a padded grid that is smaller than ``shard_shape`` is copied into one of that shape.

    Args:
      dtype: the dtype that the user asked for, or ``None`` to take that of the first block.
      copy: as in ``GlobalArray.from_callback``.
      always_align: on CPU copy unaligned blocks also where each is on one device.
      borrows: return large blocks that other code can reach as ``BorrowedBlock``, without a copy,
        where they are sent to an accelerator.
      is_weak: True if the data has a weak type, which its blocks may have lost.

    ``dtype`` is the dtype that the array has in JAX; ``None`` until it is known.
    """

    # Guards buffers and dtype. One for all readers: it is held for microseconds, and making one
    # for each would be felt in a loop over batches.
    _lock = threading.Lock()

    def __init__(
        self,
        plan: LocalBlocks,
        dtype: Any = None,
        copy: bool | None = None,
        *,
        fill: object = 0,
        always_align: bool = False,
        borrows: bool = False,
        is_weak: bool = False,
    ) -> None:
        if copy is not None and copy is not True and copy is not False:
            raise TypeError(f"copy must be True, False or None, not {copy!r}")
        self.plan, self.grid = plan, plan.grid
        self.shape = plan.grid.shard_shape
        self.wanted_dtype = None if dtype is None else requested_dtype(dtype)
        self.dtype = None if self.wanted_dtype is None else jax_dtype(self.wanted_dtype)
        self.copy = copy
        self._is_weak = is_weak
        self._has_weak = self._has_strong = False  # blocks
        aligns = plan.needs_alignment or (always_align and plan.platform == "cpu")
        self._align = aligns and copy is None
        is_sent = plan.places_early and plan.is_in_default_memory
        self._borrows = borrows and is_sent and copy is None
        self._buffers: Buffers | None = None
        self._fill = fill

    def place(self, blocks: Sequence[Block]) -> jax.Array:
        """Build the array of the blocks that were read, one for each distinct index."""
        return self.typed(self.plan.place(blocks, self.dtype, self.padding))

    def typed(self, array: jax.Array) -> jax.Array:
        """Return the array of the blocks with a weak type if the data, or all blocks, had one."""
        is_weak = self._is_weak or (self._has_weak and not self._has_strong)
        return weakly_typed(array) if is_weak and self.wanted_dtype is None else array

    def assemble(
        self, buffers: Sequence[object], expected: Sequence[Device], what: str, order: str
    ) -> jax.Array:
        """Put single-device arrays together; messages name them ``what``, devices ``order``."""
        plan = self.plan
        given = {
            device: _array_on(device, buffer, f"{what}[{i}]", order)
            for i, (buffer, device) in enumerate(zip(buffers, expected, strict=True))
        }
        arrays: dict[Device, Any] = {}
        for device, index in zip(plan.devices, plan.indices, strict=True):
            self._see_type(given[device])
            arrays[device] = self.settle_jax(index, given[device], is_sole=True)
        return self.typed(plan.joined(arrays, self.dtype))

    @calls_back
    def read(self, callback: Callable[[Index], object], indices: Iterable[Index]) -> list[Block]:
        """Return the block of ``callback`` at each index, each settled before the next call."""
        # Of a padded grid some blocks are smaller.
        shape, usual = None if self.grid.is_padded else self.shape, None
        blocks: list[Block] = []
        index: Index = ()
        try:
            for index in indices:
                value, references = _called(callback, index)
                # The usual block first: each microsecond here counts in a loop over batches.
                if (
                    references <= _ONE_REFERENCE
                    and type(value) is np.ndarray
                    and value.dtype is usual
                    and value.shape == shape
                    and _owns_memory(value)
                ):
                    blocks.append(value)
                else:
                    block = self.settle(index, value, references)
                    blocks.append(block)
                    if block is value and self.copy is None and not self._align:
                        usual = value.dtype  # a new block of this dtype may be kept as it is
        except Exception as error:
            self.note(error, index)
            raise
        return blocks

    def read_source(self, source: Source, indices: Iterable[Index]) -> list[Block]:
        """Return the block of a source at each index; empty ones are not read."""

        def block(index: Index) -> Any:
            if not math.prod(self.shape):
                return self.empty(native(source.dtype), index)
            return source.read(index, partial(self.empty, index=index))

        return self.read(block, indices)

    def note(self, error: Exception, index: Index) -> None:
        """Add a note of the block that was read to an error, unless it has one."""
        known = "gda: while reading index "
        if not any(note.startswith(known) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{known}{format_index(index)} of {self.grid!r}")

    def check_unused(self, index: Index, value: Any) -> None:
        """Raise ``ValueError`` or ``TypeError`` if an unused value could not be a block."""
        if not hasattr(value, "shape"):
            stands_for = getattr(value, "__jax_array__", None)
            value = stands_for() if stands_for else as_numpy(value, index)
        self.check_shape(index, value.shape)

    def fill(
        self, callback: Callable[[Index, np.ndarray[Any, Any]], object], indices: Iterable[Index]
    ) -> list[Block]:
        """Return aligned buffers that ``callback(index, out)`` filled, with the same errors."""
        if is_extended(self.wanted_dtype):
            raise TypeError(
                f"into=True hands out NumPy memory, and NumPy has no {self.wanted_dtype}"
            )
        dtype = np.dtype(self.wanted_dtype)

        def filled(index: Index) -> np.ndarray[Any, Any]:
            out = self.empty(dtype, index)
            returned = callback(index, out)
            check_not_awaitable(returned)
            is_data = isinstance(returned, list | tuple) or hasattr(returned, "__array__")
            is_view = isinstance(returned, np.ndarray) and np.may_share_memory(returned, out)
            if is_data and not is_view:
                raise TypeError(
                    "with into=True the callback fills its second argument, but it returned data "
                    f"of its own, a {type(returned).__name__}; write `out[...] = value`, or omit "
                    "into=True"
                )
            return out

        return self.read(filled, indices)

    def settle(self, index: Index, value: object, references: int) -> Block:
        """Return a block that JAX may keep, made of a value that ``references`` refer to."""
        is_sole = references <= _ONE_REFERENCE
        if type(value) is not np.ndarray:
            value = settled(value)
            self._see_type(value)
            if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
                value = value.__jax_array__()  # pyright: ignore[reportAttributeAccessIssue]
                is_sole = False
            if is_tracer(value):
                raise traced_error(f"the block at index {format_index(index)}")
            if isinstance(value, jax.Array):
                if value.is_deleted():
                    raise deleted_error(value, f"the block at {format_index(index)}, a jax.Array")
                here: jax.Array = array_here(value)
                if not is_on_cpu(here):
                    return self.settle_jax(index, here, is_sole)
                # JAX may also read the memory later that the callback is about to fill again.
                return jax.block_until_ready(self.settle_jax(index, here, is_sole=False))
            array = as_numpy(value, index)
            # An object may return an array that it keeps; lists and numbers become new arrays.
            is_new = array.base is None and not hasattr(value, "__array__")
            return self.from_numpy(index, array, is_new)
        self._has_strong = True
        return self.from_numpy(index, value, is_sole and _owns_memory(value))

    def _see_type(self, value: object) -> None:
        if is_weak(value):
            self._has_weak = True
        else:
            self._has_strong = True

    def empty(self, dtype: np.dtype[Any], index: Index | None = None) -> np.ndarray[Any, Any]:
        """Return an aligned buffer for one block: that at ``index``, or one with its padding."""
        shape = self.shape if index is None else shape_at(index, self.shape)
        with self._lock:
            if self._buffers is None:
                # Elsewhere a buffer is free when its block was sent.
                are_kept = self.plan.platform in ("", "cpu")
                self._buffers = Buffers(len(self.plan.distinct), are_kept)
            return self._buffers.empty(shape, dtype)

    def padding(self) -> Block:
        if is_extended(self.dtype):
            return jax.lax.full(self.shape, 0, self.dtype)
        dtype = np.dtype(self.dtype)
        out = self.empty(dtype)
        out[...] = fill_of(self._fill, dtype)
        return out

    def settle_jax(self, index: Index, value: jax.Array, is_sole: bool) -> Block:
        """Return a single-device array in the wanted dtype; on CPU perhaps as a NumPy array."""
        self.check_shape(index, value.shape)
        if is_extended(value.dtype) != is_extended(self.wanted_dtype or value.dtype):
            raise self.keys_error(index, value.dtype)
        if value.dtype != jax_dtype(value.dtype, index):
            # Made with x64, which is off now: JAX would narrow it without a look at its values.
            return self.from_numpy(index, np.asarray(value), sole=False)
        is_cast = self.wanted_dtype is not None and value.dtype != self.dtype
        if is_cast or len(value.devices()) > 1:
            with own_settings():
                if len(value.devices()) > 1:
                    # Apart, or JAX computes with it as with an array over all devices.
                    value = apart(jax.device_put(value, self.plan.devices[0]))
                if is_cast:
                    value, is_sole = self._cast(index, value), True
        self._check_dtype(index, value.dtype)
        return self._own(index, value, is_sole)

    def _cast(self, index: Index, value: jax.Array) -> jax.Array:
        if not (is_extended(value.dtype) or holds(np.dtype(self.dtype), value.dtype, rounded=True)):
            check_holds(np.asarray(value), np.dtype(self.dtype), _origin(index))
        return value.astype(self.dtype)

    def _own(self, index: Index, value: jax.Array, is_sole: bool) -> Block:
        """Return a block that stays valid when arrays that share its memory are deleted."""
        is_whole = value.shape == self.shape
        if is_whole and (self.copy is False or (is_sole and not self.copy)):
            return value
        is_key = is_extended(value.dtype)
        if is_on_cpu(value) and not is_key:
            return self.from_numpy(index, np.asarray(value), sole=False)
        if not is_whole:
            return padded(value, self.shape, 0 if is_key else fill_of(self._fill, value.dtype))
        return jax.device_put(value, value.sharding, may_alias=False)

    def keys_error(self, index: Index, dtype: Any) -> TypeError:
        return TypeError(
            f"dtype={self.wanted_dtype} was asked for, but the block at index "
            f"{format_index(index)} has dtype {dtype}; keys are made of numbers by "
            "jax.random.wrap_key_data(block) and numbers of keys by jax.random.key_data(block)"
        )

    def from_numpy(self, index: Index, value: np.ndarray[Any, Any], sole: bool) -> Block:
        """Return the block of an array; with ``sole``, of one that nothing else will write to."""
        wanted = self.wanted_dtype or native(value.dtype)
        if self.wanted_dtype is None and wanted.hasobject and wanted.names is None:
            raise TypeError(
                f"the block at index {format_index(index)} is no array of numbers; return one, a "
                "number or a list of them, or convert it, such as with block.astype('float32') or "
                "dtype="
            )
        if self.wanted_dtype is not None and is_extended(wanted):
            raise self.keys_error(index, value.dtype)
        if is_raw(value.dtype) and value.dtype.itemsize == wanted.itemsize:
            value = value.view(wanted)
        final = jax_dtype(wanted, index)
        self.check_shape(index, value.shape)
        self._check_dtype(index, final)
        if value.dtype == final and value.shape == self.shape:
            needs_alignment = self._align and value.ctypes.data % ALIGNMENT
            if self.copy is False or (sole and self.copy is None and not needs_alignment):
                return value
            if self.borrows(value):
                return value.view(BorrowedBlock)
        out = self.empty(final)
        within = out
        if value.shape != self.shape:
            out[...] = fill_of(self._fill, final)
            within = out[tuple(map(slice, value.shape))]
        self.write(within, value, index)
        return out

    def borrows(self, value: np.ndarray[Any, Any]) -> bool:
        """Return True if a block is sent from memory that other code can change."""
        return self._borrows and value.nbytes >= LARGE_BYTES

    def write(self, out: np.ndarray[Any, Any], value: np.ndarray[Any, Any], index: Index) -> None:
        """Copy the part of a block at ``index`` into its memory; cast and check it as a block."""
        if value.dtype == out.dtype:
            np.copyto(out, value)
        else:
            wanted = self.wanted_dtype or native(value.dtype)
            cast_into(out, value, _origin(index, is_narrowed=out.dtype != wanted))

    def check_shape(self, index: Index, shape: Shape) -> None:
        expected = shape_at(index, self.shape) if self.grid.is_padded else self.shape
        if shape != expected:
            whole = shape == self.grid.global_shape
            hint = ". That is the whole array: return array[index]" if whole else ""
            raise ValueError(
                f"the block at index {format_index(index)} has shape {shape}; a shard of this "
                f"array has shape {expected}{hint}"
            )

    def _check_dtype(self, index: Index, dtype: Any) -> None:
        with self._lock:
            if self.dtype is None:
                self.dtype = dtype
        if dtype != self.dtype:
            raise TypeError(
                f"the block at index {format_index(index)} has dtype {dtype}, and its array has "
                f"{self.dtype}; return one dtype, or cast with dtype="
            )


def _origin(index: Index, is_narrowed: bool = False) -> Origin:
    return Origin.of_block(
        f"the block at index {format_index(index)}", start_of(index), is_narrowed
    )


def _array_on(device: Device, buffer: object, name: str, order: str) -> jax.Array:
    if is_tracer(buffer):
        raise traced_error(name)
    if not isinstance(buffer, jax.Array):
        raise TypeError(
            f"{name} is a {type(buffer).__name__}, not a jax.Array on {device}; put it there with "
            "jax.device_put, or use from_callback for host data"
        )
    if buffer.is_deleted():
        raise deleted_error(buffer, f"{name}, a jax.Array")
    if buffer.devices() != {device}:
        on = ", ".join(sorted(map(str, buffer.devices())))
        raise ValueError(
            f"{name} is on {on}; expected is {device}. Put one array on each device, in the "
            f"order of {order}"
        )
    return buffer


def is_on_cpu(array: jax.Array) -> bool:
    """Return True if the memory of an array may be that of a NumPy array."""
    return next(iter(array.devices())).platform == "cpu"


def _owns_memory(value: np.ndarray[Any, Any]) -> bool:
    # C code makes arrays over its own memory that refer to nothing and own nothing.
    base = value.base
    return value.flags.owndata if base is None else type(base) is OwnedMemory


def _called(callback: Callable[[Index], object], index: Index) -> tuple[Any, int]:
    """Return the result of a callback, and the number of references to it."""
    value = callback(index)
    references = sys.getrefcount(value) + getweakrefcount(value)
    return value, references


# The number for a value without other references, 1 or 2 by the version of Python. A debugger may
# hold one more, which `min` leaves out.
_ONE_REFERENCE = min(_called(lambda _: np.empty(0), ())[1], 2)

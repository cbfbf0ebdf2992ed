"""The copies of pieces between blocks and flat buffers: by NumPy on CPU, by XLA elsewhere.

NumPy reaches the memory of CPU devices without a copy, and compiles nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import numpy as np

from gda.arrays.buffers import ALIGNMENT, aligned_empty, keep_freed_memory
from gda.arrays.dtypes import plain_dtype
from gda.layout.dtype_names import width_of
from gda.layout.indices import index_at
from gda.layout.spec import Shape
from gda.mesh import Device


class HostStaging:
    """The memory of CPU devices: blocks of one dtype, flat buffers, and copies between them."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        keep_freed_memory()
        self._dtype, self._plain = dtype, plain_dtype(dtype)
        self._free: defaultdict[tuple[int, Device], list[Any]] = defaultdict(list)
        self._sent: dict[int, tuple[Any, jax.Array]] = {}

    def block(self, shape: Shape, device: Device, *, zero: bool) -> Any:
        block = aligned_empty(shape, self._plain)
        if zero:
            block[...] = 0
        return block

    def flat(self, size: int, device: Device) -> Any:
        """Return a flat buffer, of numbers that XLA sends as they are."""
        if free := self._free[size, device]:
            return free.pop()
        flat = aligned_empty(size, self._plain)
        # To place one takes JAX 0.1 to 0.5 ms, and a round has one for each lane and device. So an
        # array is kept, and its memory is filled again when nothing reads it any more.
        array = jax.device_put(flat, device)
        if np.asarray(array).ctypes.data == flat.ctypes.data:
            self._sent[id(flat)] = flat, array
        return flat

    def take_back(self, flat: Any, device: Device) -> None:
        """Let ``flat`` reuse a buffer that has arrived where it was sent."""
        self._free[flat.size, device].append(flat)

    def flat_of(self, source: Any, start: Shape, sizes: Shape) -> Any:
        """Return a piece as a flat buffer without a copy; ``None`` if it is not contiguous."""
        piece = box(source, start, sizes)
        is_flat = piece.flags.c_contiguous and piece.ctypes.data % ALIGNMENT == 0
        return piece.reshape(-1) if is_flat else None

    def given(self, array: jax.Array) -> Any:
        """Return a block, or a flat buffer that has arrived, to copy from."""
        return np.asarray(array).view(self._plain)

    def copy(self, into: Any, at: Shape, source: Any, start: Shape, sizes: Shape) -> Any:
        """Return ``into`` with a piece of ``source`` in it; either may be a flat buffer."""
        box(into, at, sizes)[...] = box(source, start, sizes)
        return into

    def placed(self, block: Any, device: Device) -> jax.Array:
        return jax.device_put(block.view(self._dtype), device)

    def sent(self, flat: Any, device: Device) -> jax.Array:
        _, array = self._sent.get(id(flat), (None, None))
        return jax.device_put(flat, device) if array is None else array


class DeviceStaging:
    """The memory of any devices, also of two platforms, with the methods of ``HostStaging``.

    On CPU, where XLA changes narrow floats, blocks are unsigned integers of the same bits.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        bits, _ = width_of(dtype)
        self._plain = plain_dtype(dtype) if bits >= 8 else dtype

    def block(self, shape: Shape, device: Device, *, zero: bool) -> Any:
        dtype = self._plain if device.platform == "cpu" else self._dtype
        return jax.numpy.zeros(shape, dtype, device=device)

    def flat(self, size: int, device: Device) -> Any:
        return jax.numpy.zeros(size, self._plain, device=device)

    def take_back(self, flat: Any, device: Device) -> None:
        pass  # XLA's allocator reuses it

    def flat_of(self, source: Any, start: Shape, sizes: Shape) -> Any:
        return None

    def given(self, array: jax.Array) -> Any:
        return self._viewed(array, self._plain)

    def copy(self, into: Any, at: Shape, source: Any, start: Shape, sizes: Shape) -> Any:
        (here,), (there,) = into.devices(), source.devices()
        piece = _taken(source, start, _sizes_in(source, sizes))
        if here != there:
            piece = jax.device_put(piece, here)
        into = _filled(into, piece, at, _sizes_in(into, sizes))
        if here != there:
            # Else pieces of copies that wait for their turn take up the memory.
            into.block_until_ready()
        return into

    def placed(self, block: Any, device: Device) -> jax.Array:
        return self._viewed(block, self._dtype)

    def _viewed(self, array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        (device,) = array.devices()
        if array.dtype == dtype or device.platform != "cpu":
            return array
        return jax.device_put(np.asarray(array).view(dtype), device)

    def sent(self, flat: Any, device: Device) -> jax.Array:
        return flat


def _sizes_in(buffer: Any, sizes: Shape) -> Shape:
    return sizes if buffer.ndim == len(sizes) else (math.prod(sizes),)


def box(buffer: Any, start: Shape, sizes: Shape) -> Any:
    """Return a view of a piece in a block, or in a flat buffer, on the host."""
    part = index_at(start, _sizes_in(buffer, sizes))
    return buffer[(*part, ...)].reshape(sizes)  # with the dots, also of a scalar a view


@partial(jax.jit, static_argnums=2)
def _taken(source: jax.Array, start: Shape, sizes: Shape) -> jax.Array:
    return jax.lax.dynamic_slice(source, start, sizes)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _filled(into: jax.Array, piece: jax.Array, at: Shape, sizes: Shape) -> jax.Array:
    if piece.dtype != into.dtype:
        piece = jax.lax.bitcast_convert_type(piece, into.dtype)
    return jax.lax.dynamic_update_slice(into, piece.reshape(sizes), at)

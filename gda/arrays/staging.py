"""The copies of pieces between blocks and flat buffers: by NumPy on CPU, by XLA elsewhere.

NumPy reaches the memory of CPU devices without a copy, and compiles nothing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from gda.arrays.buffers import aligned_empty
from gda.layout.spec import Shape
from gda.mesh import Device, mesh_on


class Memory(Protocol):
    """The memory of devices, with blocks, flat buffers and copies of pieces between them."""

    def empty(self, shape: Shape, device: Device, *, zero: bool = False) -> Any:
        """Return a new buffer, of zeros or of anything."""
        ...

    def given(self, block: jax.Array) -> Any:
        """Return an array as a buffer to copy from."""
        ...

    def copy(self, into: Any, at: Shape, source: Any, start: Shape, sizes: Shape) -> Any:
        """Return ``into`` with a piece copied into it; either may be a flat buffer.

        Args:
          at, start: the first element in ``into`` and in ``source``.
          sizes: of the piece.
        """
        ...

    def placed(self, buffer: Any, device: Device) -> jax.Array:
        """Return a buffer as an array on its device; nothing may be copied into it any more."""
        ...


class HostMemory:
    """The memory of CPU devices."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        # NumPy copies the dtypes of JAX, such as bfloat16, five times as fast as plain numbers.
        self._raw = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype

    def empty(self, shape: Shape, device: Device, *, zero: bool = False) -> Any:
        buffer = aligned_empty(shape, self._raw)
        if zero:
            buffer[...] = 0
        return buffer

    def given(self, block: jax.Array) -> Any:
        return np.asarray(block).view(self._raw)

    def copy(self, into: Any, at: Shape, source: Any, start: Shape, sizes: Shape) -> Any:
        _box(into, at, sizes)[...] = _box(source, start, sizes)
        return into

    def placed(self, buffer: Any, device: Device) -> jax.Array:
        return jax.device_put(buffer.view(self._dtype), device)


class DeviceMemory:
    """The memory of any devices."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype

    def empty(self, shape: Shape, device: Device, *, zero: bool = False) -> Any:
        return jax.numpy.zeros(shape, self._dtype, device=device)

    def given(self, block: jax.Array) -> Any:
        return block

    def copy(self, into: Any, at: Shape, source: Any, start: Shape, sizes: Shape) -> Any:
        (here,), (there,) = into.devices(), source.devices()
        with jax.set_mesh(mesh_on(there)):  # that of the user has other devices
            piece = _taken(source, start, _sizes_in(source, sizes))
        if here != there:
            piece = jax.device_put(piece, here)
        with jax.set_mesh(mesh_on(here)):
            into = _filled(into, piece, at, _sizes_in(into, sizes))
        if here != there:
            # Else pieces of copies that wait for their turn take up the memory.
            into.block_until_ready()
        return into

    def placed(self, buffer: Any, device: Device) -> jax.Array:
        return buffer


def _sizes_in(buffer: Any, sizes: Shape) -> Shape:
    """Return the sizes of a piece in a block, or in a flat buffer."""
    return sizes if buffer.ndim == len(sizes) else (math.prod(sizes),)


def _box(buffer: Any, start: Shape, sizes: Shape) -> Any:
    ends = zip(start, _sizes_in(buffer, sizes), strict=True)
    return buffer[tuple([slice(first, first + size) for first, size in ends])].reshape(sizes)


@partial(jax.jit, static_argnums=2)
def _taken(source: jax.Array, start: Shape, sizes: Shape) -> jax.Array:
    return jax.lax.dynamic_slice(source, start, sizes)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _filled(into: jax.Array, piece: jax.Array, at: Shape, sizes: Shape) -> jax.Array:
    return jax.lax.dynamic_update_slice(into, piece.reshape(sizes), at)

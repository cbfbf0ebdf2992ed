"""Memory that JAX's CPU backend takes for a device buffer as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import as_dtype
from gda.layout.spec import Shape, integers

ALIGNMENT = 64  # bytes; JAX's CPU backend adopts memory that begins at a multiple of it

# Small buffers share a slab, because an allocation costs more than filling it. Medium ones do too:
# NumPy asks for huge pages from 4 MiB on, and a file is read into memory of whole huge pages in a
# quarter to a half of the time.
_SMALL_BELOW, _SMALL_SLAB_BYTES = 64 * 1024, 2**20
_MEDIUM_BELOW, _MEDIUM_SLAB_BYTES = 4 * 2**20, 32 * 2**20
HUGE_PAGE_BYTES = 2 * 2**20


@set_module("gda")
@public
def aligned_empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
    """Return an uninitialised, C-contiguous array whose memory starts at a multiple of 64 bytes.

    JAX's CPU backend places such an array on a device without copying it.

    Shape and dtype are as for ``numpy.empty``, or a dtype of JAX such as ``jax.numpy.bfloat16``.

    >>> import gda, jax.numpy as jnp
    >>> block = gda.aligned_empty((3, 5), jnp.bfloat16)
    >>> block.shape, block.dtype, block.ctypes.data % 64
    ((3, 5), dtype(bfloat16), 0)
    """
    sizes = integers(shape if np.ndim(shape) else (shape,))  # pyright: ignore
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape {sizes} has a negative size")
    if (known := as_dtype(dtype)).hasobject:
        raise TypeError("Python objects cannot be placed on a device; give a dtype of numbers")
    return Buffers(count=1).empty(sizes, known)


class OwnedMemory(np.ndarray[Any, Any]):
    """Memory that gda allocated; only aligned buffers refer to it.

    A class of its own makes NumPy let a view of a buffer refer to the buffer and not to the memory
    behind it, so that the buffer's reference count tells whether other code can write to it.
    """


class Buffers:
    """Aligned buffers, in slabs that live as long as any of their buffers.

    Without ``are_kept``, medium ones have memory of their own, which is freed with each.
    """

    def __init__(self, count: int, are_kept: bool = True) -> None:
        self._alone_from = _MEDIUM_BELOW if are_kept else _SMALL_BELOW
        self._wanted = count
        self._slab = OwnedMemory(0, np.uint8)
        self._offset = 0

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        nbytes = math.prod(shape) * dtype.itemsize
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes >= self._alone_from:
            return np.ndarray(shape, dtype, *_memory(taken))
        if self._offset + taken > self._slab.size:
            most = _SMALL_SLAB_BYTES if nbytes < _SMALL_BELOW else _MEDIUM_SLAB_BYTES
            self._slab, self._offset = _memory(min(max(self._wanted, 1) * taken, most))
        self._wanted -= 1
        offset = self._offset
        self._offset += taken
        return np.ndarray(shape, dtype, self._slab, offset)


@cache
def keep_freed_memory() -> None:
    """Let the process reuse freed memory of up to 31 MiB a block.

    Otherwise each call of an XLA program gets new pages for its results, which the kernel fills
    with zeros. glibc learns from the largest block that was freed, so freeing an unused one does.
    """
    np.empty(31 * 2**20, np.uint8)  # it learns nothing from more than 32 MiB


def _memory(nbytes: int) -> tuple[OwnedMemory, int]:
    """Return memory, and the offset in it at which ``nbytes`` aligned bytes begin."""
    alignment = ALIGNMENT if nbytes < _MEDIUM_BELOW else HUGE_PAGE_BYTES
    memory = OwnedMemory(nbytes + alignment, np.uint8)
    return memory, -memory.ctypes.data % alignment

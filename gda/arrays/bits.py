"""Moves of the elements of a block that keep the bits of NaNs.

XLA on CPU has few instructions for floats of 16 bits or fewer. It converts them to wider ones and
back where it slices, pads or joins them, in some versions and for some dtypes, and a conversion
makes one NaN of all. So these move as unsigned integers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from gda.arrays.buffers import aligned_empty
from gda.arrays.dtypes import is_extended, is_narrow, is_weak
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.mesh import own_settings

_UNSIGNED = {2: "uint2", 4: "uint4", 8: "uint8", 16: "uint16", 32: "uint32"}


def as_unsigned(block: jax.Array) -> jax.Array:
    """Return the bits as unsigned integers, if JAX has some that are as wide."""
    bits, _ = width_of(block.dtype)
    if block.dtype == jax.numpy.bool_ or bits not in _UNSIGNED:
        return block
    return lax.bitcast_convert_type(block, jax.numpy.dtype(_UNSIGNED[bits]))


def without_padding(block: jax.Array, shape: Shape) -> jax.Array:
    """Return the elements of a block, which come first in each dimension.

    They are waited for if the device is a CPU.
    """
    if block.shape == shape:
        return block
    (device,), within = block.devices(), tuple(map(slice, shape))
    is_key = is_extended(block.dtype)
    # Of 4 bits JAX would keep NumPy's copy, of 8 bits an element, with the block.
    has_view = device.platform == "cpu" and not is_key and width_of(block.dtype)[0] >= 8
    with own_settings():
        if has_view and not is_weak(block):
            # XLA would compile a program for each device and shape, which takes longer.
            data = aligned_empty(shape, block.dtype)
            data[...] = np.asarray(block)[within]
            # Else JAX narrows 64 bits, or makes this a part of a program that is being traced.
            with jax.enable_x64(True), jax.ensure_compile_time_eval():
                return jax.device_put(data, block.sharding)
        if not is_narrow(block.dtype):
            return block[within]
        return _first(block, shape)


def padded(block: jax.Array, shape: Shape, fill: Any) -> jax.Array:
    """Return a block of a larger shape, whose first elements are those of the given one."""
    start = [0] * block.ndim
    with own_settings():
        whole = lax.full(shape, fill, block.dtype)
        if not is_narrow(block.dtype):
            return lax.dynamic_update_slice(whole, block, start)
        bits = lax.dynamic_update_slice(as_unsigned(whole), as_unsigned(block), start)
        return lax.bitcast_convert_type(bits, block.dtype)


# One program: each step by itself would copy the block.
@partial(jax.jit, static_argnums=1)
def _first(block: jax.Array, shape: Shape) -> jax.Array:
    bits = lax.slice(as_unsigned(block), (0,) * block.ndim, shape)
    return lax.bitcast_convert_type(bits, block.dtype)

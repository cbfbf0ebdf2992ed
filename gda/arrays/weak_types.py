"""Weak types, which operations of arrays keep and JAX's constructors of sharded arrays lose.

A weak type gives way to the other operand, as a Python number does. A tree that comes back without
its weak types makes a jitted step another program, whose results have other dtypes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from gda.mesh import own_settings


def is_weak(leaf: Any) -> bool:
    """Return True for an array of a weak type, or a ``ShapeDtypeStruct`` of one."""
    return bool(getattr(leaf, "weak_type", False))


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return a copy of an array with a weak type; it is committed if the array is.

    Never communicates: the program of an array of several processes has no collectives.
    """
    with own_settings():
        (device, *_) = array.sharding.device_set
        sharding = array.sharding if array.committed else None
        return _program(array.shape, array.dtype, sharding, device)(array)


@lru_cache(maxsize=256)
def _program(shape: tuple[int, ...], dtype: Any, sharding: Any, device: Any) -> Any:
    # No public function gives an array a weak type. But a program that was compiled for an argument
    # of a weak type takes any array of that shape and dtype.
    weak = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    with jax.default_device(None if sharding is not None else device):
        return jax.jit(lambda array: array, out_shardings=sharding).lower(weak).compile()

"""The types of elements: dtypes that JAX has, and weak types.

Data of other dtypes is narrowed or refused. A weak type gives way to the other operand, as a Python
number does. JAX's constructors of sharded arrays lose it. A tree that comes back without its weak
types makes a jitted step another program, whose results have other dtypes.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from gda.layout.boundary import frame_of_caller
from gda.layout.dtype_names import as_dtype, is_raw, native
from gda.layout.spec import Index
from gda.layout.text import format_index
from gda.mesh import own_settings

# The usual dtypes are the same in JAX with and without x64; asking JAX takes a microsecond.
KEPT_DTYPES = frozenset(map(np.dtype, ["?", "i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4", "c8"]))
_COMPLEX_OF = {np.dtype("f4"): np.dtype("c8"), np.dtype("f8"): np.dtype("c16")}


def is_float(dtype: Any) -> bool:
    """Return True for a dtype of floating point, those that JAX adds to NumPy's included."""
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def is_narrow(dtype: Any) -> bool:
    """Return True for a float of 16 bits or fewer."""
    return is_float(dtype) and dtype.itemsize < 4


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return an unsigned integer for a narrow float or a dtype that NumPy lacks, else the dtype."""
    is_plain = dtype.kind != "V" and not is_narrow(dtype)
    return dtype if is_plain else np.dtype(f"u{dtype.itemsize}")


def dtype_of_floats(name: Any) -> np.dtype[Any]:
    """Return the dtype that a user wants arrays of floats to be cast to; ``TypeError`` if none."""
    dtype = as_dtype(name)
    if not is_float(dtype):
        raise TypeError(
            f"dtype={name} is not of floats; arrays of floats are cast, such as to bf16, and all "
            "others stay as they are"
        )
    return dtype


def dtype_in_tree(dtype: np.dtype[Any], of_floats: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an array in a tree whose floats, and complex numbers, are cast."""
    if dtype.kind == "c":
        return _COMPLEX_OF.get(of_floats, dtype)
    return of_floats if is_float(dtype) else dtype


def narrowed_dtype(dtype: np.dtype[Any], given: str) -> np.dtype[Any]:
    """Return the dtype that JAX has for data of ``dtype``; ``given`` begins the error."""
    dtype = native(dtype)
    if dtype in KEPT_DTYPES or is_extended(dtype):
        return dtype
    known = dtype.kind != "m" and (  # NumPy counts spans of time as integers
        jax.numpy.issubdtype(dtype, jax.numpy.number) or dtype == np.bool_
    )
    if not known or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        example = ", such as with .astype('int64')" if dtype.kind in "mM" else ""
        hint = f"convert it to numbers first{example}"
        if is_raw(dtype):
            hint = "name the dtype of its elements with dtype=, such as dtype=jax.numpy.bfloat16"
        raise TypeError(f"{given}{dtype}, which JAX does not have; {hint}")
    return jax.dtypes.canonicalize_dtype(dtype)


def jax_dtype(dtype: Any, index: Index | None = None) -> Any:
    """Return ``narrowed_dtype`` of a block; without ``index``, that of a user's dtype, and warn."""
    if dtype in KEPT_DTYPES or is_extended(dtype):
        return dtype
    if index is not None:
        return narrowed_dtype(dtype, f"the block at index {format_index(index)} has dtype ")
    final = narrowed_dtype(dtype, "the argument is dtype=")
    if final != dtype:
        warnings.warn(
            f"dtype={dtype} is not available without jax_enable_x64; the array will be {final}",
            stacklevel=frame_of_caller()[1],
        )
    return final


def fill_of(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    given = np.asarray(value)
    if given.shape or given.dtype.hasobject or given.dtype.kind in "USmMV":
        raise TypeError(f"fill must be a number, not {value!r}")
    with np.errstate(invalid="ignore", over="ignore"):
        fill = given.astype(dtype)
    if dtype.kind in "iub" and fill != given:
        raise ValueError(f"fill={value!r} is not a value of {dtype}; give one that is")
    return fill


def requested_dtype(dtype: Any) -> Any:
    # The dtype of PRNG keys is not a NumPy dtype and must be left as it is.
    is_key = not isinstance(dtype, str) and is_extended(dtype)
    return dtype if is_key else native(as_dtype(dtype, "the argument dtype="))


def is_extended(dtype: Any) -> bool:
    """Return True if JAX alone has a dtype, as that of PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


# Weak types.


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

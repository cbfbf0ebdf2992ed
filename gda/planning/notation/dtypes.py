"""The parser for dtypes on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gda.layout.dtype_names import dtype_named, similar_dtypes
from gda.planning.notation.mistakes import MisreadError

if TYPE_CHECKING:
    import numpy as np

# The digit counts bits in JAX and bytes in NumPy.
_BITS_OR_BYTES = {
    "i8": ("int8", "int64"),
    "u8": ("uint8", "uint64"),
    "i4": ("int4", "int32"),
    "u4": ("uint4", "uint32"),
    "i2": ("int2", "int16"),
    "u2": ("uint2", "uint16"),
}


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the JAX dtype of a name, in full or short: ``bfloat16``, ``bf16``, ``f32``.

    A dtype below a byte, such as ``int4``, takes a byte per element, as in NumPy. Names of
    safetensors files, such as ``F8_E4M3``, must be in capitals.

    Raises:
      MisreadError: no dtype has this name; the message has similar names.

    >>> parse_dtype('f32'), parse_dtype('bfloat16').itemsize, parse_dtype('I8')
    (dtype('float32'), 2, dtype('int8'))
    """
    start = len(text) - len(text.lstrip())
    name = text.strip().rpartition(".")[2]  # of jnp.bfloat16
    if name.lower() in _BITS_OR_BYTES and name not in ("I8", "U8"):
        in_jax, in_numpy = _BITS_OR_BYTES[name.lower()]
        raise MisreadError(
            f"{name.lower()} means {in_jax} in JAX and {in_numpy} in NumPy; write one of these",
            text,
            start,
        )
    if (dtype := dtype_named(name)) is not None:
        return dtype
    similar = similar_dtypes(name)
    hint = (
        f"; did you mean {' or '.join(similar)}?"
        if similar
        else ", such as float32, bfloat16 or int8"
    )
    raise MisreadError(f"the name of a dtype was expected{hint}", text, start)

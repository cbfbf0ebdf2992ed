"""Types of elements as people write them on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gda.cli.mistakes import MisreadError
from gda.layout.dtype_names import dtype_named, similar_dtypes

if TYPE_CHECKING:
    import numpy as np

# They count bits to JAX and bytes to NumPy.
_BITS_OR_BYTES = {
    "i8": ("int8", "int64"),
    "u8": ("uint8", "uint64"),
    "i4": ("int4", "int32"),
    "u4": ("uint4", "uint32"),
    "i2": ("int2", "int16"),
    "u2": ("uint2", "uint16"),
}


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return a dtype that JAX has, by its name or a short one: ``bfloat16``, ``bf16``, ``f32``.

    Those of less than a byte, such as ``int4``, take a byte an element, as NumPy stores them. The
    names in safetensors files, such as ``F8_E4M3``, are read where they are in capitals.

    Raises:
      MisreadError: there is none of this name; the message has similar ones.

    >>> parse_dtype('f32'), parse_dtype('bfloat16').itemsize, parse_dtype('I8')
    (dtype('float32'), 2, dtype('int8'))
    """
    start = len(text) - len(text.lstrip())
    name = text.strip().rpartition(".")[2]  # of jnp.bfloat16
    if name.lower() in _BITS_OR_BYTES and name not in ("I8", "U8"):
        in_jax, in_numpy = _BITS_OR_BYTES[name.lower()]
        raise MisreadError(
            f"{name.lower()} is {in_jax} to JAX and {in_numpy} to NumPy; write the one you mean",
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

"""The parsers for numbers on a command line: shapes, elements, single numbers and dtypes.

A text that cannot be read raises ``MisreadError``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gda.layout.dtype_names import dtype_named, similar_dtypes
from gda.layout.text import did_you_mean
from gda.planning.notation.mistakes import MisreadError

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.spec import Shape

# The digit counts bits in JAX and bytes in NumPy.
_BITS_OR_BYTES = {
    "i8": ("int8", "int64"),
    "u8": ("uint8", "uint64"),
    "i4": ("int4", "int32"),
    "u4": ("uint4", "uint32"),
    "i2": ("int2", "int16"),
    "u2": ("uint2", "uint16"),
}


def parse_shape(text: str) -> Shape:
    """Return a shape: ``65536x8192``, ``65536,8192`` or ``(65536, 8192)``; ``()`` or ``scalar``."""
    if text.strip() == "scalar":
        return ()
    start, inside = _inside_brackets(text)
    if not inside.strip():
        if start == len(text) - len(text.lstrip()):
            raise MisreadError(
                "a shape such as 65536x8192, or () for a scalar was expected", text, start
            )
        return ()
    separators = re.findall("[x,]", inside)
    separator = separators[0] if separators else ","
    if len({*separators}) > 1:
        raise MisreadError(
            "write x or a comma between sizes, not both; inside a size only _ is allowed, such "
            "as 16_384",
            text,
            start + inside.index("," if separator == "x" else "x"),
        )
    parts = inside.split(separator)
    if separator == "," and separators and not parts[-1].strip():
        parts.pop()  # as in (8,)
    numbers = []
    for part in parts:
        numbers.append(number_in(text, part, start, "size"))
        start += len(part) + 1
    return tuple(numbers)


def parse_number(text: str) -> int:
    """Return an integer from 0 to 2**63 - 1: ``128`` or ``65_536``."""
    return number_in(text, text, 0, "number")


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the JAX dtype of a name, in full or short: ``bfloat16``, ``bf16``, ``f32``.

    Names of safetensors files, such as ``F8_E4M3``, must be in capitals.
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
    hint = did_you_mean(similar_dtypes(name)) or ", such as float32, bfloat16 or int8"
    raise MisreadError(f"the name of a dtype was expected{hint}", text, start)


def number_in(text: str, part: str, at: int, one: str, least: int = 0) -> int:
    """Return the integer in a part of a text.

    Args:
      text: all of it, for messages.
      part: the number.
      at: its position in the text.
      one: the word for it in messages.
      least: its smallest valid value.
    """
    at += len(part) - len(part.lstrip())
    part = part.strip()
    if re.fullmatch(r"[0-9]+(_[0-9]+)*", part):
        digits = part.replace("_", "")
        if digits.startswith("0") and digits != "0":
            raise MisreadError(f"a {one} must not begin with 0", text, at)
        if len(digits) > 19 or int(digits) >= 2**63:
            raise MisreadError(f"this {one} is too large; it must be below 2**63", text, at)
        if int(digits) < least:
            raise MisreadError(f"this {one} must be {least} or more", text, at)
        return int(digits)
    if re.fullmatch(r"-[0-9_]+", part):
        raise MisreadError(f"this {one} must be {least} or more", text, at)
    if re.fullmatch(r"[0-9_.]+ ?[kKmMgG]i?[bB]?", part):
        raise MisreadError(
            f"write the {one} in full, such as 65536 or 65_536: k could mean 1000 or 1024", text, at
        )
    raise MisreadError(f"a {one} was expected, an integer such as 8192 or 8_192", text, at)


def _inside_brackets(text: str) -> tuple[int, str]:
    """Return the position and the text inside the brackets around a text, if it has any."""
    stripped = text.strip()
    start = len(text) - len(text.lstrip())
    closing = {"(": ")", "[": "]"}.get(stripped[:1])
    if closing is None:
        return start, stripped
    if not stripped.endswith(closing):
        raise MisreadError(f"this bracket is not closed; {closing} was expected", text, start)
    return start + 1, stripped[1:-1]

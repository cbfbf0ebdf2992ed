"""The parsers for numbers on a command line: shapes, single numbers and dtypes.

A text that cannot be read raises ``MisreadError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gda.cli.notation.mistakes import MisreadError
from gda.layout.dtype_names import dtype_named, near_dtype

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.spec import Shape


def parse_shape(text: str) -> Shape:
    """Return a shape: ``65536x8192``, or ``()`` of a scalar."""
    if text.strip() == "()":
        return ()
    sizes, start = [], 0
    for part in text.split("x"):
        sizes.append(number_in(text, part, start, "size"))
        start += len(part) + 1
    return tuple(sizes)


def parse_number(text: str) -> int:
    """Return an integer of 1 or more: ``128`` or ``65_536``."""
    return number_in(text, text, 0, "number", least=1)


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the JAX dtype of a name, in full or short: ``bfloat16``, ``bf16``, ``f32``.

    Names of safetensors files, such as ``F8_E4M3``, must be in capitals.
    """
    name = text.strip()
    if (dtype := dtype_named(name)) is not None:
        return dtype
    expected = "the name of a dtype was expected, such as float32, bfloat16 or int8"
    raise MisreadError(expected + near_dtype(name), text, len(text) - len(text.lstrip()))


def number_in(text: str, part: str, at: int, one: str, least: int = 0) -> int:
    """Return the integer in the part of a text that begins at ``at``; ``one`` is a word for it."""
    digits = part.strip().replace("_", "")
    if digits.isascii() and digits.isdecimal() and len(digits) < 20 and int(digits) >= least:
        return int(digits)
    at += len(part) - len(part.lstrip())
    reason = f"a {one} was expected, an integer of {least} or more such as 8192"
    raise MisreadError(reason, text, at)

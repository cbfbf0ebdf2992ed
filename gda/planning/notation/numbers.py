"""The parsers for numbers on a command line: shapes, elements, single numbers and dtypes.

A text that cannot be read raises ``MisreadError``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gda.layout.dtype_names import dtype_named
from gda.planning.notation.mistakes import MisreadError

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.spec import Shape


def parse_shape(text: str) -> Shape:
    """Return a shape: ``65536x8192``, ``65536,8192`` or ``(65536, 8192)``; ``()`` or ``scalar``."""
    start, inside = inside_brackets(text, "([")
    if text.strip() == "scalar" or (not inside.strip() and text.strip()):
        return ()
    separator = "," if "," in inside else "x"
    parts = inside.split(separator)
    if separator == "," and not parts[-1].strip():
        parts.pop()  # as in (8,)
    sizes = []
    for part in parts:
        sizes.append(number_in(text, part, start, "size"))
        start += len(part) + 1
    return tuple(sizes)


def parse_number(text: str) -> int:
    """Return an integer from 0 to 2**63 - 1: ``128`` or ``65_536``."""
    return number_in(text, text, 0, "number")


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the JAX dtype of a name, in full or short: ``bfloat16``, ``bf16``, ``f32``.

    Names of safetensors files, such as ``F8_E4M3``, must be in capitals.
    """
    start = len(text) - len(text.lstrip())
    name = text.strip().rpartition(".")[2]  # of jnp.bfloat16
    if name not in ("I8", "U8") and (short := re.fullmatch(r"([iu])([248])", name.lower())):
        kind, digit = "uint" if short[1] == "u" else "int", int(short[2])
        # The digit counts bits in JAX and bytes in NumPy.
        both = f"{kind}{digit} in JAX and {kind}{8 * digit} in NumPy"
        raise MisreadError(f"{short[0]} means {both}; write one of these", text, start)
    if (dtype := dtype_named(name)) is not None:
        return dtype
    expected = "the name of a dtype was expected, such as float32, bfloat16 or int8"
    raise MisreadError(expected, text, start)


def number_in(text: str, part: str, at: int, one: str, least: int = 0) -> int:
    """Return the integer in the part of a text that begins at ``at``; ``one`` is a word for it."""
    at += len(part) - len(part.lstrip())
    part = part.strip()
    reason = f"a {one} was expected, an integer such as 8192 or 8_192"
    if re.fullmatch(r"[0-9]+(_[0-9]+)*", part):
        digits = part.replace("_", "")
        if digits.startswith("0") and digits != "0":
            reason = f"a {one} must not begin with 0"
        elif len(digits) > 19 or int(digits) >= 2**63:
            reason = f"this {one} is too large; it must be below 2**63"
        elif int(digits) < least:
            reason = f"this {one} must be {least} or more"
        else:
            return int(digits)
    elif re.fullmatch(r"-[0-9_]+", part):
        reason = f"this {one} must be {least} or more"
    elif re.fullmatch(r"[0-9_.]+ ?[kKmMgG]i?[bB]?", part):
        reason = f"write the {one} in full, such as 65_536: k could mean 1000 or 1024"
    raise MisreadError(reason, text, at)


def inside_brackets(text: str, opening: str) -> tuple[int, str]:
    """Return the position and the text inside the brackets around a text, if it has any."""
    stripped = text.strip()
    start = len(text) - len(text.lstrip())
    if not stripped or stripped[0] not in opening:
        return start, stripped
    closing = {"(": ")", "[": "]", "{": "}"}[stripped[0]]
    if not stripped.endswith(closing):
        raise MisreadError(f"this bracket is not closed; {closing} was expected", text, start)
    return start + 1, stripped[1:-1]

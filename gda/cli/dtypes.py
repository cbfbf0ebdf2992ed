"""Types of elements as people write them on a command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gda.cli.mistakes import MisreadError

if TYPE_CHECKING:
    import numpy as np

# JAX's short names and those of other tools. Not here: i8, u8, i4, u4, f8, c8, c16, which count
# bits to JAX and bytes to NumPy.
_SHORT = {
    "bf16": "bfloat16",
    "pred": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"{short}{bits}": f"int{bits}" for short in "is" for bits in (16, 32, 64)},
    "s8": "int8",
    **{f"u{bits}": f"uint{bits}" for bits in (16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (64, 128)},
}

# As safetensors files write them, where the short names differ or do not say it. They count bits;
# nobody but safetensors writes them with a capital.
_IN_SAFETENSORS = {
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_OF_NUMPY = {"bool", *_SHORT.values(), "uint8"} - {"bfloat16"}
_OF_ML_DTYPES = re.compile(r"(b?float|u?int)\d\w*")
_BITS_OR_BYTES = {
    "i8": ("int8", "int64"),
    "u8": ("uint8", "uint64"),
    "i4": ("int4", "int32"),
    "u4": ("uint4", "uint32"),
    "i2": ("int2", "int16"),
    "u2": ("uint2", "uint16"),
}

# Names of types in C and Python, which say no number of bits or one that few have in mind.
_MEANT = {
    "half": ["float16"],
    "single": ["float32"],
    "double": ["float64"],
    "float": ["float32", "float64"],
    "short": ["int16"],
    "int": ["int32", "int64"],
    "uint": ["uint32", "uint64"],
    "long": ["int64"],
    "complex": ["complex64", "complex128"],
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
    import numpy as np

    start = len(text) - len(text.lstrip())
    given = text.strip().rpartition(".")[2]  # of jnp.bfloat16
    name = _IN_SAFETENSORS.get(given, given).lower()
    if name in _BITS_OR_BYTES:
        in_jax, in_numpy = _BITS_OR_BYTES[name]
        raise MisreadError(
            f"{name} is {in_jax} to JAX and {in_numpy} to NumPy; write the one you mean",
            text,
            start,
        )
    name = _SHORT.get(name, name)
    if name in _OF_NUMPY:
        return np.dtype(name)
    import ml_dtypes  # not before, as it takes time

    names = [each for each in dir(ml_dtypes) if _OF_ML_DTYPES.fullmatch(each)]
    known = {each.replace("_", ""): each for each in names}
    if (found := known.get(name.replace("_", ""))) is None:
        raise MisreadError(_unknown(name, sorted({*_OF_NUMPY, *names})), text, start)
    return np.dtype(getattr(ml_dtypes, found))


def _unknown(name: str, known: Sequence[str]) -> str:
    in_capitals = {each.lower(): [each] for each in _IN_SAFETENSORS}
    words = {each: each for each in known} | _SHORT
    near = [words[word] for word in difflib.get_close_matches(name[:40], words, n=3)]
    meant = _MEANT.get(name) or in_capitals.get(name) or [*dict.fromkeys(near)]
    if not meant:
        return "the name of a dtype was expected, such as float32, bfloat16 or int8"
    return f"the name of a dtype was expected; did you mean {' or '.join(meant)}?"

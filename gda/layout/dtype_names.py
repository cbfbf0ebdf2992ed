"""Dtypes: the names that people write for them, in Python and on a command line, and their bits."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gda.layout.text import near_name

if TYPE_CHECKING:  # each is imported when it is needed, as that takes time
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

# The names in safetensors files, if they differ from the short names. They count bits;
# only safetensors writes them with a capital.
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


def as_dtype(given: Any, name: str = "dtype=") -> np.dtype[Any]:
    """Return the dtype of an argument: anything that NumPy takes, or a short name.

    If NumPy reads one in its own way, such as ``i8`` for int64, NumPy is right.
    """
    import numpy as np

    is_text = isinstance(given, str)
    known = (_SHORT.get(given) or _IN_SAFETENSORS.get(given)) if is_text else None
    # NumPy takes f16 for 16 bytes, which JAX does not have.
    if known is not None and (dtype := dtype_named(known)) is not None:
        return dtype
    try:
        return np.dtype(given)
    except TypeError:
        if is_text and (dtype := dtype_named(given)) is not None:
            return dtype
    shown = repr(given) if isinstance(given, str | int) else f"a {type(given).__name__}"
    raise TypeError(
        f"{name}{shown} is not a dtype; a dtype is such as 'float32', np.int32 or jnp.bfloat16"
        + (near_dtype(given) if is_text else "")
    )


def near_dtype(name: str) -> str:
    """Return a question about the dtype that a mistaken name is nearest to."""
    return near_name(name, [*_OF_NUMPY, *_names_of_ml_dtypes()])


def dtype_named(name: str) -> np.dtype[Any] | None:
    """Return the dtype of JAX that has this name, or a short one; None if there is none."""
    import numpy as np

    name = _IN_SAFETENSORS.get(name, name).lower()
    name = _SHORT.get(name, name)
    if name in _OF_NUMPY:
        return np.dtype(name)
    known = {each.replace("_", ""): each for each in _names_of_ml_dtypes()}
    if (found := known.get(name.replace("_", ""))) is None:
        return None
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, found))


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def is_raw(dtype: np.dtype[Any]) -> bool:
    """Return True for the bytes that ``numpy.load`` gives for types NumPy lacks, as bfloat16."""
    import numpy as np

    return dtype.type is np.void and dtype.names is None


def _names_of_ml_dtypes() -> list[str]:
    import ml_dtypes

    return [each for each in dir(ml_dtypes) if _OF_ML_DTYPES.fullmatch(each)]


@lru_cache(maxsize=64)
def width_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bits of a number of a dtype, and the 32-bit words that hold them."""
    if dtype.kind not in "biufc" and not _is_of_ml_dtypes(dtype):
        raise TypeError(
            f"a fingerprint is of numbers, not of {dtype}; view raw bytes as what they are with "
            "array.view(dtype), or take the fingerprint of the numbers that stand for the values"
        )
    bits = bits_of(dtype)
    return bits, -(-bits // 32)


def packed_nbytes(num_elements: Any, dtype: Any) -> Any:
    """Return the bytes of elements on a device, which packs types below a byte, such as int4.

    NumPy, and ``jax.Array.nbytes``, have a byte for each of those. An array of numbers gives one.
    """
    bits = bits_of(dtype)
    return num_elements * (bits // 8) if bits % 8 == 0 else -(-num_elements * bits // 8)


@lru_cache(maxsize=64)
def bits_of(dtype: Any) -> int:
    """Return the bits of an element, which are fewer than eight for int4 and the like."""
    if not _is_of_ml_dtypes(dtype):
        return dtype.itemsize * 8
    import ml_dtypes

    return (ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo)(dtype).bits


def _is_of_ml_dtypes(dtype: Any) -> bool:
    import ml_dtypes

    return getattr(ml_dtypes, dtype.name, None) is dtype.type


@lru_cache(maxsize=64)  # NumPy makes a name anew each time: a quarter of a load of a manifest
def recorded_dtype(text: Any) -> np.dtype[Any]:
    """Return the dtype that a record names; ``TypeError`` if a record cannot have it."""

    dtype = dtype_named(text) if isinstance(text, str) else None
    if dtype is None or dtype.name != text:
        raise TypeError
    return dtype


def is_storable(dtype: np.dtype[Any]) -> bool:
    try:
        return recorded_dtype(dtype.name) == dtype
    except TypeError:
        return False

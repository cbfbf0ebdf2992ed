"""Values of every dtype with every pattern of bits."""

import math
from typing import Any

import ml_dtypes
import numpy as np

NARROW_FLOATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16)
DTYPES = [
    np.dtype(each)
    for each in (
        *(np.bool_, ml_dtypes.int4, ml_dtypes.uint4, np.int8, np.uint16, np.int32),
        *(*NARROW_FLOATS, np.float32, np.complex64),
    )
]


def random_bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of random bits, among which are NaNs of all kinds if the dtype has them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    if dtype.kind == "b":
        return rng.integers(2, size=shape).astype(bool)
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        low = -8 if dtype == ml_dtypes.int4 else 0
        return rng.integers(low, low + 16, shape).astype(dtype)
    values = rng.integers(256, size=(math.prod(shape), dtype.itemsize), dtype=np.uint8)
    return values.view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Return an array of a normal distribution, as weights have it."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()

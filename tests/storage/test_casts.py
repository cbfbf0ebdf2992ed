"""Casts hold every value, rounded, or name the first that they cannot hold."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gda
from gda.layout.dtype_names import _OF_NUMPY, _names_of_ml_dtypes, dtype_named
from gda.storage.casts import Origin, cast, check_holds


def outcome(values: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any] | str:
    origin = Origin.of_block("the source", (0,) * values.ndim)
    try:
        result = cast(values, np.dtype(dtype), origin)
    except gda.DoesNotFitError as error:
        with pytest.raises(gda.DoesNotFitError):
            check_holds(values, np.dtype(dtype), origin)
        return str(error)
    check_holds(values, np.dtype(dtype), origin)
    return result


@pytest.mark.parametrize(
    ("value", "of", "dtype"),
    [
        (300, "int64", "int8"),
        (-1, "int8", "uint8"),
        (2**64 - 1, "uint64", "int64"),
        (70000, "int64", "float16"),
        (np.nan, "float32", "int32"),
        (np.inf, "float32", "int64"),
        (2.0**64, "float32", "uint64"),
        (300, ml_dtypes.bfloat16, "int8"),
        (1e39, "float64", "float32"),
        (3.4e38, "float32", ml_dtypes.bfloat16),
        (1e38, ml_dtypes.bfloat16, "float16"),
        (-np.inf, "float32", ml_dtypes.float8_e4m3fn),
        (1 + 1j, "complex64", "float32"),
        (1e39j, "complex128", "complex64"),
        (1e39, "float64", "complex64"),
        (-3, ml_dtypes.int4, ml_dtypes.uint4),
    ],
)
def test_a_value_that_does_not_fit_is_named(value: Any, of: Any, dtype: Any) -> None:
    values = np.zeros((2, 3), of)
    values[1, 2] = value
    said = outcome(values, dtype)
    assert isinstance(said, str)
    assert f"which is cast to {np.dtype(dtype)}, and the value {values[1, 2]} at (1, 2)" in said


@pytest.mark.parametrize(
    ("value", "of", "dtype"),
    [
        (2.9, "float32", "int8"),
        (2**24 + 1, "int64", "float32"),
        (2**64 - 1, "uint64", "float32"),
        (np.nan, "float64", ml_dtypes.float8_e4m3fn),
        (np.inf, "float64", "float16"),
        (3.389e38, "float32", ml_dtypes.bfloat16),
        (complex(np.nan, np.inf), "complex128", "complex64"),
        (2 + 0j, "complex64", "float16"),
        (-2.5, "float32", "bool"),
        (1j, "complex64", "bool"),
    ],
)
def test_a_value_that_fits_is_rounded(value: Any, of: Any, dtype: Any) -> None:
    values = np.full((2,), value, of)
    real = values.real if np.dtype(dtype).kind not in "bc" else values
    found, wanted = outcome(values, dtype), real.astype(dtype)
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == wanted.tobytes()


def test_each_dtype_is_cast_to_each_other_one() -> None:
    names = sorted(_OF_NUMPY) + _names_of_ml_dtypes()
    dtypes = [dtype for name in names if (dtype := dtype_named(name)) is not None]
    kinds = {d: d.kind if d.kind in "bc" else "i" if "int" in d.name else "f" for d in dtypes}
    for of, kind in kinds.items():
        numbers: list[Any] = [0, 1, 2 + 1j, 3] if kind == "c" else [0, 1]
        if kind in "if":
            info = ml_dtypes.iinfo(of) if kind == "i" else ml_dtypes.finfo(of)
            others = [n for n in (-1, 300, 2**24 + 1) if float(info.min) <= n <= float(info.max)]
            numbers += [info.min, info.max, *others]
        for number, dtype in itertools.product(numbers, dtypes):
            values = np.full(1, number, of)
            value = values.astype(np.float32)[0] if of.isbuiltin == 2 else values[0]
            if np.isnan(value):  # float8_e8m0fnu has no 0
                continue
            found = outcome(values, dtype)
            if kinds[dtype] == "b":
                assert found == (value != 0), (of, value)
            elif kinds[dtype] == "c":
                assert isinstance(found, str) or np.isfinite(found[0])
            elif kinds[dtype] == "i":
                info = ml_dtypes.iinfo(dtype)
                fits = value.imag == 0 and info.min <= int(value.real) <= info.max
                is_held = not isinstance(found, str) and int(found[0]) == int(value.real)
                assert is_held == fits, (of, value, dtype)
            elif not isinstance(found, str):
                assert np.isfinite(found.astype(np.float64))[0], (of, value, dtype)

"""Casts of values to another dtype: a value that the dtype cannot hold is an error.

A cast may round: a float to fewer digits, or towards zero to an integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.layout.boundary import set_module
from gda.layout.spec import Shape

_Array = np.ndarray[Any, Any]


@set_module("gda")
class DoesNotFitError(ValueError, OverflowError):
    """A value does not fit the dtype that it is cast to, or that the array has in JAX.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ('x',))
    >>> try:
    ...     gda.GlobalArray.from_source(np.array([2**40]), mesh, ())
    ... except gda.DoesNotFitError as error:
    ...     'narrows to int32' in str(error)
    True
    """


class Origin(NamedTuple):
    """The origin of values that are cast, for the error about one of them.

    Attributes:
      what: the values, such as ``"the source"``.
      element_at: returns the element of the whole array that is at a place in the values.
      is_narrowed: True if JAX has no wider dtype without x64; else the user asked for the cast.
    """

    what: str
    element_at: Callable[[Shape], Shape]
    is_narrowed: bool = False

    @classmethod
    def of_block(cls, what: str, start: Shape, is_narrowed: bool = False) -> Origin:
        """Return the origin of values whose first is the element ``start`` of the array."""
        return cls(what, lambda place: tuple(map(operator.add, start, place)), is_narrowed)


def cast(values: _Array, dtype: np.dtype[Any], origin: Origin) -> _Array:
    """Return values in a dtype; raise ``DoesNotFitError`` if it cannot hold one of them."""
    if values.dtype == dtype:
        return values
    result = np.empty(values.shape, dtype)
    cast_into(result, values, origin)
    return result


def check_holds(values: _Array, dtype: np.dtype[Any], origin: Origin) -> None:
    """Raise as ``cast``, without its result: in most cases without making it."""
    if not _are_in_range(values, dtype):
        cast(values, dtype, origin)


def cast_into(out: _Array, values: _Array, origin: Origin) -> None:
    """Copy values into memory of another dtype; errors as ``cast``."""
    given = _as_numpy_casts(values, out.dtype)
    if given.dtype.kind == "c" and out.dtype.kind not in "bc":
        given = given.real  # NumPy would warn
    with np.errstate(all="ignore"):
        np.copyto(out, given, casting="unsafe")
    if (place := _unfit(values, out)) is None:
        return
    cast = f"is cast to {out.dtype}"
    advice = "Choose a dtype that has this value, or change the values before"
    if origin.is_narrowed:
        cast = f"JAX narrows to {out.dtype} without jax_enable_x64"
        advice = "Set jax_enable_x64, or change the values before"
    raise DoesNotFitError(
        f"{origin.what} has dtype {values.dtype}, which {cast}, and the value {values[place]} at "
        f"{origin.element_at(place)} of the array does not fit. {advice}"
    )


def _unfit(values: _Array, result: _Array) -> Shape | None:
    """Return the place of the first value that the dtype cannot hold; ``None`` if there is none.

    An integer must stay the same, a finite float finite, and a complex number that becomes a real
    one has no imaginary part. A float becomes an integer by rounding towards zero.
    """
    if _are_in_range(values, result.dtype):
        return None
    of_result = _kind_of(result.dtype)
    values = _as_numpy_casts(values, result.dtype)
    wrong = np.zeros(values.shape, bool)
    if values.dtype.kind == "c" and of_result != "c":
        wrong, values = values.imag != 0, values.real
    pairs = [(values, result)]
    if of_result == "c":
        pairs = [(values.real, result.real), (values.imag, result.imag)]
    for before, after in pairs:
        if of_result in "iu":
            wrong |= _outside(before, result.dtype)
        else:
            wrong |= np.isfinite(before) & ~np.isfinite(after)
            wrong |= np.isnan(after) & ~np.isnan(before)  # an infinity, where there is none
    return tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None


def _are_in_range(values: _Array, dtype: np.dtype[Any]) -> bool:
    """Return True if the dtype surely holds all values: a quick check, which NaN fails."""
    kind, of_result = _kind_of(values.dtype), _kind_of(dtype)
    if kind is None or of_result is None or not values.size:
        return True
    if holds(dtype, values.dtype, rounded=True):
        return True
    low, high = _range_of(dtype)
    return kind != "c" and low <= values.min().item() and values.max().item() <= high


def _as_numpy_casts(values: _Array, dtype: np.dtype[Any]) -> _Array:
    """Return values in a type that holds all of them and that NumPy can cast to a dtype.

    It has no casts between some of the types that JAX adds, and compares integers of less than a
    byte with no others.
    """
    if values.dtype.isbuiltin == 2:
        if _kind_of(values.dtype) == "i":
            return values.astype(np.int8)
        if not np.can_cast(values.dtype, dtype, "unsafe"):
            return values.astype(np.float32)
    return values


def _outside(values: _Array, dtype: np.dtype[Any]) -> Any:
    """Return a mask of the values that, rounded towards zero, are not integers of a dtype."""
    low, high = _range_of(dtype)
    if _kind_of(values.dtype) == "f":
        values = np.trunc(values.astype(np.float64))
        return ~((values >= low) & (values < float(high + 1)))
    return (values < low) | (values > high)


@lru_cache(maxsize=256)
def holds(dtype: np.dtype[Any], given: np.dtype[Any], *, rounded: bool = False) -> bool:
    """Return True if a dtype has every number of dtype ``given``, or one that it rounds to.

    ``numpy.can_cast`` differs: it allows int64 to float64, numbers to strings, durations and Python
    objects, and float8_e4m3fn to int4.

    >>> float32, int16, int32 = map(np.dtype, ['float32', 'int16', 'int32'])
    >>> holds(float32, int16), holds(float32, int32), holds(float32, int32, rounded=True)
    (True, False, True)
    """
    kind, of_given = _kind_of(dtype), _kind_of(given)
    if dtype == given or kind is None or of_given is None:
        return dtype == given
    if kind == "b":  # True for every number but 0
        return rounded
    if (of_given in "fc" and kind in "iu") or (of_given == "c" and kind != "c"):
        return False
    (low, high), (lowest, highest) = _range_of(given), _range_of(dtype)
    if not (lowest <= low and high <= highest):
        return False
    if rounded or kind in "iu":
        return True
    more = jax.numpy.finfo(dtype)
    if of_given in "biu":
        return high.bit_length() <= more.nmant + 1
    less = jax.numpy.finfo(given)
    # Each float of a byte lacks a value of the others: infinities, NaN or a negative zero.
    has_digits = more.nmant >= less.nmant and dtype.itemsize > 1
    return bool(has_digits and more.minexp - more.nmant <= less.minexp - less.nmant)


@lru_cache(maxsize=64)
def _range_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the largest finite number of a dtype, as numbers of Python."""
    kind = _kind_of(dtype)
    if kind == "b":
        return 0, 1
    info = jax.numpy.iinfo(dtype) if kind in ("i", "u") else jax.numpy.finfo(dtype)
    number = int if kind in ("i", "u") else float
    return number(info.min), number(info.max)


@lru_cache(maxsize=64)
def _kind_of(dtype: np.dtype[Any]) -> Any:
    """Return NumPy's letter for a kind of numbers; ``None`` for a dtype that has none."""
    if dtype.kind in "biufc":
        return dtype.kind
    if dtype.kind != "V":
        return None
    # One of the types that JAX adds to those of NumPy, or bytes.
    kinds = {"f": np.floating, "i": np.integer}
    return next((kind for kind, of in kinds.items() if jax.numpy.issubdtype(dtype, of)), None)

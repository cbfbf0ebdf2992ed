"""The differences between the elements of two arrays, part by part.

An element differs if its bits differ, as for a fingerprint: NaN is the same as NaN of the same
bits, and 0.0 is not the same as -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gda.layout.boundary import set_module
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.layout.text import counted

AnyArray = np.ndarray[Any, Any]

_AT_A_TIME = 2**18  # elements; their intermediate results take some MB


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ElementDifferences:
    """The elements in which two arrays of one shape and dtype differ: their number, and the most.

    A difference with a NaN is NaN, which counts as larger than all others; one with an infinity is
    infinite.

    Attributes:
      count: number of elements whose bits differ.
      size: number of all elements; of PRNG keys, of the numbers that they consist of.
      largest: the largest absolute difference, exact for integers; 0 if none differ, and if only
        the signs of zeros do.
      largest_at: its index, the first one of several.
      largest_relative: the largest difference divided by the larger of the two magnitudes.
      largest_relative_at: its index, the first one of several.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.array([1.0, 2.0, 4.0])})
    ...     differences = gda.checkpoint.diff(
    ...         folder, {'w': np.array([1.0, 2.5, 5.0])}, values=True
    ...     )
    >>> print(differences.of_other_content[0].elements)
    2 of 3 elements; largest 1.0 at [2], relative 0.2 at [1]
    """

    count: int
    size: int
    largest: int | float = 0
    largest_at: tuple[int, ...] | None = None
    largest_relative: float = 0.0
    largest_relative_at: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"{self.count:,} of {counted(self.size, 'element')}"
        if self.largest_at is None or self.largest_relative_at is None:
            return text
        return (
            f"{text}; largest {self.largest!r} at {_index(self.largest_at)}, relative "
            f"{self.largest_relative:.3g} at {_index(self.largest_relative_at)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON; infinities and NaN, which JSON does not have, as strings."""
        return {
            "count": self.count,
            "size": self.size,
            "largest": _for_json(self.largest),
            "largest_at": self.largest_at and list(self.largest_at),
            "largest_relative": _for_json(self.largest_relative),
            "largest_relative_at": self.largest_relative_at and list(self.largest_relative_at),
        }


def from_json(values: Sequence[Any]) -> ElementDifferences:
    """Return the differences whose ``astuple`` went through JSON."""
    plain: Any = [tuple(value) if isinstance(value, list) else value for value in values]
    return ElementDifferences(*plain)


def merged(parts: Sequence[ElementDifferences]) -> ElementDifferences:
    """Return the differences of a whole from those of all its parts, in any order."""
    largest, largest_at = _most([(part.largest, part.largest_at) for part in parts])
    relative, relative_at = _most(
        [(part.largest_relative, part.largest_relative_at) for part in parts]
    )
    return ElementDifferences(
        count=sum(part.count for part in parts),
        size=sum(part.size for part in parts),
        largest=largest,
        largest_at=largest_at,
        largest_relative=float(relative),
        largest_relative_at=relative_at,
    )


def element_differences(a: AnyArray, b: AnyArray, start: Shape) -> ElementDifferences:
    """Return the differences between a part of two arrays; ``start`` is its place in the whole.

    >>> element_differences(np.array([1, 7]), np.array([1, 9]), start=(10,)).largest_at
    (11,)
    """
    parts = [ElementDifferences(0, a.size)]
    flat_a, flat_b = (np.ascontiguousarray(each).reshape(-1) for each in (a, b))
    for first in range(0, a.size, _AT_A_TIME):
        of_a, of_b = flat_a[first : first + _AT_A_TIME], flat_b[first : first + _AT_A_TIME]
        places = np.flatnonzero(_bits_differ(of_a, of_b))
        if not places.size:
            continue
        largest, relative = _magnitudes(of_a[places], of_b[places])
        found = []
        for magnitudes in (largest, relative):
            number = int(np.argmax(magnitudes))  # the first NaN, if there is one
            within = np.unravel_index(first + int(places[number]), a.shape)
            at = tuple(int(i) + begin for i, begin in zip(within, start, strict=True))
            found += [magnitudes[number].item(), at]
        parts.append(ElementDifferences(len(places), 0, *found))
    return merged(parts)


def _bits_differ(a: AnyArray, b: AnyArray) -> AnyArray:
    bits, _ = width_of(a.dtype)
    if bits < 8:  # each is in a byte, whose other bits do not count
        mask = np.uint8((1 << bits) - 1)
        return (a.view(np.uint8) ^ b.view(np.uint8)) & mask != 0
    if a.dtype.itemsize == 16:
        pairs = (a.view(np.uint64) != b.view(np.uint64)).reshape(-1, 2)
        return pairs.any(1)
    return a.view(f"u{a.dtype.itemsize}") != b.view(f"u{a.dtype.itemsize}")


def _magnitudes(a: AnyArray, b: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the absolute and the relative difference of each pair of elements."""
    with np.errstate(all="ignore"):
        if a.dtype.kind in "biu" or "int" in a.dtype.name:
            return _of_integers(a, b)
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        absolute = np.abs(a - b)
        scale = np.maximum(np.abs(a), np.abs(b))
        # A pair of zeros differs in sign only; an infinity is infinitely far from any number.
        relative = np.where(scale == 0, 0.0, np.where(np.isinf(scale), absolute, absolute / scale))
        return absolute, relative


def _of_integers(a: AnyArray, b: AnyArray) -> tuple[AnyArray, AnyArray]:
    wide = np.uint64 if a.dtype == np.uint64 else np.int64
    a, b = a.astype(wide), b.astype(wide)
    of_a, of_b = a.astype(np.uint64), b.astype(np.uint64)
    # Modulo 2**64, so that the difference of any two is exact.
    absolute = np.where(a > b, of_a - of_b, of_b - of_a)
    scale = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    return absolute, absolute.astype(np.float64) / scale


def _most(
    found: Sequence[tuple[int | float, tuple[int, ...] | None]],
) -> tuple[int | float, tuple[int, ...] | None]:
    """Return the largest value, NaN above all, with the first of its indices."""
    there = [(value, at) for value, at in found if at is not None]
    if not there:
        return 0, None

    def rank(each: tuple[int | float, tuple[int, ...]]) -> tuple[Any, ...]:
        value, at = each
        is_nan = math.isnan(value)
        return not is_nan, 0 if is_nan else -value, at

    return min(there, key=rank)


def _index(at: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, at))}]"


def _for_json(value: int | float) -> int | float | str:
    return value if math.isfinite(value) else repr(value)

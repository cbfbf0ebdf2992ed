"""The lengths of the sides of a drawn array."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gda.show.drawing.sheet import TIMES
from gda.show.subject import Subject

# Sides are in proportion down to a quarter of the longest; below that differences shrink, so that
# (1000000, 8) is readable. A sharded side is long enough for a label in each block, or for a
# line between them.
_TRUE_DOWN_TO = 1 / 4
_SHRINKING = 0.2
_SHORTEST = 0.12
_NOT_NOTICED = 0.04
_ROOM_FOR_LABEL = 16
_MOST_FOR_LABELS = 0.8

_LONGEST_NAME = 16


@dataclass(frozen=True)
class Side:
    """One dimension as it is drawn, with the texts of ``size_text`` and ``axes_text``."""

    size: str
    axes: str
    length: float  # in pixels
    is_true: bool  # in proportion to the longest


def sides_of(
    subject: Subject, dimensions: Iterable[int], longest: float, shortest: float = 0
) -> list[Side]:
    """Return sides in proportion, the longest of them about ``longest`` pixels."""
    chosen = list(dimensions)
    sizes = [subject.grid.padded_shape[dimension] for dimension in chosen]
    top = max(sizes)
    proportions = [size / top if top else 1.0 for size in sizes]
    lengths = [
        _length(proportion, subject.grid.parts[dimension], longest, shortest)
        for dimension, proportion in zip(chosen, proportions, strict=True)
    ]
    return [
        Side(
            size=size_text(subject, dimension),
            axes=axes_text(subject, dimension),
            length=length,
            is_true=abs(length / max(lengths) - proportion) < _NOT_NOTICED,
        )
        for dimension, proportion, length in zip(chosen, proportions, lengths, strict=True)
    ]


def _length(proportion: float, parts: int, longest: float, shortest: float) -> float:
    room = min(_ROOM_FOR_LABEL * parts, _MOST_FOR_LABELS * longest)
    return sharp(max(longest * _shown(proportion), room, shortest), parts)


def sharp(length: float, parts: int) -> float:
    """Return a length near this one with parts of whole pixels, for sharp lines.

    >>> sharp(100, 8), sharp(100, 64)
    (96, 100)
    """
    return parts * round(length / parts) if length >= 4 * parts else length


def size_text(subject: Subject, dimension: int) -> str:
    """Return the size of a dimension, with its padding: ``10 + 6``."""
    size, padded = subject.shape[dimension], subject.grid.padded_shape[dimension]
    return str(size) if size == padded else f"{size} + {padded - size}"


def axes_text(subject: Subject, dimension: int) -> str:
    """Return the mesh axes that shard a dimension, with the number and the size of its parts."""
    axes = subject.axes_of(dimension)
    if not axes:
        return ""
    names = ", ".join(
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name, _ in axes
    )
    ways = math.prod(size for _, size in axes)
    return f"{names}: {ways} {TIMES} {subject.grid.shard_shape[dimension]}"


def _shown(proportion: float) -> float:
    if proportion >= _TRUE_DOWN_TO:
        return proportion
    return max(_TRUE_DOWN_TO * (proportion / _TRUE_DOWN_TO) ** _SHRINKING, _SHORTEST)

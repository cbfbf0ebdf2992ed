"""Leaving out the middle of what is too long to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Stands for a number of things that are left out."""

    count: int


def fold(count: int, room: int) -> Sequence[int | Gap]:
    """Return the numbers below ``count``, in at most ``room`` places: the first, a gap, the last.

    ``room`` is at least 3.

    >>> fold(3, 5), fold(4096, 5)
    (range(0, 3), [0, 1, 2, Gap(count=4092), 4095])
    """
    if count <= room:
        return range(count)
    first = min(-(-2 * (room - 1) // 3), room - 2)
    last = room - 1 - first
    return [*range(first), Gap(count - first - last), *range(count - last, count)]

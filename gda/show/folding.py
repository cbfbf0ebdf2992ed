"""The omission of the middle of a long sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """A place that stands for a number of omitted things."""

    count: int


def fold(count: int, room: int) -> Sequence[int | Gap]:
    """Return the numbers below ``count`` in at most ``room`` places (3 or more), with one gap."""
    if count <= room:
        return range(count)
    first = min(-(-2 * (room - 1) // 3), room - 2)
    last = room - 1 - first
    return [*range(first), Gap(count - first - last), *range(count - last, count)]

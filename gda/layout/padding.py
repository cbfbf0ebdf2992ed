"""The padding of arrays whose sizes the mesh does not divide, in bytes and percent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gda.layout.text import format_bytes

if TYPE_CHECKING:
    from gda.layout.grid import ShardGrid


class Padding(NamedTuple):
    """The padding of some arrays, on all their devices; ``percent`` of the bytes without it."""

    nbytes: int
    percent: float


def padding_of(layouts: Iterable[tuple[ShardGrid, int]]) -> Padding:
    total = whole = 0
    for grid, bits in layouts:
        times = grid.num_replicas * bits
        whole += math.prod(grid.global_shape) * times
        total += math.prod(grid.padded_shape) * times
    return Padding(-(-(total - whole) // 8), 100 * (total - whole) / whole if whole else 0.0)


def format_percent(percent: float) -> str:
    """Return a percentage in two digits, or all of its digits from 100 on.

    >>> [*map(format_percent, (0.001, 0.0139, 33.333, 1234.5))]
    ['<0.01 %', '0.014 %', '33 %', '1,234 %']
    """
    if 0 < percent < 0.01:
        return "<0.01 %"
    return f"{percent:,.0f} %" if percent >= 99.5 else f"{percent:.2g} %"


def format_padding(padding: Padding) -> str:
    """Return padding in words: ``21.0 KiB, 0.014 %``."""
    return f"{format_bytes(padding.nbytes)}, {format_percent(padding.percent)}"

"""Which colour each process has in a drawing.

The colours are light, for dark text on them, so that one choice is right on white pages and on dark
ones. Up to eight processes have the hues of Paul Tol's "light" scheme, made for labelled cells and
for people who confuse colours; up to 24 the same hues, darker and lighter. More processes than
people can tell apart by hue are a ramp that ascends in lightness, also without colour, in which
every other process is a little darker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gda.layout import IntArray

INK = "#16181d"
"""Of the text on these colours."""

_HUES = ("#77aadd", "#ee9977", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#c0b070")
_TINTS = (0.0, -0.16, 0.5)
_RAMP = ("#a195e0", "#74a9e2", "#4fbfb9", "#8ad07f", "#e0dc66", "#fbf0c8")
_RAMP_STEPS = 48

MOST_NAMED = len(_HUES) * len(_TINTS)
"""Up to this many processes each has a colour of its own."""


def colors_of(num_processes: int) -> tuple[str, ...]:
    """Return the colours to choose from for so many processes; ``which`` says whose is which.

    >>> colors_of(2)
    ('#77aadd', '#ee9977')
    """
    if num_processes <= MOST_NAMED:
        count = max(num_processes, 1)
        return tuple(_shaded(_HUES[i % 8], _TINTS[i // 8]) for i in range(count))
    steps = [_on_ramp(step / (_RAMP_STEPS - 1)) for step in range(_RAMP_STEPS)]
    return tuple(_shaded(color, shade) for color in steps for shade in (0.0, -0.1))


def which(ranks: IntArray, num_processes: int) -> IntArray:
    """Return the place in ``colors_of`` of the processes with these ranks, counted from 0.

    >>> which(np.array([0, 1]), 2).tolist(), which(np.array([0, 1, 999]), 1000).tolist()
    ([0, 1], [0, 1, 95])
    """
    if num_processes <= MOST_NAMED:
        return ranks
    return ranks * _RAMP_STEPS // num_processes * 2 + ranks % 2


def _on_ramp(at: float) -> str:
    place = at * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[first], _RAMP[first + 1], place - first)


def _shaded(color: str, shade: float) -> str:
    """Return a colour nearer to white, or below 0 to black."""
    return color if not shade else _mixed(color, "#ffffff" if shade > 0 else "#000000", abs(shade))


def _mixed(one: str, other: str, share: float) -> str:
    return _hex(_channels(one) * (1 - share) + _channels(other) * share)


def _channels(color: str) -> npt.NDArray[np.float64]:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)], np.float64)


def _hex(channels: Sequence[float] | npt.NDArray[np.float64]) -> str:
    return "#" + "".join(f"{round(channel):02x}" for channel in channels)

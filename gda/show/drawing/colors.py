"""The colour of each process in a drawing.

The colours are light, for dark text on them, so that one choice is right on white pages and on dark
ones. The first have the hues of Paul Tol's "light" scheme, made for labelled cells and for people
who confuse colours; up to 24 are as far from those and each other as possible. More processes than
people can distinguish by hue are a ramp that ascends in lightness, even without colour, with every
other process a little darker.
"""

from __future__ import annotations

from gda.layout.numbering import IntArray

INK = "#16181d"
"""The colour of the text on these colours."""

# Each differs from each other one by 20 or more in the space of colours CIELAB.
_NAMED = (
    *("#77aadd", "#ee9977", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#cc99dd"),
    *("#999977", "#aaffaa", "#669944", "#cceecc", "#44ffff", "#dd66aa", "#cc9944", "#eeddff"),
    *("#ffddcc", "#aa8899", "#dd6677", "#559999", "#7788dd", "#66ffcc", "#aaaa44", "#aacc88"),
)
_RAMP = ("#a195e0", "#74a9e2", "#4fbfb9", "#8ad07f", "#e0dc66", "#fbf0c8")
_RAMP_STEPS = 48

MOST_NAMED = len(_NAMED)
"""The most processes that have a colour each."""


def colors_of(num_processes: int) -> tuple[str, ...]:
    """Return the colours for a number of processes; ``which`` assigns them.

    >>> colors_of(2)
    ('#77aadd', '#ee9977')
    """
    if num_processes <= MOST_NAMED:
        return _NAMED[: max(num_processes, 1)]
    steps = [_on_ramp(step / (_RAMP_STEPS - 1)) for step in range(_RAMP_STEPS)]
    return tuple(shade for color in steps for shade in (color, _mixed(color, "#000000", 0.1)))


def which(ranks: IntArray, num_processes: int) -> IntArray:
    """Return the place in ``colors_of`` of the processes with these ranks, counted from 0."""
    if num_processes <= MOST_NAMED:
        return ranks
    return ranks * _RAMP_STEPS // num_processes * 2 + ranks % 2


def _on_ramp(at: float) -> str:
    place = at * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[first], _RAMP[first + 1], place - first)


def _mixed(one: str, other: str, share: float) -> str:
    channels = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return f"#{bytes(round(a * (1 - share) + b * share) for a, b in channels).hex()}"

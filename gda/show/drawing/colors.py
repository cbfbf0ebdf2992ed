"""The colour of each process in a drawing.

The colours are light, for dark text on them, so that one choice is right on white pages and on dark
ones. The first have the hues of Paul Tol's "light" scheme, made for labelled cells and for people
who confuse colours; the others are as far from those and each other as possible. People cannot tell
more apart, so further processes begin again with the first.
"""

from __future__ import annotations

INK = "#16181d"
"""The colour of the text on these colours."""

# Each differs from each other one by 20 or more in the space of colours CIELAB.
_COLORS = (
    *("#77aadd", "#ee9977", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#cc99dd"),
    *("#999977", "#aaffaa", "#669944", "#cceecc", "#44ffff", "#dd66aa", "#cc9944", "#eeddff"),
    *("#ffddcc", "#aa8899", "#dd6677", "#559999", "#7788dd", "#66ffcc", "#aaaa44", "#aacc88"),
)


def colors_of(num_processes: int) -> tuple[str, ...]:
    """Return the colours for a number of processes, at most 24; their ranks go round.

    >>> colors_of(2)
    ('#77aadd', '#ee9977')
    """
    return _COLORS[: max(num_processes, 1)]

"""Pictures of planned arrays, drawn with rich if it is installed."""

from __future__ import annotations

import itertools
import os
import re
import sys

from gda.cli.facts import terminal_width
from gda.planning.planned_array import PlannedArray

# Narrower pictures side by side cannot be read.
_NARROWEST = 48

_LEAST = 20
_BETWEEN = "   "
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def picture_lines(array: PlannedArray, width: int | None = None) -> list[str]:
    """Return the lines of a picture of an array, or one line with the reason for its absence.

    It has no heading, because the command has printed the same facts.
    """
    from gda import show

    width = max(width or terminal_width(), _LEAST)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        drawn = show.text(array.grid, dtype=array.dtype, width=width, color=color, header=False)
    except ImportError as error:
        return [f"(no picture: {error})"]
    return drawn.split("\n")


def before_and_after(source: PlannedArray, target: PlannedArray) -> list[str]:
    """Return the lines of two pictures, side by side if they fit."""
    width = terminal_width()
    half = (width - len(_BETWEEN)) // 2
    before, after = picture_lines(source, max(half, 1)), picture_lines(target, max(half, 1))
    if before == after and len(before) == 1:
        return before  # the reason for their absence
    widest = max(map(_width, before))
    if half < _NARROWEST or widest > half or max(map(_width, after)) > half:
        before, after = picture_lines(source), picture_lines(target)
        return ["before", *before, "", "after", *after]
    pairs = itertools.zip_longest(["before", *before], ["after", *after], fillvalue="")
    return [
        f"{left}{' ' * (widest - _width(left))}{_BETWEEN}{right}".rstrip() for left, right in pairs
    ]


def _width(line: str) -> int:
    return len(_COLOR.sub("", line))

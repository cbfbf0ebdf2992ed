"""Facts and pictures that fit the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from gda.layout.tables import wrap
from gda.layout.text import printable
from gda.planning.planned_array import PlannedArray

_LABEL = 14  # wide enough for all labels, so that the answers below each other are aligned
_NARROWEST = 8
_NARROWEST_PICTURE = 20


def terminal_width() -> int:
    """Return the columns of the terminal; 80 without one."""
    return shutil.get_terminal_size().columns


def facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of labels and values; an empty label continues the line above."""
    width = max(terminal_width() - _LABEL, _NARROWEST)
    lines = []
    for label, value in rows:
        for part in wrap(printable(value), width):
            lines.append(f"{label:{_LABEL}}{part}".rstrip())
            label = ""
    return lines


def picture_lines(array: PlannedArray) -> list[str]:
    """Return the lines of a picture of an array, without the facts that the command prints."""
    from gda import show

    width = max(terminal_width(), _NARROWEST_PICTURE)
    return show.text(array.grid, dtype=array.dtype, width=width, header=False).split("\n")

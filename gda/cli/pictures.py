"""Pictures of what a command is about, where rich is installed to draw them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys

from gda.cli.arrays import PlannedArray

# Narrower, two pictures beside each other cannot be read.
_NARROWEST = 48

# At the head of a picture; the answer of a command has them too.
_SAID = ("mesh", "spec", "blocks", "bytes")
_LEAST = 20
_BETWEEN = "   "
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def picture_lines(array: PlannedArray, width: int | None = None) -> list[str]:
    """Return the lines of a picture of an array, or one line that says why there is none."""
    from gda import show

    width = max(width or terminal_width(), _LEAST)
    try:
        drawn = show.text(array.grid, dtype=array.dtype, width=width, color=_wants_color())
    except ImportError as error:
        return [f"(no picture: {error})"]
    return _without_facts(drawn.split("\n"))


def _without_facts(lines: list[str]) -> list[str]:
    """Leave out what the command has said above the picture; how to read it stays."""
    if "" not in lines:
        return lines
    end = lines.index("")
    head = [line for line in lines[1:end] if _plain(line).split()[0] not in _SAID]
    return [*head, "", *lines[end + 1 :]] if head else lines[end + 1 :]


def _wants_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def before_and_after(source: PlannedArray, target: PlannedArray) -> list[str]:
    """Return the lines of two pictures: beside each other where they fit, else one by one."""
    width = terminal_width()
    half = (width - len(_BETWEEN)) // 2
    before, after = picture_lines(source, max(half, 1)), picture_lines(target, max(half, 1))
    if before == after and len(before) == 1:
        return before  # both say that there is none
    widest = max(map(_width, before))
    if half < _NARROWEST or widest > half or max(map(_width, after)) > half:
        before, after = picture_lines(source), picture_lines(target)
        return ["before", *before, "", "after", *after]
    pairs = itertools.zip_longest(["before", *before], ["after", *after], fillvalue="")
    return [
        f"{left}{' ' * (widest - _width(left))}{_BETWEEN}{right}".rstrip() for left, right in pairs
    ]


def _width(line: str) -> int:
    return len(_plain(line))


def _plain(line: str) -> str:
    return _COLOR.sub("", line)

"""Boxes of cells out of line-drawing characters, as lines of styled text.

A line is a list of pieces, each a text and the name of its style;
``gda/show/terminal/__init__.py`` has the look of each style.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

from gda.layout.tables import beginning, text_width, wrap

Style = str
Line = list[tuple[str, Style]]

PLAIN, FAINT = "", "faint"
PROCESS = "process"
"""With a number behind it, from 0, the style of a process."""


_WIDEST_TEXT = 28  # of several blocks side by side, if it can be broken
_BETWEEN_PICTURES = 3


class Cell(NamedTuple):
    """The texts in a cell, for a block or a gap."""

    lines: Sequence[str]
    style: Style = PLAIN
    is_gap: bool = False

    @property
    def width(self) -> int:
        return max(map(text_width, self.lines), default=0)

    def wrapped(self, width: int = _WIDEST_TEXT, *, cuts_words: bool = False) -> Cell:
        """Return the cell with wider lines broken at spaces, and longer words broken or left."""
        if self.width <= width:
            return self
        lines = [part for line in self.lines for part in wrap(line, width, cuts_words=cuts_words)]
        return Cell(lines, self.style, self.is_gap)


class BoxRow(NamedTuple):
    """Cells side by side, with the widths of their texts and the label left of the box."""

    cells: Sequence[Cell]
    widths: Sequence[int]
    label: Sequence[str] = ()


def line_width(line: Line) -> int:
    """Return the columns that all pieces of a line take."""
    return sum(text_width(text) for text, _ in line)


def box_width(widths: Sequence[int]) -> int:
    """Return the columns of a row of cells with texts of these widths."""
    return sum(widths) + 3 * len(widths) + 1


def draw_box(rows: Sequence[BoxRow], margin: int = 0) -> list[Line]:
    """Return a box with rules around all cells, ``margin`` columns from the left."""
    lines: list[Line] = []
    above: list[int] = []
    for row in rows:
        edges = [*accumulate((width + 3 for width in row.widths), initial=0)]
        lines.append(_rule(above, edges, margin))
        lines += _content(row, margin)
        above = edges
    lines.append(_rule(above, [], margin))
    return lines


def heads(tops: Sequence[Cell], widths: Sequence[int], margin: int) -> list[Line]:
    """Return the lines above a box with the labels of its columns."""
    lines: list[Line] = []
    for texts in zip_longest(*(top.lines for top in tops), fillvalue=""):
        places = [f"  {fit(text, width)} " for text, width in zip(texts, widths, strict=True)]
        lines.append([(" " * margin + "".join(places), FAINT)])
    return lines


def beside(pictures: Sequence[list[Line]], width: int) -> list[Line]:
    """Return pictures side by side as far as they fit, and an empty line above further ones."""
    if len(pictures) == 1:
        return pictures[0]
    widths = [max(map(line_width, picture)) for picture in pictures]
    lines: list[Line] = []
    first = 0
    while first < len(pictures):
        stop, total = first + 1, widths[first]
        while stop < len(pictures) and total + _BETWEEN_PICTURES + widths[stop] <= width:
            total += _BETWEEN_PICTURES + widths[stop]
            stop += 1
        lines += [[]] if lines else []
        lines += _side_by_side(pictures[first:stop], widths[first:stop])
        first = stop
    return lines


def fit(text: str, width: int) -> str:
    """Return ``text`` in exactly so many columns."""
    size = text_width(text)
    if size <= width:
        return text + " " * (width - size)
    if width < 1:
        return ""
    start = beginning(text, width - 1)
    return f"{start}…{' ' * (width - 1 - text_width(start))}"


def _side_by_side(pictures: Sequence[list[Line]], widths: Sequence[int]) -> list[Line]:
    lines: list[Line] = []
    for row in zip_longest(*pictures, fillvalue=[]):
        line: Line = []
        for pieces, width in zip(row, widths, strict=True):
            space = width - line_width(pieces) + _BETWEEN_PICTURES
            line += [*pieces, (" " * space, PLAIN)]
        lines.append(line[:-1])
    return lines


def _content(row: BoxRow, margin: int) -> list[Line]:
    lines: list[Line] = []
    for label, *texts in zip_longest(row.label, *(c.lines for c in row.cells), fillvalue=""):
        line: Line = [(f"{fit(label, margin - 1)} ", FAINT)] if margin else []
        for cell, text, width in zip(row.cells, texts, row.widths, strict=True):
            line += [("│", FAINT), (f" {fit(text, width)} ", cell.style)]
        lines.append([*line, ("│", FAINT)])
    return lines


def _rule(above: Sequence[int], below: Sequence[int], margin: int) -> Line:
    last = max(*above[-1:], *below[-1:], 0)
    characters = ["─"] * (last + 1)
    for edge in {*above, *below}:
        is_up, is_down = edge in above, edge in below
        first, middle, end = "├┼┤" if is_up and is_down else "┌┬┐" if is_down else "└┴┘"
        characters[edge] = first if edge == 0 else end if edge == last else middle
    return [(" " * margin + "".join(characters), FAINT)]

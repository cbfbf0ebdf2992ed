"""Boxes of cells out of line-drawing characters; a cell is its lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

from gda.layout.tables import beginning, text_width

Cell = Sequence[str]

_BETWEEN_PICTURES = 3


class BoxRow(NamedTuple):
    """Cells side by side, with the widths of their texts and the label left of the box."""

    cells: Sequence[Cell]
    widths: Sequence[int]
    label: str = ""


def cell_width(cell: Cell) -> int:
    return max(map(text_width, cell), default=0)


def box_width(widths: Sequence[int]) -> int:
    """Return the columns of a row of cells with texts of these widths."""
    return sum(widths) + 3 * len(widths) + 1


def draw_box(rows: Sequence[BoxRow], margin: int = 0) -> list[str]:
    """Return a box with rules around all cells, ``margin`` columns from the left."""
    lines: list[str] = []
    above: list[int] = []
    for row in rows:
        edges = [*accumulate((width + 3 for width in row.widths), initial=0)]
        lines.append(" " * margin + _rule(above, edges))
        for label, *texts in zip_longest([row.label], *row.cells, fillvalue=""):
            left = f"{fit(label, margin - 1)} " if margin else ""
            content = (
                f"│ {fit(text, width)} " for text, width in zip(texts, row.widths, strict=True)
            )
            lines.append(f"{left}{''.join(content)}│")
        above = edges
    return [*lines, " " * margin + _rule(above, [])]


def heads(tops: Sequence[Cell], widths: Sequence[int], margin: int) -> list[str]:
    """Return the lines above a box with the labels of its columns."""
    return [
        " " * margin + "".join(map("  {} ".format, map(fit, texts, widths)))
        for texts in zip_longest(*tops, fillvalue="")
    ]


def beside(pictures: Sequence[list[str]], width: int) -> list[str]:
    """Return pictures side by side as far as they fit, and an empty line above further ones."""
    widths = [cell_width(picture) for picture in pictures]
    rows: list[list[int]] = []
    room = 0
    for number, each in enumerate(widths):
        room -= each + _BETWEEN_PICTURES
        if room < 0:
            rows.append([])
            room = width - each
        rows[-1].append(number)
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        for texts in zip_longest(*(pictures[number] for number in row), fillvalue=""):
            line = map(fit, texts, (widths[number] for number in row))
            lines.append((" " * _BETWEEN_PICTURES).join(line))
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


def _rule(above: Sequence[int], below: Sequence[int]) -> str:
    last = max(*above[-1:], *below[-1:], 0)
    characters = ["─"] * (last + 1)
    for edge in {*above, *below}:
        is_up, is_down = edge in above, edge in below
        first, middle, end = "├┼┤" if is_up and is_down else "┌┬┐" if is_down else "└┴┘"
        characters[edge] = first if edge == 0 else end if edge == last else middle
    return "".join(characters)

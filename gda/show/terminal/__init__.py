"""Pictures as text: which way an array is drawn in a number of columns.

An array is a box cut into its blocks. The last two dimensions that are cut run down and across
(``matrix.py``); with one, its blocks stand below each other, or side by side if it is the last
dimension. What does not fit is folded, so that the cost does not grow with the number of blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, TextIO, cast

import rich.color
import rich.style
from rich.box import ASCII2, SQUARE, Box

from gda.show.subject import Subject
from gda.show.terminal.boxes import (
    FAINT,
    PLAIN,
    PROCESS,
    Cell,
    Line,
    Row,
    Style,
    draw_box,
    fit,
    text_width,
    wrap,
)
from gda.show.terminal.cells import Cells, Manner
from gda.show.terminal.folding import Gap, fold
from gda.show.terminal.labels import facts, title
from gda.show.terminal.matrix import MOST_LINES, Matrix

ColorSystem = Literal["standard", "256", "truecolor", "windows"]

_COLOR_SYSTEMS: dict[ColorSystem, rich.color.ColorSystem] = {
    "standard": rich.color.ColorSystem.STANDARD,
    "256": rich.color.ColorSystem.EIGHT_BIT,
    "truecolor": rich.color.ColorSystem.TRUECOLOR,
    "windows": rich.color.ColorSystem.WINDOWS,
}

PALETTE = (32, 166, 29, 169, 136, 61)
"""Numbers of terminal colours, for one process after the other.

They keep a contrast of 3 to 1 on black and on white, and neighbours differ also for people who
confuse colours.
"""

_WIDTH = 80
_NARROWEST = 20

_TITLE = "title"
_KEY_WIDTH = 8
_BETWEEN_FIELDS = "   "
_LIST_LEFT = 16
_STRIPS_LEFT = 6
_LINES_OF_STRIP = 4
_NARROWEST_COLUMN = 5


def text_of(
    subject: Subject,
    *,
    width: int | None = None,
    color_system: ColorSystem | None = None,
    is_ascii: bool = False,
) -> str:
    """Return the picture, without a line break at the end.

    Args:
      subject: what is shown.
      width: columns that no line exceeds, 20 or more; 80 if not given.
      color_system: what the terminal understands; None for plain text.
      is_ascii: draw with the characters of ASCII only.

    Raises:
      TypeError: ``width`` is no integer.
      ValueError: it is below 20.
    """
    width = _check_width(width)
    cells = Cells(subject, "..." if is_ascii else "…")
    drawing, manner = _drawn(cells, width, ASCII2 if is_ascii else SQUARE)
    notes = [("cells", cells.key_to_numbers)] if manner is Manner.NUMBERS else []
    lines: list[Line] = [[(part, _TITLE)] for part in wrap(title(subject), width)]
    for key, text in [*facts(subject), *notes]:
        lines += _fact(key, text, width)
    text = _rendered([*lines, [], *drawing], color_system)
    return text.replace("…", ".") if is_ascii else text  # where a text was cut


def text_for(
    subject: Subject, file: TextIO, *, width: int | None = None, color: bool | None = None
) -> str:
    """Return the picture as it suits a file: with colours if that is a terminal which has them.

    Args:
      subject: what is shown.
      file: where it will be written.
      width: as for ``text_of``; if not given, that of the terminal.
      color: whether to use colours; if not given, as the terminal and NO_COLOR ask for.
    """
    from rich.console import Console  # 20 ms to import, and text_of does without

    console = Console(file=file)
    if width is None and console.is_terminal:
        width = max(console.width, _NARROWEST)
    if color is None:
        color = not console.no_color and console.color_system is not None
    system = cast("ColorSystem", console.color_system or "256") if color else None
    is_ascii = not _can_write("┌…", getattr(file, "encoding", None))
    return text_of(subject, width=width, color_system=system, is_ascii=is_ascii)


def _can_write(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _check_width(width: int | None) -> int:
    if width is None:
        return _WIDTH
    try:
        columns = operator.index(width)
    except TypeError:
        raise TypeError(f"width must be an integer, the columns of text, not {width!r}") from None
    if columns < _NARROWEST:
        raise ValueError(
            f"width={columns} is too narrow for a picture; give {_NARROWEST} columns or more"
        )
    return columns


def _fact(key: str, text: str, width: int) -> list[Line]:
    parts = wrap(text, width - _KEY_WIDTH)
    keys = [key, *[""] * (len(parts) - 1)]
    return [
        [(fit(word, _KEY_WIDTH), FAINT), (part, PLAIN)]
        for word, part in zip(keys, parts, strict=True)
    ]


def _drawn(cells: Cells, width: int, box: Box) -> tuple[list[Line], Manner]:
    cut = [dimension for dimension, parts in enumerate(cells.parts) if parts > 1]
    if len(cut) > 1:
        return Matrix(cells, cut[:-2], cut[-2], cut[-1], width, box).draw()
    dimension = cut[0] if cut else 0
    is_last = bool(cut) and dimension == len(cells.parts) - 1
    rows = _side_by_side(cells, dimension, width) if is_last else None
    return draw_box(rows or _below_each_other(cells, dimension, width), box), Manner.INDEX


def _below_each_other(cells: Cells, dimension: int, width: int) -> list[Row]:
    """Return the blocks along a dimension, each in a line if that fits."""
    count = cells.parts[dimension] if cells.parts else 1
    is_short = 2 * count < MOST_LINES
    drawn = [
        cells.gap(part) if isinstance(part, Gap) else cells.cell({dimension: part}, Manner.INDEX)
        for part in (range(count) if is_short else fold(count, _LIST_LEFT))
    ]
    room = width - 4
    blocks = [cell for cell in drawn if not cell.is_gap]
    fields = [max(map(text_width, texts)) for texts in zip(*(b.lines for b in blocks), strict=True)]
    if sum(fields) + len(_BETWEEN_FIELDS) * (len(fields) - 1) <= room:
        drawn = [cell if cell.is_gap else _in_one_line(cell, fields) for cell in drawn]
    else:
        drawn = [cell.wrapped(room, cuts_words=True) for cell in drawn]
    widest = max(cell.width for cell in drawn)
    return [Row([cell], [widest]) for cell in drawn]


def _in_one_line(cell: Cell, fields: Sequence[int]) -> Cell:
    return Cell([_BETWEEN_FIELDS.join(map(fit, cell.lines, fields))], cell.style)


def _side_by_side(cells: Cells, dimension: int, width: int) -> list[Row] | None:
    """Return the blocks along a dimension in strips; None where only one fits into a strip."""
    count = cells.parts[dimension]
    per_strip = min(count, (width - 1) // _NARROWEST_COLUMN)
    while per_strip > 1:
        strips = _strips(cells, dimension, per_strip)
        widest = max(cell.width for strip in strips for cell in strip if not cell.is_gap)
        fitting = (width - 1) // (widest + 3)
        if per_strip <= fitting:
            whole = per_strip * (widest + 3) - 3
            return [
                Row(strip, [whole if strip[0].is_gap else widest] * len(strip)) for strip in strips
            ]
        per_strip = _even(count, fitting)
    return None


def _strips(cells: Cells, dimension: int, per_strip: int) -> list[list[Cell]]:
    count = cells.parts[dimension]
    num_strips = -(-count // per_strip)
    is_low = num_strips * _LINES_OF_STRIP < MOST_LINES
    strips = []
    for strip in range(num_strips) if is_low else fold(num_strips, _STRIPS_LEFT):
        if isinstance(strip, Gap):
            strips.append([cells.gap(Gap(strip.count * per_strip))])
        else:
            parts = range(strip * per_strip, min(count, (strip + 1) * per_strip))
            drawn = [cells.cell({dimension: part}, Manner.INDEX) for part in parts]
            strips.append([cell.wrapped() for cell in drawn])
    return strips


def _even(count: int, most: int) -> int:
    """Return into how many columns to put blocks: a power of two where that leaves none over."""
    power = 1 << (most.bit_length() - 1) if most else 1
    return power if count % power == 0 else most


def _rendered(lines: Iterable[Line], color_system: ColorSystem | None) -> str:
    if color_system is None:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
    system = _COLOR_SYSTEMS[color_system]
    return "\n".join(
        "".join(_look(style).render(text, color_system=system) for text, style in line)
        for line in lines
    )


@lru_cache(maxsize=256)
def _look(style: Style) -> rich.style.Style:
    kind, _, number = style.partition(" ")
    if kind == PROCESS:
        return rich.style.Style(color=f"color({PALETTE[int(number) % len(PALETTE)]})")
    return rich.style.Style(dim=style == FAINT, bold=style == _TITLE)

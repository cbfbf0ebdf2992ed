"""Pictures as text, within a number of columns.

An array is a box divided into its blocks. The last two sharded dimensions run down and across
(``matrix.py``); with one, its blocks stand below each other, or side by side if it is the last
dimension (``strips.py``). Blocks that do not fit are folded, so the cost does not grow with their
number.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterable
from functools import lru_cache
from itertools import zip_longest
from typing import TextIO

import rich.style
from rich.box import ASCII2, SQUARE, Box

from gda.layout.tables import wrap
from gda.show.subject import Subject
from gda.show.terminal.cells import PADDING, Cells
from gda.show.terminal.frames import FAINT, PLAIN, PROCESS, Line, Style, draw_box, fit
from gda.show.terminal.matrix import Drawing, Matrix
from gda.show.terminal.strips import rows_along
from gda.show.words import facts

PALETTE = (32, 166, 29, 169, 136, 61)
"""Numbers of terminal colours, for one process after the other.

They keep a contrast of 3 to 1 on black and on white, and neighbours differ even for people who
confuse colours.
"""

_WIDTH = 80
_NARROWEST = 20

_TITLE = "title"
_KEY_WIDTH = 8


def text_of(
    subject: Subject,
    *,
    width: int | None = None,
    color_system: str | None = None,
    is_ascii: bool = False,
    header: bool = True,
) -> str:
    """Return the picture as ``gda.show.text`` does, in the colours of a rich console or plain."""
    width = _check_width(width)
    cells = Cells(subject, "..." if is_ascii else "…")
    drawing, notes = _drawn(cells, width, ASCII2 if is_ascii else SQUARE)
    if subject.has_padding:
        notes = [*notes, (PADDING, f"padding in a part of the block, {PADDING * 3} in all of it")]
    lines: list[Line] = []
    if header:
        dtype = "" if subject.dtype is None else f" {subject.dtype}"
        title = f"{subject.kind} {subject.shape}{dtype}"
        lines += [[(part, _TITLE)] for part in wrap(title, width)]
    for key, text in [*(facts(subject) if header else []), *notes]:
        lines += _fact(key, text, width)
    text = _rendered([*lines, [], *drawing] if lines else drawing, color_system)
    if is_ascii:  # the ellipsis is one of a shortened text
        text = text.replace("…", ".").replace(PADDING, "#")
    return text


def text_for(
    subject: Subject, file: TextIO, *, width: int | None = None, color: bool | None = None
) -> str:
    """Return the picture for a file, by default as wide and colourful as its terminal.

    FORCE_COLOR, which notebooks set for their children, makes no terminal of a file.
    """
    from rich.console import Console  # 20 ms to import, and text_of does without

    isatty = getattr(file, "isatty", None)  # a notebook's replacement of a file may lack it
    is_terminal = isatty is not None and isatty()
    console = Console(file=file, force_terminal=is_terminal, force_jupyter=False)
    if width is None and is_terminal:
        width = max(shutil.get_terminal_size().columns, _NARROWEST)
    if color is None:
        color = not console.no_color and console.color_system is not None
    system = (console.color_system or "256") if color else None
    is_ascii = not _can_write(f"┌…{PADDING}", getattr(file, "encoding", None))
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
    parts = zip_longest([key], wrap(text, width - _KEY_WIDTH), fillvalue="")
    return [[(fit(word, _KEY_WIDTH), FAINT), (part, PLAIN)] for word, part in parts]


def _drawn(cells: Cells, width: int, box: Box) -> Drawing:
    sharded = [dimension for dimension, parts in enumerate(cells.parts) if parts > 1]
    if len(sharded) > 1:
        return Matrix(cells, sharded[:-2], sharded[-2], sharded[-1], width, box).draw()
    return draw_box(rows_along(cells, sharded[0] if sharded else 0, width), box), []


def _rendered(lines: Iterable[Line], color_system: str | None) -> str:
    if color_system is None:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
    from rich.console import COLOR_SYSTEMS

    system = COLOR_SYSTEMS[color_system]
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

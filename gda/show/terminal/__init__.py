"""Pictures as text, within a number of columns.

An array is a box divided into its blocks. The last two sharded dimensions run down and across
(``matrix``); with one, its blocks stand below each other, or side by side if it is the last
dimension (``strips``). Blocks that do not fit are folded, so the cost does not grow with their
number. Both use ``cells`` (the text of a block) and ``frames`` (lines around cells).
"""

from __future__ import annotations

import operator
import os
import shutil
from itertools import zip_longest
from typing import TextIO

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

_DRAWN = f"┌┬┐├┼┤└┴┘─│…{PADDING}"
_IN_ASCII = str.maketrans(_DRAWN, "+++++++++-|.#")


def text_of(
    subject: Subject, *, width: int | None = None, color: bool = False, header: bool = True
) -> str:
    """Return the picture as ``gda.show.text`` does."""
    width = _check_width(width)
    drawing, notes = _drawn(Cells(subject), width)
    if subject.has_padding:
        notes = [*notes, (PADDING, f"padding in a part of the block, {PADDING * 3} in all of it")]
    lines: list[Line] = []
    if header:
        dtype = "" if subject.dtype is None else f" {subject.dtype}"
        title = f"{subject.kind} {subject.shape}{dtype}"
        lines += [[(part, _TITLE)] for part in wrap(title, width)]
    for key, text in [*(facts(subject) if header else []), *notes]:
        lines += _fact(key, text, width)
    lines = [*lines, [], *drawing] if lines else drawing
    if color:
        return "\n".join("".join(_colored(*piece) for piece in line) for line in lines)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def text_for(
    subject: Subject, file: TextIO, *, width: int | None = None, color: bool | None = None
) -> str:
    """Return the picture for a file, by default as wide and colourful as its terminal."""
    isatty = getattr(file, "isatty", None)  # a notebook's replacement of a file may lack it
    is_terminal = isatty is not None and isatty()
    if width is None and is_terminal:
        width = max(shutil.get_terminal_size().columns, _NARROWEST)
    if color is None:
        has_colors = os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        color = is_terminal and has_colors and not os.environ.get("NO_COLOR")
    text = text_of(subject, width=width, color=bool(color))
    can_write = _can_write(_DRAWN, getattr(file, "encoding", None))
    return text if can_write else text.translate(_IN_ASCII)


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


def _drawn(cells: Cells, width: int) -> Drawing:
    sharded = [dimension for dimension, parts in enumerate(cells.parts) if parts > 1]
    if len(sharded) > 1:
        return Matrix(cells, sharded[:-2], sharded[-2], sharded[-1], width).draw()
    return draw_box(rows_along(cells, sharded[0] if sharded else 0, width)), []


def _colored(text: str, style: Style) -> str:
    kind, _, number = style.partition(" ")
    if kind == PROCESS:
        return f"\x1b[38;5;{PALETTE[int(number) % len(PALETTE)]}m{text}\x1b[0m"
    code = {FAINT: 2, _TITLE: 1}.get(style)
    return text if code is None else f"\x1b[{code}m{text}\x1b[0m"

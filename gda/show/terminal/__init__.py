"""Pictures as text, within a number of columns.

An array is a box of its blocks (``blocks``), drawn with lines (``frames``). Blocks that do not fit
are folded, so the cost does not grow with their number.
"""

from __future__ import annotations

import operator
import shutil
from itertools import zip_longest
from typing import TextIO

from gda.layout.tables import wrap
from gda.show.subject import Subject
from gda.show.terminal.blocks import PADDING, draw
from gda.show.terminal.frames import fit
from gda.show.words import facts

_WIDTH = 80
_NARROWEST = 20
_KEY_WIDTH = 8

_DRAWN = f"┌┬┐├┼┤└┴┘─│…{PADDING}"
_IN_ASCII = str.maketrans(_DRAWN, "+++++++++-|.#")


def text_of(subject: Subject, *, width: int | None = None, header: bool = True) -> str:
    """Return the picture as ``gda.show.text`` does."""
    width = _check_width(width)
    drawing, notes = draw(subject, width)
    if subject.has_padding:
        notes.append((PADDING, f"padding in a part of the block, {PADDING * 3} in all of it"))
    above: list[str] = []
    if header:
        dtype = "" if subject.dtype is None else f" {subject.dtype}"
        above += wrap(f"{subject.kind} {subject.shape}{dtype}", width)
        notes = [*facts(subject), *notes]
    for key, text in notes:
        parts = zip_longest([key], wrap(text, width - _KEY_WIDTH), fillvalue="")
        above += [f"{fit(word, _KEY_WIDTH)}{part}" for word, part in parts]
    lines = [*above, "", *drawing] if above else drawing
    return "\n".join(line.rstrip() for line in lines)


def text_for(subject: Subject, file: TextIO, *, width: int | None = None) -> str:
    """Return the picture for a file, by default as wide as its terminal."""
    isatty = getattr(file, "isatty", None)  # a notebook's replacement of a file may lack it
    if width is None and isatty is not None and isatty():
        width = max(shutil.get_terminal_size().columns, _NARROWEST)
    text = text_of(subject, width=width)
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

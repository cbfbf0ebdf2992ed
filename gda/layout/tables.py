"""Plain text that fits the columns of a terminal: tables, and texts broken into lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Sequence

from gda.layout.text import printable

_GAP = "  "
_NARROWEST = 8  # columns of a cell that is wrapped
_NO_LIMIT = 10**9


def table(
    rows: Iterable[Sequence[str]], *, right: Container[str] = (), width: int | None = None
) -> list[str]:
    """Return the lines of a table; cells of the widest columns are wrapped if it is too wide.

    The first row may have names of columns. Those in ``right`` are aligned to the right, and
    only their name is wrapped, so that no number is broken. Control characters are escaped.

    >>> print(*table([['name', 'size'], ['a', '1'], ['bc', '16']], right={'size'}), sep='\\n')
    name  size
    a        1
    bc      16
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return []
    room = _NO_LIMIT if width is None else width - len(_GAP) * (len(cells[0]) - 1)
    to_right = [name in right for name in cells[0]]
    columns = [[*map(len, column)] for column in zip(*cells, strict=True)]
    least = [
        max([_NARROWEST, *column[1:]] if is_right else [_NARROWEST])
        for column, is_right in zip(columns, to_right, strict=True)
    ]
    widths = _fitting([*map(max, columns)], least, room)
    lines = []
    for row in cells:
        parts = itertools.zip_longest(*map(wrap, row, widths), fillvalue="")
        lines += [_GAP.join(map(_aligned, line, widths, to_right)).rstrip() for line in parts]
    return lines


def _aligned(text: str, width: int, is_right: bool) -> str:
    return text.rjust(width) if is_right else text.ljust(width)


def _fitting(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the widths, the largest of them reduced to one that lets all of them fit.

    None is reduced below its least.
    """
    if sum(widths) <= room:
        return [*widths]

    def reduced(most: int) -> list[int]:
        return [min(width, max(most, few)) for width, few in zip(widths, least, strict=True)]

    most = _NARROWEST
    while sum(reduced(most + 1)) <= room:
        most += 1
    return reduced(most)


# A line may end after spaces and commas, but within numbers and paths only if nothing else helps.
_BREAKS = (r"(?:[^ ,]|,(?=[0-9]))+[ ,]*|[ ,]+", r"[^,]+,*|,+", r"[^./_]+[./_]*|[./_]+")


def wrap(text: str, width: int) -> list[str]:
    """Return a text in lines of at most ``width`` columns."""
    if len(text) <= width:
        return [text]
    lines, taken = [""], 0
    for piece in _pieces(text, width, _BREAKS):
        if taken and taken + len(piece.rstrip()) > width:
            lines.append("")
            taken = 0
        lines[-1] += piece
        taken += len(piece)
    return [line.rstrip() for line in lines]


def _pieces(text: str, width: int, breaks: Sequence[str]) -> Iterator[str]:
    if len(text.rstrip()) <= width:
        yield text
    elif breaks:
        for piece in re.findall(breaks[0], text):
            yield from _pieces(piece, width, breaks[1:])
    else:
        yield from (text[start : start + width] for start in range(0, len(text), width))

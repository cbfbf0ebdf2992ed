"""Plain text that fits the columns of a terminal: tables, and texts broken into lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Sequence

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
        for parts in itertools.zip_longest(*map(wrap, row, widths), fillvalue=""):
            placed = [
                part.rjust(width) if is_right else part.ljust(width)
                for part, width, is_right in zip(parts, widths, to_right, strict=True)
            ]
            lines.append(_GAP.join(placed).rstrip())
    return lines


def _fitting(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths that fit: the largest are reduced to one width, none below its ``least``."""
    if sum(widths) <= room:
        return [*widths]

    def reduced(most: int) -> list[int]:
        return [min(width, max(most, few)) for width, few in zip(widths, least, strict=True)]

    most = _NARROWEST
    while sum(reduced(most + 1)) <= room:
        most += 1
    return reduced(most)


# A line may end after spaces, and after commas that are not within numbers.
_PIECES = re.compile(r"(?:[^ ,]|,(?=[0-9]))+[ ,]*|[ ,]+")


def wrap(text: str, width: int) -> list[str]:
    """Return a text in lines of at most ``width`` characters."""
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]

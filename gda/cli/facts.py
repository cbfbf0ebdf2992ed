"""Facts, tables and pictures that fit the terminal, and sentences with numbers."""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterable, Sequence

from gda.layout.tables import lines_of_rows, table, text_width, wrap
from gda.layout.text import counted, format_bytes, printable
from gda.planning.planned_array import PlannedArray

_LABEL = 14  # wide enough for all labels, so that the answers below each other are aligned
_INDENT = " " * 12
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


def two_tables(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    first: int,
    *,
    right: Container[str],
) -> list[str]:
    """Return a table, with at least two lines for each row if it is too wide.

    The first line has the ``first`` columns; the others are below it, indented.
    """
    width, rows = terminal_width(), [header, *rows]
    one = table(rows, right=right)
    if max(map(text_width, one)) <= width:
        return one
    above = lines_of_rows([row[:first] for row in rows], right=right, width=width)
    rest = [row[first:] for row in rows]
    below = lines_of_rows(rest, right=right, width=width - len(_INDENT))
    lines: list[str] = []
    for upper, lower in zip(above, below, strict=True):
        lines += [*upper, *(f"{_INDENT}{line}" for line in lower)]
    return lines


def left_out(shown: int, count: int, one: str) -> list[str]:
    """Return the line for the rows that a table omits; none if it has all of ``count``.

    ``one`` is the word for a row.
    """
    if shown == count:
        return []
    more = counted(count - shown, f"more {one}", f"more {one}{'es' if one.endswith('s') else 's'}")
    return [f"… {more}; --json lists them"]


def picture_lines(array: PlannedArray) -> list[str]:
    """Return the lines of a picture of an array, without the facts that the command prints."""
    from gda import show

    width = max(terminal_width(), _NARROWEST_PICTURE)
    return show.text(array.grid, dtype=array.dtype, width=width, header=False).split("\n")


def held_and_distinct(held: int, distinct: Iterable[int]) -> str:
    """Return the bytes on the devices of a process, and the least and most that are distinct."""
    all_of_it = format_bytes(held)
    least_and_most = [*dict.fromkeys(map(format_bytes, distinct))]
    if least_and_most == [all_of_it]:
        return all_of_it
    return f"{all_of_it}; {' to '.join(least_and_most)} of it distinct"

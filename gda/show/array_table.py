"""A table of arrays, the largest of them, for a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gda.layout.text import format_bytes, format_more
from gda.show.report import Table

T = TypeVar("T")

ROWS_SHOWN = 20
WIDTH = 100


def array_table(
    header: Sequence[str],
    arrays: Sequence[T],
    cells_of: Callable[[T], Sequence[str]],
    nbytes_of: Callable[[T], int],
) -> list[str | Table]:
    """Return a table of the largest arrays, the largest first, and a line for the others.

    From the fourth column on, cells are numbers. Without arrays, there is no table.
    """
    others = arrays[ROWS_SHOWN:]
    nbytes = format_bytes(sum(map(nbytes_of, others)))
    more = [f"{format_more(len(others))}, {nbytes}"] if others else []
    rows = [header, *map(cells_of, arrays[:ROWS_SHOWN])]
    return [Table(rows, header[3:], WIDTH), *more] if arrays else []

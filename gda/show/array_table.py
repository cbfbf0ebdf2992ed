"""A table of arrays, the largest of them, as text and as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from gda.layout.tables import table
from gda.layout.text import format_bytes, format_more
from gda.show.markup import html_table

T = TypeVar("T")

ROWS_SHOWN = 20
_WIDTH = 100


class ArrayTable(NamedTuple):
    """Cells of text; from the fourth column on they are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: Sequence[str]  # a line for the arrays that are not shown

    def lines(self) -> list[str]:
        """Return the lines of the table, and that for the others."""
        return [*table([self.header, *self.rows], right=self.header[3:], width=_WIDTH), *self.more]

    def html(self) -> str:
        """Return the table as HTML, without ``more``."""
        return html_table(self.header, self.rows)


def array_table(
    header: Sequence[str],
    arrays: Sequence[T],
    cells_of: Callable[[T], Sequence[str]],
    nbytes_of: Callable[[T], int],
) -> ArrayTable:
    """Return the table of some arrays, of which the largest are first."""
    others = arrays[ROWS_SHOWN:]
    nbytes = format_bytes(sum(map(nbytes_of, others)))
    more = [f"{format_more(len(others))}, {nbytes}"] if others else []
    return ArrayTable(header, [cells_of(each) for each in arrays[:ROWS_SHOWN]], more)

"""A report: lines and tables, which ``print`` shows as text and a notebook as HTML."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from gda.layout.tables import table
from gda.show.markup import element, html_table, paragraph


class Table(NamedTuple):
    """A table in a report: rows of text, the first with the names of the columns if it has some.

    The columns of the names in ``right`` are aligned to the right. ``indent`` is for the text.
    """

    rows: Sequence[Sequence[str]]
    right: Container[str] = ()
    width: int | None = None
    has_names: bool = True
    indent: str = ""

    def lines(self) -> list[str]:
        return [self.indent + line for line in table(self.rows, right=self.right, width=self.width)]


class Report:
    """A base of values that are shown as the parts of a report, each a line or a table."""

    __slots__ = ()

    def _parts(self) -> Iterable[str | Table]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(text_of(self._parts()))

    def _repr_html_(self) -> str:
        found = [
            paragraph(part) if isinstance(part, str) else html_table(*part[:2], part.has_names)
            for part in self._parts()
            if part != ""
        ]
        return element(f"<div>{''.join(found)}</div>")


def text_of(parts: Iterable[str | Table]) -> list[str]:
    """Return the lines of a report."""
    return [line for part in parts for line in ([part] if isinstance(part, str) else part.lines())]

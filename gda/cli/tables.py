"""Lines of plain text that fit the terminal, and words with numbers.

Whatever is laid out here may come from a file, so what a terminal would obey is escaped.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Sequence

from gda.layout.text import counted, format_bytes, printable

_GAP = "  "
_LABEL = 14  # wide enough for all labels, so that the answers below each other are aligned
_INDENT = " " * 12
_NARROWEST = 8
_NO_LIMIT = 10**9


def terminal_width() -> int:
    """Return the columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size().columns


def facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of labels and what they are; a label that is empty continues the one above.

    >>> print(*facts([('mesh', 'x=8'), ('spec', "P('x')")]), sep='\\n')
    mesh          x=8
    spec          P('x')
    """
    width = max(terminal_width() - _LABEL, _NARROWEST)
    lines = []
    for label, value in rows:
        for part in wrapped(printable(value), width):
            lines.append(f"{label:{_LABEL}}{part}".rstrip())
            label = ""
    return lines


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[str] = ()
) -> list[str]:
    """Return the lines of a table; cells of the widest columns are wrapped where it is too wide.

    Args:
      header: the names of the columns.
      rows: their cells.
      right: the names of the columns that are aligned to the right.

    >>> print(*table(['name', 'size'], [['a', '1'], ['bc', '16']], right={'size'}), sep='\\n')
    name  size
    a        1
    bc      16
    """
    return [
        line
        for row in table_rows(header, rows, right=right, width=terminal_width())
        for line in row
    ]


def two_tables(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    first: int,
    *,
    right: Container[str],
) -> list[str]:
    """Return a table, but if it is too wide with at least two lines for each row.

    Args:
      header, rows, right: as for ``table``.
      first: of how many columns the first line is; the others stand below it, indented.
    """
    width = terminal_width()
    one = [line for row in table_rows(header, rows, right=right, width=_NO_LIMIT) for line in row]
    if max(map(len, one)) <= width:
        return one
    above = table_rows(header[:first], [row[:first] for row in rows], right=right, width=width)
    below = table_rows(
        header[first:], [row[first:] for row in rows], right=right, width=width - len(_INDENT)
    )
    lines: list[str] = []
    for upper, lower in zip(above, below, strict=True):
        lines += [*upper, *(f"{_INDENT}{line}" for line in lower)]
    return lines


def table_rows(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[str], width: int
) -> list[list[str]]:
    """Return for the header and each row of a table its lines, of at most so many columns."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = _fitting(
        [max(map(len, column)) for column in zip(*cells, strict=True)],
        width - len(_GAP) * (len(header) - 1),
    )
    to_right = [name in right for name in header]
    lines_of_rows = []
    for row in cells:
        parts = map(wrapped, row, widths)
        lines_of_rows.append(
            [
                _GAP.join(
                    part.rjust(room) if is_right else part.ljust(room)
                    for part, room, is_right in zip(line, widths, to_right, strict=True)
                ).rstrip()
                for line in itertools.zip_longest(*parts, fillvalue="")
            ]
        )
    return lines_of_rows


def _fitting(widths: Sequence[int], room: int) -> list[int]:
    """Return the widths, the largest of them reduced to one that lets all of them fit."""
    if sum(widths) <= room:
        return [*widths]
    most = _NARROWEST
    while sum(min(width, most + 1) for width in widths) <= room:
        most += 1
    return [min(width, most) for width in widths]


# Where a line may end: after spaces and commas, but within numbers only if nothing else helps.
_BREAKS = (r"(?:[^ ,]|,(?=[0-9]))+[ ,]*|[ ,]+", r"[^,]+,*|,+")


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most so many columns.

    >>> wrapped('data=1024,model=16: 16,384 devices', 18)
    ['data=1024,', 'model=16: 16,384', 'devices']
    """
    if len(text) <= width:
        return [text]
    lines = [""]
    for piece in _pieces(text, width):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(text: str, width: int, breaks: Sequence[str] = _BREAKS) -> Iterator[str]:
    """Yield the parts between which a text may be broken, none of them too wide."""
    if len(text.rstrip()) <= width:
        yield text
    elif breaks:
        for piece in re.findall(breaks[0], text):
            yield from _pieces(piece, width, breaks[1:])
    else:
        yield from (text[at : at + width] for at in range(0, len(text), width))


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence has them.

    >>> listed(['a', 'b', 'c'])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def left_out(shown: int, count: int, one: str, in_json: int | None = None) -> list[str]:
    """Return the line that stands for what is left out of a table, if anything is.

    Args:
      shown: how many rows there are.
      count: of how many.
      one: what a row is.
      in_json: how many of them ``--json`` lists at most, if it does not list all.

    >>> left_out(5, 12, 'link'), left_out(5, 5, 'link'), left_out(16, 30_000, 'device', 16_384)
    (['… 7 more links; --json lists them'], [], ['… 29,984 more devices; --json lists 16,384'])
    """
    if shown == count:
        return []
    what = "them" if in_json is None or count <= in_json else f"{in_json:,}"
    return [f"… {counted(count - shown, f'more {one}')}; --json lists {what}"]


def in_processes(num_devices: int, devices_per_process: int) -> str:
    """Return a number of devices in words.

    >>> in_processes(1024, 8), in_processes(4, 4)
    ('1,024 devices in 128 processes of 8', '4 devices')
    """
    devices, processes = counted(num_devices, "device"), num_devices // devices_per_process
    if processes == 1:
        return devices
    return f"{devices} in {processes:,} processes of {devices_per_process:,}"


def held_and_distinct(held: int, distinct: Iterable[int]) -> str:
    """Return the bytes on the devices of a process, and the least and the most that are distinct.

    >>> held_and_distinct(96, [48, 48]), held_and_distinct(96, [48, 96]), held_and_distinct(8, [8])
    ('96 B; 48 B of it distinct', '96 B; 48 B to 96 B of it distinct', '8 B')
    """
    all_of_it = format_bytes(held)
    least_and_most = [*dict.fromkeys(map(format_bytes, distinct))]
    if least_and_most == [all_of_it]:
        return all_of_it
    return f"{all_of_it}; {' to '.join(least_and_most)} of it distinct"

"""Aligned columns of plain text, and words with numbers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

_GAP = "  "
_LABEL = 14  # wide enough for all labels, so that the answers below each other are aligned


def facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of labels and what they are; a label that is empty continues the one above.

    >>> print(*facts([('mesh', 'x=8'), ('spec', "P('x')")]), sep='\\n')
    mesh          x=8
    spec          P('x')
    """
    return [f"{label:{_LABEL}}{value}".rstrip() for label, value in rows]


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[str] = ()
) -> list[str]:
    """Return the lines of a table.

    Args:
      header: the names of the columns.
      rows: their cells.
      right: the names of the columns that are aligned to the right.

    >>> print(*table(['name', 'size'], [['a', '1'], ['bc', '16']], right={'size'}), sep='\\n')
    name  size
    a        1
    bc      16
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    to_right = [name in right for name in header]
    return [
        _GAP.join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, to_right, strict=True)
        ).rstrip()
        for row in cells
    ]


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> counted(1, 'device'), counted(1024, 'device'), counted(2, 'copy', 'copies')
    ('1 device', '1,024 devices', '2 copies')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence has them.

    >>> listed(['a', 'b', 'c'])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

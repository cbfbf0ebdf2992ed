"""Blocks along one dimension: below each other, or side by side in strips."""

from __future__ import annotations

from collections.abc import Sequence

from gda.layout.tables import text_width
from gda.show.terminal.cells import Cells, Manner
from gda.show.terminal.frames import BoxRow, Cell, fit
from gda.show.terminal.matrix import MOST_LINES, NARROWEST_COLUMN
from gda.show.words import Gap, fold

_BETWEEN_FIELDS = "   "
_LIST_LEFT = 16
_STRIPS_LEFT = 6
_LINES_OF_STRIP = 4


def rows_along(cells: Cells, dimension: int, width: int) -> list[BoxRow]:
    """Return the blocks along a dimension: side by side if it is the last one and sharded."""
    is_last = dimension == len(cells.parts) - 1 and cells.parts[dimension] > 1
    rows = _side_by_side(cells, dimension, width) if is_last else None
    return rows or _below_each_other(cells, dimension, width)


def _below_each_other(cells: Cells, dimension: int, width: int) -> list[BoxRow]:
    """Return the blocks along a dimension, each in a line if that fits."""
    count = cells.parts[dimension] if cells.parts else 1
    is_short = 2 * count < MOST_LINES
    drawn = [
        cells.gap(part) if isinstance(part, Gap) else cells.cell({dimension: part}, Manner.INDEX)
        for part in (range(count) if is_short else fold(count, _LIST_LEFT))
    ]
    room = width - 4
    blocks = [cell for cell in drawn if not cell.is_gap]
    fields = [max(map(text_width, texts)) for texts in zip(*(b.lines for b in blocks), strict=True)]
    if sum(fields) + len(_BETWEEN_FIELDS) * (len(fields) - 1) <= room:
        drawn = [cell if cell.is_gap else _in_one_line(cell, fields) for cell in drawn]
    else:
        drawn = [cell.wrapped(room, cuts_words=True) for cell in drawn]
    widest = max(cell.width for cell in drawn)
    return [BoxRow([cell], [widest]) for cell in drawn]


def _in_one_line(cell: Cell, fields: Sequence[int]) -> Cell:
    return Cell([_BETWEEN_FIELDS.join(map(fit, cell.lines, fields))], cell.style)


def _side_by_side(cells: Cells, dimension: int, width: int) -> list[BoxRow] | None:
    """Return the blocks along a dimension in strips; None if only one fits into a strip."""
    count = cells.parts[dimension]
    per_strip = min(count, (width - 1) // NARROWEST_COLUMN)
    while per_strip > 1:
        strips = _strips(cells, dimension, per_strip)
        widest = max(cell.width for strip in strips for cell in strip if not cell.is_gap)
        fitting = (width - 1) // (widest + 3)
        if per_strip <= fitting:
            whole = per_strip * (widest + 3) - 3
            return [
                BoxRow(strip, [whole if strip[0].is_gap else widest] * len(strip))
                for strip in strips
            ]
        per_strip = _even(count, fitting)
    return None


def _strips(cells: Cells, dimension: int, per_strip: int) -> list[list[Cell]]:
    count = cells.parts[dimension]
    num_strips = -(-count // per_strip)
    is_low = num_strips * _LINES_OF_STRIP < MOST_LINES
    strips = []
    for strip in range(num_strips) if is_low else fold(num_strips, _STRIPS_LEFT):
        if isinstance(strip, Gap):
            strips.append([cells.gap(Gap(strip.count * per_strip))])
        else:
            parts = range(strip * per_strip, min(count, (strip + 1) * per_strip))
            drawn = [cells.cell({dimension: part}, Manner.INDEX) for part in parts]
            strips.append([cell.wrapped() for cell in drawn])
    return strips


def _even(count: int, most: int) -> int:
    """Return the number of columns for blocks: a power of two if it leaves no rest."""
    power = 1 << (most.bit_length() - 1) if most else 1
    return power if count % power == 0 else most

"""Pictures as text, within a number of columns.

An array is a box of its blocks. Those of one or two sharded dimensions are in rows and columns if
they fit. Others are below each other, and folded if they are many, so that the cost is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gda.layout.indices import start_of
from gda.layout.numbering import IntArray
from gda.layout.spec import Index
from gda.layout.tables import wrap
from gda.layout.text import format_index, format_more, format_processes
from gda.show.subject import Subject
from gda.show.words import Gap, facts, fold, format_devices, padding_of, processes_at

NARROWEST = 20
_WIDTH = 80
_KEY_WIDTH = 8
_BETWEEN_FIELDS = "   "

_PADDING = "░"  # beside an index: once if a part of the block is padding, three times if all is

# Of blocks in rows and columns, and of lines for blocks below each other.
_MOST_BLOCKS, _MOST_LINES = 512, 66
_BLOCKS_LEFT = 16

_Cell = Sequence[str]  # its lines


def text_of(subject: Subject, *, width: int | None = None) -> str:
    """Return the picture as ``gda.show.text`` does."""
    width = _WIDTH if width is None else width
    if width < NARROWEST:
        raise ValueError(
            f"width={width} is too narrow for a picture; give {NARROWEST} columns or more"
        )
    dtype = "" if subject.dtype is None else f" {subject.dtype}"
    above = wrap(f"{subject.kind} {subject.shape}{dtype}", width)
    notes = facts(subject)
    if subject.has_padding:
        notes.append((_PADDING, f"padding in a part of the block, {_PADDING * 3} in all of it"))
    for key, text in notes:
        parts = zip_longest([key], wrap(text, width - _KEY_WIDTH), fillvalue="")
        above += [f"{word:{_KEY_WIDTH}}{part}" for word, part in parts]
    box = _box(_in_rows_and_columns(subject, width) or _below_each_other(subject, width))
    return "\n".join([*above, "", *box])


def _in_rows_and_columns(subject: Subject, width: int) -> list[list[_Cell]] | None:
    """Return rows of cells; None if they do not fit."""
    count, parts = subject.grid.num_shards, subject.grid.parts
    sharded = [dimension for dimension, ways in enumerate(parts) if ways > 1]
    has_columns = len(sharded) == 2 or sharded == [len(parts) - 1]
    if not has_columns or count > _MOST_BLOCKS:
        return None
    columns = parts[sharded[-1]]
    cells: list[_Cell] = [_cell(subject, block) for block in range(count)]
    lines = count // columns * (len(cells[0]) + 1) + 1
    if columns * (_widest(cells) + 3) + 1 > width or lines > _MOST_LINES:
        return None
    return [cells[start : start + columns] for start in range(0, count, columns)]


def _below_each_other(subject: Subject, width: int) -> list[list[_Cell]]:
    """Return a row for each block, of one line if that fits."""
    count, room = subject.grid.num_shards, width - 4
    blocks = range(count) if 2 * count < _MOST_LINES else fold(count, _BLOCKS_LEFT)
    found = [each if isinstance(each, Gap) else _cell(subject, each) for each in blocks]
    sizes = [[*map(len, cell)] for cell in found if not isinstance(cell, Gap)]
    fields = [*map(max, zip(*sizes, strict=True))]
    is_one_line = sum(fields) + len(_BETWEEN_FIELDS) * (len(fields) - 1) <= room

    def drawn(cell: _Cell | Gap) -> _Cell:
        if isinstance(cell, Gap):
            return [format_more(cell.count)]
        if is_one_line:
            return [_BETWEEN_FIELDS.join(map(str.ljust, cell, fields))]
        return [part for line in cell for part in wrap(line, room)]

    return [[drawn(cell)] for cell in found]


def _cell(subject: Subject, block: int) -> list[str]:
    """Return index, devices and processes of a block."""
    index = subject.grid.block_index(block)
    positions = _holders(subject, block, index)
    padding, total = padding_of(subject, index)
    mark = f" {_PADDING * (1 if padding < total else 3)}" if padding else ""
    lines = [format_index(index)[1:-1] + mark, format_devices(subject, positions)]
    # The lines above the box name a single process.
    if subject.grid.processes is not None and subject.grid.num_processes > 1:
        lines.append(format_processes(processes_at(subject, positions)))
    return lines


def _holders(subject: Subject, block: int, index: Index) -> IntArray:
    first = start_of(index)
    if all(at < size for at, size in zip(first, subject.shape, strict=True)):
        return subject.grid.locate(first)  # for one block alone, of many
    return subject.holders[block]


def _box(rows: Sequence[Sequence[_Cell]]) -> list[str]:
    """Return the lines of a box with rules around all cells."""
    width = max(map(_widest, rows))
    rules = ["─" * (width + 2)] * len(rows[0])
    lines = [f"┌{'┬'.join(rules)}┐"]
    for number, row in enumerate(rows):
        lines += [f"├{'┼'.join(rules)}┤"] if number else []
        for texts in zip_longest(*row, fillvalue=""):
            lines.append(f"│ {' │ '.join(text.ljust(width) for text in texts)} │")
    return [*lines, f"└{'┴'.join(rules)}┘"]


def _widest(cells: Sequence[_Cell]) -> int:
    return max(len(line) for cell in cells for line in cell)

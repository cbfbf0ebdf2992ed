"""The blocks of an array in cells: in rows and columns, below each other, or side by side.

The last two sharded dimensions run down and across, with a box for each part of the others. The
blocks of a single one stand side by side if it is the last dimension, else below each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Index
from gda.layout.tables import text_width, wrap
from gda.layout.text import (
    format_index,
    format_more,
    format_numbers,
    format_processes,
    format_slice,
)
from gda.show.subject import Subject
from gda.show.terminal.frames import (
    BoxRow,
    Cell,
    beside,
    box_width,
    cell_width,
    draw_box,
    fit,
    heads,
)
from gda.show.words import Gap, fold, format_devices, padding_of, processes_at

Parts = Sequence[int | Gap]
Notes = list[tuple[str, str]]  # key words and texts

PADDING = "░"
"""Beside the index of a block: once if a part of it is padding, three times if all is."""

_MOST_LINES = 66  # of a drawing that is not folded for its height
_NARROWEST_COLUMN = 5
_BETWEEN_FIELDS = "   "

# The most blocks with all their words in a matrix, and the places, a gap among them, that folding
# leaves.
_MOST_BLOCKS = 512
_MOST_LAYERS, _LAYERS_LEFT = 8, 4
_ROWS_LEFT = (12, 8, 4)
_FEWEST_COLUMNS = 3
_LIST_LEFT, _STRIPS_LEFT = 16, 6
_LINES_OF_STRIP = 4


def draw(subject: Subject, width: int) -> tuple[list[str], Notes]:
    """Return the lines of a drawing in so many columns, and notes about it."""
    blocks = _Blocks(subject)
    sharded = [dimension for dimension, parts in enumerate(blocks.parts) if parts > 1]
    if len(sharded) > 1:
        return _Matrix(blocks, sharded[:-2], sharded[-2], sharded[-1], width).draw()
    dimension = sharded[0] if sharded else 0
    is_last = sharded == [len(blocks.parts) - 1]
    rows = _side_by_side(blocks, dimension, width) if is_last else None
    return draw_box(rows or _below_each_other(blocks, dimension, width)), []


class _Blocks:
    """The cells of a subject's blocks."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.parts = subject.grid.parts
        # The lines above the box name a single process.
        self.has_processes = subject.grid.processes is not None and subject.grid.num_processes > 1

    def cell(self, part_of: Mapping[int, int]) -> Cell:
        """Return index, devices and processes of the block at these parts, by default 0."""
        positions = self._holders(part_of)
        index = self.index(part_of)
        lines = [format_index(index)[1:-1] + self._mark(index)]
        lines.append(format_devices(self.subject, positions))
        if self.has_processes:
            lines.append(format_processes(processes_at(self.subject, positions)))
        return lines

    def numbers(self, part_of: Mapping[int, int]) -> Cell:
        """Return the numbers of the devices and processes of a block."""
        positions = self._holders(part_of)
        lines = [format_numbers(self.subject.numbers(positions))]
        if self.has_processes:
            lines.append(f"p{format_numbers(processes_at(self.subject, positions))}")
        return lines

    @property
    def key_to_numbers(self) -> str:
        kind, has_ids = self.subject.device_kind, self.subject.device_ids is not None
        what = f"numbers of devices ({kind})" if has_ids else f"numbers of {kind}s"
        return f"{what}, p0 for process 0" if self.has_processes else what

    def slice(self, dimension: int, part: int) -> str:
        """Return the slice of a dimension, for the edge of a box."""
        index = self.index({dimension: part})
        return format_slice(index[dimension], index[dimension]) + self._mark(index)

    def index(self, part_of: Mapping[int, int]) -> Index:
        return self.subject.grid.block_index(self._number(part_of))

    def _number(self, part_of: Mapping[int, int]) -> int:
        at = [part_of.get(dimension, 0) for dimension in range(len(self.parts))]
        return int(np.ravel_multi_index(at, self.parts)) if at else 0

    def _holders(self, part_of: Mapping[int, int]) -> IntArray:
        grid = self.subject.grid
        first = [part_of.get(at, 0) * step for at, step in enumerate(grid.shard_shape)]
        if all(at < size for at, size in zip(first, grid.global_shape, strict=True)):
            return grid.locate(first)  # for one block alone, of many
        return self.subject.holders[self._number(part_of)]

    def _mark(self, index: Index) -> str:
        padding, total = padding_of(self.subject, index)
        return f" {PADDING * (1 if padding < total else 3)}" if padding else ""


# Rows and columns.


class _Way(NamedTuple):
    """The layers, rows and columns to draw; with all words, or with numbers only."""

    layers: Parts
    rows: Parts
    columns: Parts
    has_words: bool


class _Table(NamedTuple):
    """The texts of the boxes, with ``margin`` columns of text left of them."""

    layers: Sequence[tuple[int | Gap, Sequence[Sequence[Cell]]]]  # with the rows of each
    labels: Sequence[str]  # left of the rows
    tops: Sequence[Cell]  # above the columns
    widths: Sequence[int]  # of the texts in each column
    margin: int


class _Matrix(NamedTuple):
    """The blocks of an array that is sharded along two dimensions or more."""

    blocks: _Blocks
    outer: Sequence[int]  # the other sharded dimensions; a box shows one part of each, a *layer*
    down: int  # the dimension of the rows
    across: int
    width: int  # the most columns of text

    def draw(self) -> tuple[list[str], Notes]:
        """Return the lines of the first way that fits, and the notes about them."""
        *ways, last = self._ways()
        for way in ways:
            table = self._table(way)
            if table.margin + box_width(table.widths) <= self.width:
                lines = self._lines(table)
                if len(lines) <= _MOST_LINES:
                    return lines, self._notes(way)
        table = self._table(last)  # with shortened texts
        margin = min(table.margin, self.width // 3)
        most = (self.width - margin - 1) // len(table.widths) - 3
        widths = [min(width, most) for width in table.widths]
        return self._lines(table._replace(widths=widths, margin=margin)), self._notes(last)

    def _notes(self, way: _Way) -> Notes:
        if way.has_words:
            return []
        sides = f"rows dimension {self.down}, columns dimension {self.across}"
        is_deep = len(self.blocks.parts) > 2
        return [("cells", self.blocks.key_to_numbers)] + [("sides", sides)] * is_deep

    def _ways(self) -> Iterator[_Way]:
        parts = self.blocks.parts
        num_rows, num_columns = parts[self.down], parts[self.across]
        num_layers = math.prod(parts[dimension] for dimension in self.outer)
        few_layers = fold(num_layers, _LAYERS_LEFT)
        is_few = num_layers <= _MOST_LAYERS
        for layers in (range(num_layers) if is_few else few_layers, few_layers):
            if len(layers) * num_rows * num_columns <= _MOST_BLOCKS:
                for has_words in (True, False):
                    yield _Way(layers, range(num_rows), range(num_columns), has_words)
        last = self.blocks.numbers({dimension: count - 1 for dimension, count in enumerate(parts)})
        most = min((self.width - _NARROWEST_COLUMN) // (cell_width(last) + 3), num_columns)
        for room in _ROWS_LEFT:
            rows = fold(num_rows, room)
            for left in range(max(most, _FEWEST_COLUMNS), _FEWEST_COLUMNS - 1, -1):
                yield _Way(few_layers, rows, fold(num_columns, left), False)

    def _table(self, way: _Way) -> _Table:
        layers = [(each, self._layer(each, way)) for each in way.layers]
        rows = [row for _, layer in layers for row in layer]
        labels, tops = [""] * len(way.rows), []
        if not way.has_words:
            labels = [self._label(part) for part in way.rows]
            rows.append(tops := [self._top(part) for part in way.columns])
        widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
        columns = [*zip(way.columns, widths, strict=True)]
        widest = max(width for column, width in columns if not isinstance(column, Gap))
        widths = [width if isinstance(column, Gap) else widest for column, width in columns]
        margin = 0 if way.has_words else cell_width(labels) + 1
        return _Table(layers, labels, tops, widths, margin)

    def _layer(self, layer: int | Gap, way: _Way) -> list[list[Cell]]:
        """Return the cells of a layer, those of folded rows and columns too."""
        if isinstance(layer, Gap):
            return []
        cell_at = self.blocks.cell if way.has_words else self.blocks.numbers
        at = self._parts_of(layer)
        return [
            [
                ["…"]
                if isinstance(row, Gap) or isinstance(column, Gap)
                else cell_at({**at, self.down: row, self.across: column})
                for column in way.columns
            ]
            for row in way.rows
        ]

    def _label(self, part: int | Gap) -> str:
        """Return the text left of a row."""
        is_gap = isinstance(part, Gap)
        return format_more(part.count) if is_gap else self.blocks.slice(self.down, part)

    def _top(self, part: int | Gap) -> Cell:
        """Return the text above a column, in two lines."""
        if isinstance(part, Gap):
            return f"… {part.count:,}", "more"
        start, _, stop = self.blocks.slice(self.across, part).partition(":")
        return f"{start}:", stop

    def _lines(self, table: _Table) -> list[str]:
        """Return the boxes of the layers, with a line for folded layers."""
        margin = table.margin
        groups: list[list[list[str]]] = [[]]
        for layer, cells_of_rows in table.layers:
            if isinstance(layer, Gap):
                groups += [[[format_more(layer.count)]], []]
                continue
            rows = [
                BoxRow(cells, table.widths, label)
                for cells, label in zip(cells_of_rows, table.labels, strict=True)
            ]
            above = [*self._layer_label(layer, margin), *heads(table.tops, table.widths, margin)]
            groups[-1].append([*above, *draw_box(rows, margin)])
        lines = beside(groups[0], self.width)
        for group in groups[1:]:
            lines += ["", *beside(group, self.width)]
        return lines

    def _layer_label(self, layer: int, margin: int) -> list[str]:
        """Return the lines above a layer: its index in the outer dimensions, in square brackets."""
        if not self.outer:
            return []
        index = self.blocks.index(self._parts_of(layer))[: self.outer[-1] + 1]
        text = f"{format_index(index)[:-1]}, …]"
        return [" " * margin + part for part in wrap(text, self.width - margin)]

    def _parts_of(self, layer: int) -> dict[int, int]:
        """Return the part of each outer dimension in a layer, the last one counting fastest."""
        parts = {}
        for dimension in reversed(self.outer):
            layer, parts[dimension] = divmod(layer, self.blocks.parts[dimension])
        return parts


# One dimension.


def _below_each_other(blocks: _Blocks, dimension: int, width: int) -> list[BoxRow]:
    """Return the blocks along a dimension, each in a line if that fits."""
    count = blocks.parts[dimension] if blocks.parts else 1
    parts = range(count) if 2 * count < _MOST_LINES else fold(count, _LIST_LEFT)
    room = width - 4
    cells = [None if isinstance(part, Gap) else blocks.cell({dimension: part}) for part in parts]
    lines = [[*map(text_width, cell)] for cell in cells if cell is not None]
    fields = [*map(max, zip(*lines, strict=True))]
    is_one_line = sum(fields) + len(_BETWEEN_FIELDS) * (len(fields) - 1) <= room
    drawn: list[Cell] = []
    for part, cell in zip(parts, cells, strict=True):
        if cell is None:
            assert isinstance(part, Gap)
            drawn.append([format_more(part.count)])
        elif is_one_line:
            drawn.append([_BETWEEN_FIELDS.join(map(fit, cell, fields))])
        else:
            drawn.append([part for line in cell for part in wrap(line, room)])
    widest = max(map(cell_width, drawn))
    return [BoxRow([cell], [widest]) for cell in drawn]


def _side_by_side(blocks: _Blocks, dimension: int, width: int) -> list[BoxRow] | None:
    """Return the blocks along a dimension in strips; None if only one fits into a strip."""
    count = blocks.parts[dimension]
    per_strip = min(count, (width - 1) // _NARROWEST_COLUMN)
    while per_strip > 1:
        num_strips = -(-count // per_strip)
        is_low = num_strips * _LINES_OF_STRIP < _MOST_LINES
        strips = range(num_strips) if is_low else fold(num_strips, _STRIPS_LEFT)
        cells: list[list[Cell]] = []
        for strip in strips:
            first = 0 if isinstance(strip, Gap) else strip * per_strip
            stop = 0 if isinstance(strip, Gap) else min(count, first + per_strip)
            cells.append([blocks.cell({dimension: part}) for part in range(first, stop)])
        widest = max(cell_width(cell) for each in cells for cell in each)
        fitting = (width - 1) // (widest + 3)
        if per_strip <= fitting:
            whole = per_strip * (widest + 3) - 3
            return [
                BoxRow([[format_more(strip.count * per_strip)]], [whole])
                if isinstance(strip, Gap)
                else BoxRow(each, [widest] * len(each))
                for strip, each in zip(strips, cells, strict=True)
            ]
        power = 1 << (fitting.bit_length() - 1) if fitting else 1
        per_strip = power if count % power == 0 else fitting
    return None

"""Blocks in rows and columns, and a box of them for each part of further dimensions.

There are several ways to draw them, from all blocks with all their words to a few of them with
numbers only. The first that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gda.layout.tables import wrap
from gda.layout.text import format_index
from gda.show.terminal.cells import Cells, Manner
from gda.show.terminal.frames import (
    FAINT,
    PLAIN,
    BoxRow,
    Cell,
    Line,
    beside,
    box_width,
    draw_box,
    heads,
)
from gda.show.words import Gap, fold

Parts = Sequence[int | Gap]
Drawing = tuple[list[Line], list[tuple[str, str]]]  # a note is a key word and a text

MOST_LINES = 66
"""The most lines of a drawing that is not folded for its height."""

_MOST_BLOCKS = 512
_MOST_LAYERS = 8

# The number of places, a gap among them, that folding leaves.
_LAYERS_LEFT = 4
_ROWS_LEFT = (12, 8, 4)
_FEWEST_COLUMNS = 3

NARROWEST_COLUMN = 5
_WIDEST_LABEL = 16


class Way(NamedTuple):
    """The layers, rows and columns to draw, and the manner of their blocks."""

    layers: Parts
    rows: Parts
    columns: Parts
    manner: Manner


class Table(NamedTuple):
    """The texts and their places, with ``margin`` columns of text left of the boxes."""

    layers: Sequence[list[list[Cell]]]  # the rows of each; none for a gap
    labels: list[Cell]  # left of the rows
    tops: list[Cell]  # above the columns
    widths: list[int]  # of the texts in each column
    margin: int

    @property
    def width(self) -> int:
        return self.margin + box_width(self.widths)


class Matrix(NamedTuple):
    """The blocks of an array that is sharded along two dimensions or more."""

    cells: Cells
    outer: Sequence[int]  # the other sharded dimensions; a box shows one part of each, a *layer*
    down: int  # the dimension of the rows
    across: int
    width: int  # the most columns of text

    def draw(self) -> Drawing:
        """Return the lines of the first way that fits, and the notes about them."""
        *ways, last = self._ways()
        for way in ways:
            if self._least_width(way) <= self.width:
                table = self._table(way)
                lines = self._lines(way, table) if table.width <= self.width else []
                if 0 < len(lines) <= MOST_LINES:
                    return lines, self._notes(way)
        return self._lines(last, self._narrowed(self._table(last))), self._notes(last)

    def _notes(self, way: Way) -> list[tuple[str, str]]:
        """Return notes about the cells and the labels beside them."""
        notes = []
        if way.manner is Manner.NUMBERS:
            notes.append(("cells", self.cells.key_to_numbers))
        if way.manner is not Manner.INDEX and len(self.cells.parts) > 2:
            notes.append(("sides", f"rows dimension {self.down}, columns dimension {self.across}"))
        return notes

    def _ways(self) -> Iterator[Way]:
        parts = self.cells.parts
        num_rows, num_columns = parts[self.down], parts[self.across]
        few_layers = fold(self._num_layers, _LAYERS_LEFT)
        is_few = self._num_layers <= _MOST_LAYERS
        for layers in (range(self._num_layers) if is_few else few_layers, few_layers):
            if len(layers) * num_rows * num_columns <= _MOST_BLOCKS:
                for manner in Manner:
                    yield Way(layers, range(num_rows), range(num_columns), manner)
        most = min(num_columns, self.width // NARROWEST_COLUMN)
        for room in _ROWS_LEFT:
            rows = fold(num_rows, room)
            if most == num_columns:
                yield Way(few_layers, rows, range(num_columns), Manner.WORDS)
            for columns in range(most, _FEWEST_COLUMNS, -1):
                yield Way(few_layers, rows, fold(num_columns, columns), Manner.NUMBERS)
        rows = fold(num_rows, _ROWS_LEFT[-1])
        yield Way(few_layers, rows, fold(num_columns, _FEWEST_COLUMNS), Manner.NUMBERS)

    @property
    def _num_layers(self) -> int:
        return math.prod(self.cells.parts[dimension] for dimension in self.outer)

    def _least_width(self, way: Way) -> int:
        """Return the columns of its blocks if all texts are as short as those of the last one."""
        last = {dimension: parts - 1 for dimension, parts in enumerate(self.cells.parts)}
        width = self._cell(last, way.manner).width
        if way.manner is not Manner.INDEX:
            width = max(width, self._top(last[self.across], way.manner is Manner.NUMBERS).width)
        return box_width([width] * sum(not isinstance(column, Gap) for column in way.columns))

    def _table(self, way: Way) -> Table:
        layers = [[] if isinstance(n, Gap) else self._layer(n, way) for n in way.layers]
        if way.manner is Manner.INDEX:
            no_labels = [Cell([])] * len(way.rows)
            return Table(layers, no_labels, [], self._widths(way, layers, []), 0)
        labels = self._labels(way.rows)
        margin = max(label.width for label in labels) + 1
        tops = [self._top(column, False) for column in way.columns]
        table = Table(layers, labels, tops, self._widths(way, layers, tops), margin)
        if way.manner is not Manner.NUMBERS or table.width <= self.width:
            return table
        tops = [self._top(column, True) for column in way.columns]
        return table._replace(tops=tops, widths=self._widths(way, layers, tops))

    def _narrowed(self, table: Table) -> Table:
        """Return a table whose rows fit the width, with shortened texts."""
        margin = min(table.margin, self.width // 3)
        most = (self.width - margin - 1) // len(table.widths) - 3
        return table._replace(widths=[min(width, most) for width in table.widths], margin=margin)

    def _lines(self, way: Way, table: Table) -> list[Line]:
        """Return the boxes of the layers, with a line for folded layers."""
        margin = table.margin
        groups: list[list[list[Line]]] = [[]]
        for layer, cells_of_rows in zip(way.layers, table.layers, strict=True):
            if isinstance(layer, Gap):
                gap = [(text, FAINT) for text in self.cells.gap(layer).lines]
                groups += [[[gap]], []]
            else:
                rows = [
                    BoxRow(cells, table.widths, label.lines)
                    for cells, label in zip(cells_of_rows, table.labels, strict=True)
                ]
                above = [
                    *self._layer_label(layer, margin),
                    *heads(table.tops, table.widths, margin),
                ]
                groups[-1].append([*above, *draw_box(rows, margin)])
        lines: list[Line] = []
        for group in groups:
            lines += [[]] if lines else []
            lines += beside(group, self.width)
        return lines

    def _layer(self, layer: int, way: Way) -> list[list[Cell]]:
        """Return the cells of a layer, those of folded rows and columns too."""
        at_layer = self._parts_of(layer)
        empty = Cell(["…"], FAINT)
        return [
            [
                empty
                if isinstance(row, Gap) or isinstance(column, Gap)
                else self._cell({**at_layer, self.down: row, self.across: column}, way.manner)
                for column in way.columns
            ]
            for row in way.rows
        ]

    def _cell(self, part_of: Mapping[int, int], manner: Manner) -> Cell:
        return self.cells.cell(part_of, manner).wrapped()

    def _labels(self, rows: Parts) -> list[Cell]:
        """Return the labels left of the rows: in two lines if one would be wide."""
        labels = [self.cells.edge(self.down, row, is_narrow=False) for row in rows]
        if max(label.width for label in labels) <= _WIDEST_LABEL:
            return labels
        return [self.cells.edge(self.down, row, is_narrow=True) for row in rows]

    def _top(self, column: int | Gap, is_narrow: bool) -> Cell:
        return self.cells.edge(self.across, column, is_narrow=is_narrow)

    def _widths(self, way: Way, layers: Sequence[list[list[Cell]]], tops: list[Cell]) -> list[int]:
        """Return the width of each column of a box: one for all columns of blocks."""
        rows = [row for layer in layers for row in layer] + ([tops] if tops else [])
        widths = [max(cell.width for cell in column) for column in zip(*rows, strict=True)]
        columns = list(zip(way.columns, widths, strict=True))
        widest = max(width for column, width in columns if not isinstance(column, Gap))
        return [width if isinstance(column, Gap) else widest for column, width in columns]

    def _layer_label(self, layer: int, margin: int) -> list[Line]:
        """Return the line above a layer: its index in the outer dimensions, in square brackets."""
        if not self.outer:
            return []
        index = self.cells.index(self._parts_of(layer))[: self.outer[-1] + 1]
        text = f"{format_index(index)[:-1]}, …]"
        return [[(" " * margin + part, PLAIN)] for part in wrap(text, self.width - margin)]

    def _parts_of(self, layer: int) -> Mapping[int, int]:
        """Return the part of each outer dimension in a layer, the last one counting fastest."""
        parts = {}
        for dimension in reversed(self.outer):
            layer, parts[dimension] = divmod(layer, self.cells.parts[dimension])
        return parts

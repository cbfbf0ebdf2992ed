"""A rectangle of blocks as visible cells, and their markup.

If there are more blocks than can be seen, or than markup should be spent on, a *cell* stands for
some neighbours. Each is an element with its own hover text, of 200 bytes or so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.text import format_bytes, format_index, format_processes
from gda.show.drawing.sheet import escape, number
from gda.show.subject import Subject
from gda.show.words import format_devices, padding_of, processes_at

MOST_CELLS = 512
"""The most cells of a drawing; with more blocks, cells stand for several."""

_SMALLEST_CELL = 3.0  # pixels
_REPLICAS_NAMED = 8

INK = "#16181d"
"""The colour of the text on the colours of processes."""

# They are light, for dark text on them, so that one choice is right on white pages and dark ones.
# The first have the hues of Paul Tol's "light" scheme, made for labelled cells and for people who
# confuse colours. Each differs from each other one by 20 or more in the space of colours CIELAB.
# People cannot tell more apart, so further processes begin again with the first.
COLORS = (
    *("#77aadd", "#ee9977", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#cc99dd"),
    *("#999977", "#aaffaa", "#669944", "#cceecc", "#44ffff", "#dd66aa", "#cc9944", "#eeddff"),
    *("#ffddcc", "#aa8899", "#dd6677", "#559999", "#7788dd", "#66ffcc", "#aaaa44", "#aacc88"),
)


SHARED = "#c8ccd4"
"""The colour of blocks that several processes hold."""


@dataclass(frozen=True)
class Paint:
    """The colours of a subject's processes."""

    subject: Subject

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The processes, ascending."""
        processes = self.subject.grid.processes
        return (0,) if processes is None else processes.numbers

    @cached_property
    def colors(self) -> tuple[str, ...]:
        return COLORS[: len(self.numbers)]

    def of_blocks(self, blocks: IntArray) -> str:
        """Return the colour of the process that holds some blocks, or that for several."""
        owners = self.subject.owners[blocks]
        if owners.min() < owners.max():
            return SHARED
        return COLORS[bisect_left(self.numbers, owners.min()) % len(COLORS)]


@dataclass(frozen=True, eq=False)
class Face:
    """Blocks side by side, drawn as a rectangle from (0, 0), in pixels."""

    paint: Paint
    blocks: IntArray  # their numbers, ``[rows, columns]``
    width: float
    height: float
    most_cells: int = MOST_CELLS

    @property
    def subject(self) -> Subject:
        return self.paint.subject

    @cached_property
    def rows(self) -> list[int]:
        """The first row of blocks in each row of cells, and the number of all."""
        return folded(self.blocks.shape[0], self._most[0])

    @cached_property
    def columns(self) -> list[int]:
        return folded(self.blocks.shape[1], self._most[1])

    @cached_property
    def _most(self) -> tuple[int, int]:
        rows, columns = self.blocks.shape
        rows = min(rows, int(self.height / _SMALLEST_CELL))
        columns = min(columns, int(self.width / _SMALLEST_CELL))
        if rows * columns > self.most_cells:
            side = math.isqrt(self.most_cells)
            rows = min(rows, max(side, self.most_cells // columns))
            columns = min(columns, self.most_cells // rows)
        return max(rows, 1), max(columns, 1)

    @property
    def num_cells(self) -> int:
        return (len(self.rows) - 1) * (len(self.columns) - 1)

    @property
    def is_folded(self) -> bool:
        return self.num_cells < self.blocks.size

    def edges(self) -> tuple[list[float], list[float]]:
        """Return the starts of the columns and the rows of cells, in pixels, and the ends."""
        rows, columns = self.blocks.shape
        return (
            [round(at * self.width / columns, 2) for at in self.columns],
            [round(at * self.height / rows, 2) for at in self.rows],
        )

    def markup(self, kind: str) -> str:
        """Return the cells in a group of the class ``gda-`` and ``kind``, and the lines over it."""
        return f'<g class="gda-{kind}">{"".join(self._cells())}</g>{self._lines()}'

    def _cells(self) -> Iterator[str]:
        xs, ys = self.edges()
        rows, columns = [*pairwise(self.rows)], [*pairwise(self.columns)]
        for i, (top, bottom) in enumerate(rows):
            for j, (left, right) in enumerate(columns):
                blocks = self.blocks[top:bottom, left:right]
                title = f"<title>{escape(_hover_text(self.subject, blocks))}</title>"
                box = (xs[j], ys[i], xs[j + 1] - xs[j], ys[i + 1] - ys[i])
                yield f'{_rect(*box)} fill="{self.paint.of_blocks(blocks)}">{title}</rect>'

    def _lines(self) -> str:
        """The lines between cells, and around all of them."""
        xs, ys = self.edges()
        width, height = number(self.width), number(self.height)
        lines: list[str] = []
        if not self.is_folded:  # lines between cells of several blocks would hide the others
            lines = [f"M{number(x)} 0v{height}" for x in xs[1:-1]]
            lines += [f"M0 {number(y)}h{width}" for y in ys[1:-1]]
        smallest = min(self.width / (len(xs) - 1), self.height / (len(ys) - 1))
        opacity = 0.65 if smallest > 8 else 0.3
        inner = f'<path d="{"".join(lines)}" stroke-opacity="{opacity}"/>' if lines else ""
        return (
            f'<g fill="none" stroke="{INK}" pointer-events="none">{inner}'
            f'<path class="gda-outline" d="M0 0h{width}v{height}h-{width}z" '
            'stroke-opacity=".85"/></g>'
        )


def folded(parts: int, most: int) -> list[int]:
    """Return the starts of at most ``most`` cells that share the parts evenly, and the end."""
    needed = -(-parts // most)
    step = next((s for s in range(needed, 2 * needed) if parts % s == 0), needed)
    return [*range(0, parts, step), parts]


def _rect(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    )


# Hover texts.


def _hover_text(subject: Subject, blocks: IntArray) -> str:
    """Return some lines about the blocks of these numbers, ``[rows, columns]``, a rectangle."""
    grid = subject.grid
    first, last = (grid.block_index(int(block)) for block in (blocks[0, 0], blocks[-1, -1]))
    index = tuple(slice(a.start, b.stop) for a, b in zip(first, last, strict=True))
    text = format_index(index)
    holders = subject.holders[blocks].ravel()
    if blocks.size > 1:
        in_order = holders[np.argsort(subject.numbers(holders))]
        lines = [f"{text}, {blocks.size:,} blocks", format_devices(subject, in_order)]
    else:
        lines = [text, _replicas(subject, holders)]
    if grid.process_of is not None:
        lines.append(format_processes(processes_at(subject, holders)))
    if subject.block_bytes is not None:
        lines.append(f"{format_bytes(subject.block_bytes)} on each device")
    if subject.has_padding:
        padding, total = padding_of(subject, index, blocks.size)
        lines += [f"{padding:,} of {total:,} elements are padding"] if padding else []
    return "\n".join(lines)


def _replicas(subject: Subject, holders: IntArray) -> str:
    if len(holders) == 1:
        return format_devices(subject, holders)
    is_all = len(holders) <= _REPLICAS_NAMED
    chosen = range(len(holders)) if is_all else (0, 1, len(holders) - 1)
    named = [
        f"{format_devices(subject, holders[replica : replica + 1])} (replica {replica})"
        for replica in chosen
    ]
    if is_all:
        return ", ".join(named)
    return f"{len(holders):,} devices: {named[0]}, {named[1]}, …, {named[2]}"

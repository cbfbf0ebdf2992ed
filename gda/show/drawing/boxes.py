"""Three dimensions and more: boxes seen from the front, above and the right.

A box has the last three dimensions. There is one for each part of the others, and of the first of
the three, so that every block is seen from the front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gda.layout.numbering import IntArray
from gda.layout.text import format_index, format_more
from gda.show.drawing.faces import MOST_CELLS, Face
from gda.show.drawing.picture import Picture
from gda.show.drawing.sheet import number, text_width
from gda.show.drawing.sides import Side, axes_text, sides_of, size_text
from gda.show.words import Gap, fold

_WIDEST = 640  # of rows of boxes
_LONGEST_ALONE = 220
_LONGEST_OF_SEVERAL = 130
_SHORTEST = 44
_FLATTEST = 12

_MOST_BOXES = 16

# The shift of a pixel of depth to the right and up.
_RIGHT, _UP = 0.5, 0.36

_BETWEEN_BOXES = 30
_BELOW_BOX = 44
_CAPTION, _CAPTION_SIZE = 18, 11

# The upper and the right face are darker than the front by these shares.
_SHADE_ABOVE, _SHADE_BESIDE = 0.1, 0.24


@dataclass(frozen=True)
class _BoxSides:
    depth: Side
    down: Side
    across: Side

    @property
    def dx(self) -> float:
        return round(self.depth.length * _RIGHT, 1)

    @property
    def dy(self) -> float:
        return round(self.depth.length * _UP, 1)

    @property
    def width(self) -> float:
        return self.across.length + self.dx

    @property
    def height(self) -> float:
        return self.down.length + self.dy


def draw_boxes(picture: Picture) -> None:
    """Draw a box for each part of the outer dimensions."""
    grid = picture.subject.grid
    rank, depth_parts = len(grid.parts), grid.parts[-3]
    num_boxes = math.prod(grid.parts[:-2])
    longest = _LONGEST_OF_SEVERAL if num_boxes > 1 else _LONGEST_ALONE
    depth, down, across = sides_of(picture.subject, range(rank - 3, rank), longest, _SHORTEST)
    picture.is_to_scale = depth.is_true and down.is_true and across.is_true
    num_outer = rank - 3
    if depth_parts > 1:
        num_outer = rank - 2
        length = max(depth.length / depth_parts, _FLATTEST)
        depth = replace(depth, size=str(grid.shard_shape[-3]), axes="", length=length)
    boxes = fold(num_boxes, _MOST_BOXES)
    most_cells = MOST_CELLS // len(boxes)
    drawing = _BoxDrawing(picture, _BoxSides(depth, down, across), num_outer, most_cells)
    drawing.draw(boxes, _say_outer_dimensions(picture, num_outer))


@dataclass(frozen=True)
class _BoxDrawing:
    """Boxes of one form, divided in the same way."""

    picture: Picture
    box: _BoxSides
    num_outer: int  # dimensions whose parts have boxes of their own
    most_cells: int  # of each face

    def draw(self, boxes: Sequence[int | Gap], y: float) -> None:
        """Draw boxes in rows."""
        box = self.box
        captions = [self._caption_of(chosen) for chosen in boxes]
        widest = max(text_width(caption, _CAPTION_SIZE) for caption in captions)
        width = max(box.width, box.dx + widest) + _BETWEEN_BOXES
        height = box.height + (_CAPTION if self.num_outer else 0)
        per_row = max(1, int((_WIDEST + _BETWEEN_BOXES) // width))
        for place, (chosen, caption) in enumerate(zip(boxes, captions, strict=True)):
            row, column = divmod(place, per_row)
            x = column * width
            front = y + row * (height + _BELOW_BOX) + height - box.down.length
            if isinstance(chosen, Gap):
                self._write(x, front + box.down.length / 2 + 4, caption)
                continue
            self._draw_box(chosen, x, front)
            if caption:
                self._write(x + box.dx, front - box.dy - 7, caption)
            if not place:
                self.picture.measure_below(x, front + box.down.length, box.across)
                self.picture.measure_left(x, front, box.down)
                self.picture.measure_depth(x, front, box.dx, -box.dy, box.depth)

    def _draw_box(self, chosen: int, x: float, y: float) -> None:
        """Draw a box with the upper left corner of its front at a point."""
        box, blocks = self.box, self._blocks_of(chosen)
        across, down, depth = box.across.length, box.down.length, box.depth.length
        lean = f"{box.dx / depth:.5g} {-box.dy / depth:.5g}"
        above = self._face(blocks[:1], across, depth)
        beside = self._face(blocks[:, -1:], depth, down)
        self._lean(above, f"1 0 {lean} {number(x)} {number(y)}", _SHADE_ABOVE)
        self._lean(beside, f"{lean} 0 1 {number(x + across)} {number(y)}", _SHADE_BESIDE)
        self.picture.place(self._face(blocks, across, down), x, y)
        self.picture.sheet.reach(x - 1, y - box.dy - 1, x + box.width + 1, y + down + 1)

    def _blocks_of(self, chosen: int) -> IntArray:
        """Return the numbers of the blocks of a box: ``[rows, columns]``."""
        return self.picture.blocks.reshape(-1, *self.picture.subject.grid.parts[-2:])[chosen]

    def _face(self, blocks: IntArray, width: float, height: float) -> Face:
        return Face(self.picture.paint, blocks, width, height, self.most_cells)

    def _lean(self, face: Face, matrix: str, shade: float) -> None:
        over = (
            f'<path d="M0 0h{number(face.width)}v{number(face.height)}h-{number(face.width)}z" '
            f'fill="#000" fill-opacity="{shade}" pointer-events="none"/>'
        )
        self.picture.sheet.add(f'<g transform="matrix({matrix})">{face.markup("side")}{over}</g>')

    def _write(self, x: float, y: float, text: str) -> None:
        self.picture.sheet.text(x, y, "", detail=text, size=_CAPTION_SIZE)

    def _caption_of(self, chosen: int | Gap) -> str:
        """Return the index of a box in the outer dimensions."""
        if isinstance(chosen, Gap):
            return format_more(chosen.count)
        block = int(self._blocks_of(chosen)[0, 0])
        index = self.picture.subject.grid.block_index(block)[: self.num_outer]
        return f"{format_index(index)[:-1]}, …]" if index else ""


def _say_outer_dimensions(picture: Picture, count: int) -> float:
    """Write the sizes that no side of a box shows, and return where the boxes may begin."""
    subject, y = picture.subject, 0.0
    for dimension in range(count):
        axes, size = axes_text(subject, dimension), size_text(subject, dimension)
        picture.sheet.text(0, y, f"dimension {dimension}: {size}", detail=axes)
        y += 18
    return y

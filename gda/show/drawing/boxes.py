"""Three dimensions and more: boxes seen from the front, above and the right, and their layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gda.layout.numbering import IntArray
from gda.layout.text import format_index, format_more, format_slice
from gda.show.drawing.faces import MOST_CELLS, Face
from gda.show.drawing.picture import Picture
from gda.show.drawing.sheet import number, text_width
from gda.show.drawing.sides import Side, axes_text, sharp, sides_of, size_text
from gda.show.words import Gap, fold

_WIDEST = 600  # of rows of boxes and layers
_LONGEST_ALONE = 220
_LONGEST_WITH_LAYERS = 160
_LONGEST_OF_SEVERAL = 130
_SHORTEST = 44

# Layers are drawn smaller than their box, more so if they are many.
_LAYERS_TO_BOX, _MANY_LAYERS_TO_BOX = 0.8, 0.56
_MANY_LAYERS = 3

_MOST_BOXES = 8
_MOST_BOXES_WITH_LAYERS = 4
_MOST_LAYERS = 16

# The shift of a pixel of depth to the right and up.
_RIGHT, _UP = 0.5, 0.36

_BETWEEN_BOXES = 30
_BETWEEN_LAYERS = 20
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
    """Draw a box for each block of the outer dimensions, with its layers beside it if it has any.

    The front of a box is its first layer, which hides the blocks of the others.
    """
    parts = picture.subject.grid.parts
    *outer, num_layers, _, _ = parts
    num_boxes, has_layers = math.prod(outer), num_layers > 1
    boxes = fold(num_boxes, _MOST_BOXES_WITH_LAYERS if has_layers else _MOST_BOXES)
    layers = fold(num_layers, _MOST_LAYERS if num_boxes == 1 else _MOST_LAYERS // 2)
    rank = len(parts)
    longest = _LONGEST_WITH_LAYERS if has_layers else _LONGEST_ALONE
    if num_boxes > 1:
        longest = _LONGEST_OF_SEVERAL
    box = _BoxSides(*sides_of(picture.subject, range(rank - 3, rank), longest, _SHORTEST))
    picture.is_to_scale = box.depth.is_true and box.down.is_true and box.across.is_true

    share = len(boxes) * len(layers)
    drawing = _BoxDrawing(picture, box, layers, MOST_CELLS // share)
    y = _say_outer_dimensions(picture)
    if has_layers:
        drawing.draw_in_a_column(boxes, y)
    else:
        drawing.draw_in_rows(boxes, y)


@dataclass(frozen=True)
class _BoxDrawing:
    """Boxes of one form, divided in the same way."""

    picture: Picture
    box: _BoxSides
    layers: Sequence[int | Gap]  # that are drawn
    most_cells: int  # of each face

    def draw_in_rows(self, boxes: Sequence[int | Gap], y: float) -> None:
        """Draw boxes of one layer."""
        box = self.box
        width = max(box.width, box.dx + self._widest_caption(boxes)) + _BETWEEN_BOXES
        per_row = max(1, int((_WIDEST + _BETWEEN_BOXES) // width))
        for place, chosen in enumerate(boxes):
            row, column = divmod(place, per_row)
            x = column * width
            front = y + row * (self._height + _BELOW_BOX) + self._height - box.down.length
            if isinstance(chosen, Gap):
                self._caption(x, front + box.down.length / 2 + 4, format_more(chosen.count))
            else:
                self._draw_box(chosen, x, front, not place)

    def draw_in_a_column(self, boxes: Sequence[int | Gap], y: float) -> None:
        """Draw boxes with their layers beside them."""
        for place, chosen in enumerate(boxes):
            if isinstance(chosen, Gap):
                self._caption(0, y + 14, format_more(chosen.count))
                y += 34
                continue
            front = y + self._height - self.box.down.length
            self._draw_box(chosen, 0, front, not place)
            lowest = self._draw_layers(chosen, front)
            below = 0 if place else _BELOW_BOX
            y = max(lowest, front + self.box.down.length + below) + _CAPTION

    @property
    def _height(self) -> float:
        """The height of a box with its caption."""
        return self.box.height + (_CAPTION if len(self.picture.subject.grid.parts) > 3 else 0)

    def _draw_box(self, chosen: int, x: float, y: float, is_first: bool) -> None:
        """Draw one with the upper left corner of its front there."""
        box, blocks = self.box, self._blocks_of(chosen)
        across, down, depth = box.across.length, box.down.length, box.depth.length
        lean = f"{box.dx / depth:.5g} {-box.dy / depth:.5g}"
        above = self._face(blocks[:, 0, :], across, depth)
        beside = self._face(blocks[:, :, -1].T, depth, down)
        self._lean(above, f"1 0 {lean} {number(x)} {number(y)}", _SHADE_ABOVE)
        self._lean(beside, f"{lean} 0 1 {number(x + across)} {number(y)}", _SHADE_BESIDE)
        front = self._face(blocks[0], across, down)
        if len(blocks) == 1:
            self.picture.place(front, x, y)
        else:
            self._lean(front, f"1 0 0 1 {number(x)} {number(y)}", 0)
        self.picture.sheet.reach(x - 1, y - box.dy - 1, x + box.width + 1, y + down + 1)
        if len(self.picture.subject.grid.parts) > 3:
            self._caption(x + box.dx, y - box.dy - 7, self._caption_of_box(chosen))
        if is_first:
            self.picture.measure_below(x, y + down, box.across)
            self.picture.measure_left(x, y, box.down)
            self.picture.measure_depth(x, y, box.dx, -box.dy, box.depth)

    def _draw_layers(self, chosen: int, y: float) -> float:
        """Draw the layers of a box right of it, and return their lower end."""
        blocks = self._blocks_of(chosen)
        scale = _MANY_LAYERS_TO_BOX if len(self.layers) >= _MANY_LAYERS else _LAYERS_TO_BOX
        width = sharp(self.box.across.length * scale, blocks.shape[2])
        height = sharp(self.box.down.length * scale, blocks.shape[1])
        captions = [self._caption_of_layer(blocks, layer) for layer in self.layers]
        left = self.box.width + 2 * _BETWEEN_LAYERS
        widest = max(text_width(caption, _CAPTION_SIZE) for caption in captions)
        pitch = max(width, widest) + _BETWEEN_LAYERS
        per_row = max(1, int((_WIDEST - left + _BETWEEN_LAYERS) // pitch))
        if len(self.layers) > per_row:
            y += _CAPTION - self.box.dy  # beside all of the box, not only beside its front
        bottom = y
        for place, (layer, caption) in enumerate(zip(self.layers, captions, strict=True)):
            row, column = divmod(place, per_row)
            x, top = left + column * pitch, y + row * (height + _CAPTION + 10)
            if isinstance(layer, Gap):
                self._caption(x, top + height / 2 + 4, caption)
                continue
            self._caption(x, top - 6, caption)
            self.picture.place(self._face(blocks[layer], width, height), x, top)
            bottom = top + height
        return bottom

    def _blocks_of(self, chosen: int) -> IntArray:
        """Return the numbers of the blocks of a box: ``[layers, rows, columns]``."""
        return self.picture.blocks.reshape(-1, *self.picture.subject.grid.parts[-3:])[chosen]

    def _face(self, blocks: IntArray, width: float, height: float) -> Face:
        return Face(self.picture.paint, blocks, width, height, self.most_cells)

    def _lean(self, face: Face, matrix: str, shade: float) -> None:
        over = ""
        if shade:
            over = (
                f'<path d="M0 0h{number(face.width)}v{number(face.height)}h-{number(face.width)}z" '
                f'fill="#000" fill-opacity="{shade}" pointer-events="none"/>'
            )
        self.picture.sheet.add(f'<g transform="matrix({matrix})">{face.markup("side")}{over}</g>')

    def _caption(self, x: float, y: float, text: str) -> None:
        self.picture.sheet.text(x, y, "", detail=text, size=_CAPTION_SIZE)

    def _caption_of_box(self, chosen: int | Gap) -> str:
        """Return the index of a box in the outer dimensions."""
        if isinstance(chosen, Gap):
            return format_more(chosen.count)
        block = int(self._blocks_of(chosen)[0, 0, 0])
        index = self.picture.subject.grid.block_index(block)[:-3]
        return f"{format_index(index)[:-1]}, …]"

    def _caption_of_layer(self, blocks: IntArray, layer: int | Gap) -> str:
        """Return the slice of a layer in the dimension of depth."""
        if isinstance(layer, Gap):
            return format_more(layer.count)
        depth = self.picture.subject.grid.block_index(int(blocks[layer, 0, 0]))[-3]
        return format_slice(depth, depth)

    def _widest_caption(self, boxes: Sequence[int | Gap]) -> float:
        if len(self.picture.subject.grid.parts) <= 3:
            return 0
        return max(text_width(self._caption_of_box(chosen), _CAPTION_SIZE) for chosen in boxes)


def _say_outer_dimensions(picture: Picture) -> float:
    """Write the sizes that no side of a box shows, and return where the boxes may begin."""
    subject, y = picture.subject, 0.0
    for dimension in range(len(subject.shape) - 3):
        axes, size = axes_text(subject, dimension), size_text(subject, dimension)
        picture.sheet.text(0, y, f"dimension {dimension}: {size}", detail=axes)
        y += 18
    return y

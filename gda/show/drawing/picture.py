"""A drawing in the making: the sheet, its faces and its notes."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gda.layout.numbering import IntArray
from gda.show.drawing.faces import Face, Paint
from gda.show.drawing.sheet import Sheet, number
from gda.show.drawing.sides import Side
from gda.show.subject import Subject

_FROM_BOX = 9  # of the lines that measure a side


class Picture:
    """A subject on its sheet; its ``faces`` show every block once, except for omitted ones."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.paint = Paint(subject)
        self.sheet = Sheet()
        self.faces: list[tuple[Face, float, float]] = []
        self.is_to_scale = True

    @cached_property
    def blocks(self) -> IntArray:
        """The numbers of all blocks, each at its coordinates."""
        return np.arange(self.subject.grid.num_shards).reshape(self.subject.grid.parts)

    def place(self, face: Face, x: float, y: float) -> None:
        """Draw a face seen from the front, with its upper left corner there."""
        self.faces.append((face, x, y))
        self.sheet.add(f'<g transform="translate({number(x)} {number(y)})">')
        self.sheet.add(face.markup("blocks"))
        self.sheet.add("</g>")
        self.sheet.reach(x - 1, y - 1, x + face.width + 1, y + face.height + 1)

    def measure_below(self, x: float, y: float, side: Side) -> None:
        """Write the size of a side that goes right from a point, below it."""
        at = y + _FROM_BOX
        self.sheet.line(
            f"M{number(x)} {number(at - 3)}v6M{number(x)} {number(at)}h{number(side.length)}"
            f"M{number(x + side.length)} {number(at - 3)}v6"
        )
        self.sheet.reach(x, at, x + side.length, at + 3)
        middle = x + side.length / 2
        self.sheet.text(middle, at + 16, side.size, detail=side.axes, anchor="middle", is_bold=True)

    def measure_left(self, x: float, y: float, side: Side) -> None:
        """Write the size of a side that goes down from a point, left of it."""
        at = x - _FROM_BOX
        self.sheet.line(
            f"M{number(at - 3)} {number(y)}h6M{number(at)} {number(y)}v{number(side.length)}"
            f"M{number(at - 3)} {number(y + side.length)}h6"
        )
        self.sheet.reach(at - 3, y, at + 3, y + side.length)
        right, middle = at - 8, y + side.length / 2
        self.sheet.text(
            right, middle + (-2 if side.axes else 4), side.size, anchor="end", is_bold=True
        )
        if side.axes:
            self.sheet.text(right, middle + 13, "", detail=side.axes, anchor="end")

    def measure_depth(self, x: float, y: float, dx: float, dy: float, side: Side) -> None:
        """Write the size of a side that goes from a point into the depth, left of it."""
        fx, fy = x - _FROM_BOX * 0.8, y - _FROM_BOX * 0.8
        self.sheet.line(
            f"M{number(fx - 2)} {number(fy - 3)}l4 6M{number(fx)} {number(fy)}l{number(dx)} "
            f"{number(dy)}m-2 -3l4 6"
        )
        right, middle = fx + dx / 2 - 8, fy + dy / 2
        self.sheet.text(right, middle, side.size, detail=side.axes, anchor="end", is_bold=True)

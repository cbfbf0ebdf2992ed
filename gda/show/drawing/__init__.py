"""Arrays drawn as SVG: strips, rectangles and boxes, cut into blocks."""

from gda.show.drawing.svg import svg_of as svg_of

"""Arrays drawn as SVG: strips, rectangles and boxes, divided into blocks."""

from gda.show.drawing.svg import svg_of as svg_of

"""Arrays drawn as SVG: strips, rectangles and boxes, divided into blocks.

Read in this order: ``svg`` (all of a drawing), ``sides`` (its lengths), ``faces`` (rectangles) and
``boxes`` (for three dimensions and more), on a ``picture`` over a ``sheet``.
"""

from gda.show.drawing.svg import svg_of as svg_of

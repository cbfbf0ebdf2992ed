"""The paper of a drawing: its markup and its extent."""

from __future__ import annotations

import html
import re

_MARGIN = 6
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

# Characters that XML cannot hold at all; a mesh axis may be named by any string.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Sheet:
    """Markup of an SVG, in pixels, with the rectangle around all of it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.left = self.top = self.right = self.bottom = 0.0

    def add(self, markup: str) -> None:
        self.parts.append(markup)

    def reach(self, left: float, top: float, right: float, bottom: float) -> None:
        """Make room for a rectangle."""
        self.left, self.top = min(self.left, left), min(self.top, top)
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        detail: str = "",
        anchor: str = "start",
        size: float = 12,
        is_bold: bool = False,
    ) -> None:
        """Write a line with its baseline at ``y``, and ``detail`` after it in a lighter weight."""
        gap = size * 0.6 if text and detail else 0
        width = text_width(text, size, is_bold=is_bold) + gap + text_width(detail, size)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        self.reach(left, y - size, left + width, y + size * 0.35)
        weight = ' font-weight="600"' if is_bold else ""
        line = f"<tspan{weight}>{escape(text)}</tspan>" if weight else escape(text)
        if detail:
            shift = f' dx="{number(gap)}"' if gap else ""
            line += f'<tspan{shift} fill-opacity=".78">{escape(detail)}</tspan>'
        self.add(
            f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" '
            f'font-size="{number(size)}">{line}</text>'
        )

    def line(self, path: str) -> None:
        """Draw a thin line along a path; the caller must ``reach`` its extent."""
        self.add(f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.55"/>')

    def document(self, summary: str) -> str:
        """Return the drawing as an SVG element that says ``summary`` to those who cannot see it."""
        left, top = self.left - _MARGIN, self.top - _MARGIN
        width, height = self.right + _MARGIN - left, self.bottom + _MARGIN - top
        # As a page or an image of its own, its text follows the reader's scheme of colours; in a
        # page that of the page, which may be another.
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gda-svg" role="img" '
            f'aria-label="{escape(summary)}" width="{number(width)}" height="{number(height)}" '
            f'viewBox="{number(left)} {number(top)} {number(width)} {number(height)}" '
            f'fill="currentColor" font-family="{_FONT}" style="max-width:100%;height:auto">'
            "<style>svg.gda-svg:root{color-scheme:light dark;color:CanvasText}</style>"
            f"{''.join(self.parts)}</svg>"
        )


TIMES = "\N{MULTIPLICATION SIGN}"


def escape(text: str) -> str:
    """Return a text for XML and HTML, also between quotes."""
    return html.escape(_NOT_XML.sub("\ufffd", text))


def number(value: float) -> str:
    """Return a length in its shortest form, to a hundredth of a pixel.

    >>> number(12.0), number(0.125), number(-0.001)
    ('12', '0.12', '0')
    """
    return f"{round(value, 2) + 0.0:.10g}"


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Return the greatest width of a text in a common font, in pixels.

    The fonts of the reader are unknown when an SVG is drawn; this is for a wide one.
    """
    return size * (1.1 if is_bold else 1) * sum(map(_width, text))


def _width(character: str) -> float:
    if character in "mwMW@%":
        return 1
    if character == " ":
        return 0.35
    return 0.73 if character.isupper() or not character.isascii() else 0.64

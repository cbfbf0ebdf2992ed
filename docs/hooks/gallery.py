"""Pictures of layouts on a page, drawn when the site is built.

A line ``<!-- picture: NAME -->`` or ``<!-- picture: NAME DTYPE -->`` stands below a block of Python
that gives the name a layout, or the layouts of a tree; the picture takes its place.
"""

import contextlib
import doctest
import html
import re
from collections.abc import Callable
from typing import Any

import gda

_PICTURE = re.compile(r"^<!-- picture: (\w+)(?: (\w+))? -->$", re.MULTILINE)
_WIDTH = 92

Drawing = Callable[[Any, str | None], str]


def as_text(layout: Any, dtype: str | None) -> str:
    """Return the picture of a layout for a page that is read as text."""
    is_table = isinstance(layout, gda.Layouts)
    text = str(layout) if is_table else gda.show.text(layout, dtype=dtype, width=_WIDTH)
    return f"```text\n{text}\n```"


def as_html(layout: Any, dtype: str | None) -> str:
    """Return the drawing of a layout on white and on dark, and its picture as text below."""
    if isinstance(layout, gda.Layouts):
        return _on_white_and_dark(layout._repr_html_(), ' style="flex-basis:100%;overflow-x:auto"')
    drawing = _on_white_and_dark(gda.show.svg(layout, dtype=dtype))
    text = html.escape(gda.show.text(layout, dtype=dtype, width=_WIDTH))
    return f'{drawing}\n\n<pre class="gda-text">{text}</pre>'


def _on_white_and_dark(drawing: str, style: str = "") -> str:
    pages = [f'<div class="gda-{page}"{style}>{drawing}</div>' for page in ("light", "dark")]
    return f'<div class="gda-pictures">{"".join(pages)}</div>'


def with_pictures(markdown: str, drawing: Drawing = as_html) -> str:
    """Return a page with its pictures drawn.

    >>> page = ">>> import gda\\n>>> rows = gda.ShardGrid((4,), {'x': 2}, ('x',))\\n"
    >>> page += "<!-- picture: rows -->"
    >>> with_pictures(page, lambda grid, dtype: str(grid.shard_shape)).splitlines()[-1]
    '(2,)'
    """
    names: dict[str, Any] = {}
    drawn, done = [], 0
    for picture in _PICTURE.finditer(markdown):
        before = markdown[done : picture.start()]
        for example in doctest.DocTestParser().get_examples(before):
            fails = [Exception] if example.exc_msg else []
            with contextlib.redirect_stdout(None), contextlib.suppress(*fails):
                exec(example.source, names)
        drawn += [before, drawing(names[picture[1]], picture[2])]
        done = picture.end()
    return "".join([*drawn, markdown[done:]])


def on_page_markdown(markdown: str, **_: Any) -> str:
    return with_pictures(markdown)

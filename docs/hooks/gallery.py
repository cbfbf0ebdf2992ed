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
    return f"```text\n{_text(layout, dtype)}\n```"


def as_html(layout: Any, dtype: str | None) -> str:
    """Return the drawing of a layout on white and on dark, and its picture as text below."""
    is_table = isinstance(layout, gda.Layouts)
    drawing = layout._repr_html_() if is_table else gda.show.svg(layout, dtype=dtype)
    text = html.escape(_text(layout, dtype))
    pages = "".join(f'<div class="gda-{page}">{drawing}</div>' for page in ("light", "dark"))
    return f'<div class="gda-pictures">{pages}</div>\n\n<pre class="gda-text">{text}</pre>'


def _text(layout: Any, dtype: str | None) -> str:
    if isinstance(layout, gda.Layouts):
        return str(layout)
    return gda.show.text(layout, dtype=dtype, width=_WIDTH)


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

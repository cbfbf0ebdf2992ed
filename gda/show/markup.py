"""Tables and bars as HTML, light or dark, without network or script.

A cell is markup: ``escape`` makes it of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gda.layout.text import format_bytes
from gda.show.drawing.sheet import escape

# Every rule names its classes, and more of them than the rules of JupyterLab for tables. Pictures
# on one page carry the same rules, so none changes another.
_STYLE = """
.gda-show{display:flex;flex-wrap:wrap;align-items:flex-start;gap:16px 32px;margin:8px 0}
.gda-show>.gda-svg{flex:0 1 auto;min-width:0}
.gda-show table.gda-facts.gda-facts.gda-facts{border-collapse:collapse;border:0;margin:6px 0;\
width:auto;font:13px/1.35 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,\
sans-serif;color:inherit;background:none;table-layout:auto}
.gda-show .gda-facts.gda-facts.gda-facts caption{caption-side:top;text-align:left;\
font-weight:600;font-size:14px;padding:0 0 6px;color:inherit}
.gda-show .gda-facts.gda-facts.gda-facts tr{background:none;border:0;\
border-top:1px solid rgba(128,128,128,.3)}
.gda-show .gda-facts.gda-facts.gda-facts :is(th,td){background:none;border:0;padding:4px 0;\
text-align:left;vertical-align:top;color:inherit;max-width:22em;overflow-wrap:anywhere;\
white-space:normal}
.gda-show .gda-facts.gda-facts.gda-facts th{font-weight:400;opacity:.8;padding-right:20px;\
white-space:nowrap}
.gda-show .gda-facts.gda-facts.gda-facts td{font-variant-numeric:tabular-nums}
.gda-show .gda-facts.gda-rows.gda-rows :is(th,td){max-width:32em;padding-right:20px;\
overflow-wrap:break-word;white-space:normal}
.gda-show .gda-facts.gda-rows.gda-rows :is(th,td):nth-child(n+4){text-align:right;\
white-space:nowrap}
.gda-show :is(.gda-title,.gda-text){font-family:system-ui,-apple-system,'Segoe UI',Roboto,\
'Helvetica Neue',Arial,sans-serif;color:inherit}
.gda-show .gda-title.gda-title{font-weight:600;font-size:15px;margin:22px 0 4px}
.gda-show .gda-text.gda-text{font-size:13px;line-height:1.5;margin:4px 0;max-width:72em;\
overflow-wrap:anywhere}
.gda-show pre.gda-text.gda-text{font-family:ui-monospace,monospace;white-space:pre-wrap}
""".strip()


def element(content: str) -> str:
    """Return markup as one element with its style."""
    return f'<div class="gda-show"><style>{_STYLE}</style>{content}</div>'


def report(lines: Sequence[str], tables: Sequence[str]) -> str:
    """Return an element of tables below the first of some lines of text, above the others."""
    first, *others = [f"<p>{escape(line)}</p>" for line in lines]
    return element(f"<div>{''.join([first, *tables, *others])}</div>")


def page(title: str, elements: Iterable[str]) -> str:
    """Return a whole page of some elements, light or dark as the browser is."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        "<style>body{font-family:system-ui,sans-serif;margin:24px auto;max-width:1100px;"
        f"padding:0 16px}}</style></head><body>{'<hr>'.join(elements)}</body></html>\n"
    )


def text(content: str, *, tag: str = "p") -> str:
    """Return markup as a paragraph or another element of text."""
    return f'<{tag} class="gda-text">{content}</{tag}>'


def section(title: str, content: str) -> str:
    """Return markup below a title."""
    return f'<h4 class="gda-title">{escape(title)}</h4>{content}'


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells; those from the fourth column on are aligned to the right."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<table class="gda-facts gda-rows"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def table_with_bars(
    cells: Sequence[Sequence[str]], at: int, bars: Iterable[str], title: str = ""
) -> str:
    """Return a table of texts with a bar in each row before the column ``at``.

    ``title`` is markup above the bars. The last row may have none.
    """
    header, *rows = [[*map(escape, row)] for row in cells]
    header.insert(at, title)
    for row, each in zip(rows, [*bars, ""], strict=False):
        row.insert(at, each)
    return html_table(header, rows)


def bar(
    parts: Mapping[str, int],
    color_of: Mapping[str, str],
    longest: int,
    width: int,
    height: int = 12,
) -> str:
    """Return a bar of sizes in bytes by name; one of ``longest`` bytes is ``width`` em wide.

    ``height`` is in pixels.
    """
    segments = "".join(
        _segment(
            f"{100 * size / longest:.3g}%",
            color_of[name],
            f"{name}: {format_bytes(size)}",
            height,
        )
        for name, size in parts.items()
        if size
    )
    return (
        f'<div style="width:{width}em;max-width:100%;height:{height}px;margin-top:2px;'
        "box-sizing:border-box;line-height:0;text-align:left;"
        "overflow:hidden;white-space:nowrap;border:1px solid rgba(128,128,128,.5)"
        f'">{segments}</div>'
    )


def legend(color_of: Mapping[str, str]) -> str:
    """Return the colours of bars with their names."""
    return " ".join(
        f'<span style="white-space:nowrap;margin-right:1em">{_segment("12px", color)} '
        f"{escape(name)}</span>"
        for name, color in color_of.items()
    )


def _segment(width: str, color: str, title: str = "", height: int = 12) -> str:
    hover = f' title="{escape(title)}"' if title else ""
    return (
        f'<span{hover} style="display:inline-block;height:{height}px;width:{width};'
        f'background:{color}"></span>'
    )

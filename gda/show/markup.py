"""Drawings and tables as HTML, light or dark, without network or script."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from gda.show.drawing import svg_of
from gda.show.drawing.sheet import escape
from gda.show.subject import Subject, subject_of
from gda.show.words import facts

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
.gda-show .gda-facts.gda-rows.gda-rows :is(th,td){max-width:32em;padding-right:16px;\
overflow-wrap:break-word;white-space:normal}
.gda-show .gda-facts.gda-rows.gda-rows :is(th,td).gda-right{text-align:right}
""".strip()


def element(content: str) -> str:
    """Return markup as one element with its style."""
    return f'<div class="gda-show"><style>{_STYLE}</style>{content}</div>'


def paragraph(line: str) -> str:
    """Return a line of text."""
    return f"<p>{escape(line)}</p>"


def html_table(
    rows: Sequence[Sequence[str]], right: Container[str] = (), has_names: bool = True
) -> str:
    """Return a table of texts, with names of columns first; those in ``right`` align right."""
    first = rows[0] if rows else ()
    css = [' class="gda-right"' if name in right else "" for name in first]

    def row(cells: Sequence[str], tag: str, scope: str = "") -> str:
        each = zip(cells, css, strict=True)
        inner = [f"<{tag}{scope}{of}>{escape(cell)}</{tag}>" for cell, of in each]
        return f"<tr>{''.join(inner)}</tr>"

    head = [row(cells, "th", ' scope="col"') for cells in rows[:has_names]]
    body = [row(cells, "td") for cells in rows[has_names:]]
    return (
        f'<table class="gda-facts gda-rows"><thead>{"".join(head)}</thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def html_of(subject: Subject) -> str:
    """Return the drawing of a subject beside a table of facts, as one HTML element."""
    dtype = [] if subject.dtype is None else [("dtype", str(subject.dtype))]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in [("shape", str(subject.shape)), *dtype, *facts(subject)]
    )
    return element(
        f'{svg_of(subject)}<table class="gda-facts"><caption>{escape(subject.kind)}</caption>'
        f"<tbody>{rows}</tbody></table>"
    )


def html_or_none(x: Any) -> str | None:
    """Return the HTML of a container; None if its text is shown instead.

    That is so for a traced array, a shape without a sharding, and the placeholders that JAX puts
    into containers while it flattens them.
    """
    try:
        return html_of(subject_of(x))
    except Exception:  # a notebook shows the array in any state, so nothing may be raised
        return None

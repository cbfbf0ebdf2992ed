"""A drawing with a table of facts, as HTML for a notebook or any page."""

from __future__ import annotations

from typing import Any

from gda.show.drawing import svg_of
from gda.show.drawing.sheet import escape
from gda.show.markup import element
from gda.show.subject import Subject, subject_of
from gda.show.words import facts


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

    That is so for a traced or deleted array, a shape without a sharding, and the placeholders that
    JAX puts into containers while it flattens them.
    """
    try:
        subject = subject_of(x)
        return None if subject.kind.endswith("(deleted)") else html_of(subject)
    except Exception:  # a notebook shows the array in any state, so nothing may be raised
        return None

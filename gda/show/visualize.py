"""Pictures of a layout in a terminal and in a notebook."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

import numpy.typing as npt

from gda import show
from gda.layout.spec import SpecLike
from gda.show.subject import subject_of
from gda.show.terminal import text_for


def print_or_display(
    x: Any,
    mesh: Any,
    spec: SpecLike | None,
    dtype: npt.DTypeLike | None,
    file: TextIO | None,
    width: int | None,
    color: bool | None,
) -> None:
    """Do what ``gda.show`` says."""
    subject = subject_of(x, mesh, spec, dtype=dtype)
    wants_text = not (file is None and width is None and color is None)
    display = None if wants_text else _notebook_display()
    if display is not None:
        display(show.html(subject))
        return
    out = sys.stdout if file is None else file
    text = text_for(subject, out, width=width, color=color)
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=out)


def _notebook_display() -> Callable[[str], None] | None:
    """Return a function that displays HTML below a notebook's cell; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = importlib.import_module("IPython.display")
    return lambda html: display.display(display.HTML(html))

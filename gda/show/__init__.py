"""Print a picture of the layout of an array: ``gda.show(x)``.

Provisional: see ``docs/stable.md``.

This module is that function too, and ``text``, ``svg`` and ``html`` return the picture. It shows
each distinct block with its index, its devices and their processes, for arrays of any rank and
meshes that exist or not; see ``text``. In a notebook it displays the drawing of ``html`` instead,
unless ``width`` asks for text. No data is moved, read or printed. It does not
communicate: any process may call it alone, and sees the blocks of all.

Inside ``jit`` JAX tells the layout that it chooses when it compiles:
``jax.debug.inspect_array_sharding(x, callback=lambda s: gda.show(x.shape, s))``.

Args:
  x, mesh, spec, dtype: as for ``text``.
  width: the most columns of a line, at least 20; by default those of the terminal, or 80.

Raises:
  TypeError, ValueError: as ``text``.

>>> import gda
>>> gda.show((8, 2), {'x': 2, 'y': 2}, ('x',), dtype='float32', width=80)
plan (8, 2) float32
mesh    x=2,y=2: 4 devices
spec    P('x')
blocks  2 of (4, 2), each on 2 devices
bytes   32 B per device, 128 B in all, 64 B without replicas
<BLANKLINE>
┌───────────────────────┐
│ 0:4, :   devices 0, 1 │
├───────────────────────┤
│ 4:8, :   devices 2, 3 │
└───────────────────────┘
"""

# Read in this order: ``subject`` (the array or plan to show), ``words``, ``terminal`` (text),
# ``drawing`` (SVG), ``markup`` (HTML), ``report`` (lines and tables), ``array_table``,
# ``memory_report`` (of ``gda.memory``).

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from gda.layout.boundary import public
from gda.layout.spec import SpecLike
from gda.show.subject import subject_of

__all__ = ["text", "svg", "html"]  # noqa: RUF022


def __dir__() -> list[str]:
    return list(__all__)


@public
def text(
    x: object,
    mesh: object = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    width: int | None = None,
) -> str:
    """Return a picture of the layout of an array as text; neither communicates nor reads data.

    The array is a box of its distinct blocks, each with its index, its devices and their processes.
    One or two sharded dimensions are the rows and columns of the box. If that is too wide or too
    high, or with more dimensions, the blocks are below each other. Of many, the middle is omitted,
    so that the cost is bounded. ``░`` beside an index says that a part of the block is padding, and
    ``░░░`` that all of it is.

    Args:
      x: a ``GlobalArray``, a ``PaddedArray``, a ``jax.Array``, a ``jax.ShapeDtypeStruct`` with a
        sharding, a ``ShardGrid``, or a global shape that comes with ``mesh`` and ``spec``.
      mesh: a ``jax.sharding.Mesh`` or the sizes of its axes by name, or a ``NamedSharding`` for
        both mesh and spec; for a shape only.
      spec: as for ``ShardGrid``; for a shape only.
      dtype: of the elements, for a shape or a grid; without it no bytes are shown.
      width: the most columns of a line, at least 20; 80 by default.

    Returns:
      The picture, without a line break at the end.

    Raises:
      TypeError: ``x`` is none of these, or its sharding names no mesh and spec.
      ValueError: the spec does not fit the shape and the mesh, or ``width`` is below 20.

    >>> import gda
    >>> print(gda.show.text((8, 2), {'x': 2, 'y': 2}, ('x', 'y'), dtype='float32'))
    plan (8, 2) float32
    mesh    x=2,y=2: 4 devices
    spec    P('x', 'y')
    blocks  4 of (4, 1), each on 1 device
    bytes   16 B per device, 64 B in all
    <BLANKLINE>
    ┌──────────┬──────────┐
    │ 0:4, 0:1 │ 0:4, 1:2 │
    │ device 0 │ device 1 │
    ├──────────┼──────────┤
    │ 4:8, 0:1 │ 4:8, 1:2 │
    │ device 2 │ device 3 │
    └──────────┴──────────┘
    """
    from gda.show.terminal import text_of

    return text_of(subject_of(x, mesh, spec, dtype=dtype), width=width)


@public
def svg(
    x: object,
    mesh: object = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> str:
    """Return a drawing of the layout of an array as an SVG element, without network or script.

    Hovering over a block shows its index, devices, replica ids, bytes and padding. It neither
    communicates nor reads data.

    Args:
      x, mesh, spec, dtype: as for ``text``.

    Raises:
      TypeError, ValueError: as ``text``.

    >>> import gda
    >>> gda.show.svg((8, 2), {'x': 4, 'y': 2}, ('x', 'y'))[:4]
    '<svg'
    """
    from gda.show.drawing import svg_of

    return svg_of(subject_of(x, mesh, spec, dtype=dtype))


@public
def html(
    x: object,
    mesh: object = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> str:
    """Return the drawing of ``svg`` beside a table of the array's properties, as HTML.

    It is a part of a page, light or dark, without network or script. It neither communicates nor
    reads data.

    Args:
      x, mesh, spec, dtype: as for ``text``.

    Raises:
      TypeError, ValueError: as ``text``.

    >>> import gda
    >>> '<svg' in gda.show.html((8, 2), {'x': 4, 'y': 2}, ('x', 'y'))
    True
    """
    from gda.show.markup import html_of

    return html_of(subject_of(x, mesh, spec, dtype=dtype))


class Show(ModuleType):
    """The type of this module, which makes it callable."""

    if TYPE_CHECKING:  # the module has them by itself
        text, svg, html = staticmethod(text), staticmethod(svg), staticmethod(html)

    @public
    def __call__(
        self,
        x: object,
        mesh: object = None,
        spec: SpecLike | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        width: int | None = None,
    ) -> None:
        from gda.show.terminal import NARROWEST, text_of

        subject = subject_of(x, mesh, spec, dtype=dtype)
        if width is None and (display := _notebook_display()):
            display(html(subject))
            return
        if width is None and sys.stdout.isatty():
            width = max(shutil.get_terminal_size().columns, NARROWEST)
        print(text_of(subject, width=width))


def _notebook_display() -> Callable[[str], None] | None:
    """Return a function that displays HTML below a notebook's cell; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = import_module("IPython.display")
    return lambda html: display.display(display.HTML(html))


sys.modules[__name__].__class__ = Show
show = cast("Show", sys.modules[__name__])

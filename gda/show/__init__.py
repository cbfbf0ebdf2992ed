"""Pictures of the layout of arrays: text for a terminal, SVG and HTML for a page.

No picture moves, reads or shows data, and none needs devices. ``gda.visualize_sharding`` prints or
displays them.

Read in this order: ``subject`` (the array or plan to show), ``words`` and ``folding``,
``terminal`` (text), ``drawing`` (SVG), ``page`` (HTML), ``visualize`` (also inside ``jit``; the
only module with JAX). ``memory_report`` is the answer of ``gda.memory``.

>>> import gda
>>> print(gda.show.text((4,), {'x': 2}, ('x',)))
plan (4,)
mesh    x=2: 2 devices
spec    P('x')
blocks  2 of (2,), each on 1 device
<BLANKLINE>
┌──────────┬──────────┐
│ 0:2      │ 2:4      │
│ device 0 │ device 1 │
└──────────┴──────────┘
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import numpy.typing as npt

from gda.layout.boundary import public
from gda.layout.distribution import install_command
from gda.layout.spec import SpecLike
from gda.show.subject import subject_of

__all__ = ["text", "svg", "html"]  # noqa: RUF022


def __dir__() -> list[str]:
    return list(__all__)


@public
def text(
    x: Any,
    mesh: Any = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    width: int | None = None,
    color: bool | None = None,
    header: bool = True,
) -> str:
    """Return a picture of the layout of an array as text; neither communicates nor reads data.

    The array is a box of its distinct blocks, each with its index, its devices and their processes.
    Two sharded dimensions are the rows and columns of the box. With more, these are the last two,
    and there is a box for each part of the others. If the picture is too large, its middle is
    replaced by the number of omitted blocks, so that the cost is bounded. Texts that do not fit a
    cell stand beside the box. ``░`` beside an index says that a part of the block is padding, and
    ``░░░`` that all of it is.

    Args:
      x: a ``GlobalArray``, a ``PaddedArray``, a ``jax.Array``, a ``jax.ShapeDtypeStruct`` with a
        sharding, a ``ShardGrid``, or a global shape that comes with ``mesh`` and ``spec``.
      mesh: a ``jax.sharding.Mesh`` or the sizes of its axes by name, or a ``NamedSharding`` for
        both mesh and spec; for a shape only.
      spec: as for ``ShardGrid``; for a shape only.
      dtype: of the elements, for a shape or a grid; without it no bytes are shown.
      width: the most columns of a line, at least 20; 80 by default.
      color: ``True`` colours the blocks by process, with the escape codes of terminals.
      header: ``True`` puts shape, mesh, spec and bytes above the picture. A legend of the cells is
        there in any case.

    Returns:
      The picture, without a line break at the end.

    Raises:
      ImportError: rich is not installed.
      TypeError: ``x`` is none of these, its sharding names no mesh and spec, or ``width`` is no
        integer.
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
    subject = subject_of(x, mesh, spec, dtype=dtype)
    color_system = "256" if color else None
    return load_terminal().text_of(subject, width=width, color_system=color_system, header=header)


@public
def svg(
    x: Any,
    mesh: Any = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
) -> str:
    """Return a drawing of the layout of an array as an SVG element, without network or script.

    Hovering over a block shows its index, devices, replica ids and bytes. Padding is hatched. It
    neither communicates nor reads data.

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
    x: Any,
    mesh: Any = None,
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
    from gda.show.page import html_of

    return html_of(subject_of(x, mesh, spec, dtype=dtype))


def load_terminal() -> ModuleType:
    """Return ``gda.show.terminal``, which draws with rich; ``ImportError`` without it."""
    try:
        return import_module("gda.show.terminal")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        raise ImportError(
            "pictures as text need rich, which is not installed; install it with: "
            f"{install_command('show')}",
            name=error.name,
        ) from error


class _Show(ModuleType):
    """The type of this module, for the message when it is called."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "gda.show is a module; gda.visualize_sharding(x) shows the picture of an array, and "
            "gda.show.text(x), gda.show.svg(x) and gda.show.html(x) return it"
        )


sys.modules[__name__].__class__ = _Show

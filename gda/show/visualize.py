"""Showing how an array is cut, where the user is: a terminal, a notebook, or inside ``jit``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TextIO

import jax
import numpy.typing as npt
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from gda import show
from gda.layout.boundary import public, set_module
from gda.layout.spec import SpecLike
from gda.show.subject import Subject, subject_of, subject_on

Find = Callable[[], Subject | str | None]


@set_module("gda")
@public
def visualize_sharding(
    x: Any,
    mesh: Any = None,
    spec: SpecLike | None = None,
    *,
    dtype: npt.DTypeLike | None = None,
    file: TextIO | None = None,
    width: int | None = None,
    color: bool | None = None,
) -> None:
    """Print a picture of how an array is cut; no data is moved, read or printed.

    It shows each distinct block with its index, its devices and their processes, of arrays of any
    rank and of meshes that exist or not; see ``gda.show.text``. In a notebook it displays the
    drawing of ``gda.show.html`` instead, unless ``file``, ``width`` or ``color`` asks for text. It
    does not communicate: any process may call it alone, and sees the blocks of all.

    It also works inside ``jit`` and other transformations. Over Explicit axes a traced array has a
    layout, which is shown at once. Over Auto axes JAX chooses the layout when it compiles; it is
    shown then, once for each compilation. Inside ``jax.vmap`` what is shown is the whole array, the
    mapped dimension first. Inside ``jax.shard_map`` an array is the block of one device; what is
    left to know of it is said in a line. There it stops no program: where there is no picture, a
    line says why, and so does one where it cannot be drawn.

    Args:
      x: a ``GlobalArray``, a ``jax.Array``, traced or not, a ``jax.ShapeDtypeStruct`` with a
        sharding, a ``ShardGrid``, or a global shape that comes with ``mesh`` and ``spec``.
      mesh: a ``jax.sharding.Mesh`` or the sizes of its axes by name, or a ``NamedSharding`` for
        both mesh and spec; for a shape only.
      spec: as for ``ShardGrid``; for a shape only.
      dtype: of the elements, for a shape or a grid; without it no bytes are shown.
      file: where to print; the standard output if not given. Characters that its encoding lacks
        are written as their codes.
      width: columns that no line exceeds, at least 20; those of the terminal if not given, or 80.
      color: whether to colour the blocks by process; if not given, where ``file`` is a terminal
        that shows colours and NO_COLOR is not set.

    Raises:
      ImportError: rich is not installed, and this is not a notebook.
      TypeError: ``x`` is none of these, its sharding names no mesh and spec, or ``width`` is no
        integer.
      ValueError: the spec does not go with the shape and the mesh, or ``width`` is below 20.

    >>> import gda
    >>> gda.visualize_sharding((8, 2), {'x': 2, 'y': 2}, ('x',), dtype='float32', width=80)
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
    # Pictures know nothing of the container but this.
    array = x.array if isinstance(getattr(x, "array", None), Tracer) else x
    if not isinstance(array, Tracer):
        _say(subject_of(x, mesh, spec, dtype=dtype), file, width, color)
        return
    for name, value in (("mesh", mesh), ("spec", spec), ("dtype", dtype)):
        if value is not None:
            raise TypeError(f"{name}= goes with a shape; this traced array has its own")
    kind = type(x).__name__ if array is not x else "jax.Array"

    def say(find: Find) -> None:
        try:
            picture = find()
            if picture is not None:
                _say(picture, file, width, color)
        except Exception as error:  # a program runs on, whatever becomes of what it prints
            with suppress(Exception):
                what = f"traced {kind} {array.shape} {array.dtype}"
                why = f"{type(error).__name__}: {error}"
                _say(f"{what}: no picture, because of {why}", file, width, color)

    say(lambda: _traced(array, kind, say))


def _traced(array: jax.Array, kind: str, say: Callable[[Find], None]) -> Subject | str | None:
    """Return what is shown at once; None where ``say`` is called when JAX compiles."""
    mesh: Any = jax.typeof(array).sharding.mesh
    if not all(isinstance(size, int) for size in array.shape):
        # Of a program that jax.export makes for many shapes; it cannot hold a callback either.
        return f"traced {kind} {array.shape} {array.dtype}: no picture, as its sizes are unknown"
    if AxisType.Manual in mesh.axis_types:
        return _in_shard_map(array, mesh)
    if mesh.axis_types and all(axis == AxisType.Explicit for axis in mesh.axis_types):
        seen: list[tuple[jax.Array, int]] = []
        _see(array, lambda *level: seen.append(level))
        whole, mapped = seen[-1]
        return _picture(whole, jax.typeof(whole).sharding, _kind(kind, mapped))

    def when_compiled(whole: jax.Array, mapped: int) -> None:
        def show(found: Any) -> None:
            say(lambda: _picture(whole, found, _kind(kind, mapped)))

        jax.debug.inspect_array_sharding(whole, callback=show)

    seen_array = _see(array, when_compiled)
    # JAX 0.8 drops from a program what is only looked at inside a custom_vmap, unless its result is
    # used.
    jax.debug.inspect_array_sharding(seen_array, callback=lambda _: None)
    return None


def _see(array: jax.Array, see: Callable[[jax.Array, int], None], mapped: int = 0) -> jax.Array:
    """Call ``see`` with the array and, where it is an element that vmap maps, with the whole.

    While tracing, in this order, and how many dimensions are mapped. What ``see`` adds to a program
    is only kept of the last call. Inside vmap an array does not know the mapped dimension, and its
    layout is about the whole: only a rule for vmap gets to see that.
    """

    @custom_vmap
    def unchanged(array: jax.Array) -> jax.Array:
        see(array, mapped)
        return array

    @unchanged.def_vmap
    def _(axis_size: int, is_mapped: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
        return _see(array, see, mapped + 1), True

    return unchanged(jax.lax.stop_gradient(array))


def _kind(kind: str, mapped: int) -> str:
    if not mapped:
        return f"traced {kind}"
    return f"traced {kind} with {mapped} mapped dimension{'s' if mapped > 1 else ''}"


def _picture(array: jax.Array, sharding: Any, kind: str) -> Subject | str:
    """Return what is shown of a layout that JAX chose, or a line where there is no picture."""
    what = f"{kind} {array.shape} {array.dtype}"
    try:
        subject = subject_on(sharding, array.shape, array.dtype, kind)
    except ValueError:  # the compiler, unlike a user, may cut into unequal parts
        return f"{what}: cut unevenly, by {sharding}"
    if subject is None:
        return f"{what}: laid out as {sharding}, which names no mesh and spec"
    # Of a mesh without devices the numbers are places in it, which could be taken for ids.
    return replace(subject, device_kind="position") if subject.device_ids is None else subject


def _in_shard_map(array: jax.Array, mesh: Any) -> str:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = [repr(name) for name, kind in kinds if kind == AxisType.Manual]
    return (
        f"block {array.shape} {array.dtype} inside jax.shard_map: each place along the mesh "
        f"{'axis' if len(manual) == 1 else 'axes'} {', '.join(manual)} has its own; to see how the "
        "array is cut, look at it outside"
    )


def _say(
    picture: Subject | str, file: TextIO | None, width: int | None, color: bool | None
) -> None:
    wants_text = not (file is None and width is None and color is None)
    display = None if wants_text else _notebook_display()
    if display is not None and isinstance(picture, Subject):
        display(show.html(picture))
        return
    out = sys.stdout if file is None else file
    if isinstance(picture, Subject):
        text: str = show.load_terminal().text_for(picture, out, width=width, color=color)
    else:
        text = picture
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=out)


def _notebook_display() -> Callable[[str], None] | None:
    """Return what displays HTML below a notebook's cell; None where this is no notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = importlib.import_module("IPython.display")
    return lambda html: display.display(display.HTML(html))

"""Pictures of a layout in a terminal, in a notebook, and from inside ``jit``."""

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
from gda.layout.text import counted
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
    """Print a picture of the layout of an array; no data is moved, read or printed.

    It shows each distinct block with its index, its devices and their processes, for arrays of any
    rank and meshes that exist or not; see ``gda.show.text``. In a notebook it displays the drawing
    of ``gda.show.html`` instead, unless ``file``, ``width`` or ``color`` asks for text. It does not
    communicate: any process may call it alone, and sees the blocks of all.

    It also works inside ``jit`` and other transformations. Over Explicit axes a traced array has a
    layout, which is shown at once. Over Auto axes JAX chooses the layout when it compiles; it is
    shown then, once for each compilation. Inside ``jax.vmap`` it shows the whole array, the mapped
    dimension first. Inside ``jax.shard_map`` an array is the block of one device, described in a
    line. There it stops no program: if there is no picture, a line gives the reason.

    Args:
      x, mesh, spec, dtype: as for ``gda.show.text``; an array may be traced.
      file: a text file, by default the standard output. Characters that its encoding lacks are
        written as their codes.
      width: the most columns of a line, at least 20; by default those of the terminal, or 80.
      color: ``True`` colours the blocks by process; by default if ``file`` is a terminal with
        colours and NO_COLOR is not set.

    Raises:
      ImportError: rich is not installed, and this is not a notebook.
      TypeError, ValueError: as ``gda.show.text``.

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
    # The array of a traced container.
    array = x.array if isinstance(getattr(x, "array", None), Tracer) else x
    if not isinstance(array, Tracer):
        _say(subject_of(x, mesh, spec, dtype=dtype), file, width, color)
        return
    for name, value in (("mesh", mesh), ("spec", spec), ("dtype", dtype)):
        if value is not None:
            raise TypeError(f"{name}= goes with a shape; this traced array has its own")
    kind = type(x).__name__ if array is not x else "jax.Array"
    if kind == "PaddedArray":
        kind = "array of a PaddedArray"  # with its padding

    def say(find: Find) -> None:
        try:
            picture = find()
            if picture is not None:
                _say(picture, file, width, color)
        except Exception as error:  # a failed picture must not stop the program
            with suppress(Exception):
                what = f"traced {kind} {array.shape} {array.dtype}"
                why = f"{type(error).__name__}: {error}"
                _say(f"{what}: no picture, because of {why}", file, width, color)

    say(lambda: _traced(array, kind, say))


def _traced(array: jax.Array, kind: str, say: Callable[[Find], None]) -> Subject | str | None:
    """Return the picture for now; None if ``say`` is called when JAX compiles."""
    mesh: Any = jax.typeof(array).sharding.mesh
    if not all(isinstance(size, int) for size in array.shape):
        # In a program that jax.export makes for many shapes, which cannot have a callback either.
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
    # JAX 0.8 drops an inspection inside a custom_vmap from the program, unless its result is used.
    jax.debug.inspect_array_sharding(seen_array, callback=lambda _: None)
    return None


def _see(array: jax.Array, see: Callable[[jax.Array, int], None], mapped: int = 0) -> jax.Array:
    """Call ``see`` with the array and, if vmap maps over it, then with the whole array.

    The calls are made while tracing, with the number of mapped dimensions. The program keeps only
    the operations of the last call. Inside vmap an array has no mapped dimension, but its layout is
    that of the whole, which only a rule for vmap can see.
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
    return f"traced {kind}" + (f" with {counted(mapped, 'mapped dimension')}" if mapped else "")


def _picture(array: jax.Array, sharding: Any, kind: str) -> Subject | str:
    """Return the picture of a layout that JAX chose, or a line if there is none."""
    what = f"{kind} {array.shape} {array.dtype}"
    try:
        subject = subject_on(sharding, array.shape, array.dtype, kind)
    except ValueError:  # the compiler, unlike a user, may make unequal parts
        return f"{what}: sharded unevenly, by {sharding}"
    if subject is None:
        return f"{what}: laid out as {sharding}, which names no mesh and spec"
    # The numbers for a mesh without devices are places in it, not ids.
    return replace(subject, device_kind="position") if subject.device_ids is None else subject


def _in_shard_map(array: jax.Array, mesh: Any) -> str:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = [repr(name) for name, kind in kinds if kind == AxisType.Manual]
    return (
        f"block {array.shape} {array.dtype} inside jax.shard_map: each place along the mesh "
        f"{'axis' if len(manual) == 1 else 'axes'} {', '.join(manual)} has its own; to see the "
        "layout of the array, call this outside"
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
    """Return a function that displays HTML below a notebook's cell; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = importlib.import_module("IPython.display")
    return lambda html: display.display(display.HTML(html))

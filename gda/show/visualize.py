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
from gda.layout.spec import SpecLike
from gda.layout.text import counted
from gda.show.subject import Subject, subject_of, subject_on
from gda.show.terminal import text_for

Find = Callable[[], Subject | str | None]


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
        text = text_for(picture, out, width=width, color=color)
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

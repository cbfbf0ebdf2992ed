"""Arrays with data in this process, and an error for each reason to have none.

Also the mark of threads that run a data callback, which may compute only with some arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.errors import UnexpectedTracerError

from gda.layout.spec import Shape, format_spec
from gda.layout.text import typed_shape
from gda.mesh import is_tracer, not_an_array_error, processes_of, sharding_of

P = ParamSpec("P")
T = TypeVar("T")

OUTSIDE = "call this outside jit and other transformations"


class _DataCallbacks(threading.local):
    """The number of data callbacks that run in this thread, one within another."""

    depth = 0


data_callbacks = _DataCallbacks()


def calls_back(work: Callable[P, T]) -> Callable[P, T]:
    """Mark the calls of a function that calls a data callback."""

    # Not as a context: a signal handler may raise in ``__exit__`` before its first line, and
    # nowhere between ``try`` and ``finally`` here, where no function of Python begins or ends.
    @wraps(work)
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        before = data_callbacks.depth
        data_callbacks.depth = before + 1
        try:
            return work(*args, **kwargs)
        finally:
            data_callbacks.depth = before

    return marked


def live(array: Any, otherwise: str = "") -> jax.Array:
    """Return an array with its data; that of a container is ``container._live()``.

    ``otherwise`` tells the user what to do with anything that is no array.
    """
    if real(array, otherwise).is_deleted():
        raise deleted_error(array, "jax.Array")
    return array


def real(array: Any, otherwise: str = "") -> jax.Array:
    """Return an array as ``live``, even if it was deleted."""
    if is_tracer(array):
        raise traced_error("the array")
    if not isinstance(array, jax.Array):
        raise kind_error(array, otherwise)
    return array


def usable(content: Any) -> jax.Array:
    """Return the content of a container to compute with: an array with its data, or a tracer."""
    # Asking a tracer would raise. An array of NumPy has nothing to ask.
    if is_tracer(content):
        return content
    if hasattr(content, "is_deleted"):
        if content.is_deleted():
            raise deleted_error(content)
    elif not hasattr(content, "dtype"):
        raise not_an_array_error(content)
    return content


def traced_error(name: str, in_jit: str = OUTSIDE) -> UnexpectedTracerError:
    """Return JAX's error for a traced array, which is a ``TypeError``."""
    return UnexpectedTracerError(f"{name} is being traced, so it has no data; {in_jit}")


def kind_error(given: object, otherwise: str = "") -> TypeError:
    if isinstance(given, jax.Ref):
        otherwise = "JAX changes it in place, so pass the array of now, ref[...]"
    hint = otherwise and f"; {otherwise}"
    return TypeError(f"expected a GlobalArray or a jax.Array, not {type(given).__name__}{hint}")


def deleted_error(
    array: jax.Array, kind: str = "GlobalArray", shape: Shape | None = None
) -> RuntimeError:
    return RuntimeError(
        f"{describe(array, kind, shape)} was deleted, by delete() or by donating it to a jitted "
        "function"
    )


def check_held(array: jax.Array, name: str) -> None:
    if array.is_fully_addressable:
        return
    process, *others = processes_of(sharding_of(array).mesh).numbers  # pyright: ignore
    if not others:
        raise ValueError(
            f"{name} was called in process {jax.process_index()} for an array that only process "
            f"{process} holds. Call it in process {process} alone, or build the array over a mesh "
            "of all processes"
        )


def describe(array: Any, kind: str = "GlobalArray", shape: Shape | None = None) -> str:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        return f"{kind}(array={array!r})"
    try:
        sharding = sharding_of(array)
        layout = f"mesh={dict(sharding.mesh.shape)}, spec={format_spec(sharding.spec)}"
    except (TypeError, ValueError):  # JAX's, for the sharding of keys with reduced axes
        layout = "traced" if is_tracer(array) else "no sharding"
    shape = array.shape if shape is None else shape
    return f"{kind}(shape={shape}, dtype={array.dtype}, {layout})"


def short_text(array: Any) -> str:
    if isinstance(array, jax.Array) and not array.shape and not is_tracer(array):
        return describe(array) if array.is_deleted() else str(array)
    try:
        spec = f" {format_spec(sharding_of(array).spec)}"
    except (TypeError, ValueError):
        spec = ""
    return typed_shape(array.dtype, array.shape) + spec

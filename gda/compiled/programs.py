"""The program of a call: a jitted function with its arguments, traced, lowered or compiled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced, Wrapped

from gda.compiled.topologies.cudnn_attention import traced_without_card

_OPTION = "jax_compilation_cache_include_metadata_in_key"
_lock = threading.Lock()  # all threads share the option

Program = Callable[..., Any] | Traced | Lowered | Compiled


def unwrapped(
    fun: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
    """Return the jitted function inside partials and methods, with their arguments too.

    Another ``jax.jit`` would make constants of these. A method looks jitted, since it passes on
    ``lower``, but without its object.
    """

    def received(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    inside, inside_args, inside_kwargs = fun, args, kwargs
    while isinstance(inside, functools.partial | MethodType):
        if isinstance(inside, MethodType):
            inside_args = (inside.__self__, *inside_args)
            inside = inside.__func__
        else:
            partial = functools.partial(received, *inside.args, **inside.keywords)
            inside_args, inside_kwargs = partial(*inside_args, **inside_kwargs)
            inside = inside.func
    is_jitted = isinstance(inside, Wrapped)
    return (inside, inside_args, inside_kwargs) if is_jitted else (fun, args, kwargs)


def stage_of(
    fun: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced | Lowered | Compiled:
    """Return ``fun`` if it is a stage of JAX, or the trace of a call of it."""
    if isinstance(fun, Traced | Lowered | Compiled):
        if args or kwargs:
            raise TypeError(
                f"a jax.stages.{type(fun).__name__} has its arguments already; pass it alone, or "
                "pass the function"
            )
        return fun
    if not callable(fun):
        raise TypeError(
            f"fun must be a function, plain or jitted, not {type(fun).__name__}; pass a function "
            "and the arguments of a call"
        )
    jitted = fun if isinstance(fun, Wrapped) else jax.jit(fun)
    platforms = {
        device.platform
        for mesh in meshes_of((args, kwargs))
        if isinstance(mesh, Mesh)
        for device in mesh.devices.flat[:1]
    }
    with traced_without_card() if platforms & {"gpu", "cuda"} else nullcontext():
        traced: Any = jitted.trace(*args, **kwargs)
    return traced if isinstance(traced, Traced) else traced.traced  # nnx.jit has its own stages


def compiled(
    stage: Traced | Lowered | Compiled, options: dict[str, str | bool] | None = None
) -> Compiled:
    """Return the compiled program of a stage, with the lines of the present source.

    ``options`` are those of XLA; a stage that is compiled already does without them. The keys of
    JAX's cache omit lines by default, so that it may return the same program from another source.
    """
    if isinstance(stage, Compiled):
        return stage
    lowered = stage.lower() if isinstance(stage, Traced) else stage
    with _lock:
        before = getattr(jax.config, _OPTION)
        jax.config.update(_OPTION, True)
        try:
            return lowered.compile(options)
        finally:
            jax.config.update(_OPTION, before)


def meshes_of(tree: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes of arrays, shape structs and shardings, then that of ``jax.set_mesh``."""
    for leaf in jax.tree.leaves(tree):
        sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding.mesh
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty:
        yield ambient

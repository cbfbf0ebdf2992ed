"""The boundary between the caller's code and gda, in tracebacks and warnings.

A traceback shows the caller's frames and the called function of gda, no inner frames, as JAX hides
its own. JAX's switch works for gda too: with ``JAX_TRACEBACK_FILTERING=off``, or
``jax.config.update('jax_traceback_filtering', 'off')``, every frame is shown.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any, TypeVar, get_type_hints

from gda.layout.text import nearest

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ObjectT = TypeVar("ObjectT")

# gda, and packages that run the caller's code for it.
_NOT_OF_CALLER = frozenset({"gda", "jax", "contextlib", "functools", "concurrent", "threading"})


def public(function: FunctionT) -> FunctionT:
    """Make the exceptions of a function show its own frame and the caller's, and no more of gda."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error, called=function)
            raise  # keeps __cause__ and __context__, and adds no frame

    return call  # pyright: ignore[reportReturnType]


def set_module(name: str) -> Callable[[ObjectT], ObjectT]:
    """Make a class or function known by a public module: messages and pickles name no other.

    It must be the outermost decorator, because ``dataclass`` evaluates annotations in the module
    that the class names. So does ``typing.get_type_hints``, for which they are evaluated here.
    """

    def named(thing: ObjectT) -> ObjectT:
        if isinstance(thing, type):
            thing.__annotations__ = get_type_hints(thing, localns={thing.__name__: thing})
        thing.__module__ = name
        return thing

    return named


def hide_own_frames(error: BaseException, *, called: Callable[..., Any] | None = None) -> None:
    """Remove gda's frames from a traceback, except the first after each frame of the caller.

    Args:
      error: an exception that is being handled; a bare ``raise`` then adds no frame.
      called: the function whose decorator handles it. Its frame is removed, and a keyword argument
        that the function does not have gets the name that it is nearest to.
    """
    entry = error.__traceback__
    if called is not None and entry is not None and entry.tb_next is None:  # it did not begin
        _name_near_keyword(error, called)
    if _shows_all_frames():
        return
    kept: list[TracebackType] = []
    is_inside = False
    if called is not None and entry is not None:
        entry = entry.tb_next
    while entry is not None:
        package = _package_of(entry.tb_frame)
        from_caller = package not in _NOT_OF_CALLER
        if from_caller or not is_inside:
            kept.append(entry)
            is_inside = package == "gda"
        entry = entry.tb_next
    shown = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shown


def _name_near_keyword(error: BaseException, function: Callable[..., Any]) -> None:
    """Add to the message of a ``TypeError`` as Python does from 3.13 on."""
    mistaken = re.search(r"unexpected keyword argument '(\w+)'$", str(error))
    if mistaken is not None:
        near = nearest(mistaken[1], inspect.signature(function).parameters)
        error.args = (f"{error}{''.join(f'. Did you mean {name!r}?' for name in near)}",)


def frame_of_caller() -> tuple[FrameType | None, int]:
    """Return the first frame of the caller, not of gda or JAX, and its ``stacklevel``."""
    frame, level = sys._getframe(1), 1
    while frame is not None and _package_of(frame) in _NOT_OF_CALLER:
        frame, level = frame.f_back, level + 1
    return frame, level


def below(files: Collection[str], entry: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of these files at its beginning."""
    while entry is not None and entry.tb_frame.f_code.co_filename in files:
        entry = entry.tb_next
    return entry


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _shows_all_frames() -> bool:
    jax: Any = sys.modules.get("jax")  # without JAX, the math runs alone
    if jax is None:
        return os.environ.get("JAX_TRACEBACK_FILTERING") == "off"
    return jax.config.jax_traceback_filtering == "off"

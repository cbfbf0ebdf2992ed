"""A function in a file of the user, written as ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gda.cli.notation.mistakes import MistakesError
from gda.layout.boundary import below

_IMPORT_FILES = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def file_and_function(text: str, example: str) -> tuple[str, str]:
    """Return the file, which exists, and the function that a text names."""
    found = re.fullmatch(r"(.+\.py):(\w+)", text)
    if not found:
        raise MistakesError(
            f"a file and a function in it were expected, such as {example}, not {text!r}"
        )
    file, function = found.groups()
    if not os.path.isfile(file):
        raise MistakesError(f"there is no file {file!r} here")
    return file, function


def function_of(file: str, name: str) -> Callable[..., Any]:
    """Return the function of a file, which is imported."""
    path = Path(file)
    # Its stem may be the name of a module that gda imports.
    spec: Any = importlib.util.spec_from_file_location(path.name, path)
    module = sys.modules[path.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise MistakesError(f"{path} cannot be imported:", *traceback_of(error, __file__)) from None
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = [
        each
        for each, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == path.name
    ]
    hint = f"it has {', '.join(known)}" if known else "define it there"
    raise MistakesError(f"{path} has no function {name!r}; {hint}")


def traceback_of(error: BaseException, *files: str) -> list[str]:
    """Return the lines of a traceback without the frames of some files and of the import."""
    frames = below((*files, *_IMPORT_FILES), error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).splitlines()

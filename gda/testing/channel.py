"""The connection between a ``gda.testing.pool.Pool`` and one of its processes: ``Channel``.

A command is a tuple that begins with its name. A process answers with one message
``(kind, time, outcome, value)`` of kind "returned" or "raised", after any number of kind "report"
or "trouble". Processes whose outcomes differ are out of step.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from gda.layout.boundary import below

_modules_of_files: dict[str, ModuleType] = {}


class Channel:
    """The end of the connection in a process; ``run_session`` runs a pytest session by a plan."""

    def __init__(self, connection: Connection, run_session: Callable[[Channel, Any], None]) -> None:
        self._connection = connection
        self._run_session = run_session

    def serve(self, session: Any = None) -> None:
        """Run the commands of the pool; with a pytest session, tests too.

        The command "session" runs pytest, whose loop over tests calls this again. So later
        functions run inside that session.
        """
        while True:
            try:
                name, *arguments = self._connection.recv()
            except EOFError:  # the pool has ended
                return
            if name == "stop":
                return
            if name == "call":
                self._call(*arguments)
            elif name == "session":
                self._run_session(self, *arguments)
                return
            elif name == "collect":
                session.collect(*arguments)
            elif name == "test":
                session.run_test(*arguments)

    def answer(self, kind: str, value: Any, outcome: str = "") -> None:
        """Send a message; ``kind`` is "returned", "raised", "report" or "trouble"."""
        self._connection.send((kind, time.monotonic(), outcome, value))

    def _call(self, reference: tuple[str, str, str | None], arguments: bytes) -> None:
        try:
            function = _find(*reference)
            args, kwargs = pickle.loads(arguments)
            result = function(*args, **kwargs)
        except BaseException as error:
            self.answer("raised", describe(error))
            return
        try:
            pickled = pickle.dumps(result)
        except Exception as error:
            line = (
                f"TypeError: {reference[1]} returned a {type(result).__name__}, which cannot be "
                "pickled; return arrays of NumPy, numbers or texts"
            )
            self.answer("raised", (line, f"{type(error).__name__}: {error}"))
            return
        self.answer("returned", pickled)


def describe(error: BaseException) -> tuple[str, str]:
    """Return an exception in one line, and its traceback without the frames of this file."""
    frames = below([__file__], error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    return line, text.rstrip()


def _find(module_name: str, name: str, file: str | None) -> Any:
    found: Any = _module(module_name, file)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _module(name: str, file: str | None) -> ModuleType:
    """Return a module by its name, or by its file if the name does not import that file."""
    if file is None:
        return importlib.import_module(name)
    if file in _modules_of_files:
        return _modules_of_files[file]
    if name != "__main__" and _is_importable(name, file):  # which pytest may have done
        return importlib.import_module(name)
    return _load(name, file)


def _is_importable(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == file


def _load(name: str, file: str) -> ModuleType:
    # Under this name, the part of a script under __name__ == "__main__" does not run.
    loaded_as = "__mp_main__" if name == "__main__" else name
    spec = None
    if name != "__main__":
        # Through the finders, because that of pytest makes failed asserts readable.
        for finder in sys.meta_path:
            spec = finder.find_spec(name, [os.path.dirname(file)])
            if spec is not None:
                break
    if spec is None or spec.origin != file:
        spec = importlib.util.spec_from_file_location(loaded_as, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    # Under the caller's name, by which pickle finds the classes of arguments.
    sys.modules[name] = sys.modules[loaded_as] = _modules_of_files[file] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del _modules_of_files[file]
        sys.modules.pop(name, None)
        raise
    return module

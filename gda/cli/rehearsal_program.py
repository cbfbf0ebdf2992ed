"""The program of one process of ``gda rehearse``: it makes one rehearsal and reports it.

It takes a request as JSON, and the file descriptor for the output of the user's program; it writes
a report as JSON to stdout. Its stderr takes the output of the compiler.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gda.cli.rehearsal_processes import Report, Request, num_cpus
from gda.layout.boundary import below
from gda.layout.text import counted, format_mesh
from gda.planning.notation.mistakes import MistakesError

_IMPORT_FILES = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_SHARDING = re.compile(r"NamedSharding\(mesh=.*?, spec=(.*?), memory_kind=\w+\)")


def main(request: Request, output: int) -> None:
    """Make a rehearsal, write its report to stdout, and end the process.

    ``output`` is the file descriptor for the output of the user's program.
    """
    os.set_inheritable(output, False)
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)  # so that nothing else goes into the pipe
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1, errors="backslashreplace")
        report = _report(request)
        sys.stdout.flush()
        json.dump(report._asdict(), pipe)
    os._exit(0)  # without the exit handlers of the compiler


def _report(request: Request) -> Report:
    try:
        function = _function(request)
        import gda

        mesh = _mesh(request)
        fun, args, kwargs = _call(request, function(mesh))
        rehearsal = gda.rehearse(fun, *args, **kwargs)
    except MistakesError as mistake:
        return Report(reason=str(mistake), lines=mistake.lines, is_for_all=True)
    except BaseException as error:
        says = f"{request.file}:{request.function} failed with the mesh {format_mesh(request.mesh)}"
        return Report(reason=_reason(error), lines=[f"{says}:", *_traceback(error)])
    text = f"{rehearsal}\n\n{rehearsal.collectives}" if rehearsal.collectives else str(rehearsal)
    return Report(rehearsal.to_dict(), text)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without the mesh, which JAX repeats."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: " + _SHARDING.sub(r"\1", line)


def _traceback(error: BaseException) -> list[str]:
    frames = below((__file__, *_IMPORT_FILES), error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).splitlines()


def _function(request: Request) -> Callable[[Any], Any]:
    """Return the function of the user's file, which is imported."""
    path = Path(request.file)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)  # as for a script
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise MistakesError(f"{path} cannot be imported:", *_traceback(error)) from None
    function = getattr(module, request.function, None)
    if callable(function):
        return function
    known = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == path.stem
    ]
    hint = f"it has {', '.join(known)}" if known else "define it there"
    raise MistakesError(f"{path} has no function {request.function!r}; {hint}")


def _mesh(request: Request) -> Any:
    import gda

    try:
        if count := num_cpus(request.topology):
            return _mesh_of_cpus(request, count)
        return gda.rehearsal_mesh(request.topology, request.mesh, num_slices=request.num_slices)
    except (ImportError, TypeError, ValueError, TimeoutError) as error:
        raise MistakesError(str(error)) from None


def _mesh_of_cpus(request: Request, count: int) -> Any:
    import jax
    import numpy as np

    if request.num_slices > 1:
        raise ValueError(f"{request.topology} has no slices; omit --num-slices")
    devices, needed = jax.devices("cpu")[:count], math.prod(request.mesh.values())
    if len(devices) != needed:
        raise ValueError(
            f"the mesh {format_mesh(request.mesh)} has {counted(needed, 'device')}, but "
            f"{request.topology} has {len(devices):,}; choose sizes with this product"
        )
    return jax.sharding.Mesh(np.array(devices).reshape(*request.mesh.values()), (*request.mesh,))


def _call(request: Request, given: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function, the arguments and the keyword arguments that the user returned."""
    if isinstance(given, tuple) and len(given) in (2, 3):
        fun, args, kwargs = (*given, {})[:3]
        if callable(fun) and isinstance(args, tuple) and isinstance(kwargs, dict):
            return fun, args, kwargs
    types = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple) else ""
    found = f"a tuple of {types}" if types else type(given).__name__
    raise MistakesError(
        f"{request.function}(mesh) of {request.file} must return a function and a tuple of its "
        f"arguments, not {found}; write: return step, (params, batch)"
    )


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])), int(sys.argv[2]))

"""The program of one process of ``gda rehearse``: it makes rehearsals and reports them.

It takes two file descriptors: one for the output of the user's program, and one of the connection
with requests, each of which it answers with a report. The compiler writes to stdout and stderr.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gda.cli.functions import function_of, traceback_of
from gda.cli.notation.mistakes import MistakesError
from gda.cli.rehearsal_processes import RehearsalReport, RehearsalRequest, num_cpus
from gda.layout.text import counted, format_mesh

_SHARDING = re.compile(r"NamedSharding\(mesh=.*?, spec=(.*?), memory_kind=\w+\)")


def main(output: int, descriptor: int) -> None:
    """Make the requested rehearsals, and end the process."""
    for each in (output, descriptor):
        os.set_inheritable(each, False)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1, errors="backslashreplace")
    with Connection(descriptor) as connection, suppress(EOFError):
        while True:
            report = _report(connection.recv())
            sys.stdout.flush()
            connection.send(report)
    os._exit(0)  # without the exit handlers of the compiler


def _report(request: RehearsalRequest) -> RehearsalReport:
    try:
        function = _function(request.file, request.function)
        import jax

        from gda.compiled.rehearse import rehearsal_of

        # A traced function may hold the mesh of the request before, as a global of its file.
        jax.clear_caches()
        mesh = _mesh(request)
        called = _call(request, function(mesh))
        about = {"examples": request.examples, "price": request.price, "costs": request.costs}
        rehearsal = rehearsal_of(*called, **about)
    except MistakesError as mistake:
        return RehearsalReport(reason=str(mistake), lines=mistake.lines, is_wrong_for_any_mesh=True)
    except BaseException as error:
        failed = (
            f"{request.file}:{request.function} failed with the mesh {format_mesh(request.mesh)}"
        )
        return RehearsalReport(
            reason=_reason(error), lines=[f"{failed}:", *traceback_of(error, __file__)]
        )
    return RehearsalReport(rehearsal)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without the mesh, which JAX repeats."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: " + _SHARDING.sub(r"\1", line)


@functools.cache
def _function(file: str, function: str) -> Callable[..., Any]:
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(file).resolve().parent)  # as for a script
    return function_of(file, function)


def _mesh(request: RehearsalRequest) -> Any:
    import gda

    try:
        if count := num_cpus(request.topology):
            return _mesh_of_cpus(request, count)
        return gda.rehearsal_mesh(
            request.topology,
            request.mesh,
            num_slices=request.num_slices,
            target_config=request.target_config,
        )
    except (ImportError, TypeError, ValueError, OSError) as error:
        raise MistakesError(str(error)) from None


def _mesh_of_cpus(request: RehearsalRequest, count: int) -> Any:
    import jax
    import numpy as np

    if request.num_slices > 1:
        raise ValueError(f"{request.topology} has no slices; omit --num-slices")
    if request.target_config is not None:
        raise ValueError(f"{request.topology} has no GPUs; omit --target-config")
    devices, needed = jax.devices("cpu")[:count], math.prod(request.mesh.values())
    if len(devices) != needed:
        raise ValueError(
            f"the mesh {format_mesh(request.mesh)} has {counted(needed, 'device')}, but "
            f"{request.topology} has {len(devices):,}; choose sizes with this product"
        )
    return jax.sharding.Mesh(np.array(devices).reshape(*request.mesh.values()), (*request.mesh,))


def _call(request: RehearsalRequest, given: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
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
    main(*map(int, sys.argv[1:]))

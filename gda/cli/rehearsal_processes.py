"""Rehearsals in processes beside each other, for ``gda rehearse``.

A process for each mesh: a compiler that dies ends one rehearsal, not the command, and Ctrl-C does
not wait for a compiler. ``gda/cli/rehearsal_program.py`` is the program of these processes.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from gda.launch.children import Children, signal_name
from gda.planning.notation.mistakes import MistakesError

_LOG_LINES = 20

# The step of examples/rehearse_transformer.py takes 1 GiB for 256 TPUs.
_BYTES_OF_ONE = 4 * 2**30

# Of a container, in version 2 and version 1 of cgroups.
_MEMORY_LIMITS = [
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]


class Request(NamedTuple):
    """A rehearsal to make: ``function`` of ``file`` on a mesh over the devices of a topology."""

    file: str
    function: str
    topology: str
    num_slices: int
    target_config: str | None
    mesh: dict[str, int]


class Report(NamedTuple):
    """The result of a request.

    Attributes:
      rehearsal: ``Rehearsal.to_dict()``; None if there is none.
      text: the rehearsal as a person reads it.
      reason: the reason of a failure, in a line.
      lines: the same with a traceback, if the user's program has raised.
      is_for_all: the request is wrong for any mesh, so that others need not be tried.
    """

    rehearsal: dict[str, Any] | None = None
    text: str = ""
    reason: str = ""
    lines: Sequence[str] = ()
    is_for_all: bool = False


def reports_of(
    requests: Sequence[Request], show_progress: Callable[[int, int], object]
) -> list[Report]:
    """Return a report for each request; ``show_progress`` takes their number so far, and of all.

    All processes have ended when it returns or raises, also after Ctrl-C. It raises
    ``MistakesError`` if a request is wrong for any mesh.
    """
    waiting = deque(enumerate(requests))
    reports: dict[int, Report] = {}
    running: dict[IO[bytes], tuple[int, _Rehearsal]] = {}
    most = _most_processes()
    # Many processes would print the same, through a progress bar.
    target = os.dup(2) if len(requests) == 1 else os.open(os.devnull, os.O_WRONLY)
    with Children() as children, os.fdopen(target, "wb") as output, ExitStack() as files:
        while len(reports) < len(requests):
            show_progress(len(reports), len(requests))
            while waiting and len(running) < most:
                index, request = waiting.popleft()
                rehearsal = _Rehearsal(children, request, output.fileno())
                files.callback(rehearsal.close)
                running[rehearsal.pipe] = index, rehearsal
            for pipe in select.select([*running], [], [])[0]:
                index, rehearsal = running.pop(pipe)
                reports[index] = report = rehearsal.report()
                if report.is_for_all:
                    raise MistakesError(*report.lines)
        show_progress(len(reports), len(requests))
    return [reports[index] for index in range(len(requests))]


class _Rehearsal:
    """A process that makes one rehearsal."""

    def __init__(self, children: Children, request: Request, output: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = children.start(
            [
                sys.executable,
                "-m",
                "gda.cli.rehearsal_program",
                json.dumps(request._asdict()),
                str(output),
            ],
            env=_environment(request.topology),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=[output],
        )
        assert self._process.stdout is not None
        self.pipe: IO[bytes] = self._process.stdout

    def report(self) -> Report:
        """Wait for the end of the process, and return its report."""
        text, _ = self._process.communicate()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        self.close()
        if text:
            return Report(**json.loads(text))
        code = self._process.returncode
        reason = f"the compiler ended with exit code {code}"
        if code < 0:
            memory = ", perhaps for lack of memory" if signal_name(-code) == "SIGKILL" else ""
            reason = f"the compiler was killed by {signal_name(-code)}{memory}"
        return Report(reason=reason, lines=[reason, *lines])

    def close(self) -> None:
        """Close the files of the process. May be called twice."""
        self.pipe.close()
        self._log.close()


def num_cpus(topology: str) -> int | None:
    """Return the number of virtual devices of ``cpu:8``; None for another topology."""
    found = re.fullmatch(r"cpu:([1-9]\d*)", topology)
    return int(found[1]) if found else None


def _environment(topology: str) -> dict[str, str]:
    # Processes that only compile leave a GPU alone, and share libtpu if there is a TPU.
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if count := num_cpus(topology):
        flag = f"--xla_force_host_platform_device_count={count}"
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {flag}".strip()
    return variables


def _most_processes() -> int:
    """Return the number of processes for which there are cores and memory."""
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    memory = [int(found[1]) * 1024] if found else []
    for limit in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            memory.append(int(limit.read_text()))
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(nbytes // _BYTES_OF_ONE for nbytes in memory)]))

"""Rehearsals in processes beside each other, for ``gda rehearse``.

A process makes one rehearsal after another, so that it imports JAX and the user's file once. A
compiler that dies ends one rehearsal, not the command, and Ctrl-C does not wait for a compiler.
``gda/cli/rehearsal_program.py`` is the program of these processes.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from gda.launch.children import Children
from gda.layout.text import signal_name
from gda.planning.notation.mistakes import MistakesError

if TYPE_CHECKING:
    from gda.compiled.rehearsal import Rehearsal

_LOG_LINES = 20

# The step of examples/rehearse_transformer.py takes 1 GiB for 256 TPUs.
_BYTES_OF_ONE = 4 * 2**30

# The files of cgroups, of version 2 and of version 1, that have the limit of the memory of a
# container, and its use. The name is that of the part of the use that the system may drop.
_CONTAINERS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        *(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
]


class RehearsalRequest(NamedTuple):
    """A rehearsal to make: ``function`` of ``file`` on a mesh over the devices of a topology.

    With ``may_skip`` it is not compiled if its arguments alone do not fit.
    """

    file: str
    function: str
    topology: str
    num_slices: int
    target_config: str | None
    mesh: dict[str, int]
    may_skip: bool = False


class RehearsalReport(NamedTuple):
    """The result of a request.

    Attributes:
      rehearsal: None if there is none.
      reason: the reason of a failure, in a line.
      lines: the same with a traceback, if the user's program has raised.
      is_wrong_for_any_mesh: others need not be tried.
    """

    rehearsal: Rehearsal | None = None
    reason: str = ""
    lines: Sequence[str] = ()
    is_wrong_for_any_mesh: bool = False


def reports_of(
    requests: Sequence[RehearsalRequest],
    show_progress: Callable[[int, int], object],
    *,
    is_silent: bool = False,
) -> list[RehearsalReport]:
    """Return a report for each request; ``show_progress`` takes their number so far, and of all.

    The requests differ in their meshes only. The program prints to stderr unless ``is_silent``. All
    processes have ended when it returns or raises, also after Ctrl-C. It raises ``MistakesError``
    if a request is wrong for any mesh.
    """
    waiting = deque(enumerate(requests))
    reports: dict[int, RehearsalReport] = {}
    running: dict[IO[bytes], tuple[int, _RehearsalProcess]] = {}
    idle: list[_RehearsalProcess] = []
    topology = requests[0].topology
    most = _most_processes()
    # Many processes would print the same, through a progress bar.
    target = os.open(os.devnull, os.O_WRONLY) if is_silent else os.dup(2)
    with Children() as children, os.fdopen(target, "wb") as output, ExitStack() as files:
        while len(reports) < len(requests):
            show_progress(len(reports), len(requests))
            while waiting and len(running) < most:
                index, request = waiting.popleft()
                worker = (
                    idle.pop()
                    if idle
                    else _RehearsalProcess(children, topology, output.fileno(), files)
                )
                worker.begin(request)
                running[worker.pipe] = index, worker
            for pipe in select.select([*running], [], [])[0]:
                index, worker = running.pop(pipe)
                report, is_alive = worker.report()
                if report.is_wrong_for_any_mesh:
                    raise MistakesError(*report.lines)
                reports[index] = report
                idle += [worker] if is_alive else []
        show_progress(len(reports), len(requests))
    return [reports[index] for index in range(len(requests))]


class _RehearsalProcess:
    """A process that makes rehearsals, one at a time."""

    def __init__(self, children: Children, topology: str, output: int, files: ExitStack) -> None:
        self._log = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = children.start(
            [sys.executable, "-m", "gda.cli.rehearsal_program", str(output)],
            env=_environment(topology),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=[output],
        )
        self.pipe: IO[bytes] = files.enter_context(self._process.stdout)
        self._requests: IO[bytes] = files.enter_context(self._process.stdin)

    def begin(self, request: RehearsalRequest) -> None:
        """Begin a rehearsal."""
        self._log.seek(0)  # of the process too, which shares the position
        self._log.truncate()
        # A process that was killed since its last report reads nothing: report() says so. Not
        # through the buffer, which would keep the request and fail again when it is closed.
        with suppress(BrokenPipeError):
            os.write(self._requests.fileno(), pickle.dumps(request))

    def report(self) -> tuple[RehearsalReport, bool]:
        """Wait for the report; also return True if the process can make another."""
        with suppress(EOFError, pickle.UnpicklingError):  # the process ended
            return pickle.load(self.pipe), True
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        code = self._process.wait()
        reason = f"the compiler ended with exit code {code}"
        if code < 0:
            memory = ", perhaps for lack of memory" if signal_name(-code) == "SIGKILL" else ""
            reason = f"the compiler was killed by {signal_name(-code)}{memory}"
        return RehearsalReport(reason=reason, lines=[reason, *lines]), False


def num_cpus(topology: str) -> int | None:
    """Return the number of virtual devices of ``cpu:8``; None for another topology."""
    found = re.fullmatch(r"cpu:([1-9]\d*)", topology)
    return int(found[1]) if found else None


def _environment(topology: str) -> dict[str, str]:
    # Processes that only compile leave a GPU alone, and share libtpu if there is a TPU.
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # A cached program lacks the list of temporaries, and JAX 0.12 cannot read one for devices
        # that are not here.
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    if count := num_cpus(topology):
        flag = f"--xla_force_host_platform_device_count={count}"
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {flag}".strip()
    return variables


def _most_processes() -> int:
    """Return the number of processes for which there are cores and memory."""
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    memory = [int(found[1]) * 1024] if found else []
    for folder, limit, use, files in _CONTAINERS:
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            free = int((folder / limit).read_text()) - int((folder / use).read_text())
            dropped = re.search(rf"^{files} (\d+)", (folder / "memory.stat").read_text(), re.M)
            memory.append(free + (int(dropped[1]) if dropped else 0))
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(nbytes // _BYTES_OF_ONE for nbytes in memory)]))

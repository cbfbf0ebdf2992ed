"""Rehearsals in processes beside each other, for ``gda rehearse``.

A process makes one rehearsal after another, so that it imports JAX and the user's file once. A
compiler that dies ends one rehearsal, not the command, and Ctrl-C does not wait for a compiler.
``gda/cli/rehearsal_program.py`` is the program of these processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.cli.notation.mistakes import MistakesError
from gda.launch.children import Children
from gda.layout.text import format_mesh, signal_name

if TYPE_CHECKING:
    from gda.compiled.rehearsal import Rehearsal

_LOG_LINES = 20

# The step of examples/rehearse_transformer.py takes 1 GiB for 256 TPUs.
_BYTES_OF_ONE = 4 * 2**30

# The memory of a container is here.
_CGROUP = Path("/sys/fs/cgroup")


class RehearsalRequest(NamedTuple):
    """A rehearsal to make: ``function`` of ``file`` on a mesh over the devices of a topology."""

    file: str
    function: str
    topology: str
    num_slices: int
    target_config: str | None
    mesh: dict[str, int]
    examples: float | None = None
    price: float | None = None
    costs: Mapping[str, float] | None = None


class RehearsalReport(NamedTuple):
    """The result of a request: a rehearsal, or the reason that there is none, in a line.

    ``lines`` are the reason with a traceback, if the user's program has raised. Other requests need
    not be tried if it ``is_wrong_for_any_mesh``.
    """

    rehearsal: Rehearsal | None = None
    reason: str = ""
    lines: Sequence[str] = ()
    is_wrong_for_any_mesh: bool = False


def reports_of(
    requests: Sequence[RehearsalRequest],
) -> Generator[tuple[int, RehearsalReport]]:
    """Yield the position and the report of each request of one function, as they are done.

    Several are also reported on stderr, with their seconds. All processes have ended when this
    ends, is closed or raises. It raises ``MistakesError`` if a request is wrong for any mesh.
    """
    waiting = deque(enumerate(requests))
    running: dict[Any, tuple[int, _RehearsalProcess]] = {}
    idle: list[_RehearsalProcess] = []
    most, num_done, begun = most_processes(), 0, time.monotonic()
    num_devices = max((num_cpus(request.topology) or 0 for request in requests), default=0)
    are_several = len(requests) > 1
    if are_several:
        _say(f"{len(requests):,} meshes to rehearse, {most} at a time")
    # Many processes would print the same, line by line.
    target = os.open(os.devnull, os.O_WRONLY) if are_several else os.dup(2)
    with Children() as children, os.fdopen(target, "wb") as output, ExitStack() as files:
        while waiting or running:
            while waiting and len(running) < most:
                if not idle:
                    idle.append(_RehearsalProcess(children, num_devices, output.fileno(), files))
                worker, (index, request) = idle.pop(), waiting.popleft()
                running[worker.pipe] = index, worker
                worker.begin(request)
            for pipe in wait([*running]):
                index, worker = running.pop(pipe)
                report, num_done = worker.report(), num_done + 1
                if report.is_wrong_for_any_mesh:
                    raise MistakesError(*report.lines)
                idle += [worker] if worker.is_alive else []
                if are_several:
                    took = f"took {time.monotonic() - worker.begun:.1f} s"
                    if left := len(requests) - num_done:
                        about = (time.monotonic() - begun) / num_done * left
                        took += f"; {left:,} more, about {about:,.0f} s"
                    of = f"{requests[index].topology} {format_mesh(requests[index].mesh)}"
                    _say(f"{of}: {_in_words(report)}; {took}")
                yield index, report


def _say(line: str) -> None:
    print(f"gda: {line}", file=sys.stderr, flush=True)


def _in_words(report: RehearsalReport) -> str:
    from gda.compiled.hlo import format_size
    from gda.compiled.report.rehearsal_text import ANSWERS

    if (rehearsal := report.rehearsal) is None:
        return report.reason.partition(". ")[0]
    time_ = f", about {rehearsal.seconds}" if rehearsal.seconds.estimate else ""
    return f"{ANSWERS[rehearsal.fits]}, {format_size(rehearsal.peak_bytes)}{time_}"


class _RehearsalProcess:
    """A process that makes rehearsals, one at a time; its pipe takes requests and has reports."""

    def __init__(self, children: Children, num_devices: int, output: int, files: ExitStack) -> None:
        self._log = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        pipe, of_program = Pipe()
        with of_program:
            self._process = children.start(
                [
                    *(sys.executable, "-m", "gda.cli.rehearsal_program"),
                    *map(str, (output, of_program.fileno())),
                ],
                env=_environment(num_devices),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[output, of_program.fileno()],
            )
        self.pipe = files.enter_context(pipe)
        self.is_alive, self.begun = True, 0.0

    def begin(self, request: RehearsalRequest) -> None:
        """Begin a rehearsal."""
        self.begun = time.monotonic()
        self._log.seek(0)  # of the process too, which shares the position
        self._log.truncate()
        with suppress(OSError):  # it was killed since its last report: report() says so
            self.pipe.send(request)

    def report(self) -> RehearsalReport:
        """Wait for the report."""
        with suppress(EOFError, OSError):  # the process ended
            return self.pipe.recv()
        self.is_alive = False
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        code = self._process.wait()
        reason = f"the compiler ended with exit code {code}"
        if code < 0:
            memory = ", perhaps for lack of memory" if signal_name(-code) == "SIGKILL" else ""
            reason = f"the compiler was killed by {signal_name(-code)}{memory}"
        return RehearsalReport(reason=reason, lines=[reason, *lines])


def num_cpus(topology: str) -> int | None:
    """Return the number of virtual devices of ``cpu:8``; None for another topology."""
    found = re.fullmatch(r"cpu:([1-9]\d*)", topology)
    return int(found[1]) if found else None


def _environment(num_devices: int) -> dict[str, str]:
    # Processes that only compile leave a GPU alone, and share libtpu if there is a TPU.
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # A cached program lacks the list of temporaries, and JAX 0.12 cannot read one for devices
        # that are not here.
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    if num_devices:
        flag = f"--xla_force_host_platform_device_count={num_devices}"
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {flag}".strip()
    return variables


def most_processes() -> int:
    """Return the number of processes that the cores and the memory allow."""
    found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    memory = [int(found[1]) * 1024] if found else []
    with suppress(OSError, ValueError):  # an old version of cgroups, or "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = (_CGROUP / "memory.stat").read_text()
        dropped = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        memory.append(limit - used + (int(dropped[1]) if dropped else 0))
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(nbytes // _BYTES_OF_ONE for nbytes in memory)]))

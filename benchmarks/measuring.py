"""Works measured in other processes: one that raises, dies or hangs costs its own line only.

Run as a program, it is such a process.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from benchmarks.pairs import LEAST_ROUNDS, measure
from benchmarks.work import Work
from gda.launch.children import Children
from gda.layout.text import signal_name

MINUTES = 20
LONGEST = 120.0  # seconds for one work, with the start of its process
# On an accelerator, which is at hand for minutes.
ACCELERATOR_MINUTES, ACCELERATOR_LONGEST = 4, 45.0
# When the last round of a work begins, this share of that time has gone: few rounds are better than
# the loss of its line.
_LAST_ROUND = 0.6
_AROUND = 20.0  # seconds for the imports before all works, and for the pages after them
_PREPARING = 2.0  # seconds, about, until a small work is measured

Outcome = list[list[float]] | str
"""The seconds of each side, round by round, or the reason why there are none."""


class Measuring:
    """Measures works one after the other, all of them within ``MINUTES``, or the minutes there are
    on an accelerator.

    Works of one file that need equal numbers of devices share a process, its pools and its caches.
    It ends before other works begin, and with it all that it started and wrote.

    Attributes:
      works: the works, in the order in which to measure them.
      log: the output of the last work.
    """

    def __init__(self, works: Sequence[Work], *, quick: bool, on_accelerator: bool = False) -> None:
        groups: dict[object, list[Work]] = {}
        for work in works:
            groups.setdefault(_key(work), []).append(work)
        # Long works last: a slow disk then costs only lines of works that need it.
        by_length = sorted(groups.values(), key=lambda group: max(each.seconds for each in group))
        self.works = [work for group in by_length for work in group]
        self.log = ""
        self._quick, self._on_accelerator = quick, on_accelerator
        self._minutes = ACCELERATOR_MINUTES if on_accelerator else MINUTES
        self._longest = ACCELERATOR_LONGEST if on_accelerator else LONGEST
        self._end = time.monotonic() + 60 * self._minutes - _AROUND
        self._expected = sum(map(_expected, works))
        self._key: object = None
        self._process: _Process | None = None

    def measure(self, work: Work) -> Outcome:
        """Measure the next work."""
        left, own = self._end - time.monotonic(), _expected(work)
        # Until the others must begin. Behind that schedule, a share of the time that is left: few
        # rounds of all works are better than none of some.
        share = max(left - self._expected + own, left * own / self._expected)
        self._expected -= own
        self.log = ""
        if left <= 0:
            return f"the {self._minutes} minutes were over"
        if self._process is None or self._key != _key(work):
            self.close()
            environment = _environment(work.devices, self._on_accelerator)
            self._key, self._process = _key(work), _Process(environment)
        message = work, self._quick, time.monotonic() + min(share, _LAST_ROUND * self._longest)
        outcome = self._process.ask(message, min(self._longest, left))
        if left < self._longest and isinstance(outcome, str) and outcome.startswith("stopped"):
            outcome += f", when the {self._minutes} minutes were over"
        self.log = self._process.log
        if self._process.is_over:
            self.close()
        return outcome

    def close(self) -> None:
        """End the process of the last work, with all that it started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(work: Work) -> tuple[str, int]:
    prepare = work.prepare.func if isinstance(work.prepare, partial) else work.prepare
    return prepare.__module__, work.devices


def _expected(work: Work) -> float:
    # Large works take longer: they write what they read later, and run once to warm up.
    return 1.6 * work.seconds + _PREPARING


def is_stand_in() -> bool:
    """Return True if CPU devices take the place of an accelerator; their figures say nothing."""
    return os.environ.get("GDA_ACCELERATOR") == "cpu"


def _environment(devices: int, on_accelerator: bool) -> dict[str, str]:
    """Return the environment of a process with so many virtual CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    own = {
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
    }
    if on_accelerator and not is_stand_in():
        # Otherwise one process would take most of its memory at once.
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    else:
        own["JAX_PLATFORMS"] = "cpu"  # where there are other devices too
    return {**os.environ, **own}


class _Process:
    """A process with an environment, and with a folder for what it writes."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.log, self.is_over = "", False
        ending = ExitStack()
        self.close = ending.close
        temporary = ending.enter_context(
            tempfile.TemporaryDirectory(prefix="gda-benchmarks-", ignore_cleanup_errors=True)
        )
        self._output = Path(temporary, "output")
        children = ending.enter_context(Children())
        self._connection, theirs = Pipe()
        ending.enter_context(self._connection)
        with theirs, self._output.open("wb") as output:
            self._process = children.start(
                [sys.executable, "-m", "benchmarks.measuring", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                env={**environment, "TMPDIR": temporary},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def ask(self, message: object, seconds: float) -> Outcome:
        """Send a work; return its figures, or the reason why there are none after so long."""
        before = self._output.stat().st_size
        try:
            self._connection.send(message)
            if self._connection.poll(seconds):
                return self._connection.recv()
            self.is_over = True
            return f"stopped after {seconds:.0f} s"
        except (EOFError, ConnectionError):
            self.is_over = True
            code = self._process.wait()
            if code >= 0:
                return f"its process exited with code {code}"
            memory = ", as the system does when memory runs out" if code == -9 else ""
            return f"its process was killed by {signal_name(-code)}{memory}"
        finally:
            self.log = self._output.read_bytes()[before:].decode(errors="replace")


def _serve(connection: Connection) -> None:
    while True:
        try:
            work, quick, until = connection.recv()
        except EOFError:
            return
        try:
            outcome: Outcome = _measured(work, quick, until)
        except BaseException as error:
            traceback.print_exc()
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
        connection.send(outcome)


def _measured(work: Work, quick: bool, until: float) -> list[list[float]]:
    gc.collect()  # of the work before it
    sides = work.prepare()
    assert len(sides) == len(work.ways)
    if quick:
        return measure(sides, 0, least=2)
    # A peak of memory varies little, and some works have theirs from one process.
    least = LEAST_ROUNDS if work.unit == "s" else 1
    return measure(sides, work.seconds, least, until=until)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

"""Run a program in several processes until all are done, one fails, or the launcher is told to end.

The first event ends the run: a report of a process that failed (``gda/launch/child.py``), the death
of a process, a signal, the time limit. What fails after that is taken for a consequence.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gda.children import Children, signal_name
from gda.launch.output import Lines, PrefixedOutput, write
from gda.processes import format_processes

# What the processes have between being asked to end and being killed.
_GRACE_SECONDS = 2.0

# The longest that it takes to write the stacks of a process; nothing tells when it is done.
_STACKS_SECONDS = 1.0

# The longest that a process which broke its connections takes to be seen as dead.
_DEATH_SECONDS = 0.3

_STDOUT, _STDERR = 1, 2

# A SIGPIPE says that nobody reads the output any more, see gda/launch/output.py.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def run(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout: float | None = None,
) -> int:
    """Run a program in one process for each environment, and return the exit code of the whole.

    Args:
      command: arguments of ``gda.launch.child``: ``"script"`` or ``"module"``, its path or name,
        and its own arguments.
      environments: all variables of each process.
      timeout: seconds for the whole run.

    Every line that a process writes comes out with its number in front. Why the run ended comes
    last, on stderr. Must be called in the main thread, because it handles signals.
    """
    width = len(str(len(environments) - 1))
    with _Signals() as signals, Children() as children:
        processes = [
            _Process(children, command, index, f"[{index:{width}}] ", variables)
            for index, variables in enumerate(environments)
        ]
        output = PrefixedOutput([lines for each in processes for lines in each.output])
        ending = _watch(processes, signals, timeout)
        if ending.process is not None and processes[ending.process].waited_in_vain():
            _write_stacks(processes)
        if ending.code:
            _ask_to_end(processes, signals, ending)
    output.finish()
    with suppress(OSError):  # as when stderr is closed; the exit code still tells
        _tell(processes, ending)
    for process in processes:
        os.close(process.report)
    return ending.code


@dataclass(frozen=True)
class _Ending:
    """Why a run ended: the exit code, the reason in words, the process whose failure it was."""

    code: int
    reason: str = ""
    process: int | None = None
    asks_with: int = signal.SIGTERM


class _Process:
    """One process of the program, what it writes, and what it reports of its own failure."""

    def __init__(
        self,
        children: Children,
        command: Sequence[str],
        index: int,
        prefix: str,
        variables: Mapping[str, str],
    ) -> None:
        self.index = index
        self.report, report = os.pipe()
        self.popen = children.start(
            [sys.executable, "-m", "gda.launch.child", str(report), *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[report],
        )
        os.close(report)
        os.set_blocking(self.report, False)
        self._received = b""
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.stderr = Lines(self.popen.stderr, prefix, _STDERR)
        self.output = (Lines(self.popen.stdout, prefix, _STDOUT), self.stderr)

    def read_report(self) -> bool:
        """Take what there is of the report without waiting; whether more may come."""
        with suppress(BlockingIOError):
            data = os.read(self.report, 1 << 16)
            self._received += data
            return bool(data)
        return True

    def failure(self) -> tuple[int, str] | None:
        """Return exit code and traceback, which may be empty, if it reported that it failed."""
        report = self._report()
        return (report["code"], report["traceback"]) if report and report["code"] else None

    def ended_well(self) -> bool:
        """Return whether the program is done; the process may still wait for the others."""
        report = self._report()
        return report is not None and not report["code"]

    def waited_in_vain(self) -> bool:
        """Return whether it failed because another process did not come."""
        _, traceback = self.failure() or (0, "")
        return "LateProcessError" in traceback or "Timed out waiting" in traceback

    def _report(self) -> dict[str, Any] | None:
        self.read_report()
        return json.loads(self._received) if self._received.endswith(b"\n") else None

    def ending(self) -> _Ending | None:
        """Return how it failed, if it did."""
        if failure := self.failure():
            code = failure[0]
        elif (code := self.popen.poll() or 0) < 0:
            reason = f"process {self.index} was killed by {signal_name(-code)}"
            return _Ending(128 - code, reason, self.index)
        reason = f"process {self.index} failed with exit code {code}"
        return _Ending(code, reason, self.index) if code else None


class _Signals:
    """Makes signals readable from a pipe: the end of a child, and what ends the run."""

    def __enter__(self) -> _Signals:
        self.pipe, self._written = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(self._written, False)
        # As nohup does it: who ignores the end of the terminal is not told.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGCHLD, *_STOPS)
            if number not in ignored
        }
        self._wakeup = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self.pipe)
        os.close(self._written)

    def stop(self) -> int | None:
        """Take the signals that came, and return the first that ends the run."""
        with suppress(BlockingIOError):
            return next(
                (number for number in os.read(self.pipe, 1 << 16) if number in _STOPS), None
            )
        return None


def _watch(processes: Sequence[_Process], signals: _Signals, timeout: float | None) -> _Ending:
    """Wait for the first event that ends the run."""
    start = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(signals.pipe, selectors.EVENT_READ)
        for process in processes:
            selector.register(process.report, selectors.EVENT_READ, process)
        while True:
            if number := signals.stop():
                return _stopped_by(number)
            if ending := _first_failure(processes):
                return ending
            if all(process.popen.returncode == 0 for process in processes):
                return _Ending(0)
            left = None if timeout is None else start + timeout - time.monotonic()
            if left is not None and left <= 0:
                _write_stacks(processes)
                return _Ending(124, f"not done after {timeout:g} s; all stacks are shown above")
            for key, _ in selector.select(left):
                if key.data is not None and not key.data.read_report():
                    selector.unregister(key.fd)


def _first_failure(processes: Sequence[_Process]) -> _Ending | None:
    reported = [process for process in processes if process.failure()]
    if reported and not _died_unheard(processes):
        # The others notice a death by their connections. Their reports of that may be here sooner
        # than the system is done with the dead one.
        time.sleep(_DEATH_SECONDS)
    for process in (*_died_unheard(processes), *reported, *processes):
        if ending := process.ending():
            return ending
    return None


def _died_unheard(processes: Sequence[_Process]) -> list[_Process]:
    # An abort is left out: so JAX ends a process when another one died.
    return [
        process
        for process in processes
        if process.popen.poll() not in (None, 0, -signal.SIGABRT) and not process.failure()
    ]


def _stopped_by(number: int) -> _Ending:
    if number == signal.SIGPIPE:
        return _Ending(128 + number, "the output can no longer be written")
    asks_with = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    return _Ending(128 + number, f"stopped by {signal_name(number)}", asks_with=asks_with)


def _write_stacks(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.popen.send_signal(signal.SIGUSR1)
    time.sleep(_STACKS_SECONDS)


def _ask_to_end(processes: Sequence[_Process], signals: _Signals, ending: _Ending) -> None:
    """Give the processes a chance to clean up; who failed is about to end anyway."""
    for process in processes:
        if process.index != ending.process:
            process.popen.send_signal(ending.asks_with)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.popen.poll() is None for process in processes):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        select.select([signals.pipe], [], [], left)
        signals.stop()


def _tell(processes: Sequence[_Process], ending: _Ending) -> None:
    """Write the tracebacks of those who failed, and last of all why the run ended."""
    last = b""
    for process in processes:
        _, text = process.failure() or (0, "")
        traceback = text.encode(errors="replace")
        if process.index == ending.process:
            last = traceback or process.stderr.last()
        else:
            write(_STDERR, process.stderr.take(traceback) + process.stderr.end())
    if ending.code:
        done = [process.index for process in processes if process.ended_well()]
        before = f"; {format_processes(done)} had ended with exit code 0 before" if done else ""
        write(_STDERR, f"gda.launch: {ending.reason}{before}\n".encode() + last)

"""Run a program in several processes until all are done, one fails, or the launcher is told to end.

The first event ends all processes: the report of a failure (``gda/launch/child.py``), the death of
one, a signal, the time limit, or processes that do not exit after the program succeeded in all. A
later failure counts as a consequence. After a failure, the program may be started again.
"""

from __future__ import annotations

import math
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from gda.launch.children import Children, Port
from gda.launch.output import Lines, Log, PrefixedOutput, write
from gda.layout.text import format_processes, signal_name

# The time between asking processes to end, because one has failed, and killing them.
_GRACE_SECONDS = 2.0

# The time for exit handlers and JAX's shutdown, after the program succeeded in all processes.
_EXIT_SECONDS = 30.0

# The time for a process to begin writing its stacks, and then to end.
_SILENT_SECONDS = 5.0
_STACKS_SECONDS = 0.5

# The longest time from the broken connections of a process to its visible death.
_DEATH_SECONDS = 0.3

# The pause before the program starts again; it doubles each time, up to the longest.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1, 60

# Exit codes after which the program does not start again: success, and "try again" after a signal.
_FINISHED = (0, 75)

# Errors of a collective on CPU that a process does not join in time. The second comes from the
# first collective of some devices, which makes the connections.
_GLOO = re.compile(rb"Gloo .*(Timed out waiting|DEADLINE_EXCEEDED)")
_IN_VAIN = re.compile(rb"LateProcessError|Timed out waiting")
_LATE = (
    "a collective waited in vain for another process. If that takes longer, such as to compile, "
    "give a longer --collective-timeout, or call gda.check_processes_agree before the collective"
)

_STDOUT, _STDERR = 1, 2

# SIGPIPE means that the output has no reader, see gda/launch/output.py.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def run(
    command: Sequence[str],
    environments: Callable[[int], Sequence[Mapping[str, str]]],
    *,
    restarts: int = 0,
    timeout: float | None = None,
    grace: float = 30.0,
    logs: str | None = None,
) -> int:
    """Run a program in several processes, and return the exit code of the whole.

    Every line of a process is written with its number in front, and last, on stderr, the reason for
    the end. A signal that ends the run is passed on to the processes, which may take ``grace``
    seconds to end. Call it in the main thread, because it handles signals.

    Args:
      command: ``"script"`` or ``"module"``, its path or name, and its own arguments.
      environments: returns the environment of each process, for a free port of this machine.
      restarts: the most times to start the program again after a failure.
      timeout: the seconds that each start may take.
      logs: a folder for a file of each process and start.
    """
    with _Signals() as signals:
        start = 0
        while True:
            start += 1
            log = None if logs is None else os.path.join(logs, f"start{start}")
            about = f"start {start} of {restarts + 1}: " if restarts else ""
            with closing(Port()) as port:
                ending = _run_once(
                    command, environments(port.number), signals, timeout, grace, about, log
                )
            if ending.code in _FINISHED or start > restarts or signals.have_stopped():
                return ending.code
            pause = min(_PAUSE_SECONDS * 2 ** (start - 1), _LONGEST_PAUSE_SECONDS)
            _say(f"gda.launch: start {start + 1} of {restarts + 1} is in {pause:g} s\n".encode())
            if signals.have_stopped(within=pause):
                _say(b"gda.launch: stopped by a signal; the program does not start again\n")
                return ending.code


def _run_once(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    signals: _Signals,
    timeout: float | None,
    grace: float,
    about: str,
    log: str | None,
) -> _EndOfRun:
    """Start the program once, and return its end; ``about`` begins the reason that is written."""
    width = len(str(len(environments) - 1))
    with Children() as children:
        processes = [
            _Process(children, command, index, f"[{index:{width}}] ", variables, log)
            for index, variables in enumerate(environments)
        ]
        output = PrefixedOutput([lines for each in processes for lines in each.output])
        ending = _watch(processes, signals, timeout)
        reasons = [ending.reason]
        if ending.shows_stacks:
            reasons += _show_stacks(processes)
        if ending.was_asked:
            ending = _asked_to_end(processes, signals, ending, grace)
            reasons[0] = ending.reason
        elif ending.reason:
            _ask_to_end(processes, signals, ending, _GRACE_SECONDS)
    output.finish()
    with suppress(OSError):  # such as a closed stderr; the exit code still tells
        _tell(processes, ending, about + "; ".join(reasons) if ending.reason else "")
    for process in processes:
        process.close()
    return ending


def _say(line: bytes) -> None:
    with suppress(OSError):
        write(_STDERR, line)


@dataclass(frozen=True)
class _EndOfRun:
    """The end of a run: its exit code, and the reason in words, empty if all succeeded.

    ``process`` is the one that failed. ``asks_with`` is the signal that asks the others to end.
    ``was_asked`` is True if the launcher got a signal to end.
    """

    code: int
    reason: str = ""
    process: int | None = None
    asks_with: int = signal.SIGTERM
    shows_stacks: bool = False
    was_asked: bool = False


class _Process:
    """One process of the program, with its output and its report."""

    def __init__(
        self,
        children: Children,
        command: Sequence[str],
        index: int,
        prefix: str,
        variables: Mapping[str, str],
        log: str | None,
    ) -> None:
        self.index = index
        self._log = None if log is None else Log(f"{log}.process{index}.log")
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
        self.stderr = Lines(self.popen.stderr, prefix, _STDERR, self._log)
        self.output = (Lines(self.popen.stdout, prefix, _STDOUT, self._log), self.stderr)

    def read_report(self) -> bool:
        """Read the available part of the report; return True if more may come."""
        with suppress(BlockingIOError):
            data = os.read(self.report, 1 << 16)
            self._received += data
            return bool(data)
        return True

    def failure(self) -> tuple[int, bytes] | None:
        """Return exit code and traceback, which may be empty, if it reported a failure."""
        report = self._report()
        return report if report and report[0] else None

    def is_done(self) -> bool:
        """Return True if the program succeeded; the process may still wait for the others."""
        report = self._report()
        return self.has_ended_well() if report is None else not report[0]

    def has_ended_well(self) -> bool:
        """Return True if the process has ended, with exit code 0 and without a failure."""
        return self.popen.poll() == 0 and not self.failure()

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def close(self) -> None:
        os.close(self.report)
        if self._log is not None:
            self._log.close()

    def _report(self) -> tuple[int, bytes] | None:
        """Return exit code and traceback, when the report is complete."""
        self.read_report()
        head, _, traceback = self._received.partition(b"\n")
        code, size = map(int, head.split()) if b"\n" in self._received else (0, math.inf)
        return (code, traceback) if len(traceback) >= size else None

    def ending(self) -> _EndOfRun | None:
        code, traceback = self.failure() or (self.popen.poll() or 0, b"")
        if code < 0:
            reason = f"process {self.index} was killed by {signal_name(-code)}"
            is_abort = code == -signal.SIGABRT
            return _EndOfRun(128 - code, reason, self.index, shows_stacks=is_abort)
        reason = f"process {self.index} failed with exit code {code}"
        if _GLOO.search(traceback):
            reason += f": {_LATE}"
        in_vain = _GLOO.search(traceback) or _IN_VAIN.search(traceback)
        return _EndOfRun(code, reason, self.index, shows_stacks=bool(in_vain)) if code else None


class _Signals:
    """A pipe with the signals that matter: the end of a child, and those that end the run."""

    def __enter__(self) -> _Signals:
        self.pipe, self._written = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(self._written, False)
        # As under nohup: a launcher that ignores SIGHUP goes on ignoring it.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGCHLD, *_STOPS)
            if number not in ignored
        }
        self._wakeup = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._have_stopped = False
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self.pipe)
        os.close(self._written)

    def stop(self) -> int | None:
        """Take the signals that came, and return the first that ends the run."""
        came = b""
        with suppress(BlockingIOError):
            came = os.read(self.pipe, 1 << 16)
        number = next((number for number in came if number in _STOPS), None)
        self._have_stopped |= number is not None
        return number

    def have_stopped(self, within: float = 0) -> bool:
        """Wait for a signal that ends the run; return True if one has ever come."""
        limit = time.monotonic() + within
        while not (self.stop() or self._have_stopped) and (left := limit - time.monotonic()) > 0:
            select.select([self.pipe], [], [], left)
        return self._have_stopped


def _watch(processes: Sequence[_Process], signals: _Signals, timeout: float | None) -> _EndOfRun:
    """Wait for the first event that ends the run."""
    limit = math.inf if timeout is None else time.monotonic() + timeout
    exit_limit = math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(signals.pipe, selectors.EVENT_READ)
        for process in processes:
            selector.register(process.report, selectors.EVENT_READ, process)
        while True:
            if number := signals.stop():
                return _stopped_by(number)
            if ending := _first_failure(processes):
                return ending
            if all(process.has_ended_well() for process in processes):
                return _EndOfRun(0)
            now = time.monotonic()
            if now >= limit:
                return _EndOfRun(124, f"not done after {timeout:g} s", shows_stacks=True)
            if now >= exit_limit:
                return _not_exiting(processes)
            if exit_limit == math.inf and all(process.is_done() for process in processes):
                exit_limit = now + _EXIT_SECONDS
            left = min(limit, exit_limit) - now
            for key, _ in selector.select(None if left == math.inf else left):
                if key.data is not None and not key.data.read_report():
                    selector.unregister(key.fd)


def _first_failure(processes: Sequence[_Process]) -> _EndOfRun | None:
    reported = [process for process in processes if process.failure()]
    if reported and not _died_unheard(processes):
        # The others notice a death by their connections, and may report it before the system does.
        time.sleep(_DEATH_SECONDS)
    for process in (*_died_unheard(processes), *reported, *processes):
        if ending := process.ending():
            return ending
    return None


def _not_exiting(processes: Sequence[_Process]) -> _EndOfRun:
    left = format_processes([process.index for process in processes if process.is_alive()])
    reason = (
        f"the program succeeded in all processes, but {left} did not exit within "
        f"{_EXIT_SECONDS:g} s and was ended; an exit handler of the program or of JAX blocked"
    )
    return _EndOfRun(0, reason, shows_stacks=True)


def _died_unheard(processes: Sequence[_Process]) -> list[_Process]:
    # Not by an abort: JAX aborts a process when another one has died.
    return [
        process
        for process in processes
        if (process.popen.poll() or 0) != 0
        and process.popen.returncode != -signal.SIGABRT
        and not process.failure()
    ]


def _stopped_by(number: int) -> _EndOfRun:
    if number == signal.SIGPIPE:
        return _EndOfRun(128 + number, "the output can no longer be written")
    asks_with = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    reason = f"stopped by {signal_name(number)}"
    return _EndOfRun(128 + number, reason, asks_with=asks_with, was_asked=True)


def _show_stacks(processes: Sequence[_Process]) -> list[str]:
    """Let every process write its stacks, and wait a while for them."""
    before = {process: process.stderr.stacks for process in processes if process.is_alive()}
    for process in before:
        process.popen.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline and any(
        process.stderr.stacks == count and process.is_alive() for process, count in before.items()
    ):
        time.sleep(0.02)
    time.sleep(_STACKS_SECONDS)
    are_shown = any(process.stderr.stacks != count for process, count in before.items())
    return ["the stacks of the processes are shown above"] if are_shown else []


def _asked_to_end(
    processes: Sequence[_Process], signals: _Signals, ending: _EndOfRun, grace: float
) -> _EndOfRun:
    """Pass the signal on, wait for the processes, and return the end of the run."""
    _ask_to_end(processes, signals, ending, grace)
    if left := [process.index for process in processes if process.is_alive()]:
        were = "was" if len(left) == 1 else "were"
        reason = f"{ending.reason}; {format_processes(left)} had not ended and {were} killed"
        return replace(ending, reason=f"{reason} (see --grace)")
    codes = [end.code for process in processes if (end := process.ending())]
    return replace(ending, code=codes[0] if codes else 0)


def _ask_to_end(
    processes: Sequence[_Process], signals: _Signals, ending: _EndOfRun, grace: float
) -> None:
    """Ask the processes to end, and wait ``grace`` seconds, no longer after a Ctrl-C."""
    for process in processes:
        if process.index != ending.process:
            process.popen.send_signal(ending.asks_with)
    deadline = time.monotonic() + grace
    while any(process.popen.poll() is None for process in processes):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        select.select([signals.pipe], [], [], left)
        if signals.stop() == signal.SIGINT:
            return


def _tell(processes: Sequence[_Process], ending: _EndOfRun, reason: str) -> None:
    """Write the tracebacks of failed processes, and last the reason for the end of the run."""
    last = b""
    for process in processes:
        _, traceback = process.failure() or (0, b"")
        told = process.stderr.take(traceback) + process.stderr.end()
        if process.index == ending.process:
            last = traceback or process.stderr.last()
        else:
            write(_STDERR, told)
    if reason:
        write(_STDERR, f"gda.launch: {reason}\n".encode() + last)

"""Real processes of this machine that run functions in step: ``Pool``.

``gda.testing.worker`` is the program of each, ``gda.testing.channel`` the connection to it. They
start at the first call and stay for the next, so that many short calls cost little. They are forked
from two processes that have imported JAX, so that not all have the same order of sets.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from gda.launch.children import Children, Port, environment
from gda.layout.boundary import set_module
from gda.layout.text import signal_name
from gda.testing.answer import GRACE, Answer, raise_first, trim_stacks
from gda.testing.forking import Forked

T = TypeVar("T")

_START_TIMEOUT = 120.0
# They are long, because a pool ends the others itself when one dies, and a busy machine may stop a
# process for 20 s: without heartbeats JAX would abort all processes.
_TIMEOUTS = {"heartbeat_timeout": 60.0, "collective_timeout": 50.0, "agreement_timeout": 50.0}
_STOP_TIMEOUT = 5.0
_POLL_INTERVAL = 0.2
_DUMP_TIMEOUT = 5.0
_OUTPUT_LIMIT = 10_000
_NO_STACK = "  unknown: the process did not react to a signal"


@set_module("gda.testing")
class Pool:
    """Processes connected through JAX, for calling functions in all of them.

    They start with the first call. After a call with different endings, they are replaced, because
    they may be out of step. They end with ``close``, and at the latest with the process that made
    the pool, even if that is killed.

    Args:
      num_processes: number of processes.
      devices: virtual CPU devices of each.
      prepare: called with the pool after its processes have started, each time.

    >>> import jax
    >>> from gda.testing import Pool
    >>> with Pool(2, devices=4) as pool:
    ...     pool.run(jax.device_count)
    [8, 8]
    """

    def __init__(
        self,
        num_processes: int,
        devices: int = 1,
        *,
        prepare: Callable[[Pool], None] | None = None,
    ) -> None:
        self.num_processes = _check_positive("num_processes", num_processes)
        self.devices = _check_positive("devices", devices)
        self._prepare = prepare
        self._group: _RunningProcesses | None = None

    def run(
        self, function: Callable[..., T], /, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[T]:
        """Call a function in every process, with equal arguments, and return the results in order.

        The function may communicate. Hypothesis draws an example in the caller, and all processes
        get the same one:

            @given(st.integers(1, 9))
            def test_sum(process_pool, rows):
                process_pool(2).run(check_sum, rows)

        Args:
          function: of an importable module or of a test module. The processes find it by its name,
            so lambdas and functions inside functions do not work.
          args, kwargs: arguments for it; they are pickled, as are the results.
          timeout: seconds after which a process counts as hung.

        Raises:
          ProcessError: the function raised in a process, or a process died or hung.
          TypeError: the function or an argument cannot be sent to the processes.
        """
        reference = _reference(function)
        name = reference[1]
        try:
            arguments = pickle.dumps((args, kwargs))
        except Exception as error:
            raise TypeError(
                f"the arguments of {name} cannot be sent to other processes, "
                f"because they cannot be pickled: {error}"
            ) from error
        answers = self.ask(("call", reference, arguments), timeout)
        raise_first(answers, f"{name} with timeout={timeout:g}")
        return [pickle.loads(answer.value) for answer in answers]

    def ask(self, command: tuple[Any, ...], timeout: float) -> list[Answer]:
        """Send a command of ``gda.testing.channel`` to all processes and return their answers."""
        self.start()
        return self._gather(command, timeout)

    def start(self) -> None:
        """Start the processes, unless they run."""
        if self._group is not None and not self._group.is_alive():
            self.kill()
        if self._group is None:
            self._group = _RunningProcesses(self.num_processes, self.devices)
            try:
                raise_first(self._gather(None, _START_TIMEOUT), f"the start of {self!r}")
                if self._prepare is not None:
                    self._prepare(self)
            except BaseException:
                self.kill()
                raise

    def close(self) -> None:
        """End the processes, after they have ended their pytest session. May be called twice.

        The pool stays usable: the next call starts new processes.
        """
        if self._group is not None:
            try:
                self._group.stop()
            finally:
                self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        group, self._group = self._group, None
        if group is not None:
            group.kill()

    @property
    def num_alive(self) -> int:
        """The number of running processes: all or none."""
        return 0 if self._group is None else self.num_processes

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.num_processes}, devices={self.devices})"

    def _gather(self, command: tuple[Any, ...] | None, timeout: float) -> list[Answer]:
        assert self._group is not None
        try:
            answers = self._group.ask(command, timeout)
        except BaseException as error:  # KeyboardInterrupt, and pytest-timeout's
            try:
                error.add_note(self._group.all_stacks())
            finally:
                self.kill()
            raise
        if any(answer.ending in ("died", "hung", "behind") for answer in answers):
            self.kill()
        elif len({(answer.ending, answer.outcome) for answer in answers}) > 1:
            self.close()  # out of step, but able to end their fixtures
        return answers


class _PoolWorker:
    """One process of a pool, and this end of its connection."""

    def __init__(self, children: Children, directory: Path, variables: dict[str, str], index: int):
        self.log = directory / f"process-{index}.log"
        self.stacks = directory / f"process-{index}.stacks"
        self.stacks.touch()
        self.connection, other_end = Pipe()
        variables["GDA_TESTING_STACKS"] = str(self.stacks)
        with other_end, self.log.open("wb") as log, open(os.devnull, "rb") as nothing:
            self.process: Forked = children.start(
                "gda.testing.worker:main",
                popen=Forked,
                pass_fds=[other_end.fileno()],
                env=variables,
                stdin=nothing.fileno(),
                stdout=log.fileno(),
                stderr=log.fileno(),
                server=index % 2,
            )


class _RunningProcesses:
    """The processes of a pool from one start to their end."""

    def __init__(self, num_processes: int, devices: int) -> None:
        ending = ExitStack()
        # Also runs when the pool is collected, and at the end of the interpreter.
        self.kill = weakref.finalize(self, ending.close)
        folder = tempfile.TemporaryDirectory(prefix="gda-testing-", ignore_cleanup_errors=True)
        directory = Path(ending.enter_context(folder))
        port = ending.enter_context(closing(Port()))
        children = ending.enter_context(Children())
        self._workers = [
            _PoolWorker(
                children,
                directory,
                environment(index, num_processes, port.number, devices, **_TIMEOUTS),
                index,
            )
            for index in range(num_processes)
        ]

    def is_alive(self) -> bool:
        """Return True if all processes wait for a command."""
        # A connection with something to read has been closed on the other side.
        return all(
            worker.process.poll() is None and not worker.connection.poll()
            for worker in self._workers
        )

    def ask(self, command: tuple[Any, ...] | None, timeout: float) -> list[Answer]:
        """Send a command, or none after the start, and return the answer of each process."""
        deadline = time.monotonic() + timeout
        log_starts = [worker.log.stat().st_size for worker in self._workers]
        if command is None:
            log_starts = [0] * len(log_starts)
        else:
            self._send(command)
        answers = [Answer(index, len(self._workers)) for index in range(len(self._workers))]
        missing = self._collect(answers, deadline)
        stacks = self._stacks() if missing else [""] * len(answers)
        timed_out = time.monotonic() >= deadline
        for answer, worker, start in zip(answers, self._workers, log_starts, strict=True):
            answer.output, answer.stack = _read(worker.log, start), stacks[answer.process]
            if answer.process in missing and timed_out:
                answer.ending, answer.at = "hung", deadline
        return answers

    def all_stacks(self) -> str:
        """Return the stacks of all processes as one text."""
        return "\n".join(
            f"Stack of process {index} of {len(self._workers)}:\n{stack}"
            for index, stack in enumerate(self._stacks())
        )

    def stop(self) -> None:
        """Ask the processes to end, and give them some seconds for it."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        self._send(("stop",))
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _send(self, command: tuple[Any, ...]) -> None:
        message = pickle.dumps(command)
        for worker in self._workers:
            try:
                worker.connection.send_bytes(message)
            except OSError:  # it is dead, which shows while waiting for its answer
                continue

    def _collect(self, answers: list[Answer], deadline: float) -> set[int]:
        """Collect answers until the deadline, or shortly after a failure; return the others."""
        index_of: dict[Connection, int] = {
            worker.connection: index for index, worker in enumerate(self._workers)
        }
        while index_of and (remaining := deadline - time.monotonic()) > 0:
            # A process that dies does not close its connection while a child of it lives on.
            workers = [self._workers[index] for index in index_of.values()]
            gone = [each.connection for each in workers if each.process.poll() is not None]
            ready = wait(list(index_of), 0 if gone else min(remaining, _POLL_INTERVAL))
            for connection in [each for each in index_of if each in ready or each in gone]:
                answer = answers[index_of[connection]]
                is_last, is_trouble = self._receive(connection, answer, connection in ready)
                if is_last:
                    del index_of[connection]
                if is_trouble:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return set(index_of.values())

    def _receive(self, connection: Connection, answer: Answer, is_ready: bool) -> tuple[bool, bool]:
        """Take one message; return True if it is the last, and True if it reports trouble."""
        try:
            if not is_ready:
                raise EOFError
            kind, at, outcome, value = connection.recv()
        except (EOFError, OSError):
            process = self._workers[answer.process].process
            answer.ending, answer.at = "died", time.monotonic()
            answer.status = _status(process)
            return True, True
        if kind in ("report", "trouble"):
            answer.reports.append(value)
            return False, kind == "trouble"
        answer.ending, answer.at, answer.outcome, answer.value = kind, at, outcome, value
        return True, kind == "raised"

    def _stacks(self) -> list[str]:
        """Return the stack of each process, as ``faulthandler`` writes it."""
        starts = [worker.stacks.stat().st_size for worker in self._workers]
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_TIMEOUT
        texts: list[str] = []
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, texts = texts, list(map(_read, [each.stacks for each in self._workers], starts))
            missing = [each for each, text in zip(self._workers, texts, strict=True) if not text]
            if texts == before and all(each.process.poll() is not None for each in missing):
                break
        return [trim_stacks(text) or _NO_STACK for text in texts]


def _reference(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    """Return module, qualified name and file by which a process finds a function."""
    # JAX's own caches, such as jax.process_count, have no name, but the wrapped function has.
    wrapped = getattr(function, "__wrapped__", None)
    named = function if hasattr(function, "__qualname__") else wrapped
    module = sys.modules.get(getattr(named, "__module__", ""))
    name = getattr(named, "__qualname__", "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if module is None or found is not function or (module.__name__ == "__main__" and not file):
        raise TypeError(
            "the processes find a function by its name, so it must stand at the top of a module or "
            f"in a class, in a file: {function!r} does not; move it, and pass values as arguments"
        )
    return module.__name__, name, None if file is None else os.path.abspath(file)


def _status(process: Forked) -> str:
    """Return text about the exit of a process that has closed its connection."""
    try:
        code = process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return "closed the connection to its pool"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with code {code}"


def _read(file: Path, start: int) -> str:
    """Return the end of the text of a file after its first ``start`` bytes."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        begin = max(start, size - _OUTPUT_LIMIT)
        stream.seek(begin)
        text = stream.read().decode(errors="replace")
    return text if begin == start else f"... {begin - start} bytes omitted ...\n{text}"


def _check_positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return value

"""A watch over processes that work together, in which a failure of one ends the others too.

A collective waits for a process that failed or died, without its name. So a process that waits for
its devices looks for a process of its machine that has ended, and for an *alarm*: a key that a
failed process has written. Then each posts its state; one without a state is the likely cause.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import jax

from gda.layout.text import MOST_CHARACTERS, MOST_NAMED, format_processes, join_some
from gda.multihost import coordination
from gda.multihost.allgather import Bytes, all_gather
from gda.multihost.background import in_thread, wait_and_look
from gda.multihost.meeting import DisagreementError, LateProcessError
from gda.multihost.places import Place, ended, neighbours, one_line, text_of_end

_FOLDER = "gda/multihost/watch"
_LOOKS = 10  # for a process that ends, after an error that its end explains
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between looks at the states after an alarm
_begun: Counter[tuple[int, ...]] = Counter()

K = TypeVar("K")
T = TypeVar("T")


class _AlarmError(Exception):
    """Another process has failed, or has ended."""


class _TransportError(Exception):
    """Work that waits for other processes has failed; the cause is its error."""


class FailureWatch:
    """A watch over ``processes``, ascending, each of which makes one for the same works."""

    def __init__(self, what: str, processes: tuple[int, ...], timeout: float) -> None:
        _begun[processes] += 1
        self._what, self._processes, self._timeout = what, processes, timeout
        self._number = _begun[processes]
        self._service = coordination.service() if len(processes) > 1 else None
        self._folder = f"{_FOLDER}/{coordination.short_name(processes)}"
        self._last: Future[Any] | None = None

    @contextmanager
    def called(self) -> Iterator[None]:
        """Watch the work in the block; work that waits for other processes goes to ``begin``.

        If the work fails here, it raises its error, or a ``LateProcessError`` if others have ended
        or do not answer. If it fails in another process, it raises a ``DisagreementError``.
        """
        try:
            yield
        except _AlarmError:
            self._raise_alarm("")
            other = DisagreementError(f"{self._what}: another process failed")
            raise self._explained() or other from None
        except _TransportError as failure:
            # The cause may be a process that died: the transport cannot tell.
            error: BaseException = failure.__cause__ or failure
            self._raise_alarm(one_line(error))
            if explained := self._explained():
                raise explained from error
            raise error from None
        except BaseException as error:
            self._raise_alarm(one_line(error))
            raise
        else:
            self._post_state("")

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin work that may wait for other processes, after all work that was begun before."""
        self._last = begun = in_thread("gda-watch", work, self._last)
        return begun

    def result(self, future: Future[T]) -> T:
        """Return the result of begun work; raise if another process fails meanwhile."""
        wait_and_look(future, self._look)
        if error := future.exception():
            raise _TransportError from error
        return future.result()

    def in_turn(
        self, works: Iterable[tuple[K, Callable[[], T]]], use: Callable[[K, T], object]
    ) -> None:
        """Do works in order, and ``use`` the key and the result of each while the next is done."""
        last: tuple[K, Future[T]] | None = None
        for key, work in works:
            arriving = self.begin(work)
            if last is not None:
                use(last[0], self.result(last[1]))
            last = key, arriving
        if last is not None:
            use(last[0], self.result(last[1]))

    def all_gather(self, data: Bytes) -> Bytes:
        return self.result(self.begin(lambda: all_gather(data, self._processes)))

    def _look(self) -> None:
        """Raise ``_AlarmError`` if another process has failed, or has ended during the work."""
        if (service := self._service) is None:
            return
        with contextlib.suppress(ConnectionError):
            if service.list(self._alarm):
                raise _AlarmError
            gone = ended(service, self._places, self._processes)
            if self._states(service, [*gone]).keys() != gone.keys():
                raise _AlarmError

    def _states(
        self, service: coordination.Service, processes: Sequence[int]
    ) -> dict[int, tuple[int, str]]:
        """Return, for each process that has done this work, number and failure of its last one."""
        folders = [f"{self._folder}/state/"]
        if len(processes) <= MOST_NAMED:
            folders = [f"{self._folder}/state/{process}/" for process in processes]
        states = {
            int(key.split("/")[-2]): json.loads(state)
            for folder in folders
            for key, state in service.list(folder).items()
        }
        return {process: state for process, state in states.items() if state[0] >= self._number}

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {} if self._service is None else neighbours(self._service)

    @property
    def _alarm(self) -> str:
        return f"{self._folder}/alarm/{self._number}/"

    def _raise_alarm(self, failure: str) -> None:
        self._post_state(failure)
        self._put(f"{self._alarm}on", b"")

    def _post_state(self, failure: str) -> None:
        state = json.dumps([self._number, failure]).encode()
        self._put(f"{self._folder}/state/{jax.process_index()}/last", state)

    def _put(self, key: str, value: bytes) -> None:
        if self._service is not None:
            with contextlib.suppress(Exception):
                self._service.put(key, value)

    def _explained(self) -> Exception | None:
        """Return the error that follows from the states of the others; ``None`` if none does."""
        if self._service is None:
            return None
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        states: dict[int, tuple[int, str]] = {}
        missing = [*self._processes]
        while True:
            try:
                # Only the missing ones, less and less often: process 0 answers all processes.
                states |= self._states(self._service, missing)
            except ConnectionError as error:
                return error
            missing = [process for process in self._processes if process not in states]
            gone = ended(self._service, self._places, missing)
            if not missing or gone or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if gone:
            return _ended(self._what, gone)
        if missing:
            who = format_processes(missing)
            return LateProcessError(
                f"{self._what}: the transport failed, and {who} did not answer for "
                f"{self._timeout:g} s. Look for the reason in the output of {who}",
                missing,
            )
        failures = [
            f"process {process} failed: {failure}"
            for process, (number, failure) in sorted(states.items())
            if number == self._number and failure and process != jax.process_index()
        ]
        if not failures:
            return None
        return DisagreementError(f"{self._what}: {join_some(failures, MOST_CHARACTERS)}")


def watched(work: Callable[[], T], what: str, processes: tuple[int, ...]) -> T:
    """Return the result of work that waits for devices, on which some processes compute together.

    Raises a ``LateProcessError`` if one of them has ended meanwhile, or the error of the work.
    """
    service = coordination.service()
    if service is None or len(processes) < 2:
        return work()
    found: dict[int, Place] = {}

    def look() -> None:
        nonlocal found
        found = found or neighbours(service)
        if gone := ended(service, found, processes):
            raise _ended(what, gone)

    done = in_thread("gda-wait", work)
    wait_and_look(done, look)
    if error := done.exception():
        # The transport fails a moment before the process is gone.
        for _ in range(_LOOKS):
            try:
                look()
            except LateProcessError as late:
                raise late from error
            time.sleep(0.1)
    return done.result()


def _ended(what: str, gone: dict[int, str]) -> LateProcessError:
    who = format_processes([*gone])
    message = f"{what}: {who} {text_of_end(gone)}. Look for the reason in the output of {who}"
    return LateProcessError(message, gone)

"""Work of several processes over their devices, in which a failure of one ends the others too.

A collective waits for a process that failed or died, and names none. So a process that waits for
its devices looks, now and then, for an *alarm*: a key of the coordination service that a failed
process has written. Then each writes its state; a process that writes none is the one to look at.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from hashlib import sha256
from queue import SimpleQueue
from typing import Any, TypeVar

import jax

from gda.layout.text import format_processes, join_some
from gda.multihost import coordination
from gda.multihost.meeting import DisagreementError, LateProcessError

_FOLDER = "gda/multihost/roll"
_LOOK_EVERY = 0.5  # seconds
_begun: Counter[tuple[int, ...]] = Counter()


T = TypeVar("T")


class _AlarmError(Exception):
    """Another process has failed."""


class Roll:
    """The processes that do a piece of work together, and their states.

    Every process of ``processes`` must make one, for the same works in the same order.

    Args:
      what: the work, for messages.
      processes: ascending.
      timeout: seconds to wait, after an alarm, for the states of the others.
    """

    def __init__(self, what: str, processes: tuple[int, ...], timeout: float) -> None:
        _begun[processes] += 1
        self._what, self._processes, self._timeout = what, processes, timeout
        self._number = _begun[processes]
        self._service = coordination.service() if len(processes) > 1 else None
        # Not the list itself, which may be long.
        self._folder = f"{_FOLDER}/{sha256(repr(processes).encode()).hexdigest()[:16]}"
        self._works: SimpleQueue[Any] | None = None

    @contextmanager
    def called(self) -> Iterator[None]:
        """Do the work inside, and in ``begin`` all that waits for other processes.

        Raises:
          LateProcessError: the work failed, and these processes do not answer.
          DisagreementError: the work of another process failed.
          Exception: an error of the work here.
        """
        try:
            yield
        except _AlarmError:
            self._tell("")
            raise self._verdict() or DisagreementError(
                f"{self._what}: another process failed"
            ) from None
        except jax.errors.JaxRuntimeError as error:
            # The cause may be a process that died: the transport cannot tell.
            self._ring(error)
            if (verdict := self._verdict()) is not None:
                raise verdict from error
            raise
        except BaseException as error:
            self._ring(error)
            raise
        else:
            self._tell("")
        finally:
            if self._works is not None:
                self._works.put(None)

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin some work that may wait for other processes; after that which was begun before."""
        future: Future[T] = Future()
        if self._works is None:
            self._works = SimpleQueue()
            # A daemon, because a collective that waits for a dead process may never end.
            threading.Thread(target=_run, args=(self._works,), daemon=True, name="gda-roll").start()
        self._works.put((work, future))
        return future

    def result(self, future: Future[T]) -> T:
        """Return the result of work that was begun, unless another process fails meanwhile."""
        while not wait([future], _LOOK_EVERY).done:
            with contextlib.suppress(ConnectionError):
                if self._service is not None and self._service.list(self._alarm):
                    raise _AlarmError
        return future.result()

    @property
    def _alarm(self) -> str:
        return f"{self._folder}/alarm/{self._number}/"

    def _ring(self, error: BaseException) -> None:
        self._tell(f"{type(error).__name__}: {error}".replace("\n", " ")[:1000])
        if self._service is not None:
            with contextlib.suppress(Exception):
                self._service.put(f"{self._alarm}{jax.process_index()}", b"")

    def _tell(self, failure: str) -> None:
        if self._service is not None:
            with contextlib.suppress(Exception):
                state = json.dumps([self._number, failure]).encode()
                self._service.put(f"{self._folder}/state/{jax.process_index()}", state)

    def _verdict(self) -> Exception | None:
        """Return the error that the states of the others explain, if they explain one."""
        deadline = time.monotonic() + self._timeout
        missing, failures = set(self._processes), list[str]()
        while missing and time.monotonic() < deadline and self._service is not None:
            try:
                states = self._service.list(f"{self._folder}/state/")
            except ConnectionError as error:
                return error
            failures = []
            for key, state in sorted(states.items()):
                process, (number, failure) = int(key.rpartition("/")[2]), json.loads(state)
                if number >= self._number:
                    missing.discard(process)
                if number == self._number and failure and process != jax.process_index():
                    failures.append(f"process {process} failed: {failure}")
            time.sleep(0.05)
        if self._service is not None and missing:
            who = format_processes(missing)
            return LateProcessError(
                f"{self._what}: the transport failed, and {who} did not answer for "
                f"{self._timeout:g} s. Look for the reason in the output of {who}",
                sorted(missing),
            )
        if failures:
            return DisagreementError(f"{self._what}: {join_some(failures)}")
        return None


def _run(works: SimpleQueue[Any]) -> None:
    """Do work in the order in which it was begun, until there is ``None``."""
    while (item := works.get()) is not None:
        work, future = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

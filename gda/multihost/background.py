"""Work in a thread of its own, for a caller that looks around while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_EVERY = 0.5  # seconds


class Background:
    """A thread that does work in the order in which it was begun.

    It is a daemon, because work that waits for a dead process may never end. It starts with the
    first work. At exit, where Python since 3.12 starts no thread, ``begin`` does the work itself.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: SimpleQueue[Any] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin some work, after that which was begun before."""
        self._last = future = Future[T]()
        self._works.put((work, future))
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True, name=self._name)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                self._works.put(None)
                self._run()
        return future

    def close(self) -> None:
        """Let the thread end after the work that was begun; wait for that only if it is done."""
        self._works.put(None)
        if self._thread is not None and self._last is not None and self._last.done():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


def wait_and_look(future: Future[Any], look: Callable[[], object]) -> None:
    """Wait until the work is done; look around now and then, until ``look`` raises."""
    while not is_done(future):
        look()


def is_done(future: Future[Any]) -> bool:
    """Wait a moment, and return True if the work is done."""
    return bool(wait([future], _LOOK_EVERY).done)

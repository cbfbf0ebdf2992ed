"""The versions of an offered tree that a process keeps: the current one, and older ones in use.

Only process 0 knows the pulls that go on, and tells the others in each update. So an update never
waits for a pull, and a pull that has begun gets its version. An older version is dropped by the
first update after its pulls. At most ``MOST_OLDER`` are kept, so that silent pullers do not fill
the memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from gda.arrays.transport.connection import Deadline

T = TypeVar("T")

MOST_OLDER = 8


class Versions(Generic[T]):
    """The versions of a process, by number, for any thread to use.

    Attributes:
      current: the number of the version that a new pull gets, 0 before there is one.
      run: a random text that names this offer; a later one at the same address has another.
    """

    def __init__(self) -> None:
        self.current, self.run = 0, ""
        self.is_closed = threading.Event()
        self._held: dict[int, tuple[T, threading.Event]] = {}  # the event tells that it was dropped
        self._pulls: Counter[int] = Counter()
        self._is_updating = False
        self._changed = threading.Condition()

    def begin_update(self) -> None:
        """Let no pull begin until ``end_update``, so that the versions in use are known."""
        with self._changed:
            self._is_updating = True

    def next_update(self) -> list[int]:
        """Return the next number, and the older versions that pulls need."""
        with self._changed:
            return [self.current + 1, *sorted(self._pulls)[-MOST_OLDER:]]

    def update(self, number: int, tree: T, older: Collection[int] = ()) -> None:
        """Make a version the current one, and drop all others but some older ones."""
        with self._changed:
            self._held[number] = tree, threading.Event()
            self.current = number
            self._keep({number, *older})

    def end_update(self) -> None:
        """Let pulls begin again, also if there was no update."""
        with self._changed:
            self._is_updating = False
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all versions; a thread that waits for one gets a ``ConnectionError``."""
        with self._changed:
            self.is_closed.set()
            self._keep(())

    def _keep(self, numbers: Collection[int]) -> None:
        for number in [*self._held]:
            if number not in numbers:
                self._held.pop(number)[1].set()
        self._changed.notify_all()

    @contextmanager
    def pulled(self, least: int, deadline: Deadline) -> Iterator[int]:
        """Keep the current version, once it is ``least`` or later, for a pull; give its number."""

        def is_here() -> bool:
            return self.current >= least and not self._is_updating

        with self._changed:
            self._wait(is_here, deadline, self._state)
            number = self.current
            self._pulls[number] += 1
        try:
            yield number
        finally:
            with self._changed:
                self._pulls[number] -= 1
                self._pulls += Counter()  # without what is 0

    def _state(self) -> str:
        return f"has version {self.current or None} and no later one"

    def get(self, run: str, number: int, deadline: Deadline) -> tuple[T, threading.Event]:
        """Wait for a version that a pull keeps; return it, and the event that it is dropped."""

        def is_here() -> bool:
            if self.current and run != self.run:
                raise LookupError("was started again; pull again")
            if number not in self._held and number <= self.current:
                raise ValueError(f"has no version {number} any more; pull again")
            return number in self._held

        with self._changed:
            self._wait(is_here, deadline, lambda: f"has no version {number} yet")
            return self._held[number]

    def _wait(
        self, is_true: Callable[[], bool], deadline: Deadline, state: Callable[[], str]
    ) -> None:
        """Wait until a condition is true; the lock is released while waiting."""
        while not self.is_closed.is_set() and not is_true():
            if not deadline.left():
                raise TimeoutError(f"{state()} after {deadline.seconds:.3g} s")
            self._changed.wait(deadline.left())
        if self.is_closed.is_set():
            raise ConnectionError("has closed its offer")

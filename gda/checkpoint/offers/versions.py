"""The versions of an offered tree that a process holds.

It holds the current one, and older ones while a pull of them goes on, which only process 0 knows:
each update brings its knowledge to the others. So an update never waits for a pull, and a pull that
has begun gets its version; the memory of an older one is free after the next update that finds its
pulls ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from gda.checkpoint.offers.connection import Deadline

T = TypeVar("T")


class Versions(Generic[T]):
    """The versions that a process holds, by number. Any thread may use it.

    ``current`` is the number of the version that a new pull gets, 0 before there is one.
    """

    def __init__(self) -> None:
        self.current = 0
        self.is_closed = threading.Event()
        self._held: dict[int, T] = {}
        self._pulls: Counter[int] = Counter()
        self._changed = threading.Condition()

    def add(self, number: int, tree: T) -> None:
        """Hold a version that is not current yet."""
        with self._changed:
            self._held[number] = tree
            self._changed.notify_all()

    def advance(self, number: int) -> list[int]:
        """Make a version the current one; return those that pulls of today need."""
        with self._changed:
            self.current = number
            self._changed.notify_all()
            return sorted(+self._pulls)

    def keep(self, numbers: list[int]) -> None:
        """Let go of all versions but the current one and some others."""
        with self._changed:
            kept = {self.current, *numbers, *+self._pulls}
            self._held = {number: tree for number, tree in self._held.items() if number in kept}

    def drop_after_current(self) -> None:
        """Let go of a version that did not become current."""
        with self._changed:
            self._held = {n: tree for n, tree in self._held.items() if n <= self.current}

    @property
    def latest(self) -> T:
        """The current version."""
        with self._changed:
            return self._held[self.current]

    def close(self) -> None:
        """Let go of all; whoever waits for a version gets a ``ConnectionError``."""
        with self._changed:
            self._held.clear()
            self.is_closed.set()
            self._changed.notify_all()

    @contextmanager
    def pulled(self, least: int, deadline: Deadline) -> Iterator[int]:
        """Hold the current version, once it is ``least`` or later, for a pull; its number."""
        with self._changed:
            self._wait(lambda: self.current >= least, deadline, self._state)
            number = self.current
            self._pulls[number] += 1
        try:
            yield number
        finally:
            with self._changed:
                self._pulls[number] -= 1

    def _state(self) -> str:
        return f"has version {self.current or None} and no later one"

    def get(self, number: int, deadline: Deadline) -> T:
        """Return a version that a pull holds; wait until this process has it, too."""

        def is_here() -> bool:
            if number not in self._held and number <= self.current:
                raise ValueError(f"has no version {number} any more; pull again")
            return number in self._held

        with self._changed:
            self._wait(is_here, deadline, lambda: f"has no version {number} yet")
            return self._held[number]

    def _wait(
        self, is_true: Callable[[], bool], deadline: Deadline, state: Callable[[], str]
    ) -> None:
        """Wait until a condition is true, with the lock held, which waiting releases."""
        while not self.is_closed.is_set() and not is_true():
            if not deadline.left():
                raise TimeoutError(f"{state()} after {deadline.seconds:.3g} s")
            self._changed.wait(deadline.left())
        if self.is_closed.is_set():
            raise ConnectionError("has closed its offer")

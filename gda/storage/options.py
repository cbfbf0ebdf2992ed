"""The options of all functions that load or store, and the display of their progress."""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

from gda.layout.boundary import set_module
from gda.layout.distribution import install_command

ProgressLike = bool | Callable[[int, int], object]

_SECONDS_BETWEEN = 0.1  # at least, between two drawings of a bar
_LONGEST_DELAY = 10.0  # between two attempts


@set_module("gda")
@dataclass(frozen=True)
class Retry:
    """The errors after which a read is tried again, the number of attempts, and the delays.

    Args:
      errors: an exception class or a tuple of them. A fault that gda finds in a block after the
        read, such as a wrong shape, counts as an error of the read.
      attempts: number of attempts to read a block, at least 1.
      delay: seconds between the first attempt and the second. From then on it doubles, up to 10
        seconds. The wait is a random share of it, from half to all, so that many hosts do not retry
        at the same moment.

    The last error reaches the caller, with a note of the number of attempts. A wait ends at once
    when another read fails or the user interrupts.

    Raises:
      TypeError: ``errors`` has something that is not an exception class.
      ValueError: a number is out of its range.

    >>> import gda
    >>> gda.Retry(OSError, attempts=5, delay=0.5)
    Retry(errors=<class 'OSError'>, attempts=5, delay=0.5)
    """

    errors: type[Exception] | tuple[type[Exception], ...]
    _: KW_ONLY
    attempts: int = 3
    delay: float = 0.1

    def __post_init__(self) -> None:
        given = self.errors if isinstance(self.errors, tuple) else (self.errors,)
        if not given or not all(isinstance(e, type) and issubclass(e, Exception) for e in given):
            raise TypeError(
                f"errors must be an exception class or a tuple of them, such as OSError, not "
                f"{self.errors!r}"
            )
        check_count(self.attempts, "attempts")
        if not 0 <= self.delay <= 86400:
            raise ValueError(f"delay must be from 0 to 86400 seconds, not {self.delay!r}")

    def seconds_after(self, attempts: int) -> float:
        """Return the seconds to wait after so many attempts."""
        longest = max(self.delay, _LONGEST_DELAY)
        return min(self.delay * 2.0 ** min(attempts - 1, 64), longest) * random.uniform(0.5, 1)


@dataclass(frozen=True)
class Options:
    """The options of all functions that load or store; ``TypeError`` or ``ValueError`` if wrong."""

    max_workers: int | None = None
    max_bytes: int | None = None
    progress: ProgressLike = False
    retry: Retry | None = None
    read_once: bool = False  # read what several processes need in one of them

    def __post_init__(self) -> None:
        for name in ("max_workers", "max_bytes"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        if not isinstance(self.progress, bool) and not callable(self.progress):
            raise TypeError(
                "progress must be True, False or a function (nbytes_done, nbytes_total), not "
                f"{self.progress!r}"
            )
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise TypeError(
                f"retry must be a gda.Retry, such as gda.Retry(OSError), not {self.retry!r}"
            )
        if not isinstance(self.read_once, bool):
            raise TypeError(f"read_once must be True or False, not {self.read_once!r}")

    @property
    def are_for_threads(self) -> bool:
        """True if several threads work at a time."""
        return self.max_workers is not None and self.max_workers > 1


def check_count(value: Any, name: str) -> None:
    try:
        is_count = not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        is_count = False
    if not is_count:
        raise ValueError(f"{name} must be a whole number, at least 1, not {value!r}")


def check_seconds(value: Any, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} must be a number of seconds, at least 0, not {value!r}")


@contextmanager
def counting(
    progress: ProgressLike, description: str, total: int | Callable[[], int]
) -> Iterator[Callable[[int], object]]:
    """Give the function that adds bytes that are done, and shows the progress.

    A function is asked for the total when the first bytes are done.
    """
    if progress is False:
        yield lambda _: None
        return
    done = 0
    with _bar(description) if progress is True else nullcontext(progress) as show:

        def add(nbytes: int) -> None:
            nonlocal done, total
            total = total if isinstance(total, int) else total()
            done += nbytes
            show(done, total)

        yield add


@contextmanager
def _bar(description: str) -> Iterator[Callable[[int, int], object]]:
    try:
        import rich.console
        import rich.progress as bars
    except ImportError as error:
        raise ImportError(
            f"progress=True needs rich: {install_command('progress')}, or pass a function "
            "(nbytes_done, nbytes_total)"
        ) from error
    # Bytes in powers of 1000, because TransferSpeedColumn has no others.
    columns = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    ]
    console = rich.console.Console(stderr=True)
    # Drawn when something is reported: rich's own refreshing is a thread that outlives its bar.
    with bars.Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(description, total=None)
        drawn = 0.0

        def update(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            is_due = done >= total or now - drawn >= _SECONDS_BETWEEN
            bar.update(task, completed=done, total=total, refresh=is_due)
            if is_due:
                drawn = now

        yield update

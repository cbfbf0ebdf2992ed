"""Work in a thread of its own, while the caller watches other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS_FOR_ANSWERS = 5.0  # of the service
_LOOK_EVERY = 0.5  # seconds


def in_thread(name: str, work: Callable[[], T], after: Future[Any] | None = None) -> Future[T]:
    """Begin some work in a daemon thread, which first waits for the end of other work.

    At exit, where Python since 3.12 starts no thread, the caller does the work itself.
    """
    future = Future[T]()

    def run() -> None:
        nonlocal after
        if after is not None:
            wait([after])
            after = None  # its result may be large
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True, name=name).start()
    except RuntimeError:
        run()
    return future


def wait_for_answers(work: Callable[[], None]) -> None:
    """Call the coordination service; raise ``TimeoutError`` if its process is stopped."""
    in_thread("gda-service", work).result(SECONDS_FOR_ANSWERS)


def wait_and_look(future: Future[Any], look: Callable[[], object]) -> None:
    while not is_done(future):
        look()


def is_done(future: Future[Any]) -> bool:
    """Wait a moment, and return True if the work is done."""
    return bool(wait([future], _LOOK_EVERY).done)

"""A check that a test leaves no thread of gda running."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if is_of_gda(thread.name)]
    for thread in left:
        thread.join(10)  # its work may be done, and its end a moment away
    assert not [thread.name for thread in left if thread.is_alive()]


def is_of_gda(name: str) -> bool:
    return name.startswith("gda") or "reader" in name

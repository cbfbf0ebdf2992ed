"""A check that a test leaves no thread of gda running."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in names if name.startswith("gda") or "reader" in name]

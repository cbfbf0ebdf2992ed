"""Checks that a test leaves no file open and no thread of gda; the memory of this process."""

import contextlib
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_file_is_left_open() -> Iterator[None]:
    kinds = (".safetensors", ".partial")
    before = [name for name in open_files() if name.endswith(kinds)]
    yield
    assert [name for name in open_files() if name.endswith(kinds)] == before


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if is_of_gda(thread.name)]
    for thread in left:
        thread.join(60)  # its work may be done, and its end a moment away
    assert not [thread.name for thread in left if thread.is_alive()]


def is_of_gda(name: str) -> bool:
    is_for_all = name.startswith("gda-fingerprints_")  # one thread, which stays for later saves
    return (name.startswith("gda") and not is_for_all) or "reader" in name


def open_files() -> list[str]:
    """Return the files that this process has open, but for those that close meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return sorted(name for name in found if not name.startswith("/proc/"))


def resident() -> int:
    """Return the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def little_memory(most_bytes: float = 2**25) -> Iterator[None]:
    """Fail if Python or NumPy take more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()

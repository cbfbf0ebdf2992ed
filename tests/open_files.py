"""What this process holds, and a check that a test leaves no safetensors file open."""

import contextlib
import os
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


def open_files() -> list[str]:
    """Return what this process has open, as far as it lasts."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return sorted(name for name in found if not name.startswith("/proc/"))


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextlib.contextmanager
def little_memory(most_bytes: float = 2**25) -> Iterator[None]:
    """Fail if Python or NumPy take more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()

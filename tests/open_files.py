"""A check that a test leaves no safetensors file open."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_file_is_left_open() -> Iterator[None]:
    before = _open_files()
    yield
    assert _open_files() == before


def _open_files() -> list[str]:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    names = [os.readlink(link) for link in links]
    return sorted(name for name in names if name.endswith((".safetensors", ".partial")))

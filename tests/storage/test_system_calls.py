"""Calls of the system that do less than they were asked."""

import os
from pathlib import Path

import numpy as np
import pytest

from gda.storage.stores.directory import FileStore
from gda.storage.system_calls import in_calls, write_all


def test_calls_are_repeated_until_all_is_done_or_nothing_more() -> None:
    memory, data = np.zeros((5, 2), np.int32), np.arange(10, dtype=np.int32)
    source, calls = data.tobytes(), []

    def read(rest: memoryview, done: int) -> int:
        calls.append(done)
        part = source[done : done + 7][: len(rest)]
        rest[: len(part)] = part
        return len(part)

    assert in_calls(read, memory) == 40
    assert calls == [0, 7, 14, 21, 28, 35]
    np.testing.assert_array_equal(memory.ravel(), data)
    source = source[:9]
    assert in_calls(read, memory) == 9
    assert in_calls(read, np.empty((0, 3))) == 0


def test_a_file_that_takes_no_more_is_an_error() -> None:
    left = iter([3, 2, 0])
    with pytest.raises(OSError, match="the file took 5 of 8 bytes and no more"):
        write_all(lambda rest, done: next(left), bytes(8))


def test_a_store_reads_files_whole_by_short_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, writev, data = os.readv, os.writev, bytes(range(256)) * 4
    monkeypatch.setattr(os, "readv", lambda file, parts: readv(file, [parts[0][:100]]))
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:100]]))
    store = FileStore(str(tmp_path))
    store.write("a", data)
    assert store.read("a", len(data)) == store.head("a", 2000) == data
    payload, tail = np.empty(1020, np.uint8), np.empty(4, np.uint8)
    size, _ = store.read_into("a", payload, tail)
    assert (size, payload.tobytes() + tail.tobytes()) == (1024, data)

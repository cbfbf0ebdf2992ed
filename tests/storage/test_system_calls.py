"""Calls of the system that do less than they were asked."""

import os
from pathlib import Path

import numpy as np
import pytest

from gda.storage.stores.directory import FileStore
from gda.storage.system_calls import read_into, write_all


def test_calls_are_repeated_until_all_is_done_or_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv, calls = os.pwrite, os.preadv, list[int]()

    def few(file: int, data: memoryview, at: int) -> int:
        calls.append(at)
        return pwrite(file, data[:7], at)

    monkeypatch.setattr(os, "pwrite", few)
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:9]], at))
    data, memory = np.arange(10, dtype=np.int32).reshape(5, 2), np.zeros((5, 2), np.int32)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        write_all(file, data, 3)
        write_all(file, np.empty((0, 3)), 3)
        assert calls == [3, 10, 17, 24, 31, 38]
        assert read_into(file, memory, 3) == 40
        np.testing.assert_array_equal(memory, data)
        assert read_into(file, memory, 34) == 9  # where the file ends
        assert read_into(file, np.empty((0, 3)), 0) == 0
    finally:
        os.close(file)


@pytest.mark.parametrize(("name", "at"), [("pwrite", (0,)), ("writev", ())])
def test_a_file_that_takes_no_more_is_an_error(
    name: str, at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([3, 2, 0])
    monkeypatch.setattr(os, name, lambda *_: next(left))
    with pytest.raises(OSError, match="the file took 5 of 8 bytes and no more"):
        write_all(-1, bytes(8), *at)


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

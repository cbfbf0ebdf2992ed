"""The files that a save writes at a time."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gda
from gda.storage.stores.directory import FileStore


def test_files_of_arrays_on_the_host_are_written_together_whatever_max_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(8)  # breaks if fewer files are written at a time
    write_sealed = FileStore.write_sealed

    def write_with_others(self: FileStore, name: str, payload: Any) -> int:
        together.wait(timeout=60)
        return write_sealed(self, name, payload)

    monkeypatch.setattr(FileStore, "write_sealed", write_with_others)
    tree = {str(number): np.full(2**18, number, np.float32) for number in range(8)}
    gda.checkpoint.save(tmp_path, tree, max_bytes=1)
    restored = gda.checkpoint.restore(tmp_path)
    assert all(np.array_equal(restored[name], array) for name, array in tree.items())

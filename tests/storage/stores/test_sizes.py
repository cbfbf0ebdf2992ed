"""Files and objects of any size: no more is taken of them than was asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from gda.storage.stores.checksums import crc32c
from gda.storage.stores.directory import FileStore
from gda.storage.stores.object_store import KvStore


class Counting:
    """A key-value store that counts the bytes of its answers."""

    def __init__(self, kv: Any) -> None:
        self._kv, self.nbytes = kv, 0

    def read(self, name: str, **options: Any) -> Any:
        found = self._kv.read(name, **options)
        if found.exception() is None:
            self.nbytes += len(found.result().value)
        return found


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileStore, KvStore]:
    return FileStore(str(tmp_path_factory.mktemp("store"))), KvStore("memory://sizes", 60)


@given(st.binary(max_size=40), st.integers(0, 40), st.integers(1, 20), st.integers(0, 4))
def test_stores_agree_and_read_no_more_than_is_asked(
    stores: tuple[FileStore, KvStore], data: bytes, most: int, size: int, of_tail: int
) -> None:
    directory, objects = stores
    Path(directory.join("a")).write_bytes(data)
    kv = ts.KvStore.open(objects.url).result()
    kv.write("a", data).result()
    objects._kv = counting = Counting(kv)
    for store in (directory, objects):
        if len(data) > most:
            with pytest.raises(ValueError, match=f"expected are at most {most}"):
                store.read("a", most)
        else:
            assert store.read("a", most) == data
    assert counting.nbytes <= min(most, len(data)) + 1
    counting.nbytes = 0
    assert directory.head("a", most) == objects.head("a", most) == data[:most]
    assert counting.nbytes == len(data[:most])
    counting.nbytes = 0
    for store in (directory, objects):
        payload, tail = np.zeros(size, np.uint8), np.zeros(of_tail, np.uint8)
        nbytes, crc = store.read_into("a", payload, tail)
        if nbytes != size + of_tail:
            assert nbytes == len(data)
            continue
        # Of a larger object the last bytes, whose checksum tells.
        assert payload.tobytes() + tail.tobytes() == data[-nbytes:]
        assert len(data) == nbytes or (store is objects and len(data) > nbytes)
        assert crc == crc32c(payload)
    assert counting.nbytes <= size + of_tail

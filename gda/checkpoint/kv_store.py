"""An object store as a store, or whatever else TensorStore has a driver for."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gda.checkpoint.stores import Bytes
from gda.checkpoint.zarr_format import require_tensorstore


class KvStore:
    """A prefix of an object store; see ``gda.checkpoint.stores.Store`` for its methods."""

    is_remote = True

    def __init__(self, where: Any) -> None:
        tensorstore = require_tensorstore("an object store")
        self._kv = tensorstore.KvStore.open(where).result() if not _is_open(where) else where
        if self._kv.path and not self._kv.path.endswith("/"):
            self._kv = tensorstore.KvStore.open(_with_slash(self._kv)).result()
        self._range = tensorstore.KvStore.KeyRange
        self.url = self._kv.url

    def join(self, name: str) -> str:
        return self.url + name

    def write(self, name: str, parts: Sequence[Any]) -> None:
        with self._about(name):
            self._kv.write(name, b"".join(parts)).result()

    def flush(self) -> None:
        """Do nothing: an object is durable when its write returns."""

    def replace(self, name: str, data: bytes) -> None:
        with self._about(name):
            self._kv.write(name, data).result()

    def read(self, name: str, most_bytes: int) -> bytes:
        with self._about(name):
            whole = self._kv.read(name).result()
        if whole.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.join(name))
        if len(whole.value) > most_bytes:
            raise ValueError(
                f"{self.join(name)} has {len(whole.value)} bytes; at most {most_bytes}"
            )
        return whole.value

    def read_into(self, name: str, payload: Bytes, tail: Bytes) -> int:
        data = np.frombuffer(self.read(name, 2**62), np.uint8)
        if data.size == payload.nbytes + tail.nbytes:
            payload[...] = data[: payload.nbytes]
            tail[...] = data[payload.nbytes :]
        return data.size

    def size(self, name: str) -> int | None:
        return None

    def entries(self) -> list[str]:
        with self._about(""):
            names = self._kv.list().result()
        return sorted({name.decode().partition("/")[0] for name in names})

    def remove(self, name: str) -> None:
        with self._about(name):
            self._kv.delete_range(self._range(f"{name}/", f"{name}0")).result()  # "0" follows "/"
            self._kv.write(name, None).result()

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        yield False

    @contextlib.contextmanager
    def _about(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(f"{self.join(name)}: {error}") from error


def _is_open(where: Any) -> bool:
    return not isinstance(where, str | dict)


def _with_slash(kv: Any) -> Any:
    spec = kv.spec().to_json()
    return spec | {"path": spec["path"] + "/"}

"""An object store as a store, or whatever else TensorStore has a driver for.

An object is written as a whole, and is there when its write returns. There are no locks. Instead
the store replaces the manifest only if it is still the one that was there when the save began, so
that of two saves one fails: S3 and GCS do so in one step. Of an S3-compatible store that does not
know ``If-Match``, TensorStore asks first and writes then; there two saves must not commit in the
same instant.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gda.checkpoint.format.errors import SaveError
from gda.checkpoint.format.zarr_format import require_tensorstore
from gda.checkpoint.stores.protocol import Bytes
from gda.checkpoint.stores.waiting import FEW_ATTEMPTS, Waiting

# The drivers whose requests TensorStore repeats by itself.
_RETRIES = tuple(f"{driver}_request_retries" for driver in ("http", "s3", "gcs"))
_MOST_REMOVED = 32  # at a time: TensorStore would send no more either


class KvStore:
    """A prefix of an object store; see ``gda.checkpoint.stores.protocol.Store`` for its methods.

    A request whose failure may pass, such as 503, is sent again until ``timeout``. A spec that says
    how often TensorStore repeats it, as in ``{"driver": "s3", "bucket": "...", "path": "run/",
    "s3_request_retries": {"max_retries": 5, "initial_delay": "1s", "max_delay": "8s"}}``, and an
    open store, which says so too, leave that to TensorStore. A connection over which nothing comes
    counts as failed after 120 seconds, or what the environment variable
    ``TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS`` says.

    Args:
      where: a URL, a spec, or an open ``tensorstore.KvStore``.
      timeout: seconds after which a request is given up, with all its retries.

    Raises:
      ValueError: TensorStore does not know it, or it is open in a transaction.
    """

    is_remote = True

    def __init__(self, where: Any, timeout: float) -> None:
        tensorstore = require_tensorstore("an object store")
        self._range = tensorstore.KvStore.KeyRange
        repeats = not isinstance(where, tensorstore.KvStore)
        if repeats:
            spec = tensorstore.KvStore.Spec(where)
            repeats = not any(name in str(spec) for name in _RETRIES)
            # A number of retries in the spec itself counts more.
            context = tensorstore.Context(dict.fromkeys(_RETRIES, FEW_ATTEMPTS))
            where = tensorstore.KvStore.open(spec, context=context).result(timeout)
        self._waiting = Waiting(timeout, repeats=repeats)
        if where.transaction is not None:
            raise ValueError(
                "the key-value store is open in a transaction, in which nothing is durable when a "
                "save returns; give one without"
            )
        # Not through the spec, which would lose the context that an open one has.
        self._kv = where if where.path.endswith("/") or not where.path else where + "/"
        self.url = _url_of(self._kv)

    def join(self, name: str) -> str:
        return self.url + name

    def write(self, name: str, parts: Sequence[Any]) -> None:
        # The joined bytes are TensorStore's from here on: no name keeps them.
        self._wait(name, lambda: self._kv.write(name, b"".join(parts)))

    def flush(self) -> None:
        """Do nothing: an object is durable when its write returns."""

    def version(self, name: str) -> bytes:
        return self._read(name, slice(0, 0)).stamp.generation

    def replace(
        self, name: str, data: bytes, version: bytes | None, check: Callable[[], None]
    ) -> None:
        check()
        try:
            written = self._wait(name, lambda: self._kv.write(name, data, if_equal=version))
        except OSError:
            if self._holds(name, data):
                return
            raise
        # Without a generation nothing was written; but it may have been in the attempt before,
        # whose answer was lost.
        if not written.generation and not self._holds(name, data):
            raise SaveError(
                f"another save into {self.url} was committed while this one was running"
            )

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name, len(data)) == data
        except (OSError, ValueError):
            return False

    def read(self, name: str, most_bytes: int) -> bytes:
        try:
            # The byte behind the last that may be there: what is too large must not come here.
            self._found(name, slice(most_bytes, most_bytes + 1))
        except _OutOfRangeError:
            return self._found(name)
        raise ValueError(f"has more than {most_bytes} bytes, which makes no sense")

    def read_into(
        self, name: str, payload: Bytes, tail: Bytes, note: Callable[[Bytes], object]
    ) -> int:
        size = payload.nbytes + tail.nbytes
        if not size:
            return len(self.read(name, 0))
        try:
            # From its end: of an object that is too large that is not what belongs here.
            data = np.frombuffer(self._found(name, slice(-size, None)), np.uint8)
        except _OutOfRangeError:
            return len(self.read(name, size))
        payload[...] = data[: payload.nbytes]
        note(payload)
        tail[...] = data[payload.nbytes :]
        return size

    def size(self, name: str) -> int | None:
        return None

    def entries(self) -> list[str]:
        # TensorStore has no listing of one level; a store answers with 1,000 names at a time.
        names = self._wait("", self._kv.list)
        return sorted({_text(name).partition("/")[0] for name in names})

    def remove(self, name: str) -> None:
        # "0" follows "/". An object is not removed before it was found: the driver of files takes
        # the name of a directory for one that cannot be.
        within = self._range(name, f"{name}0")
        there = self._wait(name, lambda: self._kv.list(within))
        below = f"{name}/".encode()
        keys = deque(key for key in there if key == name.encode() or key.startswith(below))
        pending: deque[tuple[bytes, Any]] = deque()
        try:
            while keys or pending:
                while keys and len(pending) < _MOST_REMOVED:
                    key = keys.popleft()
                    pending.append((key, self._kv.write(key, None)))
                key, future = pending.popleft()
                self._wait(_text(key), lambda key=key: self._kv.write(key, None), future)
        finally:
            for _, future in pending:
                future.cancel()

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        yield False

    def _read(self, name: str, byte_range: slice | None = None) -> Any:
        return self._wait(name, lambda: self._kv.read(name, byte_range=byte_range))

    def _found(self, name: str, byte_range: slice | None = None) -> bytes:
        found = self._read(name, byte_range)
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.join(name))
        return found.value

    def _wait(self, name: str, begin: Callable[[], Any], future: Any = None) -> Any:
        """Return what a request gives; errors name the object."""
        try:
            return self._waiting.result(self.join(name), begin, future)
        except OSError:
            raise
        except NotImplementedError as error:
            raise io.UnsupportedOperation(f"{self.join(name)}: {error}") from None
        except Exception as error:
            if isinstance(error, ValueError) and "OUT_OF_RANGE" in str(error):
                raise _OutOfRangeError(str(error)) from None
            raise OSError(f"{self.join(name)}: {str(error)[:1000]}") from error


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")  # other users of the bucket may choose such names


class _OutOfRangeError(Exception):
    """An object does not have the bytes that were asked for."""


def _url_of(kv: Any) -> str:
    try:
        return kv.url
    except NotImplementedError:  # of S3 with an endpoint of its own, for one
        spec = kv.spec().to_json()
        places = [spec[key] for key in ("endpoint", "bucket", "path") if spec.get(key)]
        return "/".join([place.rstrip("/") for place in places] or [spec["driver"] + ":"]) + "/"

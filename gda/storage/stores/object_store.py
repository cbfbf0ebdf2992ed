"""The files of a checkpoint in an object store, or in any other key-value store of TensorStore.

An object is written as a whole, and is durable when its write returns. There are no locks. Instead
the store replaces the manifest only if it has not changed since the save began, so that one of two
saves fails: S3 and GCS do this in one step. For an S3-compatible store without ``If-Match``,
TensorStore asks first and then writes; there two saves must not commit at the same moment.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

from gda.layout.distribution import of_extra
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.stores.checksums import CRC_BYTES, Bytes, crc32c
from gda.storage.stores.errors import SaveError

_MOST_AT_A_TIME = 32  # requests, as many as TensorStore sends

_DRIVERS = ("http", "s3", "gcs")


def _retries(attempts: int) -> dict[str, Any]:
    """Return a context in which TensorStore repeats a request, each time after twice the delay."""
    each = {"max_retries": attempts, "initial_delay": "100ms", "max_delay": "16s"}
    return {f"{driver}_request_retries": each for driver in _DRIVERS}


# A request is repeated for some 40 seconds. By default TensorStore would do so for 15 minutes.
_SECONDS = 40.0
RETRIES = _retries(9)
# TensorStore gives up after 3 seconds, and a store repeats the request unless no server is there.
_FEW_RETRIES = _retries(5)
_GIVEN_UP = "retry attempts failed"
# Of curl: no address of the host, and no connection to it.
_NO_SERVER = ("[curl_code='6']", "[curl_code='7']")

_TIMEOUT_AFTER_ONE = 10.0  # seconds


class KvStore:
    """A prefix of an object store; ``FileStore`` describes the methods.

    A request with a temporary failure, such as 503, is sent again for some 40 seconds. If no server
    has answered yet, an unknown host or a refused connection ends it after 3. An open store or a
    spec may say something else, such as ``{"driver": "s3", "bucket": "...", "path": "run/",
    "s3_request_retries": {"max_retries": 20, "initial_delay": "1s", "max_delay": "30s"}}``. A
    silent connection fails after 120 seconds, or after
    ``TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS``, an environment variable.
    """

    is_remote = True
    is_local = False

    def __init__(self, where: Any, timeout: float) -> None:
        tensorstore = require_tensorstore("an object store")
        self._range = tensorstore.KvStore.KeyRange
        self._timeout = timeout
        self._repeats = self._has_answered = False
        if not isinstance(where, tensorstore.KvStore):
            context = tensorstore.Context(_FEW_RETRIES)
            spec = tensorstore.KvStore.Spec(where)
            # A number of retries in the spec itself takes precedence.
            self._repeats = _FEW_RETRIES.keys().isdisjoint(spec.to_json())
            where = tensorstore.KvStore.open(spec, context=context).result(timeout)
        if where.transaction is not None:
            raise ValueError(
                "the key-value store is open in a transaction, so nothing would be durable when a "
                "save returns; pass one without a transaction"
            )
        # Not through the spec, which loses the context of an open store.
        self._kv = where if where.path.endswith("/") or not where.path else where + "/"
        self.url = _url_of(self._kv)

    def spec(self) -> dict[str, Any]:
        """Return the spec with its context, such as credentials, and the retries of the user."""
        spec = self._kv.spec(unbind_context=True).to_json()
        own = _FEW_RETRIES if self._repeats else {}
        return {key: value for key, value in spec.items() if key not in own}

    def join(self, name: str) -> str:
        return self.url + name

    def write(self, name: str, data: bytes) -> None:
        self._wait(name, self._kv.write, name, data)

    def write_sealed(self, name: str, payload: Bytes) -> int:
        crc = crc32c(payload)
        self._wait(name, self._write_joined, name, payload, crc.to_bytes(CRC_BYTES, "little"))
        return crc

    def _write_joined(self, name: str, *parts: Any) -> Any:
        # No variable holds the joined bytes, so that TensorStore can free them.
        return self._kv.write(name, b"".join(parts))

    def flush(self) -> None:
        """Do nothing: an object is durable when its write returns."""

    def version(self, name: str) -> bytes:
        return self._read(name, slice(0, 0)).stamp.generation

    @contextlib.contextmanager
    def replacing(self, name: str, data: bytes, version: bytes | None) -> Iterator[None]:
        yield
        try:
            written = self._wait(name, self._kv.write, name, data, if_equal=version)
        except OSError:
            if self._holds(name, data):
                return
            raise
        # Without a generation nothing was written; but an earlier attempt may have written it, if
        # its answer was lost.
        if not written.generation and not self._holds(name, data):
            raise SaveError(f"another save into {self.url} committed before this one; save again")

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name, len(data)) == data
        except (FileNotFoundError, ValueError):  # after any other error it is not known
            return False

    def read(self, name: str, most_bytes: int) -> bytes:
        # First a request beyond the end, the only way to learn that an object is too large.
        if self._part(name, slice(most_bytes, most_bytes + 1)) is not None:
            raise ValueError(f"has more bytes than expected; expected are at most {most_bytes}")
        return self._found(name)

    def head(self, name: str, nbytes: int) -> bytes:
        part = self._part(name, slice(0, nbytes))
        return self._found(name) if part is None else part

    def read_into(self, name: str, payload: Bytes, tail: Bytes) -> tuple[int, int]:
        nbytes = payload.nbytes + tail.nbytes
        # The last bytes: of a larger object no more is read, and its checksum differs.
        if (part := self._part(name, slice(-nbytes, None))) is None:
            return len(self.read(name, nbytes)), 0
        data = np.frombuffer(part, np.uint8)
        payload[...] = data[: payload.nbytes]
        tail[...] = data[payload.nbytes :]
        return nbytes, crc32c(payload)

    def size(self, name: str) -> int | None:
        return None

    def num_links(self, name: str) -> int:
        return 1

    def entries(self, directory: str = "", known: Collection[str] = ()) -> list[str]:
        ends = (f"{directory}/", f"{directory}0") if directory else ("", "")
        keys = self._listed(directory, *ends, known)
        return sorted({key.removeprefix(ends[0]).partition("/")[0] for key in keys})

    def _listed(self, name: str, first: str, end: str, known: Collection[str] = ()) -> list[str]:
        """Return the keys from ``first`` on, before ``end``; "0" follows "/" in a key.

        TensorStore cannot list one level, and a store lists 1,000 keys in an answer. So the keys of
        the data in known checkpoints are left out, by several lists.
        """
        starts = [first, *(f"{each}/data." for each in sorted(known))]  # "." follows "-"
        stops = [*(f"{each}/data-" for each in sorted(known)), end]
        found: list[list[bytes]] = [[] for _ in starts]

        def read(number: int) -> None:
            within = self._range(starts[number], stops[number])
            found[number] = self._wait(name, self._kv.list, within)

        each = (tasks.Task(0, partial(read, number)) for number in range(len(starts)))
        tasks.run(each, Options(max_workers=_MOST_AT_A_TIME))
        return list(map(_text, itertools.chain(*found)))

    def numbered(
        self, known: Collection[str] = (), numbers: Collection[int] | None = None
    ) -> dict[str, list[str]]:
        found: dict[str, set[str]] = {}
        for key in self._listed("", "0", ":", known):  # ":" follows "9"
            name, slash, below = key.partition("/")
            if slash and name.isdecimal() and (numbers is None or int(name) in numbers):
                found.setdefault(name, set()).add(below.partition("/")[0])
        return {name: sorted(names) for name, names in found.items()}

    def replace(self, name: str, data: bytes, version: bytes | None = None) -> None:
        with self.replacing(name, data, version):
            pass

    def remove(self, name: str) -> None:
        # One by one, because each has the timeout of an answer.
        keys = [name, *self._listed(name, f"{name}/", f"{name}0")]
        each = (tasks.Task(0, partial(self._wait, key, self._kv.write, key, None)) for key in keys)
        tasks.run(each, Options(max_workers=_MOST_AT_A_TIME))

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        yield False

    def _read(self, name: str, byte_range: slice | None = None) -> Any:
        return self._wait(name, self._kv.read, name, byte_range=byte_range)

    def _part(self, name: str, byte_range: slice) -> bytes | None:
        """Return a part of an object, or ``None`` if the object ends before it does."""
        try:
            return self._found(name, byte_range)
        except OSError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            return None

    def _found(self, name: str, byte_range: slice | None = None) -> bytes:
        found = self._read(name, byte_range)
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.join(name))
        return found.value

    def _wait(self, name: str, send: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the result of ``send(*args, **options)``; errors name the object."""
        begun = time.monotonic()
        while True:
            left = begun + self._timeout - time.monotonic()
            try:
                return self._sent(name, send(*args, **options), max(left, 0.001))
            except OSError as error:
                is_absent = not self._has_answered and any(no in str(error) for no in _NO_SERVER)
                is_over = time.monotonic() - begun > _SECONDS or _GIVEN_UP not in str(error)
                if is_absent or is_over or not self._repeats:
                    raise

    def _sent(self, name: str, future: Any, seconds: float) -> Any:
        try:
            result = future.result(seconds)
            self._has_answered = True
            return result
        except TimeoutError:
            problem = f"no answer within {self._timeout:g} s, retries included"
            # Later requests, such as those to clean up, wait less for a store that is silent.
            self._timeout = min(self._timeout, _TIMEOUT_AFTER_ONE)
            raise TimeoutError(errno.ETIMEDOUT, problem, self.join(name)) from None
        except NotImplementedError as error:
            raise io.UnsupportedOperation(f"{self.join(name)}: {error}") from None
        except Exception as error:
            raise OSError(f"{self.join(name)}: {str(error)[:1000]}") from error
        finally:
            future.cancel()  # nothing waits for it any more


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")  # names of other users may not be UTF-8


def _url_of(kv: Any) -> str:
    try:
        return kv.url
    except NotImplementedError:  # for instance S3 with a custom endpoint
        spec = kv.spec().to_json()
        places = [spec[key] for key in ("endpoint", "bucket", "path") if spec.get(key)]
        return "/".join([place.rstrip("/") for place in places] or [spec["driver"] + ":"]) + "/"


def require_tensorstore(what: str) -> Any:
    """Return TensorStore; ``ImportError`` says that something needs it."""
    with of_extra(f"{what} needs TensorStore"):
        import tensorstore
    return tensorstore

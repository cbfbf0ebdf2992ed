"""The files of local steps on their way between hosts: each is sent over one connection."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.transport.connection import Address, Connection, Deadline
from gda.arrays.transport.listening import SECONDS_TO_ASK, Server
from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest, file_of
from gda.checkpoint.local_steps.host_folder import StepName, files_of
from gda.multihost.places import one_line
from gda.storage.stores.checksums import Bytes, crc32c
from gda.storage.stores.directory import FileStore

_MOST_BYTES = 2**40  # of a file
_MOST_MESSAGE_BYTES = 2**16
_AT_A_TIME = 16  # files in memory, each of one chunk


class FileServer(Server):
    """A server of the files of local steps in one folder: it sends them, and takes copies."""

    def __init__(self, folder: str, address: Address, token: str) -> None:
        self._folder = folder
        self._some = threading.Semaphore(_AT_A_TIME)
        super().__init__(address, token, threading.Event())

    def answer(self, connection: Connection) -> None:
        """Answer questions until the other side ends the connection."""
        # Anew, because it remembers the folders that it made.
        store = FileStore(self._folder, syncs=False)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                connection.deadline = Deadline(SECONDS_TO_ASK)
                question = connection.message(_MOST_MESSAGE_BYTES)
                try:
                    name, nbytes = _checked(question["name"]), question["nbytes"]
                    connection.deadline = Deadline(float(question["timeout"]))
                    with self._some:
                        if nbytes is None:
                            _send(connection, store, name, int(question["tail"]))
                        else:
                            _take(connection, store, name, int(nbytes))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    if isinstance(error, ConnectionError | TimeoutError):
                        raise
                    connection.send({"error": one_line(error)})


def _send(connection: Connection, store: FileStore, name: str, tail: int) -> None:
    """Send a file as two blocks: all but its last bytes, and these."""
    data = np.frombuffer(store.read(name, _MOST_BYTES), np.uint8)
    connection.send({"nbytes": data.nbytes})
    rest = data.nbytes - tail
    connection.send_blocks([(part, part.dtype) for part in (data[:rest], data[rest:])])


def _take(connection: Connection, store: FileStore, name: str, nbytes: int) -> None:
    """Write a file of another host, unless it arrives with other bytes."""
    if not 0 <= nbytes <= _MOST_BYTES:
        raise ValueError(f"a file of {nbytes} bytes")
    connection.send({})
    data = np.empty(nbytes, np.uint8)
    if connection.receive_blocks([data]):
        raise ValueError(f"{name} arrived with other bytes")
    store.write(name, data)
    connection.send({})


def _checked(name: Any) -> str:
    """Return the name of a file in a local step; ``ValueError`` for any other text."""
    step, *parts = name.split("/") if isinstance(name, str) else [""]
    if StepName.of(step) is None or not parts or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.80} is no file of a local step")
    return name


class Host(NamedTuple):
    """A host with a server: its number, the address of the server, and the secret to ask it."""

    number: int
    address: Address
    token: str

    @property
    def peer(self) -> str:
        return f"host {self.number} at {self.address}"

    @contextlib.contextmanager
    def asked(self, seconds: float) -> Iterator[Connection]:
        """Give a connection to the server, for some questions."""
        connection = Connection.to(self.address, self.peer, self.token, Deadline(seconds))
        with contextlib.closing(connection):
            yield connection


def _ask(connection: Connection, **question: Any) -> dict[str, Any]:
    """Return the answer to a question; raise ``OSError`` if it is an error."""
    connection.send({**question, "timeout": connection.deadline.left() or 0.001})
    return _answer_of(connection)


def _answer_of(connection: Connection) -> dict[str, Any]:
    answer = connection.message(_MOST_MESSAGE_BYTES)
    if error := answer.get("error"):
        raise OSError(f"{connection.peer}: {error}")
    return answer


def fetch(host: Host, name: str, payload: Bytes, tail: Bytes, seconds: float) -> None:
    """Receive a file of another host in memory of its size; ``OSError`` if it has another."""
    with host.asked(seconds) as connection:
        answer = _ask(connection, name=name, nbytes=None, tail=tail.nbytes)
        if answer.get("nbytes") != payload.nbytes + tail.nbytes:
            raise OSError(f"{name} of {host.peer} has another size")
        if connection.receive_blocks([payload, tail]):
            raise OSError(f"{name} of {host.peer} arrived with other bytes")


def fetch_manifest(host: Host, folder: str, seconds: float) -> bytes:
    """Return the manifest in a folder of another host; its size is not known."""
    name = f"{folder}/{manifest_json.NAME}"
    with host.asked(seconds) as connection:
        nbytes = _ask(connection, name=name, nbytes=None, tail=0).get("nbytes")
        if not isinstance(nbytes, int) or not 0 <= nbytes <= manifest_json.MOST_BYTES:
            raise OSError(f"{name} of {host.peer} has {nbytes!r} bytes")
        data, nothing = np.empty(nbytes, np.uint8), np.empty(0, np.uint8)
        if connection.receive_blocks([data, nothing]):
            raise OSError(f"{name} of {host.peer} arrived with other bytes")
        return data.tobytes()


def send_copies(
    host: Host, step: str, names: Iterable[str], store: FileStore, seconds: float
) -> None:
    """Send files of a step to another host, which writes them."""
    with host.asked(seconds) as connection:
        for name in names:
            data = np.frombuffer(store.read(name, _MOST_BYTES), np.uint8)
            connection.deadline = Deadline(seconds)
            _ask(connection, name=f"{step}/{name}", nbytes=data.nbytes)
            connection.send_blocks([(data, data.dtype)])
            _answer_of(connection)


class StepOfHosts(FileStore):
    """A local step as a store: a file that is missing or damaged here is read on another host.

    Attributes:
      fetched: the bytes that came from each host.
    """

    def __init__(
        self,
        folder: str,
        step: str,
        file: bytes,
        manifest: Manifest,
        holders: Mapping[Host, list[list[int]]],
        seconds: float,
    ) -> None:
        super().__init__(f"{folder}/{step}")
        self._step, self._seconds = step, seconds
        self._files = {each.name: (n, each) for n, each in enumerate(files_of(manifest))}
        self._holders = holders
        self._small = {manifest_json.NAME: file} | {
            file_of(manifest.data, array): array.document for array in manifest.arrays
        }
        self.fetched: Counter[int] = Counter()

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file; those of a small one are known."""
        return self._small[name][:nbytes] if name in self._small else super().head(name, nbytes)

    def size(self, name: str) -> int | None:
        """Return ``None``: the size is compared when the file is read."""
        return None

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a small file, or that of one process."""
        if name in self._small:
            return self._small[name]
        data = np.empty(self._files[name][1].nbytes, np.uint8)
        size, _ = self.read_into(name, data, data[:0])
        return data.tobytes() if size == data.nbytes else b""

    def read_into(self, name: str, payload: Bytes, tail: Bytes) -> tuple[int, int]:
        """Read a file here, or on the first host that has it as the manifest says."""
        if name in self._small:
            payload[:] = np.frombuffer(self._small[name], np.uint8)
            return payload.nbytes, crc32c(payload)
        number, file = self._files[name]
        found: tuple[int, int] | None = None
        for read in self._reads(number, name, payload, tail):
            try:
                size, crc = read()
            except (OSError, ValueError):
                continue
            is_sealed = not file.tail or int.from_bytes(tail.tobytes(), "little") == crc
            if size == file.nbytes and crc == file.crc and is_sealed:
                return size, crc
            found = size, crc
        if found is None:
            raise FileNotFoundError(2, "no host that is there has this file", self.join(name))
        return found

    def _reads(
        self, number: int, name: str, payload: Bytes, tail: Bytes
    ) -> Iterator[Callable[[], tuple[int, int]]]:
        """Yield the reads of a file: here, and then on each host that has it."""
        yield lambda: super(StepOfHosts, self).read_into(name, payload, tail)
        having = [
            host
            for host, ranges in self._holders.items()
            if any(start <= number < stop for start, stop in ranges)
        ]
        first = number % len(having) if having else 0  # so that all hosts send
        for host in having[first:] + having[:first]:

            def read(host: Host = host) -> tuple[int, int]:
                fetch(host, f"{self._step}/{name}", payload, tail, self._seconds)
                self.fetched[host.number] += payload.nbytes + tail.nbytes
                return payload.nbytes + tail.nbytes, crc32c(payload)

            yield read

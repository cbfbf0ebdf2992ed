"""A connection between two programs: messages of JSON, and the bytes of blocks.

Both sides greet each other, and prove with an HMAC that they have the same token, which is never
sent. A message is then its length in four bytes, an HMAC of its number and its JSON, and the JSON.
The key comes from the token and this connection: without a token the HMAC is a checksum. Blocks
follow a message with their sizes, and after them comes a message with the CRC-32C of each, because
TCP's own checksum misses one damaged packet of some ten thousand. Both sides know the shapes. A
length from the other side is compared with a bound, and memory is allocated as its bytes arrive.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gda.layout.cover import boxes_of_chunks
from gda.layout.indices import index_at
from gda.layout.strict_json import parse_json
from gda.multihost.background import in_thread
from gda.storage.stores.checksums import crc32c, require_crc32c

Elements = np.ndarray[Any, Any]
BlockAs = tuple[Elements, np.dtype[Any]]  # a block, and the dtype in which it is sent

# With its version: programs of different versions of gda must not misunderstand each other.
_GREETING = b"gda offer 4\n"
_NONCE_BYTES = 32  # as many as an HMAC
_LENGTH_BYTES = 4
_MOST_BYTES_OF_SUM = 16  # of a checksum in JSON
_LOOK_EVERY = 0.25  # seconds
_CONNECTING = 5.0  # seconds of an attempt, for packets that were lost to be sent again
# A part of a block is still in the cache when it is copied the second time.
_PART_BYTES = 256 * 1024


class Deadline:
    """The moment at which a wait ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    def check(self, peer: str) -> None:
        """Raise a ``TimeoutError`` if it has passed; ``peer`` names the process that is late."""
        if not self.left():
            raise TimeoutError(
                f"{peer} did not send or take the next bytes until the end of the "
                f"{self.seconds:g} s of timeout=: it is stopped or slow, or what listens there is "
                "no offer of gda"
            )


class Address(NamedTuple):
    """An address that a process listens on."""

    host: str
    port: int

    @classmethod
    def of(cls, text: object) -> Address:
        """Return the address in a text such as ``10.0.0.1:7700`` or ``[::1]:7700``."""
        host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        host = host[1:-1] if host[:1] + host[-1:] == "[]" else host
        with suppress(UnicodeError):
            host.encode("idna")  # as a socket does it, without the address in its error
            if host and colon and port.isdecimal() and int(port) < 2**16:
                return cls(host, int(port))
        raise ValueError(
            f"an address must be a text host:port, such as '10.0.0.1:7700', not {text!r}"
        )

    @property
    def is_every(self) -> bool:
        """True for ``0.0.0.0``, in any notation: every address of the machine."""
        with suppress(socket.gaierror):  # a name
            numeric = socket.getaddrinfo(self.host, None, flags=socket.AI_NUMERICHOST)
            found = ipaddress.ip_address(numeric[0][4][0])
            return (getattr(found, "ipv4_mapped", None) or found).is_unspecified
        return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_token(token: object) -> None:
    """Raise ``TypeError`` unless a token is a text or ``None``, ``ImportError`` without CRC-32C."""
    require_crc32c()
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token must be a text, not {type(token).__name__}")


class GivenUpError(ConnectionError):
    """A connection was ended because of another error, which is the one to raise."""


class Connection:
    """A connection to a process of another program.

    Args:
      peer: that process, for messages.
      deadline: everything ends then, also if bytes arrive, with a ``TimeoutError``.
      is_stopped: if it is set, every wait ends soon, with a ``GivenUpError``.

    Every method may raise these errors, and a ``ConnectionError`` if the other side has ended.
    """

    def __init__(
        self,
        given: socket.socket,
        peer: str,
        deadline: Deadline,
        is_stopped: threading.Event | None = None,
    ) -> None:
        self.peer, self.deadline = peer, deadline
        self._socket, self.is_stopped = given, is_stopped or threading.Event()
        self._begin(b"", b"", b"")
        # The last bytes of a block would wait for an answer to those before.
        given.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(
        cls,
        address: Address,
        peer: str,
        token: str | None,
        deadline: Deadline,
        *,
        is_stopped: threading.Event | None = None,
        waits: bool = False,
    ) -> Connection:
        """Connect to a process that offers; with ``waits``, once its host has an address."""
        while True:
            try:
                given = _connected(address, deadline)
                break
            except TimeoutError:
                if is_stopped and is_stopped.is_set():
                    raise GivenUpError(f"the connection to {peer} was given up") from None
                if not deadline.left():
                    raise TimeoutError(
                        f"{peer} did not answer for {deadline.seconds:g} s; check the address, and "
                        "that no firewall is in between"
                    ) from None
            except OSError as error:
                if not waits or deadline.left() <= _LOOK_EVERY:
                    waited = f" for {deadline.seconds:g} s" if waits else ""
                    problem = (
                        f" is not there: {error.strerror or error}{waited}; its program has not "
                        "called gda.offer with this address, or has ended"
                    )
                    if isinstance(error, socket.gaierror):
                        problem = (
                            f": no address of {address.host!r}{waited}: {error}; check the name"
                        )
                    raise ConnectionError(f"{peer}{problem}") from None
                time.sleep(_LOOK_EVERY)
        connection = cls(given, peer, deadline, is_stopped)
        try:
            connection._introduce(token)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """End the connection; a thread that waits for it gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave(self) -> None:
        """Close the copy of a forked process; the connection of its parent stays."""
        self._socket.close()

    # The token.

    def _introduce(self, token: str | None) -> None:
        """Prove to a process that offers that this one has its token, and ask for the reverse."""
        greeting = self._bytes(len(_GREETING))
        if greeting != _GREETING:
            raise ConnectionError(
                f"{self.peer} is not an offer of this version of gda: it sent {greeting!r}"
            )
        of_offer, of_pull = self._bytes(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
        self._send(_GREETING + of_pull + _proof(token, b"pull", of_offer, of_pull))
        if not hmac.compare_digest(
            self._bytes(_NONCE_BYTES), _proof(token, b"offer", of_offer, of_pull)
        ):
            raise PermissionError(f"{self.peer} has another token; pass the token= of its offer")
        self._begin(_proof(token, b"messages", of_offer, of_pull), b"pull", b"offer")

    def accept(self, token: str | None) -> bool:
        """Return True if the process that has connected proves that it has the token."""
        of_offer = os.urandom(_NONCE_BYTES)
        self._send(_GREETING + of_offer)
        if self._bytes(len(_GREETING)) != _GREETING:
            return False
        of_pull = self._bytes(_NONCE_BYTES)
        is_right = hmac.compare_digest(
            self._bytes(_NONCE_BYTES), _proof(token, b"pull", of_offer, of_pull)
        )
        self._send(_proof(token, b"offer", of_offer, of_pull) if is_right else bytes(_NONCE_BYTES))
        self._begin(_proof(token, b"messages", of_offer, of_pull), b"offer", b"pull")
        return is_right

    def _begin(self, key: bytes, own_role: bytes, role_of_peer: bytes) -> None:
        """Set the keys of both roles, and begin to count their messages."""
        self._key, self._roles, self._counts = key, (own_role, role_of_peer), Counter()

    # Messages.

    def send(self, message: Any) -> None:
        """Send a value of JSON."""
        self.send_text(json.dumps(message).encode())

    def send_text(self, text: bytes) -> None:
        """Send JSON text."""
        self._send(len(text).to_bytes(_LENGTH_BYTES, "big") + self._mac(0, text))
        self._send(text)  # without a copy of it

    def _mac(self, side: int, text: bytes | bytearray) -> bytes:
        """Return the HMAC of the next message of one side: 0 for this one, 1 for the other."""
        role = self._roles[side]
        self._counts[role] += 1
        mac = hmac.new(self._key, role + self._counts[role].to_bytes(8, "big"), "sha256")
        mac.update(text)
        return mac.digest()

    def text(self, most_bytes: int) -> str:
        """Return the JSON of the next message; ``ConnectionError`` if it is larger than that."""
        length = int.from_bytes(self._bytes(_LENGTH_BYTES), "big")
        if length > most_bytes:
            raise ConnectionError(
                f"{self.peer} sent a message of {length} bytes; expected are at most {most_bytes}"
            )
        mac, text = self._bytes(_NONCE_BYTES), self._bytes(length)
        if not hmac.compare_digest(mac, self._mac(1, text)):
            raise ConnectionError(
                f"{self.peer} sent a message that arrived with other bytes: its checksum differs; "
                "pull again"
            )
        return text.decode(errors="replace")

    def message(self, most_bytes: int) -> dict[str, Any]:
        """Return the next message, which must be an object."""
        return self.object_of(self.text(most_bytes))

    def object_of(self, text: str) -> dict[str, Any]:
        """Return the object in a message."""
        try:
            message = parse_json(text)
        except ValueError as error:
            raise ConnectionError(f"{self.peer} sent a message that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ConnectionError(f"{self.peer} sent a message that is not an object")
        return message

    def wait_for_end(self) -> None:
        """Wait until the other side ends the connection, or the deadline."""
        with suppress(ConnectionError, TimeoutError):
            self._bytes(1)

    # Blocks.

    def send_blocks(self, blocks: Sequence[BlockAs]) -> None:
        """Send the elements of blocks in C order, each cast to a dtype, and then their CRC-32C."""
        sums = [0] * len(blocks)
        for parts in _sent_together(blocks):
            together = []
            for number, part, dtype in parts:
                data = _bytes_of(np.ascontiguousarray(part, dtype))
                if len(parts) == 1:
                    self._send(data, sums, number)
                else:
                    sums[number] = crc32c(data, sums[number])
                    together.append(data)
            self._send(b"".join(together))
        self.send(sums)

    def receive_blocks(self, blocks: Sequence[Elements]) -> list[int]:
        """Receive the elements of blocks in C order; return the numbers of those that differ."""
        sums = [0] * len(blocks)
        for parts in _sent_together([(block, block.dtype) for block in blocks]):
            number, part, _ = parts[0]
            if len(parts) == 1 and part.flags.c_contiguous:
                self._fill(_bytes_of(part), sums, number)
                continue
            data, offset = np.empty(sum([part.nbytes for _, part, _ in parts]), np.uint8), 0
            self._fill(data)
            for number, part, dtype in parts:
                sums[number] = crc32c(data[offset : offset + part.nbytes], sums[number])
                np.copyto(part, np.ndarray(part.shape, dtype, data, offset))
                offset += part.nbytes
        text = self.text(_MOST_BYTES_OF_SUM * (1 + len(sums)))
        try:
            sent = parse_json(text)
        except ValueError:
            sent = None
        if not isinstance(sent, list) or len(sent) != len(sums):
            raise ConnectionError(f"{self.peer} sent {text!r:.80} for {len(sums)} checksums")
        return [
            number for number, sums in enumerate(zip(sent, sums, strict=True)) if len({*sums}) > 1
        ]

    # Bytes.

    def _bytes(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = bytearray(min(count - len(data), _PART_BYTES))
            self._fill(part)
            data += part
        return bytes(data)

    def _fill(self, data: Any, sums: list[int] | None = None, number: int = 0) -> None:
        self._transfer(self._socket.recv_into, data, sums, number)

    def _send(self, data: Any, sums: list[int] | None = None, number: int = 0) -> None:
        self._transfer(self._socket.send, data, sums, number)

    def _transfer(
        self, do: Callable[[memoryview], int], data: Any, sums: list[int] | None, number: int
    ) -> None:
        """Send or receive bytes, and add them to a CRC-32C while they are cached."""
        rest = memoryview(data)
        while rest:
            count = self._do(do, rest)
            if sums is not None:
                sums[number] = crc32c(np.frombuffer(rest[:count], np.uint8), sums[number])
            rest = rest[count:]

    def _do(self, do: Callable[[memoryview], int], rest: memoryview) -> int:
        """Repeat a call that would block until the deadline; return its bytes."""
        while True:
            self.deadline.check(self.peer)
            moved = 0
            try:
                self._socket.settimeout(max(min(self.deadline.left(), _LOOK_EVERY), 0.001))
                if not (moved := do(rest)):
                    raise OSError("it has ended, or failed")
            except TimeoutError:
                pass
            except OSError as error:
                reason = error.strerror or error
                raise ConnectionError(f"{self.peer} ended the connection: {reason}") from None
            # After the call, because the end of this connection is an error of its own.
            if self.is_stopped.is_set():
                raise GivenUpError(f"the connection to {self.peer} was given up")
            if moved:
                return moved


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    """Return a socket that is connected to one of the addresses of a host."""
    places: list[Any] = [address]
    try:
        ipaddress.ip_address(address.host)
    except ValueError:  # a name
        # In a thread, because it has no deadline.
        resolve = partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
        found = in_thread("gda-resolver", resolve)
        places = [place[:2] for *_, place in found.result(deadline.left())]
    while True:
        place = places.pop(0)
        try:
            given = socket.create_connection(place, max(min(deadline.left(), _CONNECTING), 0.001))
            if not _is_to_itself(given):
                return given
            given.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError:
            if not places:
                raise


def _is_to_itself(given: socket.socket) -> bool:
    """Return True if a socket has connected to itself, because nothing listens at its port."""
    with suppress(OSError):
        return given.getsockname() == given.getpeername()
    return False


def _proof(token: str | None, role: bytes, *nonces: bytes) -> bytes:
    key = b"" if token is None else token.encode()
    return hmac.digest(key, b"\n".join([_GREETING, role, *nonces]), "sha256")


def _bytes_of(block: Elements) -> Elements:
    return block.reshape(-1).view(np.uint8)


class _SentPart(NamedTuple):
    """A part of a block, which has a number, and the dtype in which it is sent."""

    number: int
    elements: Elements
    dtype: np.dtype[Any]


def _sent_together(blocks: Iterable[BlockAs]) -> Iterator[list[_SentPart]]:
    """Yield the parts of blocks in C order: one large part, or several small ones together."""
    small: list[_SentPart] = []
    nbytes = 0
    for number, (block, dtype) in enumerate(blocks):
        is_small = 0 < block.nbytes <= _PART_BYTES
        for part in (block,) if is_small else _parts(block, block.dtype == dtype):
            if small and nbytes + part.nbytes > _PART_BYTES:
                yield small
                small, nbytes = [], 0
            small.append(_SentPart(number, part, dtype))
            nbytes += part.nbytes
    if small:
        yield small


def _parts(block: Elements, is_whole: bool) -> Iterator[Elements]:
    """Yield parts of a block in C order: small ones, or larger contiguous ones if ``is_whole``."""
    if block.nbytes <= _PART_BYTES or (is_whole and block.flags.c_contiguous):
        if block.size:
            yield block
        return
    whole = index_at((0,) * block.ndim, block.shape)
    for part in boxes_of_chunks(whole, (1,) * block.ndim, _PART_BYTES // block.itemsize):
        yield block[part]

"""A server of one process: it answers one question of each connection, in threads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import resource
import socket
import threading
import time
import weakref

from gda.arrays.transport.connection import Address, Connection, Deadline

SECONDS_TO_ASK = 10.0  # for the proof, and for each question
_MOST_CONNECTIONS = 1024  # and at most half of the files that the program may open
_MOST_UNPROVEN = 64  # connections without a proof
_SECONDS_OF_UNPROVEN = 0.5  # until the oldest makes room for another one
_LOOK_EVERY = 0.25  # seconds, for the end of the server


class Server:
    """A listening process; it ends with ``close``, or when the program begins to exit.

    Args:
      address: to listen on; port 0 lets the system choose one.
      token: that the other side must have.
      is_closed: ends all waits when it is set.
    """

    def __init__(self, address: Address, token: str | None, is_closed: threading.Event) -> None:
        self._token, self._is_closed = token, is_closed
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(files // 2, _MOST_CONNECTIONS) if files > 0 else _MOST_CONNECTIONS
        self._guard = threading.Lock()
        # In order of arrival, with its time, or None after their proof.
        self._connections: dict[Connection, float | None] = {}
        self._socket = _listening(address)
        # Not by in_thread, which would listen in this thread if the system had no more.
        self._thread = threading.Thread(target=self._listen, name="gda-offer", daemon=True)
        self._thread.start()
        # Before JAX's own, which was registered earlier and may wait for other processes.
        atexit.register(self.close)
        _servers.add(self)

    @property
    def address(self) -> Address:
        """The address that it listens on."""
        return Address(*self._socket.getsockname()[:2])

    def close(self) -> None:
        """Stop listening, and end all connections."""
        atexit.unregister(self.close)
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():  # it is not in a process that was forked
            self._thread.join()
        for connection in [*self._connections]:
            connection.close()

    def leave(self) -> None:
        """Close the copies of a forked process: the port is that of its parent."""
        atexit.unregister(self.close)
        self._socket.close()
        for connection in self._connections:
            connection.leave()

    def _listen(self) -> None:
        """Accept connections as long as there is room; others wait in the queue of the system."""
        while not self._is_closed.is_set():
            try:
                if self._has_room():
                    given, (host, *_) = self._socket.accept()
                    self._begin(given, f"the program at {host}")
                else:
                    time.sleep(0.02)
            except TimeoutError:
                pass
            except (OSError, RuntimeError):  # no more files, or threads
                self._is_closed.wait(_LOOK_EVERY)

    def _has_room(self) -> bool:
        with self._guard:
            unproven = [(came, each) for each, came in self._connections.items() if came]
            if len(unproven) >= min(_MOST_UNPROVEN, self._most // 2):
                came, oldest = unproven[0]
                if time.monotonic() - came < _SECONDS_OF_UNPROVEN:
                    return False
                del self._connections[oldest]
                oldest.close()
            return len(self._connections) < self._most

    def _begin(self, given: socket.socket, peer: str) -> None:
        """Answer the question of a connection in a thread of its own."""
        connection = Connection(given, peer, Deadline(SECONDS_TO_ASK), self._is_closed)
        with self._guard:
            self._connections[connection] = time.monotonic()
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._end(connection)
            raise

    def _serve(self, connection: Connection) -> None:
        try:
            if connection.accept(self._token):
                with self._guard:
                    self._connections[connection] = None
                self.answer(connection)
        except Exception:  # the other side reports it
            logging.getLogger("gda").debug("a connection was lost", exc_info=True)
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._guard:
            self._connections.pop(connection, None)

    def answer(self, connection: Connection) -> None:
        """Answer the question of a connection that has proved its token."""
        raise NotImplementedError


def address_towards(place: Address) -> Address:
    """Return the address by which this process reaches another; its port is not chosen yet."""
    family = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port or 1))  # sends nothing
        return Address(probe.getsockname()[0], 0)


def _listening(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(*found[:3])
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(found[4])
            listening.listen(_MOST_CONNECTIONS)
            listening.settimeout(_LOOK_EVERY)
        except BaseException:
            listening.close()
            raise
        return listening
    except OSError as error:
        message = f"cannot listen on {address}: {error.strerror}; pass an address of this machine"
        raise OSError(error.errno, f"{message} with a free port, or with port 0") from None


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _leave_all() -> None:
    for server in _servers:
        server.leave()


os.register_at_fork(after_in_child=_leave_all)

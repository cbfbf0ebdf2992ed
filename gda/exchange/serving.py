"""The server of a process that offers: it answers one question of each connection, in threads.

A puller asks the first process for the catalog, and keeps that connection open as long as it pulls,
which keeps the version alive. It asks every process for pieces of blocks. Each question is checked
before anything is sent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import operator
import os
import resource
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.dtypes import is_float
from gda.exchange.connection import Address, BlockAs, Connection, Deadline
from gda.exchange.versions import Versions
from gda.layout.dtype_names import recorded_dtype
from gda.layout.indices import index_at, within
from gda.layout.spec import Shape
from gda.multihost.places import one_line
from gda.storage.casts import DoesNotFitError, Origin, check_holds
from gda.trees.records.recorded_tree import ValueLeaf, format_path
from gda.trees.records.saved_leaves import SavedLeaf, on_host

_SECONDS_TO_ASK = 10.0  # for the proof, and for each question
MOST_SECONDS = 86400.0
MOST_PIECES = 1000  # of a question
_MOST_QUESTION_BYTES = 2**20
_MOST_CONNECTIONS = 1024  # and at most half of the files that the program may open
_MOST_UNPROVEN = 64  # connections without a proof
_SECONDS_OF_UNPROVEN = 0.5  # until the oldest makes room for another one
_LOOK_EVERY = 0.25  # seconds, for the end of the offer
# Errors of a question, and their names on the way to the puller.
ERRORS = {
    each.__name__: each
    for each in (
        ConnectionError,
        DoesNotFitError,
        LookupError,
        PermissionError,
        TimeoutError,
        ValueError,
    )
}

# JSON, and the blocks that follow it, each with the dtype to send.
_Answer = tuple[bytes, list[BlockAs]]


class HeldTree:
    """A version of the tree in one process, with the blocks that this process holds.

    Attributes:
      leaves: without their blocks; without a grid if all processes have the whole array.
      structure: that of ``flatten``.
      values: the result of ``values_of``, which must be the same in all processes.
    """

    def __init__(
        self, leaves: Sequence[SavedLeaf | ValueLeaf], structure: Any, values: dict[str, str]
    ) -> None:
        self.structure, self.values = structure, values
        arrays = [leaf for leaf in leaves if isinstance(leaf, SavedLeaf)]
        self._data = {x.number: {block.start: block.data for block in x.blocks} for x in arrays}
        self.leaves = [x._replace(blocks=()) if isinstance(x, SavedLeaf) else x for x in leaves]

    def pieces(self, numbers: Any, start: Any, shape: Any, dtype: Any) -> Iterator[BlockAs]:
        """Yield one piece of some leaves; ``ValueError`` unless a block of this process has it."""
        start, shape = tuple(start), tuple(shape)
        for number in numbers:
            is_number = type(number) is int and 0 <= number < len(self.leaves)
            leaf = self.leaves[number] if is_number else None
            if not isinstance(leaf, SavedLeaf):
                raise ValueError(f"has no array {number!r:.80}")
            at = _piece_in_block(start, shape, dtype, leaf.block_shape)
            data = self._data[number].get(at.first)
            if data is None or any(map(operator.gt, at.stops, data.shape)):
                raise ValueError(
                    f"holds no block of array {number} with the piece at {start} {shape}"
                )
            if not isinstance(data, np.ndarray):
                # It replaces the pinned memory that an accelerator has copied the block to.
                data = self._data[number][at.first] = on_host(data)
            block = data[at.place]
            if at.dtype != block.dtype:
                _check_cast(leaf, start, block, at.dtype)
            yield block, at.dtype


class _PieceInBlock(NamedTuple):
    """The place of a piece: the first element of its block, its index there; its dtype to send."""

    first: Shape
    place: Any
    stops: Shape
    dtype: np.dtype[Any]


# Many arrays have pieces at one place.
@lru_cache(maxsize=4096)
def _piece_in_block(start: Shape, shape: Shape, name: str, block_shape: Shape) -> _PieceInBlock:
    is_place = all(type(n) is int and 0 <= n < 2**62 for n in (*start, *shape))
    if not is_place or not len(start) == len(shape) == len(block_shape):
        raise ValueError(f"got {[start, shape]!r:.80} as a piece of blocks of {block_shape}")
    steps = zip(start, block_shape, strict=True)
    first = tuple([at // step * step if step else 0 for at, step in steps])
    place = within(index_at(start, shape), first)
    stops = tuple([each.stop for each in place])
    return _PieceInBlock(first, (*place, ...), stops, recorded_dtype(name))


def _check_cast(leaf: Any, start: Shape, block: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Raise unless a piece may be cast, and has no value that the dtype cannot hold."""
    is_complex = block.dtype.kind == dtype.kind == "c"
    if not is_complex and not (is_float(dtype) and is_float(block.dtype)):
        raise ValueError(f"casts no {block.dtype} to {dtype}")
    # Here, because no error can follow a part that was sent.
    what = f"its array at {format_path(leaf.record.path)}"
    check_holds(block, dtype, Origin.of_block(what, start))


class OfferServer:
    """The server of one process; it ends with ``close``, or when the program begins to exit.

    Args:
      address: to listen on; port 0 lets the system choose one.
      name: of the offer.
      token: that a puller must have.
      versions: the trees that this process holds.
      catalog: returns the catalog of a version; ``None`` in all processes but the first.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        token: str | None,
        versions: Versions[HeldTree],
        catalog: Callable[[int], bytes] | None,
    ) -> None:
        self._name, self._token = name, token
        self._versions, self._catalog = versions, catalog
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
        self._versions.close()
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
        while not self._versions.is_closed.is_set():
            try:
                if self._has_room():
                    given, (host, *_) = self._socket.accept()
                    self._begin(given, f"the puller at {host}")
                else:
                    time.sleep(0.02)
            except TimeoutError:
                pass
            except (OSError, RuntimeError):  # no more files, or threads
                self._versions.is_closed.wait(_LOOK_EVERY)

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
        connection = Connection(given, peer, Deadline(_SECONDS_TO_ASK), self._versions.is_closed)
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
                self._answer(connection)
        except Exception:  # the puller reports it
            logging.getLogger("gda").debug("an offer lost a puller", exc_info=True)
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._guard:
            self._connections.pop(connection, None)

    def _answer(self, connection: Connection) -> None:
        connection.deadline = Deadline(_SECONDS_TO_ASK)
        question = connection.message(_MOST_QUESTION_BYTES)
        seconds = question.get("timeout")
        if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
            seconds = _SECONDS_TO_ASK
        connection.deadline = Deadline(float(seconds))
        answers = {"tree": self._tree, "pieces": self._pieces}
        with contextlib.ExitStack() as held:
            try:
                kind = question["ask"]
                text, blocks = answers[kind](question, connection, held)
            except (*ERRORS.values(), KeyError, TypeError) as error:
                is_known = type(error).__name__ in ERRORS
                message = str(error) if is_known else f"got a wrong question: {one_line(error)}"
                kind = type(error).__name__ if is_known else "ValueError"
                connection.send({"error": [kind, message]})
            else:
                connection.send_text(text)
                if kind == "tree":
                    connection.wait_for_end()
                else:
                    connection.send_blocks(blocks)

    def _tree(self, question: Any, asker: Connection, held: contextlib.ExitStack) -> _Answer:
        """Keep the current version until the puller ends the connection; return its catalog."""
        assert self._catalog is not None  # in the first process, whose address pullers are given
        if question["name"] not in (None, self._name):
            raise LookupError(f"offers {self._name!r}, and not {question['name']!r:.80}")
        pulled = self._versions.pulled(int(question["least"]), _sooner(asker.deadline))
        return self._catalog(held.enter_context(pulled)), []

    def _pieces(self, question: Any, asker: Connection, held: object) -> _Answer:
        pieces, number = question["pieces"], int(question["version"])
        if (count := sum([len(numbers) for numbers, *_ in pieces])) > MOST_PIECES:
            raise ValueError(f"got {count} pieces; expected are at most {MOST_PIECES}")
        # A silent puller must not keep the blocks of a dropped version alive.
        tree, asker.is_stopped = self._versions.get(
            question["run"], number, _sooner(asker.deadline)
        )
        blocks = [block for each in pieces for block in tree.pieces(*each)]
        nbytes = sum(block.size * dtype.itemsize for block, dtype in blocks)
        return json.dumps({"nbytes": nbytes}).encode(), blocks


def _sooner(deadline: Deadline) -> Deadline:
    """Return an earlier deadline, which leaves time for an answer to arrive."""
    return Deadline(0.9 * deadline.left())


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


_servers: weakref.WeakSet[OfferServer] = weakref.WeakSet()


def _leave_all() -> None:
    for server in _servers:
        server.leave()


os.register_at_fork(after_in_child=_leave_all)

"""The server of a process that offers: it answers one question after another, in threads.

A puller asks the first process for the catalog, and keeps that connection open as long as it pulls:
so long is its version held. It asks every process for pieces of blocks, or for their sums, which
make up a fingerprint. What it asks is checked before anything is sent.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gda.arrays.dtypes import is_float
from gda.arrays.fingerprints.fingerprint import sums_of_host
from gda.checkpoint.format.manifest import ValueLeaf
from gda.checkpoint.format.manifest_json import dtype_named
from gda.checkpoint.format.structure import format_path
from gda.checkpoint.offers.connection import Address, Connection, Deadline
from gda.checkpoint.offers.versions import Versions
from gda.checkpoint.writing.saved_leaves import SavedLeaf, on_host
from gda.layout.spec import Shape
from gda.multihost.meeting import one_line
from gda.storage.casts import DoesNotFitError, Origin, check_holds

_SECONDS_TO_GREET = 10.0
MOST_SECONDS = 86400.0
_MOST_QUESTION_BYTES = 2**26
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

_Reply = Callable[[Connection], None]


class Piece(NamedTuple):
    """A piece that a puller asks for: of a leaf, from an element on, in a dtype."""

    leaf: int
    start: Shape
    shape: Shape
    dtype: str

    @classmethod
    def of_json(cls, value: Any) -> Piece:
        leaf, start, shape, dtype = value
        if type(leaf) is not int or not isinstance(dtype, str):
            raise ValueError("got a piece of no leaf or no dtype")
        return cls(leaf, _sizes(start), _sizes(shape), dtype)


def _sizes(values: Any) -> Shape:
    are_sizes = isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**62 for value in values
    )
    if not are_sizes:
        raise ValueError(f"got {values!r:.80} as the place of a piece")
    return tuple(values)


class HeldTree:
    """A version of the tree in one process, with the blocks that this process holds.

    Attributes:
      leaves: without their blocks; without a grid if all processes have the whole array.
      structure: that of ``flatten``.
      values: what must be the same in all processes, as ``values_of`` returns it.
    """

    def __init__(
        self, leaves: Sequence[SavedLeaf | ValueLeaf], structure: Any, values: dict[str, str]
    ) -> None:
        self.structure, self.values = structure, values
        arrays = [leaf for leaf in leaves if isinstance(leaf, SavedLeaf)]
        self._data = {x.number: {block.start: block.data for block in x.blocks} for x in arrays}
        self.leaves = [x._replace(blocks=()) if isinstance(x, SavedLeaf) else x for x in leaves]

    def elements(self, piece: Piece) -> np.ndarray[Any, Any]:
        """Return the elements of a piece; ``ValueError`` unless one block here has them."""
        number, start, shape, _ = piece
        leaf = self.leaves[number] if 0 <= number < len(self.leaves) else None
        rank = len(leaf.record.shape) if isinstance(leaf, SavedLeaf) else -1
        if not isinstance(leaf, SavedLeaf) or not len(start) == len(shape) == rank:
            raise ValueError(f"has no array {number} with a piece of shape {shape}")
        steps = zip(start, leaf.block_shape, strict=True)
        first = tuple([at // step * step if step else 0 for at, step in steps])
        sides = zip(start, first, shape, strict=True)
        within = [slice(at - begin, at - begin + size) for at, begin, size in sides]
        data = self._data[number].get(first)
        if data is None or any(map(_is_beyond, within, data.shape)):
            raise ValueError(f"holds no block of array {number} with the piece at {start} {shape}")
        if not isinstance(data, np.ndarray):
            # In place of the pinned memory that an accelerator has copied the block to.
            data = self._data[number][first] = on_host(data)
        block = data[(*within, ...)]
        if (dtype := dtype_named(piece.dtype)) != block.dtype:
            is_complex = block.dtype.kind == dtype.kind == "c"
            if not is_complex and not (is_float(dtype) and is_float(block.dtype)):
                raise ValueError(f"casts no {block.dtype} to {dtype}")
            # Here, because nothing can be said when a part was sent.
            what = f"its array at {format_path(leaf.record.path)}"
            check_holds(block, dtype, Origin.of_block(what, start))
        return block


def _is_beyond(part: slice, size: int) -> bool:
    return part.stop > size


class OfferServer(socketserver.ThreadingTCPServer):
    """The server of one process.

    Args:
      address: to listen on; port 0 lets the system choose one.
      name: of the offer.
      token: that a puller must have.
      versions: the trees that this process holds.
      catalog: returns the catalog of a version; ``None`` in all processes but the first.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

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
        try:
            self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            super().__init__(address, socketserver.BaseRequestHandler)
        except OSError as error:
            said = f"cannot listen on {address}: {error.strerror}; pass an address of this machine"
            raise OSError(error.errno, f"{said} with a free port, or with port 0") from None
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK_EVERY,), name="gda-offer", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> Address:
        """The address that it listens on."""
        return Address(*self.server_address[:2])  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.shutdown()
        self.server_close()
        self._versions.close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the questions of one connection; called in a thread of its own."""
        peer = f"the puller at {client_address[0]}"
        deadline, is_closed = Deadline(_SECONDS_TO_GREET), self._versions.is_closed
        connection = Connection(request, peer, deadline, is_closed)
        if connection.accept(self._token):
            while self._answer(connection):
                pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error that ended a connection; the puller reports it."""
        logging.getLogger("gda").debug("an offer lost a puller", exc_info=True)

    def _answer(self, connection: Connection) -> bool:
        """Answer one question; return False if there is none."""
        try:
            question = connection.message(_MOST_QUESTION_BYTES)
        except ConnectionError:
            return False
        connection.deadline = _deadline(question)
        answers = {"tree": self._tree, "pieces": self._pieces, "sums": self._sums}
        with contextlib.ExitStack() as held:
            try:
                reply = answers[question["ask"]](question, connection.deadline, held)
            except (*ERRORS.values(), KeyError, TypeError) as error:
                is_known = type(error).__name__ in ERRORS
                said = str(error) if is_known else f"got a wrong question: {one_line(error)}"
                kind = type(error).__name__ if is_known else "ValueError"
                connection.send({"error": [kind, said]})
            else:
                reply(connection)
        return True

    def _tree(self, question: Any, deadline: Deadline, held: contextlib.ExitStack) -> _Reply:
        """Hold the current version until the puller ends the connection, and send its catalog."""
        if self._catalog is None:
            raise LookupError("is not the first process of its program; ask that one")
        if question["name"] not in (None, self._name):
            raise LookupError(f"offers {self._name!r}, and not {question['name']!r:.80}")
        least = int(question["least"] or 1)
        catalog = self._catalog(held.enter_context(self._versions.pulled(least, _sooner(deadline))))

        def reply(connection: Connection) -> None:
            connection.send_text(catalog)
            connection.wait_for_end()

        return reply

    def _pieces(self, question: Any, deadline: Deadline, held: object) -> _Reply:
        found = [
            (block, dtype_named(piece.dtype)) for piece, block in self._asked(question, deadline)
        ]

        def reply(connection: Connection) -> None:
            connection.send({"nbytes": sum(block.size * dtype.itemsize for block, dtype in found)})
            connection.send_blocks(found)

        return reply

    def _sums(self, question: Any, deadline: Deadline, held: object) -> _Reply:
        sums = [
            sums_of_host(np.ascontiguousarray(block), piece.start).tolist()
            for piece, block in self._asked(question, deadline)
        ]
        return lambda connection: connection.send({"sums": sums})

    def _asked(self, question: Any, deadline: Deadline) -> list[tuple[Piece, np.ndarray[Any, Any]]]:
        """Return the pieces of a question, each with its elements."""
        pieces = [Piece.of_json(value) for value in question["pieces"]]
        tree = self._versions.get(int(question["version"]), _sooner(deadline))
        return [(piece, tree.elements(piece)) for piece in pieces]


def _deadline(question: Any) -> Deadline:
    seconds = question.get("timeout")
    if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        seconds = _SECONDS_TO_GREET
    return Deadline(float(seconds))


def _sooner(deadline: Deadline) -> Deadline:
    """Return a deadline after which an answer still arrives before the other one."""
    return Deadline(0.9 * deadline.left())

"""The questions of a process to the processes of an offer, and their answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.transport.connection import Address, Connection, Deadline, GivenUpError
from gda.exchange.catalog import Catalog
from gda.exchange.pieces import PulledPiece
from gda.exchange.serving import ERRORS, MOST_PIECES
from gda.layout.cover import groups_within
from gda.layout.text import join_some
from gda.multihost.background import in_thread
from gda.trees.records.arrivals import Arrival
from gda.trees.records.recorded_tree import format_path

_MOST_CATALOG_BYTES = 2**26  # about 500,000 arrays
_MOST_ANSWER_BYTES = 2**20
_MOST_CONNECTIONS = 8  # at a time: each thread copies as fast as a core can


class PiecesToPull(NamedTuple):
    """One piece of several leaves of the same shape and layout, at most ``MOST_PIECES``.

    Attributes:
      dtype: the name of the dtype in which it is sent.
      arrivals: the arrays that the pieces are for.
    """

    piece: PulledPiece
    dtype: str
    leaves: Sequence[int]
    arrivals: Sequence[Arrival]

    @property
    def question(self) -> list[Any]:
        return [self.leaves, self.piece.start, self.piece.shape, self.dtype]

    def memory(self) -> list[np.ndarray[Any, Any]]:
        """Return the views of the arrays that the pieces fill."""
        block, place = self.piece.block, (*self.piece.place, ...)
        return [arrival.blocks[block][place] for arrival in self.arrivals]


PiecesByProcess = Mapping[int, list[PiecesToPull]]  # the processes of the offer


@dataclass(frozen=True)
class OfferToPull:
    """The offer of another program."""

    address: Address
    token: str | None
    deadline: Deadline

    def peer(self, server: int, address: object = None) -> str:
        """Return a name for a process of the offer, for messages."""
        if server == 0:
            return f"the offer at {self.address}"
        return f"process {server} of the offer at {self.address}, at {address},"

    def catalog(self, name: str | None, least: int, held: contextlib.ExitStack) -> str:
        """Return the catalog; the first process keeps its version until ``held`` is closed."""
        peer = self.peer(0)
        connection = Connection.to(self.address, peer, self.token, self.deadline, waits=True)
        held.callback(connection.close)
        question = {"ask": "tree", "name": name, "least": least}
        connection.send(question | {"timeout": self.deadline.left()})
        text = connection.text(_MOST_CATALOG_BYTES)
        if text.startswith('{"error"'):
            _raise_error(connection.object_of(text), peer)
        return text

    def pull(self, catalog: Catalog, pieces: PiecesByProcess) -> None:
        """Receive pieces in the memory of their arrays, by several connections at a time.

        Processes are asked in turn, so that all of them send; each process that pulls begins with
        another one. An error ends all questions; of several, that of the first question is raised.
        """
        count = len(catalog.servers)
        begin = jax.process_index() * count // jax.process_count()
        questions = [
            (turn, (server - begin) % count, server, of_question)
            for server, of_server in pieces.items()
            for turn, of_question in enumerate(
                groups_within(of_server, [len(each.leaves) for each in of_server], MOST_PIECES)
            )
        ]
        questions.sort(key=lambda each: each[:2])
        following = iter(enumerate(questions))  # from which several threads take
        errors: dict[int, Exception] = {}
        is_stopped = threading.Event()

        def ask_following() -> None:
            for number, (_, _, server, of_question) in following:
                if is_stopped.is_set():
                    break
                # A proxy or a tunnel may have another address than the first process.
                place = self.address if server == 0 else catalog.servers[server].place
                deadline = self.deadline
                peer = self.peer(server, place)
                question = {"ask": "pieces", "run": catalog.run, "version": catalog.version}
                try:
                    connection = Connection.to(
                        place, peer, self.token, deadline, is_stopped=is_stopped
                    )
                    with contextlib.closing(connection):
                        places = [each.question for each in of_question]
                        connection.send(question | {"timeout": deadline.left(), "pieces": places})
                        _receive(connection, of_question)
                except GivenUpError:
                    pass  # the error that ended it counts
                except Exception as error:
                    errors[number] = error
                    is_stopped.set()

        # This thread asks too, so that a small pull starts none.
        helpers = min(_MOST_CONNECTIONS, len(questions)) - 1
        asking = [in_thread("gda-pull", ask_following) for _ in range(helpers)]
        try:
            ask_following()
            wait(asking)
        finally:
            is_stopped.set()  # for the others, after Ctrl-C
            wait(asking)
        if errors:
            raise errors[min(errors)]


def _receive(connection: Connection, pieces: list[PiecesToPull]) -> None:
    blocks = [block for each in pieces for block in each.memory()]
    expected = sum(block.nbytes for block in blocks)
    answer = connection.message(_MOST_ANSWER_BYTES)
    _raise_error(answer, connection.peer)
    if answer.get("nbytes") != expected:
        raise ConnectionError(
            f"{connection.peer} has {answer.get('nbytes')!r:.80} bytes for pieces of "
            f"{expected} bytes"
        )
    if differing := connection.receive_blocks(blocks):
        records = [arrival.record for each in pieces for arrival in each.arrivals]
        paths = join_some([format_path(records[number].path) for number in differing])
        raise ConnectionError(
            f"{connection.peer} sent elements of {paths}, and other bytes arrived: their CRC-32C "
            "differs; pull again, and look for a faulty network card or memory if it comes back"
        )


def _raise_error(answer: dict[str, Any], peer: str) -> None:
    match answer:
        case {"error": [str(kind), str(text)]}:
            raise ERRORS.get(kind, ConnectionError)(f"{peer} {text:.1000}")
        case {"error": other}:
            raise ConnectionError(f"{peer} sent an error without a text: {other!r:.80}")

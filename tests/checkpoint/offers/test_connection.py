"""Peers that are no offers, or no pullers, or hostile: errors that name them, and nothing else."""

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from meshes import batch

import gda
from gda.checkpoint.offers.connection import Address, Connection, Deadline

GREETING = b"gda offer 2\n"
SHORT = 0.6  # seconds

Peer = Callable[[socket.socket], object]


@contextmanager
def listening(serve: Peer) -> Iterator[str]:
    """Serve every connection to an address by a function."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with closing(connection), suppress(OSError, ConnectionError, TimeoutError):
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def until_the_end(connection: socket.socket) -> None:
    while connection.recv(2**16):
        pass


def says(*data: bytes) -> Peer:
    def serve(connection: socket.socket) -> None:
        for each in data:
            connection.sendall(each)
        until_the_end(connection)

    return serve


def closes(connection: socket.socket) -> None:
    pass


def closes_after_its_greeting(connection: socket.socket) -> None:
    connection.sendall(GREETING + bytes(32))
    connection.recv(2**10)


def answers(*messages: Any) -> Peer:
    """Return a peer that greets as an offer does, and then says these to any question."""

    def serve(given: socket.socket) -> None:
        connection = Connection(given, "the test", Deadline(20))
        assert connection.accept(None)
        for message in messages:
            connection.message(2**20)
            if isinstance(message, bytes):
                connection.send_text(message)
            else:
                connection.send(message)
        until_the_end(given)

    return serve


def answers_with_length(length: int) -> Peer:
    """Return a peer that answers with the length of a message, and ends the connection."""

    def serve(given: socket.socket) -> None:
        connection = Connection(given, "the test", Deadline(20))
        assert connection.accept(None)
        connection.message(2**20)
        given.sendall(length.to_bytes(4, "big"))

    return serve


def catalog(**changes: Any) -> Any:
    leaf = {"path": ["w"], "kind": "numpy", "shape": [4], "dtype": "float32", "array": 0}
    return {
        "leaves": [leaf | changes.pop("leaf", {})],
        "structure": {"dict": [["w", 0]]},
        "name": "tree",
        "run": "a",
        "version": 1,
        "meshes": [[[["process", 1]], [0]]],
        "layouts": [[0, []]],
        "servers": [["127.0.0.1:1", ""]],
    } | changes


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (
            says(b"SSH-2.0-OpenSSH_9.6\r\n"),
            "is no offer of this version of gda: it sent b'SSH-2.0-Ope",
        ),
        (says(b"gda offer 9\n" + bytes(32)), "is no offer of this version of gda"),
        (closes, "ended the connection"),
        (closes_after_its_greeting, "ended the connection"),
        (answers_with_length(2**32 - 1), "sent a message of 4294967295 bytes; expected are at mo"),
        (answers(b"{]"), "a catalog that is not valid"),
        (answers([1, 2]), "a catalog that is not valid"),
        (answers({"name": "tree"}), "a catalog that is not valid"),
        (answers(catalog(version="1")), "it has no name, no run or no version"),
        (answers(catalog(run=1)), "it has no name, no run or no version"),
        (answers(catalog(leaf={"dtype": "object"})), r"leaves\[0\].dtype is 'object'"),
        (answers(catalog(leaf={"shape": [-1]})), r"leaves\[0\].shape is \[-1\]"),
        (answers(catalog(leaf={"shape": [2**40, 2**40]})), r"leaves\[0\].shape"),
        (answers(catalog(leaf={"array": 7})), "a catalog that is not valid"),
        (answers(catalog(structure={"dict": [["v", 0]]})), "a leaf in a wrong place"),
        (answers(catalog(meshes=[[[["process", 2**40]], [0]]])), "has 1 devices"),
        (answers(catalog(meshes=[[[["process", 1]], [3]]])), "processes without an address"),
        (answers(catalog(layouts=[[0, ["model"]]])), "a catalog that is not valid"),
        (answers(catalog(meshes=[[[["a", 2], ["a", 2]], [0] * 4]])), "but the mesh {'a': 2} has 2"),
        (answers(catalog(meshes=[[[["a", 0]], []]])), "has an axis without devices"),
        (answers(catalog(leaf={"array": None})), "has neither an array nor pieces"),
        (answers(catalog(servers=[["127.0.0.1", ""]])), "must be a text host:port"),
        (answers(catalog(servers=[["trainer..local:1", ""]])), "must be a text host:port"),
        (answers(b"[" * 200_000), "it is nested too deeply"),
        (
            answers(catalog(meshes=[[[["process", 2**18]], [0] * 2**18]])),
            "it has 262144 devices; expected are at most 131072",
        ),
        (answers({"error": ["SystemExit", "hello"]}), "hello"),
        (answers({"error": 3}), "sent an error without a text: 3"),
        (answers({"error": ["ValueError", None]}), "sent an error without a text"),
        (answers(b'{"error"'), "sent a message that is no JSON"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "peer",
)
def test_something_else_that_listens_is_named(peer: Peer, message: str) -> None:
    with listening(peer) as address, pytest.raises(ConnectionError, match=message) as error:
        gda.pull(address, timeout=10)
    assert f"the offer at {address}" in str(error.value)


def test_something_that_says_nothing_ends_in_time() -> None:
    with listening(says()) as address:
        said = rf"the offer at {address} did not send .* of the 0.6 s of timeout=.*no offer of gda"
        with pytest.raises(TimeoutError, match=said):
            gda.pull(address, timeout=SHORT)


def offering(pieces: str) -> AbstractContextManager[str]:
    """Offer an array whose pieces another address has."""
    return listening(answers(catalog(servers=[[pieces, ""]])))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"nbytes": 2**60}, "has 1152921504606846976 bytes for pieces of 16 bytes"),
        ({"nbytes": None}, "has None bytes for pieces of 16 bytes"),
        ({"error": ["ValueError", "is tired"]}, "is tired"),
        ({"error": 5}, "sent an error without a text: 5"),
        ([3], "sent a message that is no object"),
    ],
)
def test_pieces_of_another_size_are_refused(answer: Any, message: str) -> None:
    with listening(answers(answer)) as pieces, offering(pieces) as address:  # noqa: SIM117
        with pytest.raises((ConnectionError, ValueError), match=message):
            gda.pull(address, timeout=10)


@pytest.mark.parametrize(
    "sums", [None, [], ["x"], [[1]], [[1, 2, 3, 2**70]], [[1, 2, 3, -1]], [[1, 2, 3, 4]] * 2]
)
def test_sums_that_are_none_are_refused(sums: Any) -> None:
    with listening(answers({"sums": sums})) as pieces, offering(pieces) as address:
        said = f"the offer at {address} sent no sums of the pieces"
        with pytest.raises(ConnectionError, match=said):
            gda.pull(address, verify=True, timeout=10)


def test_a_pull_never_takes_itself_for_the_offer(
    offer: gda.Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that nothing listens on can be the one that the system chooses to connect from."""
    connect, made = socket.create_connection, []

    def to_itself_first(*given: Any) -> socket.socket:
        if made:
            return connect(*given)
        made.append(socket.socket())
        made[0].bind(("127.0.0.1", 0))
        made[0].connect(made[0].getsockname())
        return made[0]

    monkeypatch.setattr(socket, "create_connection", to_itself_first)
    assert gda.pull(offer.address, token="secret", timeout=20)["step"] == 3
    assert made[0].fileno() == -1


def test_a_piece_that_ends_too_early_is_an_error() -> None:
    def serve(given: socket.socket) -> None:
        connection = Connection(given, "the test", Deadline(20))
        assert connection.accept(None)
        connection.message(2**20)
        connection.send({"nbytes": 16})
        given.sendall(bytes(7))

    with listening(serve) as pieces, offering(pieces) as address:  # noqa: SIM117
        with pytest.raises(ConnectionError, match="ended the connection: it has ended"):
            gda.pull(address, timeout=10)


def test_ctrl_c_ends_a_pull_and_its_threads() -> None:
    def serve(given: socket.socket) -> None:
        connection = Connection(given, "the test", Deadline(20))
        assert connection.accept(None)
        connection.message(2**20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        until_the_end(given)

    before = {*threading.enumerate()}
    with listening(serve) as pieces, offering(pieces) as address:  # noqa: SIM117
        with pytest.raises(KeyboardInterrupt):
            gda.pull(address)
    assert {*threading.enumerate()} == before


# Pullers.


@pytest.fixture(scope="module")
def offer() -> Iterator[gda.Offer]:
    with gda.offer({"w": batch(8, 4), "n": np.arange(4), "step": 3}, token="secret") as offer:
        yield offer


def ask(offer: gda.Offer, token: str | None = "secret", **question: Any) -> Any:
    """Return the answer to a question."""
    connection = Connection.to(Address.of(offer.address), "the offer", token, Deadline(20))
    with closing(connection):
        connection.send({"run": offer.run} | question)
        return json.loads(connection.text(2**20))


@pytest.mark.parametrize(
    ("question", "kind", "said"),
    [
        ({}, "ValueError", "got a wrong question: KeyError: 'ask'"),
        ({"ask": "files"}, "ValueError", "got a wrong question"),
        ({"ask": "tree"}, "ValueError", "got a wrong question"),
        ({"ask": "tree", "name": 3, "least": 1}, "LookupError", "offers 'tree', and not 3"),
        (
            {"ask": "pieces", "version": 9, "pieces": [], "timeout": 0.3},
            "TimeoutError",
            "version 9",
        ),
        ({"ask": "pieces", "version": 0, "pieces": []}, "ValueError", "has no version 0 any more"),
        *[
            ({"ask": "pieces", "version": 1, "pieces": [piece]}, "ValueError", said)
            for piece, said in [
                ([1, [0, 0], [1, 1]], "not enough values"),
                ([9, [0, 0], [1, 1], "float32"], "has no array 9"),
                ([-1, [0, 0], [1, 1], "float32"], "has no array -1"),
                ([1, [], [], "float32"], "has no array 1"),
                ([2, [0], [1], "float32"], "has no array 2 with a piece"),
                ([2, [0, 0], [9, 1], "float32"], "holds no block"),
                ([2, [2**61, 0], [1, 1], "float32"], "holds no block"),
                ([2, [-1, 0], [1, 1], "float32"], "got [-1, 0] as the place"),
                ([2, [0, 0], [True, 1], "float32"], "got [True, 1] as the place"),
                ([2, [0, 0], [1, 1], "object"], "wrong question: TypeError"),
                ([2, [0, 0], [1, 1], "int8"], "casts no float32 to int8"),
                ([0, [0], [1], "float32"], "casts no int64 to float32"),
            ]
        ],
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_question_gets_an_error_and_the_offer_goes_on(
    offer: gda.Offer, question: Any, kind: str, said: str
) -> None:
    answer = ask(offer, **question)
    assert [*answer] == ["error"]
    assert answer["error"][0] == kind
    assert said in answer["error"][1]
    np.testing.assert_array_equal(gda.pull(offer.address, token="secret")["w"], batch(8, 4))


@pytest.mark.parametrize("token", [None, "", "guess", "secret "])
def test_nothing_is_served_without_the_token(offer: gda.Offer, token: str | None) -> None:
    with pytest.raises(PermissionError, match="has another token; pass the token= of its offer"):
        gda.pull(offer.address, token=token)


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", GREETING, GREETING + bytes(64), bytes(200)]
)
def test_garbage_gets_no_answer(offer: gda.Offer, data: bytes) -> None:
    with closing(socket.create_connection(Address.of(offer.address), 20)) as connection:
        received = b""
        with suppress(OSError):  # the offer may end the connection before it has read everything
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while more := connection.recv(2**10):
                received += more
    assert received[: len(GREETING)] == GREETING
    assert len(received) in (len(GREETING) + 32, len(GREETING) + 64)
    assert received[len(GREETING) + 32 :] == bytes(len(received) - len(GREETING) - 32)


def test_a_message_that_is_too_large_ends_the_connection(offer: gda.Offer) -> None:
    address = Address.of(offer.address)
    with closing(Connection.to(address, "the offer", "secret", Deadline(20))) as connection:
        connection._socket.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionError, match="the offer ended the connection"):
            connection.message(2**20)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (700, 300), (3, 400, 500)])
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
def test_blocks_of_any_strides_arrive(shape: tuple[int, ...], sent: str) -> None:
    import ml_dtypes  # noqa: F401  # the dtype of that name

    blocks = [batch(*shape), np.asfortranarray(batch(*shape)), batch(*shape, 2)[..., 0]]
    dtype, deadline = np.dtype(sent), Deadline(20)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with (
        closing(Connection(ours, "the sender", deadline)) as receiver,
        closing(Connection(theirs, "the receiver", deadline)) as sender,
    ):
        given = [(block, dtype) for block in blocks]
        thread = threading.Thread(target=sender.send_blocks, args=(given,))
        thread.start()
        arrived = [np.zeros_like(block, dtype) for block in blocks]
        receiver.receive_blocks(arrived)
        thread.join()
    for one, other in zip(arrived, blocks, strict=True):
        np.testing.assert_array_equal(one, other.astype(dtype))

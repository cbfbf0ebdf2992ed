"""Peers that are no offers, or no pullers, or hostile: errors that name them, and nothing else."""

import json
import resource
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from meshes import batch

import gda
from gda.arrays.transport.connection import Address, Connection, Deadline
from gda.exchange import asking, pulling, serving

GREETING = b"gda offer 4\n"
SHORT = 1.0  # seconds

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


def asked(then: Callable[[Connection, socket.socket], object]) -> Peer:
    """Return a peer that greets as an offer does, hears a question, and then does something."""

    def serve(given: socket.socket) -> None:
        connection = Connection(given, "the test", Deadline(60))
        assert connection.accept(None)
        connection.message(2**20)
        then(connection, given)

    return serve


def answers(message: Any) -> Peer:
    def say(connection: Connection, given: socket.socket) -> None:
        if isinstance(message, bytes):
            connection.send_text(message)
        else:
            connection.send(message)
        until_the_end(given)

    return asked(say)


def answers_with_length(length: int) -> Peer:
    """Return a peer that answers with the length of a message, and ends the connection."""
    return asked(lambda _, given: given.sendall(length.to_bytes(4, "big")))


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
            "is not an offer of this version of gda: it sent b'SSH-2.0-Ope",
        ),
        (lambda _: None, "ended the connection"),
        (answers_with_length(2**32 - 1), "sent a message of 4294967295 bytes; expected are at mo"),
        (answers(b"{]"), "a catalog that is not valid"),
        (answers(catalog(version="1")), "it has no name, no run or no version"),
        (answers(catalog(structure={"dict": [["v", 0]]})), "a leaf in a wrong place"),
        (answers(catalog(meshes=[[[["process", 2**40]], [0]]])), "has 1 devices"),
        (answers(catalog(meshes=[[[["a", 2**40], ["b", [0]]], [0]]])), "whose size is no integer"),
        (answers(catalog(meshes=[[[["process", 1]], [3]]])), "processes without an address"),
        (answers(catalog(meshes=[[[["a", 2], ["a", 2]], [0] * 4]])), "but the mesh {'a': 2} has 2"),
        (answers(catalog(leaf={"array": None})), "has neither an array nor pieces"),
        (answers(catalog(servers=[["127.0.0.1", ""]])), "must be a text host:port"),
        (answers({"error": ["SystemExit", "hello"]}), "hello"),
        (answers({"error": 3}), "sent an error without a text: 3"),
        (answers(b'{"error"'), "sent a message that is not JSON"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "peer",
)
def test_something_else_that_listens_is_named(peer: Peer, message: str) -> None:
    with listening(peer) as address, pytest.raises(ConnectionError, match=message) as error:
        gda.pull(address, timeout=60)
    assert f"the offer at {address}" in str(error.value)


def test_something_that_says_nothing_ends_in_time() -> None:
    with listening(says()) as address:
        said = rf"the offer at {address} did not send .* of the 1 s of timeout=.*no offer of gda"
        with pytest.raises(TimeoutError, match=said):
            gda.pull(address, timeout=SHORT)


def test_a_resolver_that_hangs_does_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(100) and [])
    begun = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"trainer.local:7700 did not answer for 1 s"):
            gda.pull("trainer.local:7700", timeout=SHORT)
        assert time.monotonic() - begun < 60
    finally:
        answered.set()


def test_a_name_that_has_no_address_yet_is_waited_for(
    offer: gda.Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, names = socket.getaddrinfo, []

    def later(host: str, *given: Any, **options: Any) -> Any:
        if host == "trainer.local":
            names.append(host)
            if len(names) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return resolve(host, *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    port = Address.of(offer.address).port
    assert gda.pull(f"trainer.local:{port}", token="secret", timeout=60)["step"] == 3
    names.clear()
    with pytest.raises(ConnectionError, match="no address of 'trainer.local' for 0.2 s"):
        gda.pull(f"trainer.local:{port}", token="secret", timeout=0.2)


def test_a_length_takes_no_memory_before_its_bytes_come() -> None:
    with listening(answers_with_length(2**26)) as address:
        tracemalloc.start()
        try:
            with pytest.raises(ConnectionError, match="ended the connection"):
                gda.pull(address, timeout=60)
            assert tracemalloc.get_traced_memory()[1] < 2**23
        finally:
            tracemalloc.stop()


def connected() -> tuple[socket.socket, socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def test_a_message_with_any_flipped_bit_is_an_error() -> None:
    """Not a value of the catalog, such as a learning rate, that is another number."""

    def arriving(data: bytes) -> Connection:
        sent, received = connected()
        sent.sendall(data)
        sent.close()  # if the length is larger now, no more bytes come
        return Connection(received, "the sender", Deadline(60))

    sent, received = connected()
    with closing(Connection(sent, "the receiver", Deadline(60))) as sender, received:
        sender.send({"lr": 0.125})
        data = received.recv(2**10)
    with closing(arriving(data)) as receiver:
        assert receiver.message(2**20) == {"lr": 0.125}
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with closing(arriving(bytes(flipped))) as receiver, pytest.raises(ConnectionError):
            receiver.message(2**20)


def test_a_message_that_is_sent_again_is_an_error() -> None:
    sent, received = connected()
    with (
        closing(Connection(received, "the sender", Deadline(60))) as receiver,
        closing(Connection(sent, "the receiver", Deadline(60))) as sender,
    ):
        sent.sendall(2 * ((2).to_bytes(4, "big") + sender._mac(0, b"{}") + b"{}"))
        assert receiver.message(2**20) == {}
        with pytest.raises(ConnectionError, match="arrived with other bytes: its checksum differs"):
            receiver.message(2**20)


def offering(pieces: str) -> AbstractContextManager[str]:
    """Offer an array whose pieces another address has."""
    mesh = [[["process", 1]], [1]]
    return listening(answers(catalog(meshes=[mesh], servers=[["127.0.0.1:1", ""], [pieces, ""]])))


@pytest.mark.parametrize(
    ("answer", "message", "options"),
    [
        ({"nbytes": 2**60}, "has 1152921504606846976 bytes for pieces of 16 bytes", {}),
        ({"error": ["ValueError", "is tired"]}, "is tired", {}),
        ([3], "sent a message that is not an object", {}),
        ({}, "sent version 1 of 'tree', which was not asked for", {"name": "policy"}),
        ({}, "sent version 1 of 'tree', which was not asked for", {"min_version": 2}),
    ],
)
def test_answers_that_are_none_are_refused(answer: Any, message: str, options: Any) -> None:
    with listening(answers(answer)) as pieces, offering(pieces) as address:  # noqa: SIM117
        with pytest.raises((ConnectionError, ValueError), match=message):
            gda.pull(address, timeout=60, **options)


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
    assert gda.pull(offer.address, token="secret", timeout=60)["step"] == 3
    assert made[0].fileno() == -1


def test_ctrl_c_ends_a_pull_and_its_threads() -> None:
    def serve(_: Connection, given: socket.socket) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        until_the_end(given)

    before = {*threading.enumerate()}
    with listening(asked(serve)) as pieces, offering(pieces) as address:  # noqa: SIM117
        with pytest.raises(KeyboardInterrupt):
            gda.pull(address)
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert {*threading.enumerate()} <= before  # of which one may have ended


# Pullers.


@pytest.fixture(scope="module")
def offer() -> Iterator[gda.Offer]:
    with gda.offer({"w": batch(8, 4), "n": np.arange(4), "step": 3}, token="secret") as offer:
        yield offer


def connected_to(offer: gda.Offer, token: str | None = "secret") -> Connection:
    return Connection.to(Address.of(offer.address), "the offer", token, Deadline(60))


@pytest.mark.parametrize(
    ("question", "kind", "said"),
    [
        ({}, "ValueError", "got a wrong question: KeyError: 'ask'"),
        ({"ask": "files"}, "ValueError", "got a wrong question"),
        ({"ask": "tree", "name": 3, "least": 1}, "LookupError", "offers 'tree', and not 3"),
        (
            {"ask": "pieces", "version": 9, "pieces": [], "timeout": 2},
            "TimeoutError",
            "version 9",
        ),
        ({"ask": "pieces", "version": 0, "pieces": []}, "ValueError", "has no version 0 any more"),
        (
            {"ask": "pieces", "version": 1, "pieces": [[[2] * 1001, [0, 0], [8, 4], "float32"]]},
            "ValueError",
            "got 1001 pieces; expected are at most 1000",
        ),
        *[
            ({"ask": "pieces", "version": 1, "pieces": [piece]}, "ValueError", said)
            for piece, said in [
                ([[9], [0, 0], [1, 1], "float32"], "has no array 9"),
                ([[1], [], [], "float32"], "has no array 1"),
                ([[2], [2**61, 0], [1, 1], "float32"], "holds no block"),
                ([[2], [-1, 0], [1, 1], "float32"], "got [(-1, 0), (1, 1)] as a piece of blocks"),
                ([[2], [0, 0], [1, 1], "object"], "wrong question: TypeError"),
                ([[2], [0, 0], [1, 1], "int8"], "casts no float32 to int8"),
                ([[0], [0], [1], "float32"], "casts no int64 to float32"),
            ]
        ],
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_question_gets_an_error_and_the_offer_goes_on(
    offer: gda.Offer, question: Any, kind: str, said: str
) -> None:
    with closing(connected_to(offer)) as connection:
        connection.send({"run": offer._versions.run} | question)
        answer = json.loads(connection.text(2**20))
    assert [*answer] == ["error"]
    assert answer["error"][0] == kind
    assert said in answer["error"][1]
    np.testing.assert_array_equal(gda.pull(offer.address, token="secret")["w"], batch(8, 4))


def test_an_offer_goes_on_when_there_are_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with gda.offer({"w": 1}) as offer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(ConnectionError, match="ended the connection"):
                gda.pull(offer.address, timeout=60)
        assert gda.pull(offer.address, timeout=60) == {"w": 1}


def test_nothing_is_served_without_the_token(offer: gda.Offer) -> None:
    for token in (None, "", "secret "):
        with pytest.raises(PermissionError, match="has another token; pass the token= of its offe"):
            gda.pull(offer.address, token=token)
    for data in (b"GET / HTTP/1.1\r\n\r\n", GREETING + bytes(64), bytes(200)):
        with closing(socket.create_connection(Address.of(offer.address), 20)) as connection:
            received = b""
            with suppress(OSError):  # the offer may end the connection before it has read all
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while more := connection.recv(2**10):
                    received += more
        assert received[: len(GREETING)] == GREETING
        assert received[len(GREETING) + 32 :] in (b"", bytes(32))


def test_a_message_that_is_too_large_ends_the_connection(offer: gda.Offer) -> None:
    with closing(connected_to(offer)) as connection:
        connection._socket.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionError, match="the offer ended the connection"):
            connection.message(2**20)


def test_a_question_without_an_end_ends_in_time(
    offer: gda.Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SECONDS_TO_ASK", 0.5)
    with closing(connected_to(offer)) as connection:
        connection._socket.sendall((100).to_bytes(4, "big"))
        with pytest.raises(ConnectionError, match="the offer ended the connection"):
            connection.message(2**10)


def test_many_pieces_are_pulled_by_several_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (asking, pulling, serving):
        monkeypatch.setattr(module, "MOST_PIECES", 3)
    tree = {f"w{n}": batch(n + 1, 2) for n in range(10)}
    tree |= {f"of one shape {n}": batch(3, 2) + n for n in range(10)}
    with gda.offer(tree) as offer:
        pulled = gda.pull(offer.address)
    for name, whole in tree.items():
        np.testing.assert_array_equal(pulled[name], whole)


def test_connections_without_a_proof_take_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    with gda.offer({"step": 3}) as offer:
        idle = [socket.create_connection(Address.of(offer.address)) for _ in range(4)]
        assert gda.pull(offer.address, timeout=60) == {"step": 3}
        assert len(offer._server._connections) <= 3
        proven = [connected_to(offer, None) for _ in range(3)]
        with pytest.raises(TimeoutError, match="did not send or take"):
            gda.pull(offer.address, timeout=SHORT)
        for each in proven:
            each.close()
        assert gda.pull(offer.address, timeout=60) == {"step": 3}
        for each in idle:
            each.close()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (700, 300), (3, 400, 500)])
@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
def test_blocks_of_any_strides_arrive(shape: tuple[int, ...], sent: str) -> None:
    import ml_dtypes  # noqa: F401  # the dtype of that name

    blocks = [batch(*shape), np.asfortranarray(batch(*shape)), batch(*shape, 2)[..., 0]]
    dtype, deadline = np.dtype(sent), Deadline(60)
    ours, theirs = connected()
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

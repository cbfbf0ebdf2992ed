"""Pulls through a relay that fails at any byte: right values, or an error in time."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of
from trials import Trials, tried

import gda

SECONDS = 0.3  # of timeout=
KINDS = ("dies", "stops", "drips", "flips a bit")


class Fault(NamedTuple):
    """A fault at a byte of those that pass in one direction, in all connections of a pull."""

    kind: str
    direction: str
    byte: int
    bit: int = 0


class Relay:
    """A relay between a puller and an offer; ``passed`` counts the bytes of each direction."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.begin(None)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, fault: Fault | None) -> None:
        """Begin a trial."""
        self.fault, self.passed = fault, Counter[str]()
        self._guard, self._over = threading.Lock(), threading.Event()
        self._sockets: list[socket.socket] = []

    def end(self) -> None:
        """End all connections."""
        self._over.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                puller, _ = self._server.accept()
                if self._over.is_set():
                    puller.close()
                    continue
                offer = socket.create_connection(self.target or ("", 0))
                self._sockets += [puller, offer]
                # A connection of one trial must not count in the next.
                trial = self.fault, self.passed, self._over
                for each in [(puller, offer, "to the offer"), (offer, puller, "from the offer")]:
                    threading.Thread(target=self._relay, args=(*each, *trial), daemon=True).start()

    def _relay(
        self,
        source: socket.socket,
        sink: socket.socket,
        direction: str,
        fault: Fault | None,
        passed: Counter[str],
        over: threading.Event,
    ) -> None:
        with source, suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                with self._guard:
                    at = -1 if fault is None else fault.byte - passed[direction]
                    passed[direction] += len(data)
                if fault is not None and direction == fault.direction and at < len(data):
                    self._fail(fault, sink, data, at, over)
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _fail(
        self, fault: Fault, sink: socket.socket, data: bytearray, at: int, over: threading.Event
    ) -> None:
        """Send data in which the fault is, or before which it was if ``at`` is below 0."""
        if fault.kind == "flips a bit":
            if at >= 0:
                data[at] ^= 1 << fault.bit
            sink.sendall(data)
            return
        sink.sendall(data[: max(at, 0)])
        if fault.kind == "dies":
            if not over.is_set():
                self.end()
        elif fault.kind == "stops":
            over.wait(120)
        else:
            for byte in data[max(at, 0) :]:
                sink.sendall(bytes([byte]))
                over.wait(0.02)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with closing(Relay()) as relay:
        yield relay


def tree() -> Any:
    rows = cut(batch(8, 25), mesh_of({"x": 8}), P("x"))
    arrays = {"rows": rows, "numpy": batch(100)}
    return {"arrays": arrays, "digests": gda.fingerprint(arrays), "lr": 0.125, "step": 3}


def outcome_of_pull(address: str, seconds: float) -> str:
    try:
        pulled = gda.pull(address, token="secret", timeout=seconds)
    except (ConnectionError, TimeoutError, PermissionError) as error:
        return "named" if address in str(error) else f"unknown: {error}"
    assert (pulled["lr"], pulled["step"]) == (0.125, 3)
    if gda.fingerprint(pulled["arrays"]) != pulled["digests"]:
        return "found"
    np.testing.assert_array_equal(pulled["arrays"]["rows"], batch(8, 25))
    np.testing.assert_array_equal(pulled["arrays"]["numpy"], batch(100))
    return "whole"


@tried("a connection of a pull dies, stops, drips or flips a bit", 24, 1000)
def test_an_interrupted_pull_gives_right_values_or_an_error_in_time(
    trials: Trials, relay: Relay
) -> None:
    with gda.offer(tree(), token="secret") as offer:
        relay.target = offer._server.address
        assert outcome_of_pull(relay.address, 60) == "whole"
        passed = relay.passed
        relay.end()
        for number in range(trials.most):
            kind, direction = KINDS[number % 4], trials.chance.choice([*passed])
            byte, bit = trials.chance.randrange(passed[direction]), trials.chance.randrange(8)
            relay.begin(Fault(kind, direction, byte, bit))
            begun = time.monotonic()
            outcome = outcome_of_pull(relay.address, SECONDS)
            assert time.monotonic() - begun < SECONDS + 60, relay.fault
            assert outcome in ("whole", "named", "found"), (outcome, relay.fault)
            was_reached = relay.passed[direction] > byte  # not every pull has as many bytes
            assert kind != "dies" or not was_reached or outcome == "named", relay.fault
            trials.count(outcome)
            relay.end()
        relay.begin(None)
        assert outcome_of_pull(relay.address, 60) == "whole"
        relay.end()
        limit = time.monotonic() + 60
        while offer._server._connections or offer._versions._pulls:
            assert time.monotonic() < limit, "the offer still has connections"
            time.sleep(0.02)

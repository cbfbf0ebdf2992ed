"""Pulls through a relay that fails at any byte: right values, or an error in time."""

import socket
import threading
import time
from collections import Counter
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
    """A relay to an offer, for one pull; ``passed`` counts the bytes of each direction."""

    def __init__(self, target: tuple[str, int], fault: Fault | None = None) -> None:
        self._target, self._fault, self.passed = target, fault, Counter[str]()
        self._guard, self._over = threading.Lock(), threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._server]
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        self._over.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                puller, _ = self._server.accept()
                offer = socket.create_connection(self._target)
                self._sockets += [puller, offer]
                for each in [(puller, offer, "to the offer"), (offer, puller, "from the offer")]:
                    threading.Thread(target=self._relay, args=each, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        fault = self._fault
        with source, suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                with self._guard:
                    at = -1 if fault is None else fault.byte - self.passed[direction]
                    self.passed[direction] += len(data)
                if fault is not None and direction == fault.direction and at < len(data):
                    self._fail(fault, sink, data, at)
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _fail(self, fault: Fault, sink: socket.socket, data: bytearray, at: int) -> None:
        """Send data in which the fault is, or before which it was if ``at`` is below 0."""
        if fault.kind == "flips a bit":
            if at >= 0:
                data[at] ^= 1 << fault.bit
            sink.sendall(data)
            return
        sink.sendall(data[: max(at, 0)])
        if fault.kind == "dies":
            self.close()
        elif fault.kind == "stops":
            self._over.wait(120)
        else:
            for byte in data[max(at, 0) :]:
                sink.sendall(bytes([byte]))
                self._over.wait(0.02)


def tree() -> Any:
    rows = cut(batch(8, 25), mesh_of({"x": 8}), P("x"))
    return {"arrays": {"rows": rows, "numpy": batch(100)}, "lr": 0.125, "step": 3}


def outcome_of_pull(address: str, seconds: float) -> str:
    try:
        pulled = gda.pull(address, token="secret", timeout=seconds)
    except (ConnectionError, TimeoutError, PermissionError) as error:
        return "named" if address in str(error) else f"unknown: {error}"
    assert (pulled["lr"], pulled["step"]) == (0.125, 3)
    np.testing.assert_array_equal(pulled["arrays"]["rows"], batch(8, 25))
    np.testing.assert_array_equal(pulled["arrays"]["numpy"], batch(100))
    return "whole"


def test_a_flipped_bit_of_any_block_is_an_error_that_names_leaf_and_server() -> None:
    large = {"rows": cut(batch(8, 2**17), mesh_of({"x": 8}), P("x")), "small": batch(100)}
    with gda.offer(large) as offer:
        target, most = offer._server.address, 2**20 // 4
        for byte, leaf in [(most, "rows"), (2**22, "(rows|small)")]:
            with (
                closing(Relay(target, Fault("flips a bit", "from the offer", byte, 3))) as relay,
                pytest.raises(ConnectionError, match=f"offer at .* sent elements of {leaf}, and"),
            ):
                gda.pull(relay.address)


@tried("a connection of a pull dies, stops, drips or flips a bit", 24, 1000)
def test_an_interrupted_pull_gives_right_values_or_an_error_in_time(trials: Trials) -> None:
    with gda.offer(tree(), token="secret") as offer:
        target = offer._server.address
        with closing(Relay(target)) as relay:
            assert outcome_of_pull(relay.address, 60) == "whole"
            passed = relay.passed
        for number in range(trials.most):
            kind, direction = KINDS[number % 4], trials.chance.choice([*passed])
            byte, bit = trials.chance.randrange(passed[direction]), trials.chance.randrange(8)
            fault, begun = Fault(kind, direction, byte, bit), time.monotonic()
            with closing(Relay(target, fault)) as relay:
                outcome = outcome_of_pull(relay.address, SECONDS)
            assert time.monotonic() - begun < SECONDS + 60, fault
            assert outcome in ("whole", "named"), (outcome, fault)
            was_reached = relay.passed[direction] > byte  # not every pull has as many bytes
            if was_reached and kind in ("dies", "flips a bit"):
                assert outcome == "named", fault
            trials.count(outcome)
        assert outcome_of_pull(offer.address, 60) == "whole"
        limit = time.monotonic() + 60
        while offer._server._connections or offer._versions._pulls:
            assert time.monotonic() < limit, "the offer still has connections"
            time.sleep(0.02)

"""The access to JAX's coordination service, without other processes."""

import logging

import jax
import pytest

from gda.multihost import coordination


def test_a_jax_that_moved_its_service_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from jax._src import distributed

    assert coordination.service() is None  # in a program of one process
    monkeypatch.delattr(distributed, "global_state")
    coordination.warn_of_moved_service.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gda"):
        assert coordination.service() is None
        assert coordination.service() is None
    assert caplog.text.count("gda does not find the coordination service") == 1


def test_errors_are_of_kinds_that_python_users_know() -> None:
    class Client:
        def key_value_set_bytes(self, *_: object) -> None:
            raise jax.errors.JaxRuntimeError(status)

    for status, kind in [
        ("UNAVAILABLE: socket closed", ConnectionError),
        ("DEADLINE_EXCEEDED: too late", TimeoutError),
        ("INTERNAL: Barrier failed", TimeoutError),
        ("ALREADY_EXISTS: key", KeyError),
        ("SOMETHING_NEW: happened", RuntimeError),
    ]:
        with pytest.raises(kind, match=status.partition(":")[0]):
            coordination.Service(Client()).put("key", b"")
    status = "UNAVAILABLE: recvmsg:Connection reset by peer"
    with pytest.raises(ConnectionError, match="process 0, which runs the coordination service"):
        coordination.Service(Client()).put("key", b"")

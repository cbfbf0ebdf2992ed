"""The key-value store and the barriers, in real processes and without any."""

import logging
import socket
import threading
from contextlib import suppress

import jax
import pytest

from gda.multihost import coordination


def service() -> coordination.Service:
    found = coordination.service()
    assert found is not None
    return found


@pytest.mark.processes(2, devices=4)
def test_processes_put_get_list_and_delete_values() -> None:
    me = jax.process_index()
    service().put(f"test/folder/{me}", b"\0\xff" * me)
    assert service().get("test/folder/1", timeout=50) == b"\0\xff"
    service().barrier("test folder", 50)
    assert service().list("test/folder/") == {"test/folder/0": b"", "test/folder/1": b"\0\xff"}
    service().barrier("test folder", 50)
    if me == 0:
        service().delete("test/folder/")
    service().barrier("test folder", 50)
    assert service().list("test/folder/") == {}
    # A key that is there is kept if asked.
    service().put(f"test/kept/{me}", b"old")
    with pytest.raises(KeyError, match="test/kept"):
        service().put(f"test/kept/{me}", b"new", overwrite=False)
    assert service().get(f"test/kept/{me}", timeout=50) == b"old"
    service().put(f"test/kept/{me}", b"new")
    assert service().get(f"test/kept/{me}", timeout=50) == b"new"
    # A value that is not there yet is waited for.
    with pytest.raises(TimeoutError, match="test/never"):
        service().get("test/never", timeout=0.2)
    timer = threading.Timer(0.3, lambda: service().put(f"test/soon/{me}", b"now"))
    timer.start()
    assert service().get(f"test/soon/{me}", timeout=50) == b"now"
    timer.join()


@pytest.mark.processes(2, devices=4)
def test_a_barrier_gives_up() -> None:
    if jax.process_index() == 0:
        with pytest.raises(TimeoutError, match="test alone"):
            service().barrier("test alone", timeout=0.3)
    service().put(f"test/alone/{jax.process_index()}", b"")
    service().get("test/alone/0", timeout=50)


@pytest.mark.processes(2, devices=4)
def test_a_barrier_for_differing_processes_is_refused() -> None:
    service().barrier(f"test own {jax.process_index()}", 50, [jax.process_index()])
    # The first to come fixes who is meant; whoever means others is told at once.
    me = jax.process_index()
    refusals = (TimeoutError, ValueError)
    with pytest.raises(refusals) if me else suppress(*refusals):
        service().barrier("test differing", 3, [0] if me == 0 else [0, 1])
    service().barrier("test differing is over", 50)


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


def test_a_jax_that_has_moved_the_way_to_choose_an_address_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("jaxlib._jax.make_gloo_tcp_collectives")
    with caplog.at_level(logging.WARNING, "gda"):
        coordination.listen_on("127.0.0.1")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"JAX {jax.__version__} does not let gda choose the address on which CPU collectives "
        f"listen: they use that of this machine's name, {socket.gethostname()}. If the name has "
        "none, add one to /etc/hosts"
    )

"""The only access of gda to private parts of JAX, above all to its coordination service.

The service, a key-value store and barriers with a timeout, runs in process 0 and needs no devices.
If a version of JAX has moved a part, its function logs the loss once.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any

import jax

_LONGEST = 2**31 - 1  # milliseconds, 24 days; the service takes no more

_METHODS = (
    "blocking_key_value_get_bytes",
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_set_bytes",
    "wait_at_barrier",
)


class Service:
    """The client of the coordination service in this process. Every call blocks the thread.

    Any call may raise ``ConnectionError``: process 0, which runs the service, has ended.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> None:
        """Store ``value``, for all to read; raise ``KeyError`` if it must not ``overwrite`` one."""
        with _errors(key):
            self._client.key_value_set_bytes(key, value, overwrite)

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of ``key``, or raise ``TimeoutError`` after ``timeout`` seconds."""
        with _errors(key):
            return self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout))

    def list(self, folder: str) -> dict[str, bytes]:
        """Return the values under ``folder`` by key, without waiting. A folder ends with ``/``."""
        with _errors(folder):
            return dict(self._client.key_value_dir_get_bytes(folder))

    def delete(self, key: str) -> None:
        """Remove a key, or a folder with its content."""
        with _errors(key):
            self._client.key_value_delete(key)

    def barrier(self, name: str, timeout: float, processes: Iterable[int] | None = None) -> None:
        """Wait until all ``processes``, by default every one, wait at this barrier.

        Raise ``TimeoutError`` if some do not come within ``timeout`` seconds, or are dead, and
        ``ValueError`` if others wait here for another set of processes.
        """
        with _errors(name):
            some = None if processes is None else list(processes)
            self._client.wait_at_barrier(name, _milliseconds(timeout), some)


def service() -> Service | None:
    """Return the service, or ``None`` if ``jax.distributed.initialize`` has not started it.

    A forked child has none: its calls would not return, and would count as its parent's.
    """
    try:
        from jax._src import distributed

        client = distributed.global_state.client
    except (ImportError, AttributeError):
        return warn_of_moved_service()
    if client is None or client is _of_parent:
        return None
    if not all(hasattr(client, method) for method in _METHODS):
        return warn_of_moved_service()
    return Service(client)


def coordinator_address() -> str:
    """Return ``host:port`` of the service, by which processes reach process 0; empty without it."""
    try:
        from jax._src import distributed

        return distributed.global_state.coordinator_address or ""
    except (ImportError, AttributeError):
        warn_of_moved_service()
        return ""


_of_parent: Any = None  # the client of the process that forked this one


def _forget_client() -> None:
    global _of_parent
    if (distributed := sys.modules.get("jax._src.distributed")) is not None:
        _of_parent = getattr(getattr(distributed, "global_state", None), "client", None)


os.register_at_fork(after_in_child=_forget_client)


def short_name(value: object) -> str:
    """Return a part of a key for a value with a long repr."""
    return sha256(repr(value).encode()).hexdigest()[:16]


def has_backends() -> bool:
    """Return True if JAX has made its devices; asking JAX's public functions would make them."""
    try:
        from jax._src import xla_bridge

        return xla_bridge.backends_are_initialized()
    except (ImportError, AttributeError):
        return False


def listen_on(address: str) -> None:
    """Let CPU collectives listen on an address, in a process that has not used its devices yet.

    By default gloo listens on that of the machine's name, which others may reach, or none has.
    """
    try:
        from jax._src import distributed, xla_bridge
        from jaxlib._jax import make_gloo_tcp_collectives

        # Public as jax.extend.backend.register_backend_factory, which imports Pallas.
        register = xla_bridge.register_backend_factory
        make_client, state = xla_bridge.make_cpu_client, distributed.global_state
    except (ImportError, AttributeError):
        logging.getLogger("gda").warning(
            "JAX %s does not let gda choose the address on which CPU collectives listen: they use "
            "that of this machine's name, %s. If the name has none, add one to /etc/hosts",
            jax.__version__,
            socket.gethostname(),
        )
        return

    def make_cpu_client() -> Any:
        transport = getattr(jax.config, "jax_cpu_collectives_implementation", None)
        if state.client is None or transport != "gloo":
            return make_client()
        return make_client(
            make_gloo_tcp_collectives(distributed_client=state.client, hostname=address)
        )

    # In place of JAX's own, with the same options.
    register("cpu", make_cpu_client, priority=0, fail_quietly=False)


@cache  # logged once
def warn_of_moved_service() -> None:
    logging.getLogger("gda").warning(
        "gda does not find the coordination service of JAX %s, through which processes agree: "
        "functions that communicate will raise. Use a version of JAX that gda supports",
        jax.__version__,
    )


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(min(seconds * 1000, _LONGEST)))


# The service tells kinds of errors apart by the first word of the message.
_KINDS = {
    "DEADLINE_EXCEEDED": TimeoutError,
    "INTERNAL": TimeoutError,  # a barrier that waits for a dead process
    "ABORTED": TimeoutError,
    "CANCELLED": TimeoutError,
    "INVALID_ARGUMENT": ValueError,
    "ALREADY_EXISTS": KeyError,
    "UNAVAILABLE": ConnectionError,
}


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        kind = _KINDS.get(str(error).partition(":")[0], RuntimeError)
        reason = f"{what}: {error}"
        if kind is ConnectionError:
            reason = (
                "the connection to process 0, which runs the coordination service, is lost: it has "
                f"ended, or its host could not be reached. Look at its output ({reason})"
            )
        raise kind(reason) from None

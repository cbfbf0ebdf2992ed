"""The program of a process of a ``gda.testing.pool.Pool``: join the others, then run commands."""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from gda.launch.children import arguments_of, listen_on_loopback
from gda.testing.channel import Channel

_SHUTDOWN_TIMEOUT = 5


def main(file_descriptor: int) -> None:
    """Join the other processes, then run the commands of the pool until the command to stop."""
    connection = Connection(file_descriptor)
    # The handler of faulthandler cannot open a file itself.
    stacks = open(os.environ.pop("GDA_TESTING_STACKS"), "a")  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = Channel(connection, _run_session)
    code = 1
    try:
        _join()
        channel.answer("returned", b"")
        channel.serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without JAX's exit hooks, which wait for the other processes and may abort.
        os._exit(code)


def _join() -> None:
    """Join the others and make JAX's devices, before any user code runs."""
    listen_on_loopback()
    import jax

    options: dict[str, Any] = {}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        options["shutdown_timeout_seconds"] = _SHUTDOWN_TIMEOUT
    jax.distributed.initialize(**arguments_of(), **options)
    jax.devices()


def _run_session(channel: Channel, plan: Any) -> None:
    from gda.testing.session import run_session  # imports pytest

    run_session(channel, plan)

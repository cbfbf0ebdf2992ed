"""Processes of this machine that stand for many hosts and cannot outlive their parent.

They find each other through JAX's coordination service on 127.0.0.1. ``gda.launch`` starts programs
this way, ``gda.testing`` tests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"

# The argument of jax.distributed.initialize that each variable of an environment gives.
ARGUMENT_OF = {
    "JAX_COORDINATOR_ADDRESS": "coordinator_address",
    "JAX_NUM_PROCESSES": "num_processes",
    "JAX_PROCESS_ID": "process_id",
    "GDA_HEARTBEAT_TIMEOUT_SECONDS": "heartbeat_timeout_seconds",
}

_THREADS_PER_DEVICE = 8

# The guard leads the group of all children. It waits for the end of a pipe that only the parent
# holds open, which comes even if SIGKILL ends the parent, and then kills the group.
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.buffer.read()
os.killpg(0, signal.SIGKILL)
"""


class Children:
    """A group of processes that ends when it is closed, and at the latest with its parent.

    Processes that the children start are in the group too, unless they leave on purpose.
    """

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._processes: list[Any] = []

    def start(self, *command: Any, popen: Any = subprocess.Popen, **options: Any) -> Any:
        """Start a process of the group; the arguments are those of ``popen``."""
        process = popen(*command, process_group=self._guard.pid, **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill the rest of the group and wait for its end. May be called twice."""
        if self._guard.returncode is None:
            # Not reaped yet, so its number, which is that of the group, belongs to no other.
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.communicate()
        for process in self._processes:
            process.send_signal(signal.SIGKILL)  # a fork may have joined the group after its end
            process.wait()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Port:
    """A free port of 127.0.0.1 that the system chose, kept for one service until closed.

    The socket is bound and does not listen. gRPC, the transport of JAX's coordination service,
    binds with SO_REUSEPORT and may share the port; other programs may not.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def environment(
    process: int,
    num_processes: int,
    port: int,
    devices: int,
    *,
    heartbeat_timeout: float,
    collective_timeout: float,
    agreement_timeout: float = 60,
) -> dict[str, str]:
    """Return the environment in which a process finds the others; it keeps flags in XLA_FLAGS.

    The port is that of process 0, and each process has as many virtual CPU devices. A process that
    is silent for ``heartbeat_timeout`` seconds counts as dead. The other timeouts are those of
    collectives and of ``gda.check_processes_agree`` for a late process.
    """
    address = f"{LOOPBACK}:{port}"
    # The threads that XLA would start on a machine with so many cores. Each device that waits in a
    # collective holds one: on 2 cores, 2 devices that run consecutive steps deadlock (JAX 0.8 and
    # 0.10).
    threads = max(_THREADS_PER_DEVICE * devices, os.cpu_count() or 1)
    given = os.environ.get("XLA_FLAGS", "")
    flags = [given, f"--xla_force_host_platform_device_count={devices}"]
    if has_collective_timeout() and "--xla_cpu_collective_timeout_seconds" not in given:
        flags.append(f"--xla_cpu_collective_timeout_seconds={collective_timeout:.0f}")
    return {
        "NPROC": str(threads),
        "GDA_CHECK_AGREEMENT": "1",
        "GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS": f"{agreement_timeout:.0f}",
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(process),
        "GDA_HEARTBEAT_TIMEOUT_SECONDS": f"{heartbeat_timeout:.0f}",
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags).strip(),
    }


def arguments_of() -> dict[str, Any]:
    """Return the arguments of ``jax.distributed.initialize`` that the environment of a process has.

    It omits empty variables. JAX reads JAX_COORDINATOR_BIND_ADDRESS itself.
    """
    arguments: dict[str, Any] = {}
    for variable, argument in ARGUMENT_OF.items():
        if text := os.environ.get(variable):
            try:
                arguments[argument] = text if variable == "JAX_COORDINATOR_ADDRESS" else int(text)
            except ValueError:
                raise ValueError(f"{variable} is {text!r}; it must be an integer") from None
    return arguments


def listen_on_loopback() -> None:
    """Let the CPU collectives of this process listen on 127.0.0.1, once it uses JAX."""
    sys.path.append(str(Path(__file__).with_name("loopback")))


def has_collective_timeout() -> bool:
    """Return True if XLA has an option for the time that a collective on CPU waits."""
    # An unknown flag ends a process. By version, because asking jaxlib means importing JAX.
    major, minor = version("jaxlib").split(".")[:2]
    return (int(major), int(minor)) >= (0, 10)

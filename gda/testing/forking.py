"""Processes that are forked from one that has imported JAX, which takes a second: ``Forked``.

That process, a server, has not made JAX's devices. So each process that it forks has an environment
and devices of its own. It ends with the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pkgutil import resolve_name
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from gda.launch.children import listen_on_loopback

# sys.path comes first, so that a process imports the same gda, and all else, as the caller.
_BOOTSTRAP = """
import sys
number, modules, *sys.path[:] = sys.argv[1:]
from gda.testing.forking import serve
begin = serve(int(number), modules.split())
if begin is not None:
    begin()
"""

# Packages that tests of arrays often use. A server imports those that its parent has imported. Not
# Orbax, which configures logging.
_SLOW = ("equinox", "flax", "hypothesis", "optax", "pytest", "zarr")

# Variables that are read when JAX makes its devices, or later, such as those of object stores. A
# server serves those only whose other variables are the same.
_LATE = re.compile(
    "ALLOW_MULTIPLE_LIBTPU_LOAD|AWS_.*|GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS|"
    "GDA_HEARTBEAT_TIMEOUT_SECONDS|GDA_TESTING_.*|"
    "JAX_COORDINATOR_.*|JAX_NUM_PROCESSES|JAX_PROCESS_ID|NPROC|PYTEST_.*|PYTHONUNBUFFERED|XLA_FLAGS"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GROUP_BYTES = 8
_MOST_FILES = 16


class Forked:
    """A process forked from a server, with the methods of ``subprocess.Popen`` that a pool needs.

    Its program is a function, named as ``"package.module:function"``. The arguments for it are
    pickled, and the last of them are ``pass_fds``, under other numbers. ``env`` has all its
    variables. Processes of another ``server`` have other orders of their sets.
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        process_group: int,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
        cwd: str | os.PathLike[str] | None = None,
        server: object = 0,
    ) -> None:
        self.args = target
        self.returncode: int | None = None
        directory = os.path.abspath(cwd or "")
        ignored = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
        self._status, status = Pipe(duplex=False)
        requested, request = Pipe(duplex=False)
        with status, requested:
            files = [requested.fileno(), status.fileno(), stdin, stdout, stderr, *pass_fds]
            _send(env, server, process_group, files)
        with request:
            request.send((target, arguments, dict(env), directory, sys.path, ignored))

    @cached_property
    def pid(self) -> int:
        """Its number. A server that has just started takes a second to fork."""
        return self._status.recv()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code."""
        code = self.returncode
        if code is None:
            try:
                self.pid  # noqa: B018, the first message
                if not self._status.poll(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                code = self._status.recv()
            except EOFError:  # the server has ended
                code = -signal.SIGKILL
            self.returncode = code
            self._status.close()
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _ForkServer:
    """The end of the connection to a server in the process that started it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._socket, other_end = socket.socketpair()
        modules = " ".join(name for name in _SLOW if name in sys.modules)
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(other_end.fileno()), modules, *sys.path],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**variables, "PYTHONUNBUFFERED": "1"},
            )
        self._owner = os.getpid()

    def send(self, group: int, files: Sequence[int]) -> None:
        socket.send_fds(self._socket, [group.to_bytes(_GROUP_BYTES)], files)

    def close(self) -> None:
        if os.getpid() == self._owner:
            with self._socket, suppress(OSError):  # others may have copies
                self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait()


_servers: dict[tuple[Any, ...], _ForkServer] = {}
_guard = threading.Lock()


def _send(environment: Mapping[str, str], name: object, group: int, files: Sequence[int]) -> None:
    """Send a request to the server for an environment; start it if there is none."""
    variables = {name: each for name, each in environment.items() if not _LATE.fullmatch(name)}
    key = os.getpid(), name, *sorted(variables.items())
    with _guard:
        if key not in _servers:
            _servers[key] = _ForkServer(variables)
        _servers[key].send(group, files)


def end_servers() -> None:
    """End the servers of this process; their CPU time counts as that of its children."""
    for server in _servers.values():
        server.close()
    _servers.clear()


atexit.register(end_servers)


def serve(file_descriptor: int, modules: Sequence[str]) -> Callable[[], None] | None:
    """Import modules, then fork a process for every request.

    Return in each of these, with the function to call there; and at the end, with ``None``.
    """
    for number in _SIGNALS:  # it ends with its connection
        signal.signal(number, signal.SIG_IGN)
    listen_on_loopback()  # before JAX is imported, which looks for the folder then
    gda = import_module("gda")
    for name in gda.__all__:
        getattr(gda, name)
    for name in ("gda.testing.worker", *modules):
        import_module(name)
    gc.collect()
    gc.freeze()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with socket.socket(fileno=file_descriptor) as server, DefaultSelector() as selector:
        selector.register(server, EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _report_end(*key.data)
                    continue
                group, files, _, _ = socket.recv_fds(server, _GROUP_BYTES, _MOST_FILES)
                if not group:
                    return None
                pid = os.fork()
                if not pid:
                    for each in selector.get_map().values():
                        if each.data is not None:
                            os.close(each.fd)
                            each.data[1].close()
                    return lambda: _begin(*files)
                try:
                    os.setpgid(pid, int.from_bytes(group))
                except OSError:  # the group was killed
                    os.kill(pid, signal.SIGKILL)
                status = Connection(os.dup(files[1]), readable=False)
                for each in files:
                    os.close(each)
                with suppress(OSError):
                    status.send(pid)
                selector.register(os.pidfd_open(pid), EVENT_READ, (pid, status))


def _report_end(pid: int, status: Connection) -> None:
    _, code = os.waitpid(pid, 0)
    with status, suppress(OSError):
        status.send(os.waitstatus_to_exitcode(code))


def _begin(requested: int, status: int, *files: int) -> None:
    """Become the process of a request."""
    os.close(status)
    with Connection(requested, writable=False) as connection:
        target, arguments, variables, directory, path, ignored = connection.recv()
    for number in _SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.path[:] = path
    sys.argv[:] = ["-c"]
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()  # else all draw the same
    resolve_name(target)(*arguments, *files[3:])

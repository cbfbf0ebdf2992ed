"""The first code in a forked process with JAX, which becomes a program, a launcher or a pytest."""

import atexit
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from gda.cli import rehearsal_program
from gda.launch import __main__ as launcher
from gda.launch import child, launching
from gda.launch.children import Children
from gda.testing import forking

CLONE_NEWUTS = 0x04000000  # os has it since Python 3.12


def run(*words: str) -> None:
    """Run a program as ``python`` does with these words: a script, or ``-c`` and its text."""
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        return
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


def launch(*words: str) -> NoReturn:
    """Run ``python -m gda.launch`` with these words; it forks its processes."""
    sys.path.insert(0, os.getcwd())
    Children.start = _fork
    try:
        _end(launcher.main(words))
    except _InChild as started:
        report, kind, *sys.argv[:] = started.args
    # It would end the process before the hooks of JAX and of gda, which were imported before.
    child.leave = lambda: None
    try:
        child.run(int(report), kind, sys.argv[0])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _end(int(bool(end.code)) if isinstance(end.code, str) else end.code or 0)
    _end(0)


def rehearse(*arguments: int) -> None:
    """Run the process of ``gda rehearse`` with the environment of other processes, and no cache."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    rehearsal_program.main(*arguments)


def _end(code: int) -> NoReturn:
    """End as Python does, without its garbage: to free what JAX has imported takes 0.2 s."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def launch_impatiently(*words: str) -> NoReturn:
    """Run ``python -m gda.launch`` with 4 s for the exit of processes, and 5 s for their stacks.

    These and the time limit begin once each process has ended or has made the file ``ready`` with
    its number.
    """
    launching._EXIT_SECONDS, launching._SILENT_SECONDS = 4, 5
    watch = launching._watch

    def watch_once_ready(processes: Any, *others: Any) -> Any:
        while not all(
            each.popen.poll() is not None or os.path.exists(f"ready{each.index}")
            for each in processes
        ):
            time.sleep(0.02)
        return watch(processes, *others)

    launching._watch = watch_once_ready
    launch(*words)


def launch_patiently(*words: str) -> NoReturn:
    """Run ``python -m gda.launch`` with a minute for the others to end after a failure."""
    launching._GRACE_SECONDS = 60
    launch(*words)


def launch_without_address(*words: str) -> NoReturn:
    """Run ``python -m gda.launch`` on a machine whose name has no address."""
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS):
        sys.exit("the name of the machine cannot be changed here, not even for one process")
    socket.sethostname("nohost.invalid")
    launch(*words)


def pytest(*words: str) -> NoReturn:
    """Run ``python -m pytest`` with these words; its pools are forked from this process."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    import pytest

    servers: list[Any] = []
    for _ in range(2):  # now, because pytest takes the output
        servers.append(_ForkedServer(servers))
    forking._ForkServer = lambda _: servers.pop()
    _end(pytest.main([*words]))


class _InChild(BaseException):
    """Leaves the code of the launcher in a process that it forked."""


class _Forked:
    """The part of ``subprocess.Popen`` that the launcher and a fork server need."""

    stdout: Any
    stderr: Any

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _fork(children: Any, command: list[str], *, env: Any, **options: Any) -> _Forked:
    assert options.pop("stdin") == subprocess.DEVNULL
    outputs, errors = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.setpgid(pid, children._guard.pid)
        os.close(outputs[1])
        os.close(errors[1])
        process = _Forked(pid)
        process.stdout, process.stderr = (os.fdopen(each[0], "rb", 0) for each in (outputs, errors))
        children._processes.append(process)
        return process
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), outputs[1], errors[1])):
        os.dup2(file, number)
    for file in (*outputs, *errors):
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    Children.close = lambda _: None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    raise _InChild(*command[3:])


class _ForkedServer(forking._ForkServer):
    """A server that is forked from this process, not started."""

    def __init__(self, others: list["_ForkedServer"]) -> None:
        self._socket, other_end = socket.socketpair()
        self._owner = os.getpid()
        if pid := os.fork():
            other_end.close()
            self._process: Any = _Forked(pid)
            return
        for each in (self, *others):  # it ends with the other ends
            each._socket.close()
        begin = forking.serve(other_end.detach(), ())
        if begin is not None:
            begin()
        os._exit(0)

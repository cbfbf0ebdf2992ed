"""Programs in processes, which are forked with JAX imported; the command line in this process."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from costs import COMPILER_FLAGS

from gda import cli
from gda.testing.forking import Forked

# One server forks the pools, which have these, and all others.
USUAL = {"JAX_PLATFORMS": "cpu", "GDA_CHECK_AGREEMENT": "1"}


def is_running(pid: int) -> bool:
    """Return whether any thread of a process runs; in a container an orphan is never reaped."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([process], [], [], 0)[0]
    finally:
        os.close(process)


def wait_for(paths: Iterable[Path]) -> None:
    """Wait until there is a file at each path."""
    limit, paths = time.monotonic() + 120, [*paths]
    while missing := [path for path in paths if not path.exists()]:
        assert time.monotonic() < limit, f"not there: {missing}"
        time.sleep(0.02)


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 120
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < limit, f"still running: {[*filter(is_running, pids)]}"
        time.sleep(0.02)


def python(
    *words: object,
    how: str = "run",
    interrupt_after: str = "",
    interrupt_with: int = signal.SIGINT,
    cwd: Path | None = None,
    timeout: float = 200,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words in a forked process, which need not import JAX.

    Args:
      how: a function of ``forked_program``.
      interrupt_after: text; after it was written the process gets a signal, by default a Ctrl-C.
      more: variables.

    Bytes of its output that are no text become surrogates.
    """
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as out,
        tempfile.TemporaryFile("w+", errors="surrogateescape") as err,
        open(os.devnull) as nothing,
    ):
        process = Forked(
            f"forked_program:{how}",
            *map(str, words),
            process_group=os.getpgrp(),
            env={**os.environ, **USUAL, **more},
            stdin=nothing.fileno(),
            stdout=out.fileno(),
            stderr=err.fileno(),
            cwd=cwd,
        )
        try:
            if interrupt_after:
                limit = time.monotonic() + timeout
                while interrupt_after not in os.pread(out.fileno(), 1 << 16, 0).decode():
                    assert time.monotonic() < limit, f"no {interrupt_after!r}"
                    time.sleep(0.01)
                time.sleep(0.1)  # in which it begins to wait
                process.send_signal(interrupt_with)
            process.wait(timeout)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, process.wait(), out.read(), err.read())


def fresh_python(
    *words: object, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words as a user does: in a new interpreter, with usual devices."""
    ours = ("XLA_FLAGS", "COLUMNS", "FORCE_COLOR")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**clean, **more},
        capture_output=True,
        text=True,
        timeout=600,
    )


def launch(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m gda.launch`` in a forked process, which forks the others.

    A process of a busy machine may be silent for more than the usual 10 s.
    """
    words = ("--heartbeat-timeout", 60, *words)
    return python(*words, **{"how": "launch", "XLA_FLAGS": COMPILER_FLAGS, **options})


def ignoring(command: Sequence[str]) -> list[str]:
    """The command, in which Ctrl-C and the end of the terminal are ignored from the start."""
    return ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", *command]


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def addresses_listened_on() -> list[str]:
    """Return the addresses on which this process listens, as /proc has them."""
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(link))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.append(address.partition(":")[0])
    return found


# The command line.


def exit_code(*args: Any) -> Any:
    """Run a command and return its exit code."""
    try:
        return cli.main([str(arg) for arg in args])
    except SystemExit as end:
        return end.code


class Run:
    """Runs commands in this process; gives the exit code, the output and the message of each."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> tuple[int, str, str]:
        code = exit_code(*args)
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def printed(self, *args: object) -> str:
        """Return what a command prints that succeeds without a message."""
        code, out, err = self(*args)
        assert (code, err) == (0, "")
        return out

    def refusal(self, *args: object) -> str:
        """Return the message of a command that is refused and prints nothing else."""
        code, out, err = self(*args)
        assert (code, out) == (2, "")
        return err

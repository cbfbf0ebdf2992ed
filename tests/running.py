"""Programs in processes: checks that they run, and a start on a machine without a name."""

import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence

import pytest


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


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < limit, f"still running: {[*filter(is_running, pids)]}"
        time.sleep(0.02)


def ignoring(command: Sequence[str]) -> list[str]:
    """The command, in which Ctrl-C and the end of the terminal are ignored from the start."""
    return ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", *command]


def without_address(command: Sequence[str]) -> list[str]:
    """The command, on a machine whose name has no address."""
    inside = ["unshare", "-u", "sh", "-c", 'hostname nohost.invalid && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode:
        pytest.skip("the name of the machine cannot be changed here, not even for one process")
    return [*inside, *command]

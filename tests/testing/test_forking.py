"""Processes that are forked from a server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import USUAL, is_running, wait_until_gone

from gda.testing import forking
from gda.testing.forking import Forked


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with open(os.devnull) as nothing, (tmp_path / "out").open("w") as out:
        yield {
            "process_group": os.getpgrp(),
            "env": {**os.environ, **USUAL},
            "stdin": nothing.fileno(),
            "stdout": out.fileno(),
            "stderr": out.fileno(),
        }


def test_a_process_runs_until_it_is_killed(files: dict[str, Any]) -> None:
    process = Forked("time:sleep", 300, **files)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert is_running(process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # of no process


# A server that imports no JAX.
LIGHT = f"import gda\ngda.__all__ = []{forking._BOOTSTRAP}"


def test_a_killed_server_is_replaced(
    files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_BOOTSTRAP", LIGHT)
    monkeypatch.setattr(forking, "_SLOW", ())
    own = {**files, "server": "a server of this test"}
    process = Forked("time:sleep", 300, **own)
    assert is_running(process.pid)
    (server,) = [each for key, each in forking._servers.items() if own["server"] in key]
    server._process.kill()
    server._process.wait()
    assert process.wait(60) == -signal.SIGKILL
    os.kill(process.pid, signal.SIGKILL)
    assert Forked("time:sleep", 0, **own).wait(60) == 0


def test_a_server_ends_with_a_parent_that_is_killed() -> None:
    program = f"""
import os, time
from gda.testing import forking
forking._BOOTSTRAP = {LIGHT!r}
server = forking._ForkServer(dict(os.environ))
print(server._process.pid, flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until_gone([pid])

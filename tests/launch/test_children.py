"""Processes of this machine that cannot outlive their parent."""

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from gda.launch.children import Children, Port, arguments_of, environment

# Longer than any test, so that nothing here ends by itself and yet nothing stays for ever.
SLEEP = "import time; time.sleep(300)"


def variables(seconds: float = 60) -> dict[str, str]:
    times = {f"{name}_timeout": seconds for name in ("heartbeat", "collective", "agreement")}
    return environment(1, 4, 1234, 2, **times)


def test_close_leaves_the_result_of_a_child_that_is_done() -> None:
    with Children() as children:
        process = children.start([sys.executable, "-c", "raise SystemExit(3)"])
        assert process.wait(60) == 3
        children.close()
    assert process.returncode == 3


def test_a_port_is_not_given_to_others() -> None:
    port = Port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    port.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))


def test_environment_names_the_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDA_CHECK_AGREEMENT", raising=False)
    given = variables()
    assert given["PATH"] == os.environ["PATH"]
    assert given["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
    assert given["JAX_NUM_PROCESSES"] == "4"
    assert given["JAX_PROCESS_ID"] == "1"
    assert given["JAX_PLATFORMS"] == "cpu"
    assert given["GDA_CHECK_AGREEMENT"] == "1"
    assert given["GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS"] == "60"
    assert "--xla_force_host_platform_device_count=2" in given["XLA_FLAGS"].split()
    monkeypatch.setenv("GDA_CHECK_AGREEMENT", "0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=7")
    given = variables()
    assert given["GDA_CHECK_AGREEMENT"] == "0"
    assert given["XLA_FLAGS"].count("collective_timeout") == 1


def test_process_reads_the_environment_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given = variables(10_000_000)
    assert given["GDA_HEARTBEAT_TIMEOUT_SECONDS"] == "10000000"
    assert "e+" not in given["XLA_FLAGS"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert arguments_of() == {
        "coordinator_address": "127.0.0.1:1234",
        "num_processes": 4,
        "process_id": 1,
        "heartbeat_timeout_seconds": 10_000_000,
    }


def test_a_process_that_joined_the_group_too_late_is_killed() -> None:
    def start_late(*command: Any, process_group: int, **options: Any) -> Any:
        assert process_group > 0
        return subprocess.Popen(*command, process_group=0, **options)

    with Children() as children:
        process = children.start([sys.executable, "-c", SLEEP], popen=start_late)
    assert process.returncode == -signal.SIGKILL

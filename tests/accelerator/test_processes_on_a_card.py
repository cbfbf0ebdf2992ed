"""Two processes that share one accelerator: two programs, and the two processes of one program."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import normal, random_bits
from on_accelerator import Measured

import gda
from gda.launch.children import Children, Port, environment

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
# Seconds for a process to begin, and for each of its steps. Twice as long is within the limit of a
# test on an accelerator.
WAIT = 40


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


def shared(on_card: bool, variables: dict[str, str]) -> dict[str, str]:
    """Return variables with which a process takes a part of the accelerator."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    own = {
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": "0.2",
    }
    if on_card:
        variables = {name: value for name, value in variables.items() if name != "JAX_PLATFORMS"}
    else:
        own["JAX_PLATFORMS"] = "cpu"
    return {**variables, **own}


def lines_of(process: subprocess.Popen[Any]) -> Iterator[str]:
    """Yield the lines that a process writes, until it ends or writes none for a long time."""
    output, rest, limit = process.stdout.fileno(), b"", time.monotonic() + WAIT
    while select.select([output], [], [], max(limit - time.monotonic(), 0))[0]:
        new = os.read(output, 1 << 16)
        if not new:
            return
        *lines, rest = (rest + new).split(b"\n")
        for line in lines:
            limit = time.monotonic() + WAIT
            yield line.decode()


def test_two_programs_on_one_card_exchange_a_tree(
    children: Children, one_mesh: Mesh, on_card: bool, tmp_path: Path
) -> None:
    side = 4096 if on_card else 256
    sharding = NamedSharding(one_mesh, P("x"))
    tree = {
        "w": jax.device_put(normal((side, side)), sharding),
        "narrow": jax.device_put(random_bits((64, 64), "bfloat16"), sharding),
    }
    expected = gda.fingerprint(tree)
    with gda.offer(tree) as offer, (tmp_path / "errors").open("w+") as errors:
        process = children.start(
            [sys.executable, str(FOLDER / "pulling_program.py"), offer.address],
            env=shared(on_card, dict(os.environ)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with process:  # which closes its pipes, and so ends it
            told = json.loads(next(lines_of(process), "null"))
            assert told, (tmp_path / "errors").read_text()
            for name in ("the card", "CPU devices"):
                assert told[name]["fingerprints"] == expected
            assert told["platform"] == next(iter(tree["w"].devices())).platform
            assert len(told["CPU devices"]["devices"]) == 4
            back = gda.pull(told["address"], one_mesh, P("x"), plain=True)
            assert gda.fingerprint(back) == expected
        assert process.returncode == 0, (tmp_path / "errors").read_text()


def test_two_processes_of_one_program_on_one_card(
    children: Children, card: Any, on_card: bool, measured: Measured, tmp_path: Path
) -> None:
    timeouts = {"heartbeat_timeout": 30.0, "collective_timeout": 30.0, "agreement_timeout": 30.0}
    with closing(Port()) as port, (tmp_path / "errors").open("w+") as errors:
        processes = [
            children.start(
                [sys.executable, str(FOLDER / "pair_program.py"), str(tmp_path)],
                env=shared(on_card, environment(number, 2, port.number, 1, **timeouts)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for number in range(2)
        ]
        states: list[dict[str, str]] = []
        for number, process in enumerate(processes):
            found = {}
            with process.stdout:
                # Gloo writes lines of its own.
                for line in filter(lambda line: line.startswith("{"), lines_of(process)):
                    told = json.loads(line)
                    found[told["step"]] = told["state"]
                    if told["state"] != "began":
                        measured(f"process {number}: {told['step']}", told["value"] or "done")
            states.append(found)
    for found in states:
        assert found, (tmp_path / "errors").read_text()
        undone = {step: state for step, state in found.items() if state != "done"}
        if on_card:  # NCCL may refuse one GPU for two processes
            undone = {step: undone[step] for step in undone if "communicates" not in step}
        assert len(found) >= 10
        assert not undone

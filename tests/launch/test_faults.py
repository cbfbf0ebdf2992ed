"""Processes that die, hang, fail or come late: the run ends in bounded time and names them.

With JAX's own defaults each of these would take 99 seconds or 5 minutes. Every program gets 60
seconds, several times its need and well below that: a fault that JAX's timeouts notice, not gda's,
fails the test. Benchmarks measure the time.
"""

import os
import signal
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
import running
from jax.sharding import NamedSharding, PartitionSpec

from gda.launch.children import Children, Port, environment
from gda.testing import Pool, ProcessError
from gda.testing.forking import Forked

LIMIT = 60  # seconds

START = """
import os, signal, sys, threading, time
import gda.launch
gda.launch.initialize()
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import gda
me = jax.process_index()
mesh = Mesh(np.array(jax.devices()), ("x",))
n = mesh.size
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def build(read=lambda index: np.ones(1, np.float32)):
    return gda.GlobalArray.from_callback((n,), mesh, P("x"), read)
def total(g):
    return float(jax.jit(lambda x: x.sum())(g.array))
"""


def launch(
    tmp_path: Path, program: str, *options: str, processes: int = 3
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(START + program)
    return running.launch("-n", processes, *options, script, timeout=LIMIT)


KILLED = {
    "before construction": "if me == 1: die()\nbuild()",
    "during construction": "build(lambda index: die() if me == 1 else np.ones(1, np.float32))",
    "during a collective": """
g = build()
total(g)
if me == 1: threading.Timer(0.2, die).start()
while True: total(g)
""",
    "the coordinator": "g = build()\nif me == 0: die()\nwhile True: total(g)",
}


@pytest.mark.parametrize("when", KILLED)
def test_a_process_that_is_killed_is_named(tmp_path: Path, when: str) -> None:
    done = launch(tmp_path, KILLED[when])
    assert done.returncode == 128 + 9, done.stderr
    victim = 0 if when == "the coordinator" else 1
    assert f"gda.launch: process {victim} was killed by SIGKILL" in done.stderr


def test_survivors_without_a_launcher_name_the_missing_process(tmp_path: Path) -> None:
    # As on a cluster, where nobody ends the other processes: a watcher that only starts them.
    program = """
if me == 1: die()
try:
    build()
except gda.LateProcessError as error:
    print(error)
os._exit(3)
"""
    script = tmp_path / "program.py"
    script.write_text(START + program)
    times = {"heartbeat_timeout": 60, "collective_timeout": 30, "agreement_timeout": 3}
    with (
        Children() as children,
        closing(Port()) as port,
        open(os.devnull) as nothing,
        (tmp_path / "output").open("w+") as output,
    ):
        started = [
            children.start(
                "forked_program:run",
                str(script),
                popen=Forked,
                env=environment(index, 2, port.number, 1, **times),
                stdin=nothing.fileno(),
                stdout=output.fileno(),
                stderr=output.fileno(),
            )
            for index in range(2)
        ]
        codes = [process.wait(LIMIT) for process in started]
        said = (tmp_path / "output").read_text()
    assert "process 1 did not come within 3 s" in said
    assert codes == [3, -9]


def test_a_callback_that_raises_in_one_process_ends_all_with_its_message(tmp_path: Path) -> None:
    program = """
def read(index):
    if me == 1: raise OSError("the disk is gone")
    return np.ones(1, np.float32)
build(read)
"""
    done = launch(tmp_path, program)
    assert done.returncode == 1, done.stderr
    assert "OSError: the disk is gone" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    # The others hear of it, and the launcher may see one of those end first.
    named = ("gda.launch: process 1 failed", "process 1 failed: OSError: the disk is gone")
    assert any(text in done.stderr for text in named), done.stderr


@pytest.mark.parametrize(
    ("seconds", "timeout"), [(7, 2), pytest.param(20, 5, marks=pytest.mark.torture)]
)
def test_a_process_that_is_late_is_waited_for_or_named(
    tmp_path: Path, seconds: int, timeout: int
) -> None:
    program = f"""
gda.check_processes_agree(0, name="the start")
began = time.monotonic()
if me == 1: time.sleep({seconds})
try:
    gda.check_processes_agree(0, name="the epoch", timeout={timeout})
except gda.LateProcessError as error:
    print(error, flush=True)
print("sum", total(build()), flush=True)
print("late" if time.monotonic() - began > {seconds} - 2 else "early", flush=True)
"""
    done = launch(tmp_path, program, processes=2)
    assert done.returncode == 0, done.stderr
    said = f"did not come within {timeout} s. process 0 waited at check 'the epoch' (program.py:"
    assert done.stdout.count(f"process 1 {said}") == 2
    assert done.stdout.count("process 1 was last at check 'the start' (program.py:") == 2
    # Then the constructor and the collective wait for it, and all is well.
    assert done.stdout.count("sum 2.0") == done.stdout.count("late\n") == 2


# In a pool of processes, which the pytest plugin has too.


def sum_until_killed(victim: int | None) -> float:
    """Sum over all processes, again and again; the victim dies in the middle of it."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec("x")), lambda _: np.ones(1, np.float32)
    )

    def total(block: jax.Array) -> jax.Array:
        return jax.lax.psum(block.sum(), "x")

    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
    step = jax.jit(jax.shard_map(total, mesh=mesh, **specs))
    result = float(step(ones))
    if jax.process_index() == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while victim is not None:
        step(ones).block_until_ready()
    return result


def test_a_process_of_a_pool_that_is_killed_in_a_collective_is_named() -> None:
    with Pool(2) as pool:
        assert pool.run(sum_until_killed, None) == [2, 2]
        for num_starts, victim in [(2, 1), (3, 0)]:  # another one, then the coordinator
            # Past the limit it would be one that "gave no answer in time".
            with pytest.raises(ProcessError) as caught:
                pool.run(sum_until_killed, victim, timeout=LIMIT)
            assert caught.value.process == victim
            assert str(caught.value).startswith(f"process {victim} of 2 was killed by SIGKILL")
            assert pool.run(sum_until_killed, None) == [2, 2]
            assert pool.num_starts == num_starts

"""Four processes that call an operation, of which one is killed; the others say what they raise.

As a program it forks as kill_program.py does.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import kill_program
from kill_program import say
from test_other_arguments import CASES, World

import gda
from gda.multihost.failure_watch import FailureWatch

VICTIM = 2
OPERATIONS: dict[str, Callable[[World], None]] = {call.__name__: call for call in CASES}
WITH_COLLECTIVES = (
    "restore_together",
    "load_tree",
    "gather",
    "fingerprint",
    "reshard",
    "reshard_tree",
)
MOMENTS = {
    "before its first call": 0,
    "instead of a call": 0,
    "before its part of a collective": 0,
    "while the others compute the array": 1,
    "while the others compute another array": 1,
    "at a random moment": 1,
}


def work_until_one_ends(operation: str, moment: str, path: str, seed: int) -> None:
    """Call an operation again and again; one process is killed, and the others say their errors."""
    call, world, is_victim = OPERATIONS[operation], World(), jax.process_index() == VICTIM
    world.folder = path
    if moment != "before its first call":
        call(world)
    if moment.startswith("while the others compute") and not is_victim:
        g = world.g.array
        # Not of the tree: JAX waits for one such program before it begins another.
        computed = gda.GlobalArray.from_array(jax.jit(same_with_sum, out_shardings=g.sharding)(g))
        if moment.endswith("the array"):
            world.g, world.tree = computed, {**world.tree, "a": computed}
    if is_victim:
        die_at(moment, random.Random(seed).uniform(0, MOMENTS[moment]))
    try:
        while True:
            call(world)
    except Exception as error:
        named = ",".join(map(str, getattr(error, "processes", [])))
        text = f"{type(error).__name__} {error}".replace("\n", " ")
        say("raised", jax.process_index(), time.monotonic(), f"({named})", text)
    signal.pause()  # process 0 has the service of JAX, which ends the others when it is gone


def same_with_sum(x: jax.Array) -> jax.Array:
    return x + 0 * x.sum()


def die_at(moment: str, seconds: float) -> None:
    if moment == "before its part of a collective":
        FailureWatch.begin = die
    elif MOMENTS[moment]:
        threading.Timer(seconds, die).start()
    else:
        die()


def die(*args: Any) -> Any:
    say("killed", VICTIM, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def join(process: int, processes: int, port: int) -> None:
    """Join the other processes as users of JAX do, without the launcher."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // processes}"
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)


if __name__ == "__main__":
    kill_program.main(globals(), join)

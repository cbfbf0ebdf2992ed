"""A training under the launcher, which is killed; each process writes a journal of what it did.

The integers of its state make a chain: each step depends on every bit of the one before. Sums of
integers are exact, so a loss has the same bits on any devices.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kill_program import Arguments, Disk

import gda
from gda.checkpoint import PerProcess, Run

OPTIONS: dict[str, Any] = {
    "every": 4,
    "keep": 2,
    "keep_every": 64,
    "keep_best": (1, "loss"),
    "timeout": 20,
}
FROZEN = np.arange(2**18, dtype=np.uint32)  # as large as arrays whose files are linked


def first() -> Any:
    return np.arange(64, dtype=np.uint32).reshape(8, 8)


def after(w: Any, step: Any) -> Any:
    """Return the integers after one more step; of NumPy or JAX."""
    return w * np.uint32(1664525) + w[::-1] + step


def loss_of(w: Any) -> Any:
    return (w >> 8).sum(dtype=w.dtype)


def state_of(w: np.ndarray[Any, Any], step: int) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def placed(values: np.ndarray[Any, Any]) -> jax.Array:
        rows = NamedSharding(mesh, P("x"))
        return jax.make_array_from_callback(values.shape, rows, lambda index: values[index])

    return {"w": placed(w), "frozen": placed(FROZEN), "n": step, "data": own(step)}


def own(step: int) -> PerProcess:
    return PerProcess({"seen": 8 * step, "process": jax.process_index()})


def merge(values: Sequence[Any], count: int) -> list[Any]:
    assert [each["process"] for each in values] == [*range(len(values))]
    return [{"seen": values[0]["seen"], "process": process} for process in range(count)]


def is_whole(state: Any, step: int) -> bool:
    """Return True if the state is that after so many steps, in this process."""
    w = first()
    for number in range(step):
        w = after(w, np.uint32(number))
    shards = [(state["w"], w), (state["frozen"], FROZEN)]
    return (
        state["n"] == step
        and state["data"].value == own(step).value
        and all(
            np.array_equal(shard.data, whole[shard.index])
            for array, whole in shards
            for shard in array.addressable_shards
        )
    )


def full_once(at: int) -> Disk:
    """Return a disk on which one write fails, because there is no space left."""
    failed: list[bool] = []

    def fails(is_first: bool, name: str, arguments: Arguments) -> None:
        if name == "writev" and not failed:
            failed.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return Disk(fails, at)


def main(folder: str, journal: str, steps: int, back: list[int], full: list[int]) -> int:
    """Train to the last step.

    Args:
      journal: the file to which each process appends its lines.
      back: a step to go back to, and the newest if that is still to be done; or nothing.
      full: a process whose disk has no space for a moment, and the step of it; or nothing.
    """
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    me = jax.process_index()

    def say(*words: object) -> None:
        os.write(file, (" ".join(map(str, (me, *words))) + "\n").encode())

    say("is", os.getpid())
    run = Run(folder, **OPTIONS, on_error="log")
    if back:
        to, newest = back
        say("rolls", run.rollback(to, newest=newest))
    state, step = run.resume(state_of(first(), 0), merge=merge)
    say("resumed", step, is_whole(state, step))
    if full and me == full[0]:
        full_once(full[1]).install()
    train = jax.jit(lambda w, step: (after(w, step), loss_of(after(w, step))))
    before = step
    while step < steps:
        w, loss = train(state["w"], jnp.uint32(step))
        step += 1
        state = {**state, "w": w, "n": step, "data": own(step)}
        say("step", step, int(loss))
        if run.save(step, state, metrics={"loss": loss}) and not full:
            say("durable", before)  # the save before this one
            before = step
        if run.is_ending:
            break
    run.close(step, state)
    say("closed", step)
    jax.distributed.shutdown()
    return 75 if step < steps else 0


if __name__ == "__main__":
    gda.launch.initialize()
    sys.exit(main(**json.loads(Path(sys.argv[1]).read_text())))

"""A long run: what a round of saves, restores and moves takes, it gives back.

As a program, with a folder and a number of rounds, this file prints a line of JSON: the growth from
the end of the warm-up to the end.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from leaks import resident
from running import python
from trials import Trials, tried

import gda

_COMPILED = "/jax/core/compile/backend_compile_duration"
MIB = 2**20
_WARM_UP = 3  # rounds; the memory of threads and buffers settles in these

num_compiled = 0


def count(name: str, *_: Any, **__: Any) -> None:
    global num_compiled
    num_compiled += name == _COMPILED


def used() -> dict[str, int]:
    """Return the handles and the memory of this process, and the programs that it has compiled."""
    gc.collect()
    return {
        "compilations": num_compiled,
        "live arrays": len(jax.live_arrays()),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "RSS": resident(),
    }


def one_round(folder: str, other: Mesh, tree: dict[str, Any]) -> None:
    digest = tree["w"].fingerprint()
    path = f"{folder}/run"
    for save in (gda.checkpoint.save, gda.checkpoint.save_async):
        pending = save(path, tree, overwrite=True)
        if pending is not None:
            pending.result()
        back = gda.checkpoint.restore(path, mesh=other, specs=P("z"))
        assert back["w"].fingerprint() == digest
    gda.checkpoint.verify(path)
    assert not gda.checkpoint.diff(path, tree).of_other_content
    moved = gda.reshard_tree(tree, other, {"w": P(None, "z"), "v": P("z"), "small": P()})
    assert moved["w"].fingerprint() == digest
    np.testing.assert_array_equal(moved["w"].reshard(P("z")).gather(), tree["w"].gather())
    gda.check_replicas_agree(tree)
    str(gda.memory(tree=tree))


def main(folder: str, rounds: int) -> None:
    jax.monitoring.register_event_duration_secs_listener(count)
    devices = np.array(jax.devices())
    mesh, other = Mesh(devices.reshape(4, 2), ("x", "y")), Mesh(devices[::-1], ("z",))
    side = 1024 if rounds > 10 else 256  # memory is an affair of many rounds, handles are not
    data = np.arange(side * side, dtype=np.float32).reshape(side, side)
    tree = {
        name: gda.GlobalArray.from_callback(data.shape, mesh, spec, lambda index: data[index])
        for name, spec in {"w": P("x", "y"), "v": P("x")}.items()
    }
    tree["small"] = gda.GlobalArray.from_callback((8,), mesh, P(), lambda index: data[0, :8])
    for _ in range(_WARM_UP):
        one_round(folder, other, tree)
    before = used()
    for _ in range(rounds):
        one_round(folder, other, tree)
    print(json.dumps({name: after - before[name] for name, after in used().items()}))


@tried("a round of all operations in a long run", sample=2, full=100)
def test_a_long_run_holds_no_more_than_a_short_one(tmp_path: Path, trials: Trials) -> None:
    done = python(__file__, tmp_path, trials.most, timeout=3600)
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout)
    print(growth)
    # The allocator keeps some; a program that is compiled anew takes more in each round.
    assert growth.pop("RSS") < 64 * MIB
    assert growth == dict.fromkeys(growth, 0)
    for _ in range(trials.most):
        trials.count("held")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""A program on simulated hosts: its first argument names the function to call."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, is_right

import gda
import gda.launch
from gda import checkpoint
from gda.multihost import shared_folders

DATA = batch(24, 12)
MIB = 2**20


def mesh_of_all() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def tree() -> dict[str, Any]:
    return {"a": cut(DATA, mesh_of_all(), P("x")), "whole": cut(DATA, mesh_of_all(), P()), "n": 3}


def check(tree: Any) -> None:
    assert is_right(tree["a"], DATA)
    assert is_right(tree["whole"], DATA)
    assert tree.get("n", 3) == 3


def say(*words: object) -> None:
    print(*words, flush=True)


def said(name: str, call: Callable[[], Any]) -> None:
    """Call, and say what it raised after how many seconds."""
    begin, error = time.monotonic(), ""
    try:
        call()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".replace("\n", " ")
    say(f"{name}: {time.monotonic() - begin:.1f} s: {error or 'returned'}")


def call_all(shared: str) -> None:
    """Call all that communicates."""
    mesh, state = mesh_of_all(), tree()
    arrays = {name: state[name] for name in ("a", "whole")}
    gda.check_processes_agree(3, name="a value")
    np.testing.assert_array_equal(state["a"].gather(), DATA)
    gda.check_replicas_agree(state)
    assert gda.fingerprint(arrays) == gda.fingerprint(arrays)
    backwards = Mesh(np.array(jax.devices())[::-1], ("x",))
    check(gda.reshard_tree(arrays, backwards, {"a": P(None, "x"), "whole": P("x")}))
    for number, save in enumerate((checkpoint.save, checkpoint.save_async)):
        path = f"{shared}/saved/{number}"
        if pending := save(path, state):
            pending.result()
        for read_once in (False, True):
            check(checkpoint.restore(path, mesh=mesh, specs=P(), read_once=read_once))
        assert not checkpoint.diff(path, state)
    gda.storage.save_safetensors(f"{shared}/model", arrays)
    model = gda.storage.open_safetensors(f"{shared}/model")
    check(gda.load_tree(model, mesh, P(), read_once=True))
    assert is_right(gda.GlobalArray.from_source(model["a"], mesh, P("x"), read_once=True), DATA)


def call_without_shared_folder(shared: str) -> None:
    """Call all that needs a shared folder with one that each host has for itself."""
    shared_folders.LATE_SECONDS = 0.5
    state = tree()
    if jax.process_index() == 0:
        shutil.copytree(f"{shared}/saved/0", "/dev/shm/of0")
    large = {"w": cut(batch(3 * MIB // 4), mesh_of_all(), P("x"))}
    said("save", lambda: checkpoint.save("/dev/shm/s/a", state))
    said("save_async", lambda: checkpoint.save_async("/dev/shm/s/a", state).result())
    said("save_safetensors", lambda: gda.storage.save_safetensors("/dev/shm/m", {"a": state["a"]}))
    said("Run", lambda: checkpoint.Run("/dev/shm/run", every=1).resume(state))
    said("base", lambda: checkpoint.save(f"{shared}/b", large, base="/dev/shm/of0"))
    said("diff", lambda: checkpoint.diff("/dev/shm/of0", state))
    once = {"mesh": mesh_of_all(), "specs": P(), "read_once": True}
    said("restore", lambda: checkpoint.restore("/dev/shm/of0", **once))
    files = [name for _, _, names in os.walk("/dev/shm/s") for name in names if name != ".lock"]
    assert not [*files, *Path("/dev/shm").glob("m/*")]


def train(shared: str, steps: int = 10**6) -> int:
    """Train some steps, or until a signal; the state says how many steps were done."""
    run = checkpoint.Run(f"{shared}/run", every=5, keep=None)
    state, step = run.resume({"w": cut(DATA, mesh_of_all(), P("x")), "n": 0})
    assert state["n"] == step
    assert is_right(state["w"], DATA + step)
    say("resumed at", step)
    last = step + steps
    while step < last:
        step += 1
        run.save(step, {"w": cut(DATA + step, mesh_of_all(), P("x")), "n": step})
        if step == 12:
            say("training")
        if run.is_ending:
            break
        time.sleep(0.02)
    run.close(step, {"w": cut(DATA + step, mesh_of_all(), P("x")), "n": step})
    say("closed at", step)
    return step


def training(shared: str, steps: str) -> int:
    train(shared, int(steps))
    return 0


# Steps on the disks of the hosts.

LARGE = batch(24, MIB // 16)  # 6 MiB


def state_after(step: int) -> dict[str, Any]:
    """Return the state of a training after a step: arrays of all kinds, with values of its own."""
    mesh = mesh_of_all()
    return {
        "rows": cut(LARGE + step, mesh, P("x")),
        "whole": cut(LARGE[:6] + step, mesh, P()),
        "small": cut(DATA + step, mesh, P("x")),
        "n": step,
        "own": checkpoint.PerProcess([jax.process_index(), step]),
    }


def check_state(state: dict[str, Any], step: int) -> None:
    assert is_right(state["rows"], LARGE + step)
    assert is_right(state["whole"], LARGE[:6] + step)
    assert is_right(state["small"], DATA + step)
    assert state["n"] == step
    assert state["own"].value[1] == step


def local_training(shared: str, steps: str, every: str = "1000", pause: str = "0") -> int:
    """Train with local steps: at every second step there, and every few to the folder of all."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    say("begins")
    run = checkpoint.Run(
        f"{shared}/local",
        every=int(every),
        keep=2,
        local="/dev/shm/run",
        local_every=2,
        timeout=60,
    )
    state, first = run.resume(state_after(0), merge=lambda values, count: [values[0]] * count)
    check_state(state, first)
    say("resumed at", first)
    for step in range(first + 1, first + 1 + int(steps)):
        run.save(step, state_after(step))
        say("after step", step)
        time.sleep(float(pause))
    run.wait()
    return 0


def first(shared: str) -> int:
    call_all(shared)
    call_without_shared_folder(shared)
    train(shared)
    return 75


def second(shared: str) -> int:
    """Go on at the last step, go back, and offer the tree until another program has it."""
    last = train(shared, 1)
    assert checkpoint.Run(f"{shared}/run", every=5, keep=None).rollback(10, newest=last)
    assert train(shared, 1) == 11
    host = os.environ["JAX_COORDINATOR_BIND_ADDRESS"].partition(":")[0]
    with gda.offer(tree(), f"{host}:0", name="weights") as offer:
        Path(f"{shared}/address").write_text(offer.address)
        say("offers")
        while not Path(f"{shared}/pulled").exists():
            time.sleep(0.1)
    return 0


def third(shared: str) -> int:
    """Pull the tree of the other program."""
    address = Path(f"{shared}/address").read_text()
    check(gda.pull(address, mesh_of_all(), P("x")))
    gda.check_processes_agree(name="all have pulled")
    if jax.process_index() == 0:
        Path(f"{shared}/pulled").touch()
    return 0


# Links with faults.


def link_calls(shared: str) -> dict[str, Callable[[], object]]:
    """Return calls that move 3 MiB, or little, over the links."""
    mesh, data = mesh_of_all(), batch(6, MIB // 8)
    rows = cut(data, mesh, P("x"))
    path = f"{shared}/large"
    checkpoint.save(path, {"w": rows})
    run = checkpoint.Run(f"{shared}/run", every=1)
    run.resume({"w": rows})
    steps = iter(range(1, 100))

    def save_step() -> None:
        run.save(next(steps), {"w": rows})
        run.wait()

    def restore() -> None:
        restored = checkpoint.restore(path, mesh=mesh, specs=P(), read_once=True)
        assert is_right(restored["w"], data)

    return {
        "check_processes_agree": lambda: gda.check_processes_agree(1),
        "gather": lambda: np.testing.assert_array_equal(rows.gather(), data),
        "check_replicas_agree": lambda: gda.check_replicas_agree({"w": rows}),
        "reshard": lambda: rows.reshard(mesh, P()).array.block_until_ready(),
        "save": lambda: checkpoint.save(path, {"w": rows}, overwrite=True),
        "restore": restore,
        "Run.save": save_step,
    }


def link(shared: str, *names: str) -> int:
    """Make each of these calls twice: at once, and when the file of its name is there."""
    calls = link_calls(shared)
    for name in names:
        calls[name]()
        calls[name]()  # the first ones compile, and make connections
        said(f"before {name}", calls[name])
        say("ready for", name)
        while not Path(shared, name).exists():
            time.sleep(0.05)
        said(name, calls[name])
    return 0


def offer(shared: str) -> int:
    """Offer 8 MiB for three minutes, or until another program has them."""
    host = os.environ["JAX_COORDINATOR_BIND_ADDRESS"].partition(":")[0]
    with gda.offer({"w": batch(2 * MIB)}, f"{host}:0", name="weights") as offer:
        Path(f"{shared}/new").write_text(offer.address)
        os.rename(f"{shared}/new", f"{shared}/address")
        limit = time.monotonic() + 180
        while not Path(f"{shared}/pulled").exists() and time.monotonic() < limit:
            time.sleep(0.1)
    return 0


def pull(shared: str, timeout: str) -> int:
    """Pull twice, the second time when the file ``pull`` is there."""
    while not Path(f"{shared}/address").exists():
        time.sleep(0.1)
    address = Path(f"{shared}/address").read_text()

    def call() -> None:
        tree = gda.pull(address, mesh_of_all(), P("x"), timeout=float(timeout))
        assert is_right(tree["w"], batch(2 * MIB))

    call()
    said("before pull", call)
    say("ready for", "pull")
    while not Path(shared, "pull").exists():
        time.sleep(0.05)
    said("pull", call)
    Path(f"{shared}/pulled").touch()
    return 0


if __name__ == "__main__":
    gda.launch.initialize()
    code = globals()[sys.argv[1]](*sys.argv[2:])
    jax.distributed.shutdown()
    sys.exit(code)

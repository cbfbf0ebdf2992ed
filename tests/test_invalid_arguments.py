"""Functions that communicate, called with an invalid argument in one process: all hear at once.

The process that fails raises its own error, and the others one that names process and reason.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch
from running import wait_for
from test_other_arguments import CASES as OTHERS
from test_other_arguments import (
    ME,
    World,
    check_replicas_agree,
    diff,
    from_source,
    gather,
    load_tree,
    reshard,
    reshard_tree,
    restore_together,
    save,
    save_async,
    save_safetensors,
)

import gda
from gda import checkpoint
from gda.multihost import meeting

SECONDS = 40  # many times the need, and below the limits of checks


def fingerprint(w: World, **others: Any) -> None:
    gda.fingerprint(**{"tree": w.tree, **others})


def check_processes_agree(w: World, **others: Any) -> None:
    gda.check_processes_agree(**{"tree": w.tree, **others})


def constrain(w: World, **others: Any) -> None:
    gda.constrain(**{"x": w.tree, "spec": P(None, "x"), **others})


def with_sharding_constraint(w: World, **others: Any) -> None:
    given = {"x": w.tree, "shardings": P(None, "x"), "mesh": w.mesh}
    gda.compat.with_sharding_constraint(**given | others)


def global_array_to_host_local_array(w: World, **others: Any) -> None:
    given = {"global_inputs": w.tree, "global_mesh": w.mesh, "pspecs": P(None, "x")}
    gda.compat.global_array_to_host_local_array(**given | others)


def offer(w: World, **others: Any) -> None:
    gda.offer(**{"tree": w.tree, **others})


def update(w: World, is_closed: bool = False) -> None:
    with gda.offer(w.tree) as offer:
        if is_closed:
            offer.close()
        offer.update(w.tree)


def pull(w: World, **others: Any) -> None:
    with gda.offer(w.tree) as offer:
        gda.pull(**{"address": offer.address, **others})


# These communicate to check.


def from_callback(w: World, **others: Any) -> None:
    given = {"global_shape": (8, 2), "mesh": w.mesh, "spec": P("x"), "data_callback": ones}
    gda.GlobalArray.from_callback(**given | others)


def padded_from_callback(w: World, **others: Any) -> None:
    given = {"global_shape": (8, 2), "mesh": w.mesh, "spec": P("x"), "data_callback": ones}
    gda.PaddedArray.from_callback(**given | others)


def from_batched_callback(w: World, **others: Any) -> None:
    given = {"global_shape": (8, 2), "mesh": w.mesh, "spec": P("x")}
    callback = lambda indices: [ones(index) for index in indices]  # noqa: E731
    gda.GlobalArray.from_batched_callback(**given | {"data_callback": callback} | others)


def host_to_global_device_array(w: World, **others: Any) -> None:
    given = {"host_arrays": np.zeros((4, 8)), "mesh": w.mesh}
    gda.compat.host_to_global_device_array(**given | others)


def from_process_local(w: World, **others: Any) -> None:
    given = {"local_data": batch(4, 2), "mesh": w.mesh, "spec": P("x")}
    gda.GlobalArray.from_process_local(**given | others)


def from_device_buffers(w: World, **others: Any) -> None:
    buffers = [jax.device_put(batch(1, 2), device) for device in jax.local_devices()]
    given = {"global_shape": (8, 2), "mesh": w.mesh, "spec": P("x"), "device_buffers": buffers}
    gda.GlobalArray(**given | others)


def ones(index: Any) -> np.ndarray:
    return np.ones((1, 2), np.float32)


WORKERS = {"max_workers": 0}
CASES: dict[Callable[..., None], list[tuple[dict[str, Any], type[Exception]]]] = {
    save: [(WORKERS, ValueError), ({"surplus": 3}, TypeError)],
    save_async: [({"path": 3}, TypeError), ({"retry": 3}, TypeError)],
    restore_together: [
        ({"path": "/not/here"}, FileNotFoundError),
        ({"at": ["nowhere"]}, KeyError),
        ({"specs": P("y")}, ValueError),
    ],
    diff: [({"a": "/not/here"}, FileNotFoundError), ({"a": 3}, TypeError)],
    save_safetensors: [(WORKERS, ValueError), ({"tree": {"a": object()}}, TypeError)],
    load_tree: [
        ({"specs": P("y")}, ValueError),
        ({"dtype": "no"}, TypeError),
        ({"sources": {"a": object()}}, TypeError),
    ],
    from_source: [({"source": object()}, TypeError), ({"mesh": 3}, TypeError)],
    gather: [({"max_device_bytes": 0}, ValueError), ({"process": 9}, ValueError)],
    fingerprint: [({"tree": object()}, TypeError), ({"tree": {"a": object()}}, TypeError)],
    reshard: [
        ({"mesh": 3}, TypeError),
        ({"mesh": 3, "spec": None}, TypeError),
        ({"spec": None}, TypeError),
        ({"spec": P("y")}, ValueError),
        ({"max_device_bytes": 0}, ValueError),
    ],
    reshard_tree: [
        ({"mesh": 3}, TypeError),
        ({"specs": P("y")}, ValueError),
        ({"specs": {"z": P()}}, ValueError),
        ({"tree": {"a": object()}}, TypeError),
        ({"max_device_bytes": 0}, ValueError),
    ],
    check_replicas_agree: [({"tree": object()}, TypeError)],
    check_processes_agree: [({"timeout": 0}, ValueError), ({"timeout": "soon"}, ValueError)],
    constrain: [({"spec": P("y")}, ValueError), ({"spec": {"z": P()}}, ValueError)],
    with_sharding_constraint: [
        ({"shardings": P("y")}, ValueError),
        ({"shardings": {"z": P()}}, ValueError),
    ],
    global_array_to_host_local_array: [
        ({"pspecs": P("y")}, ValueError),
        ({"global_mesh": 3}, TypeError),
    ],
    offer: [
        ({"address": "localhost"}, ValueError),
        ({"token": b"secret"}, TypeError),
    ],
    update: [({"is_closed": True}, ConnectionError)],
    pull: [
        ({"address": "localhost"}, ValueError),
        ({"like": P()}, ValueError),
        ({"mesh": 3}, TypeError),
    ],
    from_callback: [
        (WORKERS, ValueError),
        ({"mesh": 3}, TypeError),
        ({"data_callback": 3}, TypeError),
    ],
    padded_from_callback: [(WORKERS, ValueError), ({"global_shape": 3.5}, TypeError)],
    from_batched_callback: [({"mesh": 3}, TypeError), ({"data_callback": 3}, TypeError)],
    from_process_local: [({"mesh": 3}, TypeError), ({"spec": P("y")}, ValueError)],
    host_to_global_device_array: [
        ({"partition": "full"}, NotImplementedError),
        ({"partition": P("y")}, ValueError),
    ],
    from_device_buffers: [({"device_buffers": []}, ValueError), ({"mesh": 3}, TypeError)],
}
CHECKING = [*CASES][[*CASES].index(from_callback) :]  # they communicate to check


@pytest.mark.processes(2, devices=4)
def test_an_invalid_argument_in_one_process_is_told_to_all_at_once() -> None:
    world = World()
    _ = world.path, world.model
    is_me = jax.process_index() == ME
    with gda.checking_agreement(False):
        for call, cases in CASES.items():
            for given, kind in cases:
                began = time.monotonic()
                with (
                    gda.checking_agreement(call in CHECKING),
                    pytest.raises(kind if is_me else gda.DisagreementError) as caught,
                ):
                    call(world, **given if is_me else {})
                said = f"{call.__name__}({given}): {caught.value}"
                assert time.monotonic() - began < SECONDS, said
                assert is_me or f"process {ME} failed: {caught_kind(kind)}" in said, said
        world.check_nothing_is_lost()


@pytest.mark.processes(2, devices=4)
def test_an_error_of_an_array_with_padding_is_told_to_all() -> None:
    world, is_me = World(), jax.process_index() == ME
    kind, said = (ValueError, None) if is_me else (gda.DisagreementError, f"process {ME} failed")
    padded = gda.PaddedArray.from_source(batch(13, 2), world.mesh, P("x"))
    with gda.checking_agreement(timeout=SECONDS), pytest.raises(kind, match=said):
        gda.constrain({"a": padded}, {"z": P()} if is_me else P())


def caught_kind(kind: type[Exception]) -> str:
    return "CheckpointNotFoundError" if kind is FileNotFoundError else kind.__name__


@pytest.mark.processes(2, devices=4)
def test_an_error_in_a_call_that_one_process_makes_alone_disturbs_no_other_call() -> None:
    world = World()
    if jax.process_index() == ME:
        own = jax.device_put(batch(8, 2), jax.local_devices()[0])
        for failing in (
            lambda: gda.constrain(own, P("y")),
            lambda: jax.jit(lambda x: gda.constrain(x, P("y"), mesh=world.mesh))(world.g.array),
            lambda: gda.fingerprint(jax.random.key),
            lambda: gda.GlobalArray.from_array(own).gather(9),
        ):
            with pytest.raises((TypeError, ValueError)):
                failing()
    world.g.reshard(P(None, "x"))
    world.g.gather()
    gda.check_processes_agree(0, timeout=SECONDS)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("call", [restore_together, diff])
def test_timeout_bounds_the_wait_for_the_others(call: Any, shared_tmp_path: Path) -> None:
    world = World()
    _ = world.path
    over = shared_tmp_path / "over"
    if jax.process_index() != ME:
        with gda.checking_agreement(False), pytest.raises(gda.LateProcessError, match="within 1 s"):
            call(world, timeout=1)
        over.touch()
    wait_for([over])
    gda.check_processes_agree(0, name="in step again", timeout=SECONDS)


# An argument by which a process has nothing to say, where the others wait for it.


def run_save(w: World, **others: Any) -> None:
    run = checkpoint.Run(f"{w.folder}/run", every=1)
    run.resume(w.tree)
    run.save(1, others.get("state", w.tree), now=True)
    run.close()


ONE_LESS: Callable[[World], Any] = lambda w: {"a": w.g}  # noqa: E731
NO_TREES: list[Callable[[World], Any]] = [lambda _: {}, ONE_LESS, lambda w: w.path]
TREE_OF: dict[Callable[..., None], str] = {
    save: "tree",
    save_async: "tree",
    diff: "b",
    save_safetensors: "tree",
    fingerprint: "tree",
    reshard_tree: "tree",
    check_replicas_agree: "tree",
    check_processes_agree: "tree",
    constrain: "x",
    global_array_to_host_local_array: "global_inputs",
    offer: "tree",
    load_tree: "sources",
    run_save: "state",
}
OTHER_CALLS: list[tuple[Callable[..., None], Callable[[World], dict[str, Any]]]] = [
    (diff, lambda w: {"a": w.tree, "b": w.path}),
    (diff, lambda _: {"a": "/not/here", "b": "/not/here"}),
    (load_tree, lambda _: {"sources": {}, "mesh": {}, "specs": None}),
    (load_tree, lambda _: {"read_once": False}),
    (from_source, lambda _: {"read_once": False}),
    (restore_together, lambda _: {"read_once": False}),
    (reshard_tree, lambda _: {"tree": {}, "mesh": {}, "specs": None}),
    (reshard_tree, lambda w: {"tree": {"a": local(w)}, "mesh": local(w).sharding, "specs": None}),
    (fingerprint, lambda w: {"tree": w.sources}),
    (fingerprint, lambda w: {"tree": {"a": local(w)}}),
    (check_replicas_agree, lambda w: {"tree": {"a": local(w)}}),
    (constrain, lambda _: {"spec": None}),
    (pull, lambda w: {"like": {}}),
]
SILENT = [
    *((call, lambda w, n=name, f=f: {n: f(w)}) for call, name in TREE_OF.items() for f in NO_TREES),
    *OTHER_CALLS,
]


def local(w: World) -> jax.Array:
    return jax.device_put(w.sources["a"], jax.local_devices()[0])


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("checks", [False, True], ids=["checks off", "checks on"])
def test_a_process_with_nothing_to_say_lets_no_other_wait(
    checks: bool, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 2.0)
    world, is_me = World(), jax.process_index() == ME
    with gda.checking_agreement(False):
        _ = world.path, world.model
    expected = Exception if is_me else (gda.DisagreementError, gda.LateProcessError)
    wrong: list[str] = []
    for number, (call, others) in enumerate(SILENT):
        given, began, caught = others(world), time.monotonic(), None
        try:
            with gda.checking_agreement(checks):
                call(world, **given if is_me else {})
        except expected as error:
            caught = error
        seconds = time.monotonic() - began
        if seconds > SECONDS or (caught is None and not is_me):
            wrong.append(f"{call.__name__}({given}): {caught} after {seconds:.0f} s")
        over = shared_tmp_path / f"{number}"
        if not is_me:
            over.touch()
        wait_for([over])  # no other call of the process tells the others
        with gda.checking_agreement(False):
            gda.check_processes_agree(0, name="in step", timeout=SECONDS)
    assert not wrong
    with gda.checking_agreement(False):
        world.check_nothing_is_lost()


def test_each_function_of_the_walk_over_other_arguments_is_walked_over_here() -> None:
    assert {call.__name__ for call in OTHERS} <= {call.__name__ for call in CASES}

"""A run that goes on from the steps of an Orbax CheckpointManager, in their folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import PartitionSpec as P
from meshes import cut, mesh_of
from training import DATA

import gda
from gda.checkpoint import Run
from gda.checkpoint.step_folders.folder import RunFolder
from gda.storage.stores.opening import open_store


def state_of(steps: int, mesh: Any, spec: P) -> Any:
    """Return the state after so many steps, with leaves of all kinds."""
    params = {"w": cut(DATA + steps, mesh, spec).array, "b": jnp.full(3, steps, jnp.bfloat16)}
    return {
        "params": params,
        "adam": optax.adam(1e-3).init(params),
        "key": jax.random.key(steps),
        "own": np.arange(3) + steps,
        "n": steps,
    }


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, jax.Array):
            assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
            if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
                ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.fixture(scope="module")
def steps_of_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the steps 9 and 10, and one that is not finished."""
    folder = tmp_path_factory.mktemp("orbax")
    mesh = mesh_of({"x": 4, "y": 2})
    options = ocp.CheckpointManagerOptions(best_fn=lambda each: each["loss"])
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in (9, 10):
            state = ocp.args.StandardSave(state_of(step, mesh, P("x", "y")))
            manager.save(step, args=state, metrics={"loss": 0.5})
    (folder / "11.orbax-checkpoint-tmp-12").mkdir()
    (folder / "11.orbax-checkpoint-tmp-12/default").mkdir()
    (folder / "9.orbax-checkpoint-tmp-10").mkdir()
    (folder / "other_10").mkdir()
    return folder


@pytest.fixture
def folder(steps_of_orbax: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(steps_of_orbax, tmp_path / "run"))


def test_a_run_goes_on_from_the_newest_step_of_orbax(folder: Path) -> None:
    for step in ("9", "10"):  # as options.step_prefix has it
        (folder / step).rename(folder / f"run_{step}")
    theirs, mesh, spec = {*os.listdir(folder)}, mesh_of({"z": 2}), P(None, "z")
    like = state_of(0, mesh, spec)
    with pytest.raises(ValueError, match="has steps up to 10, and this run has not resumed"):
        Run(folder, every=1).save(1, like)
    assert {*os.listdir(folder)} == theirs
    run = Run(folder, every=1, keep=1)
    state, step = run.resume(like)
    assert step == 10
    assert_same(state, state_of(10, mesh, spec))
    assert run.steps() == []
    assert not run.save(10, state, now=True)
    for step in (11, 12):
        run.save(step, state_of(step, mesh, spec))
    run.close()
    assert run.steps() == [12]
    assert {*os.listdir(folder)} == theirs | {"run.json", ".lock", "00000012"}
    state, step = Run(folder, every=1).resume(like)
    assert step == 12
    assert_same(state, state_of(12, mesh, spec))


def test_a_step_of_orbax_is_a_checkpoint_to_start_from(folder: Path, tmp_path: Path) -> None:
    mesh, spec = mesh_of({"z": 2}), P("z")
    like = state_of(0, mesh, spec)
    state, step = Run(tmp_path / "new", every=1).resume(like, start_from=folder / "9")
    assert step == 0
    assert_same(state, state_of(9, mesh, spec))
    tree = gda.checkpoint.restore(folder / "9", at=["params"], mesh=mesh, specs=P())
    np.testing.assert_array_equal(tree["w"], DATA + 9)
    with pytest.raises(ValueError, match="is a checkpoint, and a run is a folder of them"):
        Run(folder / "9", every=1).resume(like)


def test_a_step_of_orbax_that_cannot_be_read_is_an_error_and_stays(folder: Path) -> None:
    (folder / "10/default/_METADATA").write_text("{")
    with pytest.raises(ValueError, match="_METADATA is damaged"):
        Run(folder, every=1).resume(state_of(0, mesh_of({"z": 2}), P()))
    assert (folder / "10").exists()


def test_a_folder_of_the_user_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "data_2024/default").mkdir(parents=True)
    assert RunFolder(tmp_path, 10).newest_of_orbax() == {}
    (tmp_path / "run_7/default").mkdir(parents=True)
    (tmp_path / "run_7/default/_METADATA").touch()  # of an older release
    assert RunFolder(tmp_path, 10).newest_of_orbax() == {7: "run_7"}


def resumed(path: str) -> int:
    """Resume in this process, and return the step; the state is right."""
    mesh, spec = mesh_of({"x": jax.device_count()}), P("x")
    shapes = {"params": {"w": cut(DATA, mesh, spec)}, "n": 0}
    state, step = Run(path, every=1).resume(shapes, partial=True, read_once=True)
    for shard in state["params"]["w"].local_shards:
        np.testing.assert_array_equal(shard.data, (DATA + step)[shard.index])
    return step


def test_processes_go_on_together_from_a_step_of_orbax(folder: Path, process_pool: Any) -> None:
    assert process_pool(2, devices=4).run(resumed, str(folder)) == [10, 10]


def test_a_step_of_orbax_on_an_object_store_is_complete_with_its_mark() -> None:
    place = ts.KvStore.open("memory://").result() / "run/"
    store, folder = open_store(place, 10), RunFolder(place, 10)
    assert folder.newest_of_orbax() == {}
    for name in ("7", "run_8", "9"):
        store.write(f"{name}/_CHECKPOINT_METADATA", b"{}")
    for name in ("7", "run_8"):
        store.write(f"{name}/commit_success.txt", b"")
    assert folder.newest_of_orbax() == {8: "run_8"}

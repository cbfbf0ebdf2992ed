"""A run that goes on from the steps of an Orbax CheckpointManager, in their folder."""

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import nnx
from flax.training.train_state import TrainState
from grain.checkpoint import CheckpointSave
from jax.sharding import PartitionSpec as P
from meshes import cut, mesh_of
from training import DATA

import gda
from gda.checkpoint import PerProcess, Run
from gda.checkpoint.converting import convert
from gda.checkpoint.step_folders.folder import RunFolder
from gda.storage.stores.opening import open_store
from gda.storage.views.lazy import LazyArray


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
    (folder / "11.orbax-checkpoint-tmp-12/default/_METADATA").touch()
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


ADAMW = optax.adamw(0.1)  # a state is of its own optimizer only


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.head = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def nnx_state(seed: int) -> Any:
    model = Net(seed)
    return nnx.state((model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))


def equinox_state(seed: int) -> Any:
    model = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(seed))
    params = eqx.filter(model, eqx.is_array)
    return params, optax.adamw(0.1).init(params)


def chain_state(seed: int) -> Any:
    params = {"a": jnp.full(3, seed, jnp.float32), "b": [jnp.full(2, seed, jnp.bfloat16)]}
    labels = {"a": "slow", "b": ["fast"]}
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"slow": optax.sgd(0.1, momentum=0.9), "fast": optax.adam(0.1)}, labels),
        optax.inject_hyperparams(optax.scale)(step_size=0.5 + seed),
        optax.masked(optax.trace(0.9), {"a": True, "b": False}),
    )
    opt_state = optax.MultiSteps(chain, 2).init(params)
    return {"params": params, "opt_state": opt_state, "ema": {7: jnp.int8(seed)}}


def maxtext_state(seed: int) -> Any:
    layers = {"mlp": {"wi": jnp.full((2, 3), seed, jnp.float32)}}
    params = {"params": {"decoder": {"layers": layers, "layers_0": layers}}}
    state = TrainState.create(apply_fn=None, params=params, tx=ADAMW)
    return state.replace(step=jnp.asarray(seed))


@pytest.mark.parametrize("state_of", [nnx_state, equinox_state, chain_state, maxtext_state])
@pytest.mark.parametrize("is_converted", [False, True])
def test_states_of_other_libraries_move_in(
    state_of: Callable[[int], Any], is_converted: bool, tmp_path: Path
) -> None:
    state, like = state_of(2), state_of(1)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
    if is_converted:
        source = tmp_path / "gda"
        convert(str(tmp_path / "run/5"), str(source))
        assert_same(gda.checkpoint.restore(source, like), state)
    else:
        found, step = Run(tmp_path / "run", every=1).resume(like)
        assert step == 5
        assert_same(found, state)


def test_keys_of_a_part_and_of_specs_are_those_of_the_program(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"layers": {0: {"w": jnp.arange(4.0)}}})
    mesh = mesh_of({"x": 2})
    options: dict[str, Any] = {"mesh": mesh, "specs": {0: {"w": P("x")}}}
    for like in (None, {0: {"w": jnp.zeros(4)}}):
        part = gda.checkpoint.restore(tmp_path / "run", like, at=["layers"], **options)
        (layer,) = part.values()
        assert layer["w"].sharding.spec == P("x")
    weight = gda.checkpoint.restore(tmp_path / "run", at=["layers", 0, "w"])
    np.testing.assert_array_equal(weight, np.arange(4.0))
    loaded = gda.load_tree(gda.storage.open_orbax(tmp_path / "run"), mesh, {"layers": {0: P("x")}})
    np.testing.assert_array_equal(loaded["layers"]["0"]["w"], np.arange(4.0))


def test_a_chunk_that_blocks_share_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"w": jnp.asarray(data)})
    reads: list[Any] = []
    getitem = LazyArray.__getitem__

    def counted(self: LazyArray, index: Any) -> Any:
        reads.append(index)
        return getitem(self, index)

    monkeypatch.setattr(LazyArray, "__getitem__", counted)
    columns = gda.checkpoint.restore(tmp_path / "run", mesh=mesh_of({"x": 8}), specs=P(None, "x"))
    np.testing.assert_array_equal(columns["w"], data)
    assert len(reads) == 1


def test_a_key_of_a_number_and_its_text_stay_two_leaves(tmp_path: Path) -> None:
    state = OrderedDict({0: np.arange(2), "0": np.arange(3)})
    gda.checkpoint.save(tmp_path / "saved", state)
    turned = OrderedDict({"0": np.zeros(3, int), 0: np.zeros(2, int)})
    assert_same(gda.checkpoint.restore(tmp_path / "saved", turned)[0], np.arange(2))
    assert_same(gda.checkpoint.restore(tmp_path / "saved", at=["0"]), np.arange(3))
    with pytest.raises(ValueError, match="like has no 0 "):
        gda.checkpoint.restore(tmp_path / "saved", {0: np.zeros(2, int)})


def test_items_of_json_beside_the_state_move_in(tmp_path: Path) -> None:
    data = grain.MapDataset.range(20).to_iter_dataset()
    batches = iter(data)
    assert [next(batches), next(batches)] == [0, 1]
    with ocp.CheckpointManager(tmp_path) as manager:
        items: Any = {"iter": CheckpointSave(batches), "config": ocp.args.JsonSave({"lr": [0.5]})}
        state = ocp.args.PyTreeSave(maxtext_state(2))
        manager.save(5, args=ocp.args.Composite(items=state, **items))
    assert gda.storage.open_orbax(tmp_path / "5/iter") == [{"next_index": 2}]
    assert gda.storage.open_orbax(tmp_path / "5/config") == {"lr": [0.5]}
    alone, _ = Run(tmp_path, every=1).resume(maxtext_state(1))
    assert_same(alone, maxtext_state(2))
    batches = iter(data)
    like = {"items": maxtext_state(1), "iter": PerProcess(batches.get_state())}
    found, step = Run(tmp_path, every=1).resume(like)
    assert step == 5
    assert_same(found["items"], maxtext_state(2))
    batches.set_state(found["iter"].value)
    assert next(batches) == 2
    texts = {"iter": PerProcess(b""), "config": {"lr": [0.0]}}  # as a DataLoader of grain has it
    found = gda.checkpoint.restore(tmp_path / "5", texts)
    assert found["config"] == {"lr": [0.5]}
    assert json.loads(found["iter"].value) == {"next_index": 2}


def test_items_of_another_number_of_processes_are_merged(tmp_path: Path) -> None:
    for name in ("process_0-of-2.json", "process_1-of-2.json"):
        (tmp_path / "5/iter").mkdir(parents=True, exist_ok=True)
        (tmp_path / "5/iter" / name).write_text(f'{{"next_index": {name[8]}}}')
    with ocp.CheckpointManager(tmp_path / "other") as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(2)})))
    shutil.copytree(tmp_path / "other/5", tmp_path / "5", dirs_exist_ok=True)
    like = {"state": {"w": jnp.zeros(2)}, "iter": PerProcess(None)}
    with pytest.raises(ValueError, match="the values of 2 processes, and this program has 1; pass"):
        Run(tmp_path, every=1).resume(like)

    def merge(values: list[Any], count: int) -> list[Any]:
        return [values] * count

    found, _ = Run(tmp_path, every=1).resume(like, merge=merge)
    assert found["iter"].value == [{"next_index": 0}, {"next_index": 1}]
    (tmp_path / "5/iter/process_0-of-2.json").unlink()
    with pytest.raises(ValueError, match="it has process_1-of-2.json; expected is one file"):
        gda.storage.open_orbax(tmp_path / "5/iter")


def test_files_of_the_user_beside_the_items_are_no_item(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (folder / "10" / name).write_text("{}")
    assert gda.storage.open_orbax(folder / "10")["n"] == 10
    (folder / "10/metrics/notes.json").write_text("{}")
    assert gda.storage.open_orbax(folder / "10/metrics") == {"loss": 0.5}


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


def resumed(path: str) -> tuple[int, Any]:
    """Resume in this process, and return the step and this process's data; the state is right."""
    mesh, spec = mesh_of({"x": jax.device_count()}), P("x")
    shapes = {"params": {"w": cut(DATA, mesh, spec)}, "n": 0}
    like = {"default": shapes, "data": PerProcess(None)}
    found, step = Run(path, every=1).resume(like, partial=True, read_once=True)
    for shard in found["default"]["params"]["w"].local_shards:
        np.testing.assert_array_equal(shard.data, (DATA + step)[shard.index])
    return step, found["data"].value


def test_processes_go_on_together_from_a_step_of_orbax(folder: Path, process_pool: Any) -> None:
    (folder / "10/data").mkdir()
    for process in (0, 1):  # as a grain iterator in two processes
        text = json.dumps({"next_index": process})
        (folder / f"10/data/process_{process}-of-2.json").write_text(text)
    found = process_pool(2, devices=4).run(resumed, str(folder))
    assert found == [(10, {"next_index": 0}), (10, {"next_index": 1})]


def test_metrics_and_items_of_a_run_in_an_object_store_are_read(folder: Path) -> None:
    store: Any = {"driver": "kvstack", "layers": [{"base": f"file://{folder}/"}]}
    for path in (folder / "10", store | {"path": "10/"}):
        like = {"default": state_of(0, mesh_of({"z": 2}), P("z")), "metrics": {"loss": 0.0}}
        found = gda.checkpoint.restore(path, like)
        assert_same(found["default"], state_of(10, mesh_of({"z": 2}), P("z")))
        assert found["metrics"] == {"loss": 0.5}


def test_a_step_of_orbax_on_an_object_store_is_complete_with_its_mark() -> None:
    place = ts.KvStore.open("memory://").result() / "run/"
    store, folder = open_store(place, 10), RunFolder(place, 10)
    assert folder.newest_of_orbax() == {}
    for name in ("7", "run_8", "9"):
        store.write(f"{name}/_CHECKPOINT_METADATA", b"{}")
    for name in ("7", "run_8"):
        store.write(f"{name}/commit_success.txt", b"")
    assert folder.newest_of_orbax() == {8: "run_8"}

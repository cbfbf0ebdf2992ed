"""Tied leaves, the same array at several paths: written once, and tied again."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda
from gda.checkpoint import inspect, restore, save

LARGE = np.arange(2**19, dtype=np.float32).reshape(1024, 512)  # with an array of its own


def tied(array: Any) -> Any:
    return {"embed": {"w": array}, "head": {"w": array}, "norm": jnp.ones(3)}


def nbytes_of_files(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("c*") if each.is_file())


@pytest.mark.parametrize("shape", [(8, 2), LARGE.shape])
def test_a_tied_array_is_written_once_and_tied_again(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mesh = mesh_of({"x": 4, "y": 2})
    sharding = NamedSharding(mesh, P("x"))
    state = tied(jax.device_put(data, sharding))
    save(tmp_path / "tied", state)
    save(tmp_path / "two", tied(data) | {"head": {"w": data + 1}})
    assert nbytes_of_files(tmp_path / "tied") < nbytes_of_files(tmp_path / "two") * 0.7
    assert inspect(tmp_path / "tied").nbytes == data.nbytes + 12
    gda.checkpoint.verify(tmp_path / "tied")
    found = restore(tmp_path / "tied", state)
    assert found["embed"]["w"] is found["head"]["w"]
    np.testing.assert_array_equal(found["head"]["w"], data)
    assert gda.checkpoint.diff(tmp_path / "tied", found).are_equal


@pytest.mark.parametrize("data", [batch(8, 2), LARGE])
def test_leaves_of_like_that_are_not_tied_get_an_array_each(tmp_path: Path, data: Any) -> None:
    save(tmp_path, tied(data))
    mesh = mesh_of({"x": 4, "y": 2})
    like = tied(cut(data, mesh, P("x"))) | {"head": {"w": cut(data, mesh, P(None, "y"))}}
    found = restore(tmp_path, like)
    assert [found[name]["w"].spec for name in ("embed", "head")] == [P("x"), P(None, "y")]
    for name in ("embed", "head"):
        np.testing.assert_array_equal(found[name]["w"], data)
    part = restore(tmp_path, like["head"], at=["head"])
    np.testing.assert_array_equal(part["w"], data)


def test_arrays_that_were_not_tied_stay_apart_in_a_tied_like(tmp_path: Path) -> None:
    save(tmp_path, {"a": np.zeros(4), "b": np.ones(4)})
    found = restore(tmp_path, dict.fromkeys("ab", np.zeros(4)))
    assert (found["a"].tolist(), found["b"].tolist()) == ([0.0] * 4, [1.0] * 4)


def test_without_like_tied_leaves_come_back_as_one_array(tmp_path: Path) -> None:
    save(tmp_path, tied(LARGE))
    found = restore(tmp_path)
    assert found["embed"]["w"] is found["head"]["w"]
    placed = restore(tmp_path, mesh=mesh_of({"x": 4, "y": 2}), specs=P())
    assert placed["embed"]["w"] is placed["head"]["w"]
    lazy = gda.checkpoint.open(tmp_path)
    np.testing.assert_array_equal(lazy["head"]["w"], LARGE)


def test_only_arrays_of_one_kind_are_tied(tmp_path: Path) -> None:
    key, array = jax.random.key(1), jnp.ones((4, 2))
    tree = {"a": key, "b": key, "c": array, "d": gda.GlobalArray.from_array(array), "n": 7, "m": 7}
    save(tmp_path, tree)
    found = restore(tmp_path, tree)
    assert jax.random.key_data(found["a"]).tolist() == jax.random.key_data(found["b"]).tolist()
    assert (type(found["c"]), type(found["d"])) == (type(array), gda.GlobalArray)
    assert (found["n"], found["m"]) == (7, 7)


def test_numbers_are_saved_for_each_leaf_whether_they_are_one_object_or_not(
    tmp_path: Path,
) -> None:
    one = np.float32(2)
    save(tmp_path / "one", {"a": one, "b": one})
    save(tmp_path / "two", {"a": np.float32(2), "b": np.float32(2)})
    assert inspect(tmp_path / "one").leaves == inspect(tmp_path / "two").leaves


def test_a_run_links_a_tied_array_and_goes_on_with_it(tmp_path: Path) -> None:
    state = tied(jnp.asarray(LARGE))
    with gda.checkpoint.Run(tmp_path, every=1) as run:
        run.save(1, state)
        run.save(2, state)
    assert inspect(f"{tmp_path}@2").shared_nbytes >= LARGE.nbytes
    found, step = gda.checkpoint.Run(tmp_path, every=1).resume(state)
    assert (step, found["embed"]["w"] is found["head"]["w"]) == (2, True)


def save_and_restore(path: str, differs: bool) -> tuple[bool, bool]:
    mesh = mesh_of({"x": 8})
    state, other = tied(cut(LARGE, mesh, P("x"))), cut(LARGE, mesh, P("x"))
    if differs and jax.process_index() == 1:
        state["head"]["w"] = other
    try:
        save(path, state)
    except gda.DisagreementError as error:
        return "tied arrays" in str(error), True
    found = restore(path, state, read_once=True)
    shards = found["head"]["w"].local_shards
    same = all(np.array_equal(shard.data, LARGE[shard.index]) for shard in shards)
    return found["embed"]["w"] is found["head"]["w"], same


@pytest.mark.parametrize("differs", [False, True])
def test_processes_tie_the_same_leaves(tmp_path: Path, process_pool: Any, differs: bool) -> None:
    pool = process_pool(2, devices=4)
    assert pool.run(save_and_restore, str(tmp_path / "run"), differs) == [(True, True)] * 2

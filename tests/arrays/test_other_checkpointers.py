"""Trees of GlobalArrays in other checkpointers: Orbax, and JAX's array_serialization.

A container is one leaf under the key ``array`` to them. What a user has to write stands in the
README, under "Other checkpointers".
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, ordered_mesh, plain

import gda

Save = Callable[[Path, Any], object]
Restore = Callable[[Path, Any], Any]


class Head(NamedTuple):
    w: Any
    b: Any


def parameters(mesh: Mesh) -> Any:
    return {
        "layers": [cut(batch(8, 8) + i, mesh, P("x", "y")) for i in range(2)],
        "head": Head(cut(batch(2, 8), mesh, P(None, "y")), cut(batch(8), mesh, P())),
        "half": cut(batch(8, dtype=jnp.bfloat16), mesh, P(("y", "x"))),
    }


def training_state(mesh: Mesh) -> Any:
    """Return parameters and what adam keeps of them; its count is a plain array."""
    params, count = parameters(mesh), jax.device_put(np.int32(7), NamedSharding(mesh, P()))
    adam = optax.ScaleByAdamState(count, mu=parameters(mesh), nu=parameters(mesh))
    return {"params": params, "adam": (adam, optax.EmptyState())}


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(restored: Any, expected: Any) -> None:
    """Same containers, shapes, dtypes and layouts, and every bit."""
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, jax.Array)
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


# The ways to save, and to restore as a tree of arrays or of ShapeDtypeStructs says.


def save_standard(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def restore_standard(path: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def save_by_manager(path: Path, tree: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        # A saved array may be donated at once.
        jax.tree.map(lambda x: x.delete(), tree)
        manager.wait_until_finished()


def restore_by_manager(path: Path, like: Any) -> Any:
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))


@cache
def register_named_tuples() -> None:
    for kind in [Head, optax.ScaleByAdamState, optax.EmptyState]:
        jax.export.register_namedtuple_serialization(kind, serialized_name=f"test.{kind.__name__}")


def save_jax(path: Path, tree: Any) -> None:
    register_named_tuples()
    pytree_serialization.save(tree, path)


def restore_jax(path: Path, like: Any) -> Any:
    return pytree_serialization.load(path, shardings=jax.tree.map(lambda x: x.sharding, like))


ORBAX: dict[str, tuple[Save, Restore]] = {
    "standard": (save_standard, restore_standard),
    "manager": (save_by_manager, restore_by_manager),
}
JAX: dict[str, tuple[Save, Restore]] = {
    "pytree_serialization": (save_jax, restore_jax),
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("standard", AxisType.Auto),
        ("manager", AxisType.Explicit),
        ("pytree_serialization", AxisType.Auto),
    ],
)
def test_a_training_state_comes_back_as_it_was(kind: AxisType, tmp_path: Path, way: str) -> None:
    save, restore = (ORBAX | JAX)[way]
    mesh = mesh_of({"x": 4, "y": 2}, kind)
    save(tmp_path / "saved", training_state(mesh))
    expected = training_state(mesh)
    like = expected if kind is AxisType.Auto else abstract(expected)
    assert_same(restore(tmp_path / "saved", like), expected)


# Containers on one side and plain arrays on the other.


def test_plain_arrays_come_back_as_containers(auto_mesh: Mesh, tmp_path: Path) -> None:
    expected = training_state(auto_mesh)
    save_standard(tmp_path / "saved", plain(expected))
    restored = restore_standard(tmp_path / "saved", abstract(plain(expected)))
    # A container is one leaf, so both trees have the same leaves in the same order.
    wrapped = jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(restored))
    assert_same(wrapped, expected)


def test_containers_come_back_as_plain_arrays_where_there_is_no_gda(
    mesh: Mesh, tmp_path: Path
) -> None:
    save_standard(tmp_path / "saved", parameters(mesh))
    expected = jax.tree.map(lambda leaf: {"array": leaf}, plain(parameters(mesh)))
    assert_same(restore_standard(tmp_path / "saved", abstract(expected)), expected)


def test_without_a_target_orbax_gives_dicts_with_the_key_array(
    auto_mesh: Mesh, tmp_path: Path
) -> None:
    params = parameters(auto_mesh)
    save_standard(tmp_path / "saved", params)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "saved")
    assert_same(
        restored["head"],
        {"w": {"array": params["head"].w.array}, "b": {"array": params["head"].b.array}},
    )


def test_jax_knows_the_structure_without_a_target(auto_mesh: Mesh, tmp_path: Path) -> None:
    register_named_tuples()
    params = parameters(auto_mesh)
    pytree_serialization.save(params, tmp_path / "saved")
    structure = pytree_serialization.load_pytreedef(tmp_path / "saved")
    assert jax.tree.structure(structure) == jax.tree.structure(params)
    assert isinstance(structure["half"], gda.GlobalArray)


# Many processes.


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param("standard", AxisType.Explicit, marks=pytest.mark.torture),
        ("manager", AxisType.Auto),
        pytest.param("pytree_serialization", AxisType.Auto, marks=pytest.mark.torture),
    ],
)
@pytest.mark.processes(2, devices=4)
def test_processes_save_and_restore_together(
    kind: AxisType, way: str, shared_tmp_path: Path
) -> None:
    save, restore = (ORBAX | JAX)[way]
    mesh = mesh_of({"x": 4, "y": 2}, kind)
    tree = {
        "cut": [cut(batch(8, 8), mesh, P("x", "y")), cut(batch(8), mesh, P("y"))],
        "whole": cut(batch(3), mesh, P()),
    }
    save(shared_tmp_path / "saved", tree)
    other = ordered_mesh([0, 4, 1, 5, 2, 6, 3, 7], {"y": 8}, kind)
    like = abstract(
        {
            "cut": [cut(batch(8, 8), other, P(None, "y")), cut(batch(8), other, P())],
            "whole": cut(batch(3), other, P()),
        }
    )
    for target in [abstract(tree), like]:
        restored = restore(shared_tmp_path / "saved", target)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
            lambda x: x.sharding, target
        )
        gathered = [g.gather() for g in [*restored["cut"], restored["whole"]]]
        for ours, expected in zip(gathered, [batch(8, 8), batch(8), batch(3)], strict=True):
            np.testing.assert_array_equal(ours, expected)

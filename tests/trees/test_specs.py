"""Specs for a tree, in every function that takes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import cut, holding, mesh_of

import gda

MESH = mesh_of({"x": 4, "y": 2})
DATA = np.arange(32, dtype=np.float32).reshape(8, 4)


class Layer(NamedTuple):
    w: Any
    b: Any


def load(tree: Any, specs: Any, folder: Path) -> Any:
    return gda.load_tree(tree, MESH, specs)


def restore(tree: Any, specs: Any, folder: Path) -> Any:
    gda.checkpoint.save(folder, tree, overwrite=True)
    return gda.checkpoint.restore(folder, mesh=MESH, specs=specs)


def to_global(tree: Any, specs: Any, folder: Path) -> Any:
    return gda.compat.host_local_array_to_global_array(tree, MESH, specs)


def jitted(tree: Any, specs: Any, folder: Path) -> Any:
    return gda.jit(lambda tree: tree, out_specs=specs)(load(tree, P(), folder))


WAYS = [load, restore, to_global, jitted]


def specs_in(tree: Any) -> list[Any]:
    arrays = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, gda.GlobalArray))
    return [tuple(array.sharding.spec) for array in arrays]


@pytest.mark.parametrize("way", WAYS)
def test_keys_count_and_classes_do_not(way: Callable[..., Any], tmp_path: Path) -> None:
    tree = {"layer": Layer(DATA, [DATA, DATA]), "bias": None}
    for specs in (
        {"layer": {"w": P("x"), "b": P("y")}, "bias": P()},
        {"layer": Layer(P("x"), (P("y"), P("y"))), "bias": None},
        # In containers, as jax.tree.map(spec_of, params) returns them.
        {"layer": {"w": holding(P("x")), "b": P("y")}, "bias": None},
    ):
        found = way(tree, specs, tmp_path)["layer"]
        layer = found if isinstance(found, Layer) else Layer(found["w"], found["b"])
        assert specs_in([layer.w, layer.b]) == [("x",), ("y",), ("y",)]


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_match_is_named_by_path(way: Callable[..., Any], tmp_path: Path) -> None:
    tree = {"a": [DATA, DATA], "b": {"c": DATA}}
    with pytest.raises(ValueError, match="specs|partition") as caught:
        way(tree, {"a": [P()], "b": {"d": P()}}, tmp_path)
    for path in ("a/1; b/c", "b/d"):
        assert path in str(caught.value)
    said = r"specs/b/c is 'x', not a PartitionSpec; .* such as PartitionSpec\('x'\)"
    with pytest.raises(TypeError, match=said):
        way(tree, {"a": P(), "b": {"c": "x"}}, tmp_path)


def test_shardings_and_dtypes_may_be_in_containers() -> None:
    params = {"a": cut(DATA, MESH, P("x")), "b": [cut(DATA, MESH, P("y"))]}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    dtypes = jax.tree.map(lambda x: np.dtype("float16"), params)
    for made in (
        gda.load_tree({"a": DATA, "b": [DATA]}, shardings, dtype=dtypes),
        gda.reshard_tree(params, shardings),
        gda.constrain(params, shardings),
    ):
        assert specs_in(made) == [("x",), ("y",)]
    assert jax.tree.map(lambda x: x.dtype, gda.load_tree(params, MESH, P(), dtype=dtypes)) == dtypes


@pytest.mark.parametrize("way", [load, restore])
def test_a_module_that_can_be_called_is_a_tree_of_specs(way: Any, tmp_path: Path) -> None:
    model = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    specs = eqx.tree_at(lambda layer: (layer.weight, layer.bias), model, (P("x"), P("y")))
    found = way({"weight": model.weight, "bias": model.bias}, specs, tmp_path)
    assert (tuple(found["weight"].spec), tuple(found["bias"].spec)) == (("x",), ("y",))


@pytest.mark.parametrize("way", [load, restore])
def test_a_function_sees_the_same_path(way: Any, tmp_path: Path) -> None:
    paths = []

    def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        assert (leaf.ndim, leaf.size) == (2, DATA.size)
        paths.append((path, leaf.shape, leaf.dtype))
        return P("x") if path == "layers/1" else P()

    tree = {"layers": {1: DATA}, "layer": Layer(DATA, [cut(DATA, MESH, P("y"))])}
    assert specs_in(way(tree, spec_of, tmp_path)) == [(), (), ("x",)]
    at = ["layer/w", "layer/b/0", "layers/1"]
    assert sorted(paths) == sorted((path, DATA.shape, DATA.dtype) for path in at)


@pytest.mark.parametrize("mesh", [NamedSharding(MESH, P("x")), {"a": NamedSharding(MESH, P("x"))}])
def test_shardings_stand_in_place_of_mesh_and_specs(mesh: Any, tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path, {"a": DATA})
    for call in (
        lambda *given: gda.load_tree({"a": DATA}, *given),
        lambda mesh, specs=None: gda.checkpoint.restore(tmp_path, mesh=mesh, specs=specs),
    ):
        assert specs_in(call(mesh)) == [("x",)]
        for given, message in [
            ((mesh, P("x")), "was given with NamedSharding|mesh must be a jax.sharding.Mesh, or"),
            ((MESH,), "a mesh was given without a spec; write P"),
            (({"a": MESH},), r"mesh/a is Mesh.*, not a NamedSharding; mesh is a"),
        ]:
            with pytest.raises(TypeError, match=message):
                call(*given)


def test_children_of_one_name_are_told_apart() -> None:
    class Twins:
        def __init__(self, children: Any) -> None:
            self.children = children

    jax.tree_util.register_pytree_with_keys(
        Twins,
        lambda twins: ([(jax.tree_util.GetAttrKey("same"), c) for c in twins.children], None),
        lambda _, children: Twins(children),
    )
    made = gda.load_tree(Twins([None, DATA, DATA]), MESH, Twins([None, P("x"), P("y")]))
    assert specs_in(made.children[1:]) == [("x",), ("y",)]

"""Descriptions of trees, equal in all processes if and only if the trees are."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from gda.multihost.descriptions import STRUCTURE, describe, stable_text


def line() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def test_the_same_layouts_have_one_description() -> None:
    mesh = line()
    texts = [describe(NamedSharding(mesh, spec)) for spec in (P("x"), P("x", None), P(("x",)))]
    assert texts[0] == texts[1] == texts[2]
    assert describe(NamedSharding(mesh, P(None, "x"))) != texts[0]
    g = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda _: np.zeros(1))
    assert describe({"w": g})["w", "shape"] == "(8,)"
    # An array of one device has no mesh to compare.
    assert {field for _, field in describe(jnp.zeros(3))} == {"shape", "dtype", "structure"}
    devices = np.array(jax.devices()).reshape(4, 2)
    kinds = [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]
    meshes = [Mesh(devices, ("x", "y"), axis_types=kind) for kind in kinds]
    assert describe(meshes[0]) != describe(meshes[1])


# The same in every process.


def structure(tree: Any) -> str:
    return describe(tree)[STRUCTURE]


def test_structures_are_told_apart_by_kind_and_keys() -> None:
    trees = [{"a": 1}, {"b": 1}, [1], (1,), [1, None], [[1]], optax.sgd(0.1).init(1.0), {"a": None}]
    assert len({structure(tree) for tree in trees}) == len(trees)
    assert structure({"b": [1, None], "a": (2,)}) == "{'a': (*), 'b': [*, None]}"


def test_addresses_and_orders_of_hashes_are_no_difference() -> None:
    def function() -> None: ...

    text = structure(jax.tree_util.Partial(function, 3))
    assert "function" in text
    assert "0x" not in text
    assert stable_text(frozenset("abc")) == "{'a', 'b', 'c'}"
    named = types.SimpleNamespace(frozen={"b", "a", "c"})
    assert stable_text(named) == "namespace(frozen={'a', 'b', 'c'})"

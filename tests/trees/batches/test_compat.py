"""The names of ``multihost_utils``, against those."""

import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, ordered_mesh

import gda

to_global = gda.compat.host_local_array_to_global_array
to_local = gda.compat.global_array_to_host_local_array


def test_the_names_are_reachable_without_being_listed() -> None:
    assert "compat" not in gda.__all__
    with pytest.raises(
        AttributeError, match=r"its successor is gda\.compat\.host_local_array_to_global_array$"
    ):
        gda.host_local_array_to_global_array  # pyright: ignore  # noqa: B018


@pytest.mark.parametrize("function", [to_global, to_local])
def test_a_function_can_be_pickled(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function


# Host-local arrays in one process.


class Batch(NamedTuple):
    tokens: Any
    step: Any


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
        assert (mine.device, mine.index) == (other.device, other.index)
        np.testing.assert_array_equal(mine.data, other.data)


def test_every_leaf_gets_its_spec(mesh: Mesh) -> None:
    tree = {"a": batch(8, 4), "b": Batch([batch(16), batch(4, 4)], np.float32(3)), "none": None}
    specs = {"a": P("x", "y"), "b": Batch(P("y"), P()), "none": None}
    globals_ = to_global(tree, mesh, specs)
    assert isinstance(globals_["b"], Batch)
    shapes = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), globals_)
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: type(x) is tuple)
    assert leaves == [(2, 2), (8,), (2, 4), ()]
    jax.tree.map(np.testing.assert_array_equal, to_local(globals_, mesh, specs), tree)
    everywhere = to_global(tree, mesh, P())
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(everywhere))


def test_one_process_as_jax_does(auto_mesh: Mesh) -> None:
    no_gradient = np.zeros((8, 4), jax.dtypes.float0)
    for spec, data in [(P("x", "y"), batch(8, 4)), (P(("y", "x")), no_gradient)]:
        theirs = multihost_utils.host_local_array_to_global_array(data, auto_mesh, spec)
        ours = to_global(data, auto_mesh, spec)
        assert isinstance(ours, gda.GlobalArray)
        assert_same(ours.array, theirs)
        assert to_local(ours, auto_mesh, spec) is ours.array


def test_errors_have_the_path_of_the_leaf(auto_mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="not divisible by 4") as raised:
        to_global({"a": batch(8), "b": [batch(8), batch(6)]}, auto_mesh, P("x"))
    assert raised.value.__notes__[-1] == "gda: at b/1 of the tree"
    with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not ndarray") as e:
        to_local({"a": batch(8)}, auto_mesh, P())
    assert e.value.__notes__ == ["gda: at a of the tree"]
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        to_global(batch(8), None, P())


# Host-local arrays in several. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.


@pytest.mark.processes(2, devices=4)
def test_contiguous_meshes_as_jax_does() -> None:
    for shape, order, kind, spec in [
        ({"a": 2, "b": 4}, ORDERS["contiguous"], AxisType.Auto, P("a")),
        ({"a": 4, "b": 2}, ORDERS["interleaved"], AxisType.Explicit, P("b", "a")),
        ({"a": 4, "b": 2}, [2, 3, 0, 1, 6, 7, 5, 4], AxisType.Auto, P(None, ("a", "b"))),
    ]:
        mesh = ordered_mesh(order, shape, kind)
        data = batch(8, 8) + 100 * jax.process_index()
        local = jax.device_put(data, NamedSharding(mesh.local_mesh, spec))
        theirs = multihost_utils.host_local_array_to_global_array(data, mesh, spec)
        for inputs in (data, jnp.asarray(data), local):
            assert_same(to_global(inputs, mesh, spec).array, theirs)
        back = to_local(theirs, mesh, spec)
        their_back = multihost_utils.global_array_to_host_local_array(theirs, mesh, spec)
        assert_same(back, their_back)
        assert back.sharding == their_back.sharding
        np.testing.assert_array_equal(back, data)


@pytest.mark.processes(2, devices=4)
def test_an_array_that_is_cut_otherwise_is_moved_first() -> None:
    mesh = ordered_mesh(ORDERS["contiguous"], {"a": 2, "b": 4})
    whole = batch(8, 8)
    rows = whole[4 * jax.process_index() :][:4]
    g = to_global(rows, mesh, P("a"))
    np.testing.assert_array_equal(to_local(g, mesh, P("b")), whole)
    # Arrays that are global, or of this process alone, are passed through.
    again = to_global({"g": g, "array": g.array, "local": batch(4)}, mesh, P("b"))
    assert again["g"] is g
    assert isinstance(again["array"], gda.GlobalArray)
    assert again["array"].array is g.array
    assert again["local"].spec == P("b")
    local = jnp.arange(4)
    assert to_local({"a": local}, mesh, P("a"))["a"] is local

"""Trees of host-local arrays to global arrays and back, against ``multihost_utils``.

The examples of its documentation are in ``test_many_processes.py``, in every split of 8 devices.
"""

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

to_global = gda.host_local_array_to_global_array
to_local = gda.global_array_to_host_local_array


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


# One process.


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


@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y"), P(("y", "x")), P(None, "y")])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, jnp.bfloat16])
def test_one_process_as_jax_does(auto_mesh: Mesh, spec: P, dtype: Any) -> None:
    data = batch(8, 4).astype(dtype)
    theirs = multihost_utils.host_local_array_to_global_array(data, auto_mesh, spec)
    ours = to_global(data, auto_mesh, spec)
    assert isinstance(ours, gda.GlobalArray)
    assert_same(ours.array, theirs)
    assert to_local(ours, auto_mesh, spec) is ours.array
    float0 = np.zeros((8, 4), jax.dtypes.float0)
    assert_same(
        to_global(float0, auto_mesh, spec).array,
        multihost_utils.host_local_array_to_global_array(float0, auto_mesh, spec),
    )


def test_a_container_of_this_process_is_placed_as_any_array(auto_mesh: Mesh) -> None:
    g = gda.GlobalArray.from_process_local(batch(8), auto_mesh, P())
    assert to_global(batch(8), auto_mesh, P(), check_replicas=True).is_fully_replicated
    placed = to_global({"a": g}, auto_mesh, P("x"))["a"]
    assert placed.spec == P("x")
    assert isinstance(placed.array, jax.Array)
    np.testing.assert_array_equal(np.asarray(placed), batch(8))


@pytest.mark.parametrize("convert", [to_global, to_local])
def test_specs_that_do_not_match_the_tree(auto_mesh: Mesh, convert: Any) -> None:
    tree = {"a": [jnp.zeros(8), jnp.zeros(8)], "b": jnp.zeros(8)}
    for specs, error, message in [
        (None, ValueError, r"pspecs is None.* write PartitionSpec\(\)"),
        ({"a": [P(), None], "b": P()}, ValueError, r"pspecs\['a'\]\[1\] is None.* write Partit"),
        ({"a": [P()], "b": P()}, ValueError, r"pspecs\['a'\] is a list of 1, and the tree has"),
        ({"a": ("x", "y"), "b": P()}, TypeError, r"pspecs\['a'\]\[0\] is 'x', not a Partition"),
    ]:
        with pytest.raises(error, match=message):
            convert(tree, auto_mesh, specs)
    g = gda.GlobalArray.from_array(jnp.zeros(8))
    with pytest.raises(ValueError, match=r"pspecs is a list of 1, and the tree has a GlobalArray"):
        convert(g, auto_mesh, [P()])


def test_errors_have_the_path_of_the_leaf(auto_mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="not divisible by 4") as raised:
        to_global({"a": batch(8), "b": [batch(8), batch(6)]}, auto_mesh, P("x"))
    assert raised.value.__notes__[-1] == "gda: at ['b'][1] of the tree"
    with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not ndarray") as e:
        to_local({"a": batch(8)}, auto_mesh, P())
    assert e.value.__notes__ == ["gda: at ['a'] of the tree"]
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        to_global(batch(8), None, P())


def test_small_leaves_share_memory_and_no_values(auto_mesh: Mesh) -> None:
    tree = [batch(size * 8) + size for size in range(1, 60)] + [batch(64, 1024), batch(4096)]
    for leaf, built in zip(tree, to_global(tree, auto_mesh, P("x")), strict=True):
        np.testing.assert_array_equal(np.asarray(built), leaf)


# Several processes. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_contiguous_meshes_as_jax_does(kind: AxisType) -> None:
    me = jax.process_index()
    specs = [P(), P("a"), P("b"), P("b", "a"), P(("a", "b")), P(("b", "a")), P(None, ("a", "b"))]
    for shape, order in [
        ({"a": 2, "b": 4}, ORDERS["contiguous"]),
        ({"a": 4, "b": 2}, ORDERS["contiguous"]),
        ({"a": 4, "b": 2}, [0, 4, 1, 5, 2, 6, 3, 7]),
        ({"a": 2, "b": 4}, [7, 6, 5, 4, 3, 2, 1, 0]),
        ({"a": 4, "b": 2}, [2, 3, 0, 1, 6, 7, 5, 4]),
    ]:
        mesh = ordered_mesh(order, shape, kind)
        for spec in specs:
            data = batch(8, 8) + 100 * me
            local = jax.device_put(data, NamedSharding(mesh.local_mesh, spec))
            for inputs in (data, jnp.asarray(data), local):
                ours = to_global(inputs, mesh, spec)
                theirs = multihost_utils.host_local_array_to_global_array(inputs, mesh, spec)
                assert_same(ours.array, theirs)
            back = to_local(ours, mesh, spec)
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
    theirs = multihost_utils.global_array_to_host_local_array(g.array, mesh, P("b"))
    ours = to_local(g, mesh, P("b"))
    assert_same(ours, theirs)
    np.testing.assert_array_equal(ours, whole)
    np.testing.assert_array_equal(to_local(g, mesh, P()), whole)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_rows_stay_with_their_process_in_any_order_of_devices(
    order: list[int], kind: AxisType
) -> None:
    me = jax.process_index()
    data = {"a": batch(8, 4) + 100 * me, "b": batch(4, dtype=np.int32) - me}
    for shape in ({"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}):
        mesh = ordered_mesh(order, shape, kind)
        spec = P(tuple(shape))
        g = to_global(data, mesh, spec)
        local = to_local(g, mesh, spec)
        for name, leaf in data.items():
            np.testing.assert_array_equal(local[name], leaf)
            assert local[name].sharding.device_set == set(jax.local_devices())
            rows = [np.asarray(shard.data) for shard in g[name].local_shards]
            np.testing.assert_array_equal(np.concatenate(rows), leaf)


@pytest.mark.processes(2, devices=4)
def test_the_mesh_of_a_local_array_where_devices_form_no_subcube() -> None:
    # Process 0 is at (0, 0), (0, 2), (2, 0) and (2, 2) of the first two axes.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    mesh = ordered_mesh(order, {"x": 4, "y": 2})
    mesh = Mesh(mesh.devices.reshape(2, 4), ("x", "y"))
    me = jax.process_index()
    local = to_local(to_global(batch(2, 4) + me, mesh, P("x", "y")), mesh, P("x", "y"))
    assert dict(local.sharding.mesh.shape) == {"dim0": 2, "dim1": 2, "replica": 1}
    assert local.sharding.spec == P("dim0", "dim1")
    np.testing.assert_array_equal(local, batch(2, 4) + me)
    local = to_local(to_global(batch(2, 4), mesh, P(None, "y")), mesh, P(None, "y"))
    assert dict(local.sharding.mesh.shape) == {"dim1": 2, "replica": 2}
    np.testing.assert_array_equal(local, batch(2, 4))


@pytest.mark.processes(2, devices=4)
def test_devices_that_hold_a_block_once_more_are_left_out() -> None:
    # Process 0 holds block 0 twice and blocks 1 and 2 once each.
    mesh = ordered_mesh([0, 1, 2, 4, 3, 5, 6, 7], {"x": 4, "y": 2})
    me = jax.process_index()
    data = jnp.asarray(batch(3) if me == 0 else batch(3) + 1)
    g = to_global(data, mesh, P("x"))
    local = to_local(g, mesh, P("x"))
    assert dict(local.sharding.mesh.shape) == {"dim0": 3, "replica": 1}
    np.testing.assert_array_equal(local, data)


@pytest.mark.processes(2, devices=4)
def test_blocks_that_form_no_regular_grid_are_shown() -> None:
    mesh = ordered_mesh([0, 1, 2, 4, 3, 5, 6, 7], {"x": 4, "y": 2})
    with pytest.raises(ValueError, match="do not form a regular grid") as raised:
        to_global({"a": np.zeros((4, 4))}, mesh, P("x", "y"))
    assert "holds the blocks (" in str(raised.value)
    assert raised.value.__notes__ == ["gda: at ['a'] of the tree"]
    whole = batch(4, 2)
    g = gda.GlobalArray.from_callback((4, 2), mesh, P("x", "y"), lambda index: whole[index])
    with pytest.raises(ValueError, match="do not form a regular grid"):
        to_local(g, mesh, P("x", "y"))


@pytest.mark.processes(2, devices=4)
def test_global_arrays_are_passed_through() -> None:
    mesh = ordered_mesh(ORDERS["contiguous"], {"a": 2, "b": 4})
    g = to_global(batch(4), mesh, P("a"))
    again = to_global({"g": g, "array": g.array, "local": batch(4)}, mesh, P("b"))
    assert again["g"] is g
    assert isinstance(again["array"], gda.GlobalArray)
    assert again["array"].array is g.array
    assert again["local"].spec == P("b")
    local = jnp.arange(4)
    assert to_local({"a": local}, mesh, P("a"))["a"] is local


@pytest.mark.processes(2, devices=4)
def test_keys_there_and_back() -> None:
    keys = jax.random.split(jax.random.key(jax.process_index()), 4)
    for order in ORDERS.values():
        mesh = ordered_mesh(order, {"x": 8})
        g = to_global(keys, mesh, P("x"))
        assert (g.shape, g.dtype) == ((8,), keys.dtype)
        local = to_local(g, mesh, P("x"))
        assert local.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(local), jax.random.key_data(keys))


# Blocks that several processes hold.


@pytest.mark.processes(2, devices=4)
def test_replicas_that_differ_are_found() -> None:
    mesh = ordered_mesh(ORDERS["contiguous"], {"host": 2, "dev": 4})
    me = jax.process_index()
    good = {"rows": batch(4) + me, "table": batch(8), "key": jax.random.key(0), "step": 3}
    specs = {"rows": P("host"), "table": P("dev"), "key": P(), "step": P()}
    to_global(good, mesh, specs, check_replicas=True)
    table = batch(8)
    table[5] += me
    bad = {**good, "table": table, "key": jax.random.key(me)}
    to_global(bad, mesh, specs)
    with pytest.raises(gda.DisagreementError) as raised:
        to_global(bad, mesh, specs, check_replicas=True)
    text = str(raised.value)
    assert "at ['table'], block [4:6]: process 0, and other bytes in process 1" in text
    assert "at ['key'], block [()]" in text
    assert "['rows']" not in text
    assert "['step']" not in text
    # All processes are in step afterwards.
    to_global(good, mesh, specs, check_replicas=True)


@pytest.mark.processes(2, devices=4)
def test_a_process_that_fails_does_not_keep_the_others_waiting() -> None:
    mesh = ordered_mesh(ORDERS["contiguous"], {"host": 2, "dev": 4})
    inputs = np.array(["no numbers"] * 4) if jax.process_index() else batch(4)
    expected = TypeError if jax.process_index() else gda.DisagreementError
    for is_on in (True, False):
        with (
            gda.checking_agreement(is_on, timeout=20),
            pytest.raises(expected, match="which JAX does not have"),
        ):
            to_global(inputs, mesh, P(), check_replicas=True)
    gda.check_processes_agree(0, name="still in step", timeout=20)


@pytest.mark.processes(4, devices=2)
def test_the_minority_is_named_first_and_only_some_blocks() -> None:
    mesh, me = ordered_mesh(ORDERS["contiguous"], {"host": 4, "dev": 2}), jax.process_index()
    data = batch(4)
    data[3] += me == 2
    with pytest.raises(gda.DisagreementError) as raised:
        to_global(data, mesh, P("dev"), check_replicas=True)
    assert (
        "): blocks that several processes hold differ: block [2:4]:"
        " process 2, and other bytes in processes 0, 1, 3. Give every process the same data there"
    ) in str(raised.value)
    with pytest.raises(
        gda.DisagreementError, match=r"differ: at \[0\], .*; and 12 more\. G"
    ) as raised:
        to_global([batch(2) + me] * 10, mesh, P("dev"), check_replicas=True)
    assert str(raised.value).count("block [") == 8
    # An array that is global already is not compared.
    other = to_global(batch(4) + me, mesh, P("dev"))
    to_global({"passed": other, "a": batch(4)}, mesh, P("dev"), check_replicas=True)

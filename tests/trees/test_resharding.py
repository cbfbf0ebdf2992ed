"""Trees go between meshes whole, with the values of NumPy, in as few rounds as one array."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, ordered_mesh

import gda
from gda.arrays.transport import carrying

MODEL = {
    "table": batch(50, 4),
    "layers": [{"b": batch(8).astype(ml_dtypes.bfloat16)}],
    "mask": batch(24) % 3 == 0,
    "step": np.array(7, np.int32),
}


def padded(tree: Any, mesh: Mesh, specs: Any) -> Any:
    return gda.load_tree(tree, mesh, specs, pad=True)


def rows(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Shard the first dimension."""
    return P("x") if leaf.ndim else P()


def check_equal(tree: Any, expected: Any = MODEL) -> None:
    """Check that the shards of this process have the bits of NumPy's arrays."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, gda.PaddedArray))
    for leaf, data in zip(leaves, jax.tree.leaves(expected), strict=True):
        g = leaf if hasattr(leaf, "local_shards") else gda.GlobalArray.from_array(leaf)
        assert (g.shape, g.dtype) == (data.shape, data.dtype)
        for shard in g.local_shards:
            assert np.asarray(shard.data).tobytes() == data[shard.index].tobytes()


def specs_of(tree: Any) -> list[Any]:
    return [leaf.sharding.spec for leaf in jax.tree.leaves(tree)]


# One process.


def test_specs_are_one_or_a_tree_or_a_function(mesh: Mesh) -> None:
    data = {"w": batch(8, 4), "b": batch(8)}
    tree = padded(data, mesh, P("x"))
    fewer = ordered_mesh([5, 2], {"z": 2})
    named = {"w": P(None, "z"), "b": P()}
    for specs, expected in [
        (P("z"), [P("z"), P("z")]),
        (named, [P(), P(None, "z")]),
        (lambda path, leaf: named[path] if leaf.shape else P(), [P(), P(None, "z")]),
    ]:
        moved = gda.reshard_tree(tree, fewer, specs)
        assert specs_of(moved) == expected
        assert all(leaf.mesh == fewer for leaf in moved.values())
        check_equal(moved, data)
    shardings = {"w": NamedSharding(fewer, P("z")), "b": NamedSharding(mesh, P("y"))}
    moved = gda.reshard_tree(tree, shardings)
    assert {name: leaf.sharding for name, leaf in moved.items()} == shardings
    check_equal(moved, data)


def test_every_leaf_keeps_its_kind(mesh: Mesh) -> None:
    g = cut(batch(8, 2), mesh, P("x"))
    tree = {
        "global": g,
        "jax": g.array,
        "local": jnp.asarray(3),
        "none": None,
        "padded": gda.PaddedArray.from_source(batch(7), mesh, P("x")),
    }
    moved = gda.reshard_tree(tree, ordered_mesh([1, 2, 3, 4], {"z": 4}), P())
    kinds = {name: type(leaf) for name, leaf in moved.items()}
    assert kinds == {name: type(leaf) for name, leaf in tree.items()}
    check_equal(moved, {"a": batch(8, 2), "b": batch(8, 2), "c": np.int32(3), "d": batch(7)})
    assert gda.reshard_tree({}, mesh, P()) == {}
    keys = jax.random.split(jax.random.key(1), 8)
    moved = gda.reshard_tree({"keys": keys, "w": g}, ordered_mesh([3, 0], {"z": 2}), P("z"))
    assert np.array_equal(jax.random.key_data(moved["keys"]), jax.random.key_data(keys))
    assert specs_of(moved) == [P("z"), P("z")]


def test_an_error_names_the_path_and_nothing_has_moved(mesh: Mesh) -> None:
    tree = {"even": cut(batch(8), mesh, P("x")), "odd": cut(batch(4), mesh, P("x"))}
    for bad, error, text in [
        (tree, ValueError, "4 is not divisible by 8"),
        ({**tree, "odd": np.zeros(8)}, TypeError, "ndarray"),
        ({**tree, "odd": jax.ShapeDtypeStruct((8,), np.float32)}, TypeError, "no mesh and spec"),
    ]:
        with pytest.raises(error, match=text) as caught:
            gda.reshard_tree(bad, ordered_mesh(range(8), {"z": 8}), P("z"), donate=True)
        assert "at odd of the tree" in caught.value.__notes__[-1]
    with pytest.raises(ValueError, match=r"specs has nothing for odd"):
        gda.reshard_tree(tree, mesh, {"even": P()}, donate=True)
    with pytest.raises(ValueError, match="max_device_bytes must be 1 or more, not 0"):
        gda.reshard_tree(tree, mesh, P(), max_device_bytes=0, donate=True)
    check_equal(tree, {"even": batch(8), "odd": batch(4)})


def test_donated_arrays_are_deleted(mesh: Mesh) -> None:
    data = {"w": batch(9, 8), "even": batch(8), "odd": batch(7)}
    tree = padded(data, mesh, {"w": P(None, "x"), "even": P("x"), "odd": P("x")})
    # A mesh that does not divide makes padded arrays if asked.
    new = ordered_mesh([6, 1, 2], {"z": 3})
    moved = gda.reshard_tree(tree, new, P("z"), pad=True, max_device_bytes=1, donate=True)
    assert all(leaf.is_deleted() for leaf in tree.values())
    assert (type(moved["w"]), type(moved["even"])) == (gda.GlobalArray, gda.PaddedArray)
    assert moved["even"].padded_shape == (9,)
    check_equal(moved, data)


# Several processes.


@pytest.mark.processes(2, devices=4)
def test_a_model_goes_from_eight_devices_to_six_and_back() -> None:
    eight, six = ordered_mesh(range(8), {"x": 8}), ordered_mesh([7, 0, 2, 1, 5, 4], {"x": 6})
    model = padded(MODEL, eight, rows)
    # A shape that 8 divides and 6 does not is a GlobalArray until it leaves.
    model = jax.tree.map(
        lambda g: gda.PaddedArray(g.array, g.shape) if g.ndim and g.shape[0] == 8 else g,
        model,
        is_leaf=lambda node: isinstance(node, gda.GlobalArray | gda.PaddedArray),
    )
    moved = gda.reshard_tree(model, six, rows)
    assert jax.tree.structure(moved) == jax.tree.structure(model)
    assert moved["layers"][0]["b"].padded_shape == (12,)
    assert len(moved["table"].local_shards) == 3
    check_equal(moved)
    back = gda.reshard_tree(moved, eight, rows, max_device_bytes=256, donate=True)
    check_equal(back)
    assert back["table"].fingerprint() == gda.fingerprint(MODEL["table"])


@pytest.mark.processes(4, devices=2)
def test_a_process_without_the_arrays_gives_their_layouts() -> None:
    trainers, sampler = ordered_mesh([3, 0, 1, 2], {"x": 4}), ordered_mesh([5, 4], {"z": 2})
    if jax.process_index() == 3:
        return
    data = {name: MODEL[name] for name in ("mask", "step")}
    tree = padded(data, trainers, rows)
    if jax.process_index() == 2:
        tree = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            {name: leaf.array for name, leaf in tree.items()},
        )
    moved = gda.reshard_tree(tree, sampler, P())
    kind = jax.Array if jax.process_index() == 2 else gda.GlobalArray
    assert all(isinstance(leaf, kind) for leaf in moved.values())
    check_equal(moved, data)


@pytest.mark.processes(2, devices=4)
def test_a_training_state_moves_with_the_arrays_that_each_process_made() -> None:
    mesh, key = ordered_mesh(range(8), {"x": 8}), jax.random.key(3)
    data = {"w": batch(8, 4), "odd": batch(7)}
    # To some devices of both processes, and to some of one.
    for donate, order in [(False, [6, 0, 2]), (True, [5, 4])]:
        params = {"w": cut(data["w"], mesh, P("x")).array, "odd": jnp.asarray(data["odd"])}
        state = optax.adam(1e-3).init(params)
        tree = {"params": params, "adam": state, "key": jax.random.clone(key), "step": 3}
        new = ordered_mesh(order, {"x": len(order)})
        moved = gda.reshard_tree(tree, new, rows, pad=True, donate=donate)
        assert moved["step"] == 3
        check_equal(moved["params"], data)
        check_equal(moved["adam"][0].mu, jax.tree.map(np.zeros_like, data))
        check_equal(moved["adam"][0].count, np.int32(0))
        for scalar in (moved["key"], moved["adam"][0].count):
            assert scalar.sharding == NamedSharding(new, P())
        for shard in moved["key"].addressable_shards:
            assert np.array_equal(*map(jax.random.key_data, (shard.data, key)))
        arrays = [*jax.tree.leaves(params), *jax.tree.leaves(state), tree["key"]]
        assert all(array.is_deleted() is donate for array in arrays)
    # An array that one process made moves to another.
    w: Any = jax.ShapeDtypeStruct((8,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    if jax.process_index() == 0:
        w = jnp.asarray(batch(8))
    check_equal(gda.reshard_tree({"w": w}, ordered_mesh([6, 4], {"z": 2}), P("z")), {"w": batch(8)})


@pytest.mark.processes(4, devices=2)
def test_arrays_that_processes_made_must_be_equal_and_uncommitted() -> None:
    mesh, me = ordered_mesh(range(8), {"x": 8}), jax.process_index()
    made = {"w": jnp.ones(8), "n": jnp.asarray(me // 3)}
    with pytest.raises(gda.DisagreementError, match="process 3: value of n .*, processes 0-2: "):
        gda.reshard_tree(made, mesh, rows)
    check_equal(gda.reshard_tree({"w": made["w"]}, mesh, rows), {"w": np.ones(8, np.float32)})
    committed = {"w": jax.device_put(made["w"], jax.local_devices()[0])}
    with pytest.raises(gda.DisagreementError):
        gda.reshard_tree(committed, mesh, P("x"))
    placed = gda.load_tree(committed, mesh, P("x"), plain=True)
    check_equal(gda.reshard_tree(placed, mesh, P()), {"w": np.ones(8, np.float32)})


@pytest.mark.processes(2, devices=4)
def test_many_small_arrays_share_the_rounds_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[Any] = []
    sending = carrying._Wave._sending

    def counted(*arguments: Any) -> Any:
        rounds.append(arguments)
        return sending(*arguments)

    monkeypatch.setattr(carrying._Wave, "_sending", counted)
    before, after = ordered_mesh(range(8), {"x": 8}), ordered_mesh([7, 0, 3, 1, 5, 2], {"y": 6})
    data = {f"layer{number}": batch(10, 9) + number for number in range(4)}

    def rounds_for(tree: dict[str, np.ndarray]) -> int:
        rounds.clear()
        check_equal(gda.reshard_tree(padded(tree, before, P("x")), after, P(None, "y")), tree)
        return len(rounds)

    assert 0 < rounds_for({"layer0": data["layer0"]}) == rounds_for(data)


def test_a_sharding_comes_back_as_it_was_asked_for(mesh: Mesh) -> None:
    asked = NamedSharding(mesh, P("x", None))
    for before in (P("x", None), P("x"), P("y")):
        x = jax.device_put(batch(8, 4), NamedSharding(mesh, before))
        moved = gda.reshard_tree({"x": x}, asked)["x"]
        assert moved.sharding == asked
        assert tuple(moved.sharding.spec) == ("x", None)
        assert (moved is x) == (before == asked.spec)
    few = ordered_mesh([5, 2], {"z": 2}, mesh.axis_types[0])
    assert tuple(gda.reshard_tree([x], few, P("z", None))[0].sharding.spec) == ("z", None)


@pytest.mark.processes(2, devices=4)
def test_paths_with_the_same_text_are_compared_apart() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    rows = 16 if jax.process_index() else 8
    make, sharding = (
        jax.make_array_from_callback,
        NamedSharding(mesh, P("x")),
    )  # which check nothing
    x, y = (make((n,), sharding, batch(n).__getitem__) for n in (rows, 8))
    tree = {"a/b": x, "a": {"b": y}, "": y}
    with pytest.raises(gda.DisagreementError, match=r"'a/b'.*\(16,\)"):
        gda.reshard_tree(tree, mesh, P())


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("donate", [False, True])
def test_array_within_one_process_moves_beside_those_of_all(donate: bool) -> None:
    everywhere, there = ordered_mesh(range(8), {"x": 8}), ordered_mesh(range(4, 8), {"x": 4})
    own = Mesh(np.array(jax.local_devices()), ("x",))
    data = {"a": batch(8, 2), "b": batch(4, 8), "c": batch(4, 4)}
    for target in (there, everywhere):
        tree = {"a": cut(data["a"], everywhere, P("x")), "b": cut(data["b"], there, P("x"))}
        meshes = dict.fromkeys(tree, NamedSharding(target, P(None, "x")))
        if target is there:  # each process has its own
            tree["c"] = cut(data["c"], own, P())
            meshes["c"] = NamedSharding(own, P("x"))
        meshes["a"] = NamedSharding(target, P("x"))
        digests = gda.fingerprint(tree)
        assert digests["b"] == gda.fingerprint(data["b"])  # in the process without it, too
        moved = gda.reshard_tree(tree, meshes, donate=donate)
        check_equal(moved, {name: data[name] for name in sorted(moved)})
        if target is everywhere:
            assert gda.fingerprint(moved) == digests
        assert moved["b"].sharding.is_equivalent_to(meshes["b"], 2)

"""Trees with arrays that the mesh does not divide: every function takes them, or says why not."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, mesh_of, ordered_mesh

import gda
from gda import PaddedArray

DATA = {"even": batch(8, 2), "odd": batch(5, 3) + 100}
SPECS = [P(("y", "x")), P(None, "x")]


def loaded(mesh: Mesh, spec: P = P("x")) -> dict[str, Any]:
    return gda.load_tree(DATA, mesh, spec, pad=True)


def poisoned(data: np.ndarray, mesh: Mesh, spec: P) -> PaddedArray:
    return PaddedArray.from_callback(
        data.shape, mesh, spec, lambda index: data[index], dtype=data.dtype, fill=7e7
    )


def check_equal(tree: Any, expected: Any = DATA) -> None:
    jax.tree.map(np.testing.assert_array_equal, gda.to_numpy(tree), expected)


# Loading.


def test_only_the_arrays_that_the_mesh_does_not_divide_are_padded(mesh: Mesh) -> None:
    tree = loaded(mesh)
    assert {name: type(array) for name, array in tree.items()} == {
        "even": gda.GlobalArray,
        "odd": PaddedArray,
    }
    check_equal(tree)
    assert gda.to_numpy(tree)["odd"].shape == (5, 3)
    assert gda.fingerprint(tree["odd"]) == gda.fingerprint(DATA["odd"])
    gda.check_processes_agree(tree)
    jax.block_until_ready(tree)
    assert not np.asarray(tree["odd"].array)[5:].any()
    check_equal(gda.load_tree(DATA, NamedSharding(mesh, P("y")), pad=True))
    with pytest.raises(ValueError, match="5 is not divisible by 4") as caught:
        gda.load_tree(DATA, mesh, P("x"))
    assert "at odd of the tree" in caught.value.__notes__[-1]


# Other functions.


def test_into_jit_and_out_of_it(mesh: Mesh) -> None:
    def double(tree: Any) -> Any:
        assert isinstance(tree["odd"], PaddedArray)
        assert isinstance(tree["even"], jax.Array)
        return jax.tree.map(lambda x: x * 2, tree), tree["odd"].filled(0).sum()

    tree = loaded(mesh)
    for out_specs in (None, ({"even": P("y"), "odd": P("x")}, P())):
        f = gda.jit(double, in_specs=(P("x"),), out_specs=out_specs, mesh=out_specs and mesh)
        doubled, total = f(tree)
        assert {type(array) for array in doubled.values()} == {gda.GlobalArray, PaddedArray}
        check_equal(doubled, {name: 2 * data for name, data in DATA.items()})
        assert total == DATA["odd"].sum()
    auto_mesh = mesh_of({"x": 4, "y": 2})  # over Explicit axes, JAX 0.8 fails
    empty = gda.jit(lambda p: p)(poisoned(batch(0, 5), auto_mesh, P(None, "x")))
    for shard in empty.local_shards[:1]:
        assert shard.data.shape == batch(0, 5)[shard.index].shape


def test_constraints_keep_the_padding_inside_jit(mesh: Mesh) -> None:
    odd = loaded(mesh)["odd"]
    for spec in (P("x", None), NamedSharding(mesh, P("x"))):
        np.testing.assert_array_equal(gda.constrain(odd, spec), DATA["odd"])
        moved = jax.jit(lambda p, spec=spec: gda.constrain({"a": p}, spec, mesh=None))(odd)
        np.testing.assert_array_equal(moved["a"], DATA["odd"])
    # Over y alone 5 rows become 6, and not 8.
    moved = gda.constrain({"a": odd}, P("y"))["a"]
    assert moved.padded_shape == (6, 3)
    np.testing.assert_array_equal(moved, DATA["odd"])
    assert gda.constrain(odd, P("x"), mesh=mesh_of({"x": 5})).padded_shape == (5, 3)
    needs = r"padded to \(8, 3\), and sharded by P\('y'\) it has to be padded to \(6, 3\)"
    with pytest.raises(ValueError, match=needs):
        jax.jit(gda.constrain, static_argnums=1)(odd, NamedSharding(mesh, P("y")))
    with pytest.raises(ValueError, match=needs):
        gda.jit(lambda p: p, out_specs=P("y"), mesh=mesh)(odd)


def test_batches_from_the_hosts(mesh: Mesh) -> None:
    odd = loaded(mesh)["odd"]
    with pytest.raises(TypeError, match=r"is a PaddedArray, .* take them from p\.local_shards"):
        gda.compat.global_array_to_host_local_array({"a": odd}, mesh, P("x"))


def test_a_padded_array_of_another_padding_is_refused(auto_mesh: Mesh) -> None:
    sharding = NamedSharding(auto_mesh, P("x"))
    wrong = PaddedArray(jax.device_put(jnp.ones(16), sharding), (5,))
    for function in (
        lambda: gda.fingerprint(wrong),
        lambda: gda.store(wrong, np.empty(5)),
        lambda: wrong.local_shards,
    ):
        with pytest.raises(ValueError, match=r"has shape \(16,\).*has the padded shape \(8,\)"):
            function()


def test_an_array_that_xla_replicated_keeps_its_padding(mesh: Mesh) -> None:
    data = DATA["odd"]
    array = poisoned(data, mesh, P("x", "y")).array
    replicated = PaddedArray(jax.device_put(array, NamedSharding(mesh, P())), data.shape)
    assert replicated.padded_shape == (8, 4)
    np.testing.assert_array_equal(replicated, data)
    assert replicated.fingerprint() == gda.fingerprint(data)
    for shard in replicated.local_shards[:1]:
        np.testing.assert_array_equal(shard.data, data)
    target = np.empty_like(data)
    gda.store(replicated, target)
    np.testing.assert_array_equal(target, data)


# Storing.


@pytest.mark.parametrize("spec", SPECS)
def test_storing_writes_the_elements_alone(mesh: Mesh, spec: P) -> None:
    for name, data in DATA.items():
        target = np.full(data.shape, -1, np.float32)
        gda.store(poisoned(data, mesh, spec), target)
        np.testing.assert_array_equal(target, data, err_msg=name)
    with pytest.raises(ValueError, match=r"array has shape \(8, 2\), and the target \(16, 2\)"):
        gda.store(poisoned(DATA["even"], mesh, spec), np.empty((16, 2)))


def test_storing_a_tree_by_threads(mesh: Mesh, tmp_path: Path) -> None:
    tree = loaded(mesh, P("x", "y"))
    targets = {}
    for name, array in tree.items():
        layout: Any = {"shape": array.shape, "chunks": array.grid.shard_shape, "dtype": "f4"}
        targets[name] = zarr.create_array(str(tmp_path / name), **layout)
    gda.store(tree, targets, max_workers=3)
    for name, data in DATA.items():
        np.testing.assert_array_equal(targets[name][:], data)
    # Blocks of padding alone share no chunk.
    target = zarr.create_array(store={}, shape=(2,), chunks=(1,), dtype="f4")
    gda.store(poisoned(batch(2), mesh_of({"x": 8}), P("x")), target, max_workers=4)
    np.testing.assert_array_equal(target[:], batch(2))


# Several processes.


@pytest.mark.processes(4, devices=2)
def test_many_processes(shared_tmp_path: Path) -> None:
    for number, spec in enumerate(SPECS):
        order = ORDERS["contiguous" if number % 2 else "interleaved"]
        mesh = ordered_mesh(order, {"x": 4, "y": 2})
        tree = {name: poisoned(data, mesh, spec) for name, data in DATA.items()}
        targets = {}
        for name, data in DATA.items():
            path = shared_tmp_path / f"{number}{name}.npy"
            if jax.process_index() == 0:
                np.save(path, np.full_like(data, -1))
            gda.check_processes_agree(name)
            targets[name] = np.load(path, mmap_mode="r+")
        gda.store(tree, targets)
        gda.check_processes_agree({}, name="written")
        for name, data in DATA.items():
            np.testing.assert_array_equal(np.load(targets[name].filename), data)
        kept = gda.compat.host_local_array_to_global_array(tree, mesh, P())
        assert kept["odd"] is tree["odd"]


@pytest.mark.processes(4, devices=2)
def test_processes_that_load_different_sizes_hear_of_it() -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    with gda.checking_agreement():
        assert isinstance(loaded(mesh)["odd"], PaddedArray)
        size = 5 + (jax.process_index() == 3)  # both are padded to 8
        with pytest.raises(gda.DisagreementError, match="process 3: .*6"):
            gda.load_tree([np.zeros(size)], mesh, P("x"), pad=True)

"""The functions of the placement guide, in one process and in two."""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, cut, mesh_of, ordered_mesh
from trials import rarely

import gda
import gda.compat
from gda.compat import DataPartitionType as Partition
from gda.compat import global_to_host_array as get
from gda.compat import host_to_global_device_array as put
from gda.compat import with_sharding_constraint as constrain
from gda.testing import Pool


def test_the_module_is_imported_and_its_names_pickled() -> None:
    assert {put, get, constrain} <= {getattr(gda.compat, name) for name in gda.compat.__all__}
    for each in (put, get, constrain, Partition, Partition.FULL):
        assert pickle.loads(pickle.dumps(each)) is each


# The current mesh.


@contextlib.contextmanager
def entered(mesh: Mesh) -> Iterator[None]:
    """Enter ``with mesh:`` without the warning that JAX has for it."""
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack.enter_context(mesh)
        yield


WAYS = {"set_mesh": jax.set_mesh, "with mesh": entered}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def under(request: pytest.FixtureRequest) -> Callable[[Mesh], AbstractContextManager[Any]]:
    """A way to make a mesh the current one."""
    return request.param


def test_arrays_are_placed_on_the_current_mesh(mesh: Mesh, under: Any) -> None:
    other = Mesh(mesh.devices[::-1], ("a", "b"), axis_types=mesh.axis_types)
    for each in (mesh, other, mesh, Mesh(np.array(jax.devices()[3:4]), ("x",))):
        with under(each):
            g = put(batch(16))
        assert g.mesh == each
        assert g.grid.spec in ((each.axis_names,), each.axis_names)
        np.testing.assert_array_equal(np.asarray(g), batch(16))
    with pytest.raises(ValueError, match=r"no current mesh .* jax\.set_mesh\(mesh\)"):
        put(batch(8))
    assert put(batch(16), mesh=mesh).mesh == mesh
    assert constrain(jnp.zeros(8), P("x"), mesh=mesh).sharding == NamedSharding(mesh, P("x"))


# Batches in one process.


def test_partitions(mesh: Mesh) -> None:
    tree = {"tokens": batch(16, 4), "labels": [batch(16, dtype=np.int32), None]}
    with jax.set_mesh(mesh):
        full = put(tree)
        replicated = put({**tree, "step": 3}, partition=Partition.REPLICATED)
        by_spec = put(tree, partition=P("y"))
        by_specs = put(tree, partition={"tokens": P("x", "y"), "labels": P("x")})
    assert full["labels"][1] is None
    assert full["tokens"].grid.shard_shape == (2, 4)
    assert full["labels"][0].grid.shard_shape == (2,)
    assert all(g.is_fully_replicated for g in jax.tree.leaves(replicated))
    assert by_spec["tokens"].grid.shard_shape == (8, 4)
    assert by_specs["tokens"].grid.shard_shape == (4, 2)
    back = get(by_spec, partition=P("y"))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for each, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(each, wanted, strict=True)
    host = get(full["tokens"])
    np.testing.assert_array_equal(host, tree["tokens"])
    host[...] = -1  # new memory of the caller's own
    np.testing.assert_array_equal(np.asarray(full["tokens"]), tree["tokens"])
    assert get(replicated, partition=Partition.REPLICATED)["step"] == 3


def test_partitions_inside_a_tree(mesh: Mesh) -> None:
    tree = {"tokens": [batch(16, 4), batch(32, 2)], "step": 3, "table": batch(4, 2)}
    partition = {"tokens": Partition.FULL, "step": Partition.REPLICATED, "table": P(None, "y")}
    with jax.set_mesh(mesh):
        g = put(tree, partition=partition)
    assert [t.grid.shard_shape for t in g["tokens"]] == [(2, 4), (4, 2)]
    assert g["step"].is_fully_replicated
    assert g["table"].grid.spec == (None, "y")
    for checked in (None, partition, {**partition, "tokens": None}):
        jax.tree.map(np.testing.assert_array_equal, get(g, partition=checked), tree)


@pytest.mark.parametrize(
    ("axes", "spec", "flat_spec"),
    [
        ({"data": 4, "model": 2}, P("data"), P("data")),
        ({"fsdp": 2, "seq": 4}, P("fsdp", "seq"), P("fsdp")),
        ({"data": 2, "seq": 2, "fsdp": 2}, P(("data", "fsdp"), "seq"), P(("data", "fsdp"))),
    ],
    ids=str,
)
def test_a_batch_over_the_axes_that_are_named_so(
    axes: dict[str, int], spec: P, flat_spec: P
) -> None:
    mesh = mesh_of(axes)
    tree = {"tokens": batch(8, 4, 3), "lengths": batch(4)}
    with jax.set_mesh(mesh):
        g = put(tree, partition=Partition.BATCH)
    assert g["tokens"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert g["lengths"].sharding.is_equivalent_to(NamedSharding(mesh, flat_spec), 1)
    jax.tree.map(np.testing.assert_array_equal, get(g, partition=Partition.BATCH), tree)


@pytest.mark.parametrize("partition", [None, "full", {"a": "x"}])
def test_other_partitions_are_not_implemented(auto_mesh: Mesh, partition: object) -> None:
    with jax.set_mesh(auto_mesh), pytest.raises(NotImplementedError, match=r"PartitionSpec"):
        put({"a": batch(8)}, partition=partition)
    if partition is not None:
        with pytest.raises(NotImplementedError, match=r"PartitionSpec"):
            get({"a": jnp.zeros(8)}, partition=partition)


def test_misfits_are_named_with_numbers_and_path(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        with pytest.raises(
            ValueError,
            match=r"dimension 0 of (.|\n)*not divisible by 8(.|\n)*at b/0 of the tree$",
        ):
            put({"a": batch(8), "b": [batch(12, 3)]})
        with pytest.raises(ValueError, match="mesh {.*} has neither; rename one of its axes"):
            put(batch(8), partition=Partition.BATCH)
        with pytest.raises(ValueError, match=r"a scalar, and .*FULL.*REPLICATED(.|\n)*at step of"):
            put({"a": batch(8), "step": 3})
        with pytest.raises(ValueError, match="partition has nothing for 0, and the tree has no a"):
            put([batch(8)], partition={"a": P()})
        with pytest.raises(gda.DoesNotFitError) as raised:
            put({"a": np.full(8, 2**40)})
    assert raised.value.__notes__[-1] == "gda: at a of the tree"
    with pytest.raises(ValueError, match="the array is a scalar"):
        get(jnp.zeros(()), partition=Partition.FULL)
    with pytest.raises(TypeError, match="NumPy has no key"):
        get(jax.random.split(jax.random.key(0), 8))


# Constraints.


# For Explicit axes JAX itself wants set_mesh.
@pytest.mark.parametrize(
    ("way", "kind"),
    [("set_mesh", AxisType.Auto), ("set_mesh", AxisType.Explicit), ("with mesh", AxisType.Auto)],
)
def test_a_constraint_inside_jit(way: str, kind: AxisType) -> None:
    mesh = mesh_of({"x": 4, "y": 2}, kind)

    @jax.jit
    def double(tree: Any) -> Any:
        assert isinstance(tree["g"], gda.GlobalArray)
        return constrain(jax.tree.map(lambda x: x * 2, tree), {"g": P("x"), "a": P("x", "y")})

    g = gda.GlobalArray.from_process_local(batch(8, 4), mesh, P())
    with WAYS[way](mesh):
        tree = double({"g": g, "a": jax.device_put(batch(8, 4), NamedSharding(mesh, P()))})
    assert isinstance(tree["g"], gda.GlobalArray)
    assert tree["g"].grid.spec == ("x",)
    assert tree["a"].sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    np.testing.assert_array_equal(tree["a"], 2 * batch(8, 4))


def test_a_constraint_outside_jit_moves(mesh: Mesh, under: Any) -> None:
    g = gda.GlobalArray.from_process_local(batch(8, 4), mesh, P())
    with under(mesh):
        tree = constrain({"g": g, "a": batch(8, 4), "b": jnp.zeros((8, 4))}, P("x"))
        assert constrain(g, None) is g
    assert isinstance(tree["g"], gda.GlobalArray)
    assert tree["g"].grid.spec == ("x",)
    for name in "ab":
        assert tree[name].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)


def test_a_sharding_brings_its_mesh(mesh: Mesh) -> None:
    tree = {"a": jnp.zeros((8, 4)), "b": jnp.zeros(8)}
    out = constrain(tree, {"a": NamedSharding(mesh, P("y")), "b": None})
    assert out["a"].sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 2)
    assert out["b"] is tree["b"]
    if mesh.axis_types[0] == AxisType.Auto:
        y = jax.jit(lambda x: constrain(x, NamedSharding(mesh, P("y"))))(jnp.zeros(8))
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)


@pytest.mark.parametrize("size", [1, 8])
def test_a_sharding_brings_its_memory(size: int) -> None:
    mesh = mesh_of({"x": size})
    pinned = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    x = jax.device_put(batch(8), NamedSharding(mesh, P("x")))
    moved = constrain({"a": x, "g": gda.GlobalArray.from_array(x)}, pinned)
    assert moved["a"].sharding == pinned
    assert moved["g"].sharding == pinned
    np.testing.assert_array_equal(moved["a"], batch(8))
    again = constrain(moved, NamedSharding(mesh, P()))
    assert again["g"].sharding.memory_kind == "device"
    with jax.set_mesh(mesh):
        assert constrain(moved["a"], P("x")).sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_no_device_or_one_nothing_is_done(kind: AxisType, under: Any) -> None:
    x = {"a": jnp.zeros(3), "b": 1.0, "g": gda.GlobalArray.from_array(jnp.zeros(5))}
    assert_same = lambda tree: all(map(lambda p, q: p is q, tree.values(), x.values()))  # noqa
    assert assert_same(constrain(x, P("nowhere")))
    assert jax.jit(lambda x: constrain(x, P("nowhere")) is x)(jnp.zeros(3))
    one = mesh_of({"x": 1, "y": 1}, kind)
    with under(one):
        assert assert_same(constrain(x, P("x")))
        assert jax.jit(lambda x: constrain(x, P("x")) is x)(jnp.zeros(3))


def test_bad_constraints(auto_mesh: Mesh) -> None:
    with jax.set_mesh(auto_mesh):
        with pytest.raises(ValueError, match="not divisible by 4") as raised:
            constrain({"a": jnp.zeros(6)}, P("x"))
        assert raised.value.__notes__[-1] == "gda: at a of the tree"
        with pytest.raises(TypeError, match=r"shardings is 'x', not a PartitionSpec"):
            constrain(jnp.zeros(8), "x")
        with pytest.raises(ValueError, match="nothing for a, and the tree has no a/0"):
            constrain({"a": jnp.zeros(8)}, {"a": [P()]})
        with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not type"):
            constrain({"a": float}, P("x"))


# Batches of several processes.


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_full_there_and_back(order: list[int]) -> None:
    """Each process's rows are on its own devices, in order, and come back."""
    me = jax.process_index()
    for size, kind, mesh_shape in (
        (8, AxisType.Auto, {"x": 4, "y": 2}),
        (6, AxisType.Explicit, {"x": 6}),  # the processes have different numbers of devices
    ):
        mesh = ordered_mesh(order[:size], mesh_shape, kind)
        mine = len(mesh.local_devices)
        tree = {"a": batch(2 * mine, 3) + 100 * me, "b": [batch(mine, dtype=np.int32) - me]}
        with jax.set_mesh(mesh):
            g = put(tree)
        assert g["a"].shape == (2 * size, 3)
        rows = [np.asarray(shard.data) for shard in g["a"].local_shards]
        np.testing.assert_array_equal(np.concatenate(rows), tree["a"])
        jax.tree.map(np.testing.assert_array_equal, get(g), tree)


def check_batch(order: list[int], mesh_shape: dict[str, int], kind: AxisType) -> None:
    """Each process brings the rows of its blocks, and sequences whole."""
    mesh = ordered_mesh(order[: int(np.prod(list(mesh_shape.values())))], mesh_shape, kind)
    whole = {"a": batch(8, 4, 2), "b": batch(16, dtype=np.int32)}
    axes = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))

    def my_rows(data: np.ndarray) -> np.ndarray:
        indices = NamedSharding(mesh, P(axes)).addressable_devices_indices_map(data.shape)
        starts = sorted({tuple(index[0].indices(len(data))) for index in indices.values()})
        return np.concatenate([data[slice(*start)] for start in starts])

    with jax.set_mesh(mesh):
        if not mesh.local_devices:
            with pytest.raises(ValueError, match=r"has no device of the mesh"):
                put(whole, partition=Partition.BATCH)
            return
        g = put(jax.tree.map(my_rows, whole), partition=Partition.BATCH)
    for name, data in whole.items():
        assert g[name].shape == data.shape
        for shard in g[name].local_shards:
            np.testing.assert_array_equal(shard.data, data[shard.index])


@rarely(3)
@given(
    order=st.permutations(range(8)),
    axes=st.permutations(["data", "fsdp", "seq", "model"]),
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4).filter(
        lambda sizes: np.prod(sizes) <= 8
    ),
    kind=st.sampled_from([AxisType.Auto, AxisType.Explicit]),
)
def test_batches_of_two_processes(
    process_pool: Callable[..., Pool],
    order: list[int],
    axes: list[str],
    sizes: list[int],
    kind: AxisType,
) -> None:
    mesh_shape = dict(zip(axes, sizes, strict=True))
    process_pool(2, devices=4).run(check_batch, order, mesh_shape, kind)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("partition", [Partition.FULL, P()], ids=str)
def test_a_process_without_a_device_of_the_mesh_is_told(partition: Any) -> None:
    mesh = ordered_mesh([4, 5, 6, 7], {"x": 4})
    no_device = r"process 0 has no device of the mesh {'x': 4}.* the mesh has devices of process 1"
    data = batch(8, 2)
    with jax.set_mesh(mesh):
        if jax.process_index() == 1:
            g = put({"a": data}, partition=partition)
            assert g["a"].shape == (8, 2)
            np.testing.assert_array_equal(get(g, partition=partition)["a"], data)
            return
        for tree in ({"a": data}, {"a": data[:3]}):
            with pytest.raises(ValueError, match=no_device) as raised:
                put(tree, partition=partition)
            assert raised.value.__notes__ == ["gda: at a of the tree"]
    g = cut(data, mesh, P("x") if partition is Partition.FULL else partition)
    with pytest.raises(ValueError, match=no_device):
        get({"a": g}, partition=partition)


@pytest.mark.processes(2, devices=4)
def test_layouts_without_rows_are_refused() -> None:
    mesh = ordered_mesh(range(8), {"x": 2, "y": 4})

    def array(spec: P) -> jax.Array:
        return cut(batch(8, 8), mesh, spec).array

    for layouts, partition, message in [
        (
            {"a": P(None, "x")},
            Partition.FULL,
            r"\(8, 4\) of it; under .*FULL it must have whole rows",
        ),
        (
            {"a": P("x")},
            Partition.REPLICATED,
            r"shape \(8, 8\), and this process has \(4, 8\) of it",
        ),
        ({"a": P("x")}, P("y"), "is sharded by .*'x'.*, and partition says .*'y'"),
        ({"a": P("x")}, Partition.BATCH, r"DataPartitionType\.BATCH .* has neither; rename one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            get({name: array(spec) for name, spec in layouts.items()}, partition=partition)
    get({"a": array(P("x")), "b": array(P("y"))}, partition={"a": P("x"), "b": P("y")})
    get({"a": array(P("x")), "table": array(P())}, partition={"a": P("x"), "table": P()})


@pytest.mark.processes(2, devices=4)
def test_a_constraint_over_processes() -> None:
    mesh = ordered_mesh(ORDERS["interleaved"], {"x": 8})
    with jax.set_mesh(mesh):
        g = put(batch(8) + 100 * jax.process_index())
        whole = jax.jit(lambda g: constrain(g, P()))(g)
        again = constrain(whole, P("x"))
    assert whole.is_fully_replicated
    np.testing.assert_array_equal(get(again), get(g))

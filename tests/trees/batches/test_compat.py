"""The names of ``multihost_utils``, against those, and of axlearn.

The examples of the documentation of ``multihost_utils`` are in ``test_many_processes.py``, in every
split of 8 devices.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, cut, mesh_of, ordered_mesh
from trials import rarely

import gda
from gda.testing import Pool

to_global = gda.compat.host_local_array_to_global_array
to_local = gda.compat.global_array_to_host_local_array
put = gda.compat.host_to_global_array
get = gda.compat.global_to_host_array
constrain = gda.compat.with_sharding_constraint
Partition = gda.compat.DataPartitionType


def test_the_names_are_reachable_without_being_listed() -> None:
    assert dir(gda.compat) == sorted(gda.compat.__all__)
    assert "compat" not in gda.__all__
    assert gda.compat.host_to_global_device_array is put  # its former name
    with pytest.raises(
        AttributeError, match=r"its successor is gda\.compat\.host_to_global_array$"
    ):
        gda.host_to_global_array  # pyright: ignore  # noqa: B018


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


@pytest.mark.parametrize(
    ("spec", "dtype"), [(P(), np.bool_), (P("x", "y"), jnp.bfloat16), (P(("y", "x")), np.int8)]
)
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


def test_errors_have_the_path_of_the_leaf(auto_mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="not divisible by 4") as raised:
        to_global({"a": batch(8), "b": [batch(8), batch(6)]}, auto_mesh, P("x"))
    assert raised.value.__notes__[-1] == "gda: at ['b'][1] of the tree"
    with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not ndarray") as e:
        to_local({"a": batch(8)}, auto_mesh, P())
    assert e.value.__notes__ == ["gda: at ['a'] of the tree"]
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        to_global(batch(8), None, P())


# Host-local arrays in several. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_contiguous_meshes_as_jax_does(kind: AxisType) -> None:
    me = jax.process_index()
    specs = [P(), P("a"), P("b", "a"), P(("b", "a")), P(None, ("a", "b"))]
    for shape, order in [
        ({"a": 2, "b": 4}, ORDERS["contiguous"]),
        ({"a": 4, "b": 2}, [0, 4, 1, 5, 2, 6, 3, 7]),
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
    with pytest.raises(
        gda.ReplicaMismatchError, match=r"\(process 0\) and .*\(process 1\)"
    ) as raised:
        to_global(bad, mesh, specs, check_replicas=True)
    mismatches = raised.value.mismatches
    assert [(each.path, each.index) for each in mismatches] == [
        ("['key']", ()),
        ("['table']", (slice(4, 6),)),
    ]
    # All processes are in step afterwards.
    to_global(good, mesh, specs, check_replicas=True)


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
            match=r"dimension 0 of (.|\n)*not divisible by 8(.|\n)*at \['b'\]\[0\] of the tree$",
        ):
            put({"a": batch(8), "b": [batch(12, 3)]})
        with pytest.raises(ValueError, match="mesh {.*} has neither; rename one of its axes"):
            put(batch(8), partition=Partition.BATCH)
        with pytest.raises(ValueError, match=r"a scalar, and .*FULL.*REPLICATED(.|\n)*\['step'\]"):
            put({"a": batch(8), "step": 3})
        with pytest.raises(ValueError, match=r"partition is a dict with the keys \['a'\]"):
            put([batch(8)], partition={"a": P()})
        with pytest.raises(gda.DoesNotFitError) as raised:
            put({"a": np.full(8, 2**40)})
    assert raised.value.__notes__[-1] == "gda: at ['a'] of the tree"
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
        assert raised.value.__notes__[-1] == "gda: at ['a'] of the tree"
        with pytest.raises(TypeError, match=r"shardings is 'x', not a PartitionSpec"):
            constrain(jnp.zeros(8), "x")
        with pytest.raises(ValueError, match=r"shardings\['a'\] is a list of 1, and the tree has"):
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
            assert raised.value.__notes__ == ["gda: at ['a'] of the tree"]
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

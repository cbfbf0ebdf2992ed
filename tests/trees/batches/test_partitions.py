"""Batches to the devices of the current mesh and back."""

import contextlib
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
from gda import DataPartitionType as Partition
from gda.testing import Pool

put = gda.host_to_global_array
get = gda.global_to_host_array
constrain = gda.with_sharding_constraint


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


# The current mesh.


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


# In one process.


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
    assert gda.host_to_global_device_array is put  # its former name
    with jax.set_mesh(mesh):
        of_float0 = put(np.zeros((8, 2), jax.dtypes.float0))
    np.testing.assert_array_equal(of_float0, np.zeros((8, 2), bool))


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


def test_a_batch_that_does_not_fit() -> None:
    neither = r"axes 'data' and 'fsdp', and the mesh {'x': 8} has neither"
    with jax.set_mesh(mesh_of({"x": 8})), pytest.raises(ValueError, match=neither):
        put(batch(8), partition=Partition.BATCH)
    with jax.set_mesh(mesh_of({"data": 4, "seq": 2})):
        with pytest.raises(ValueError, match=r"(?s)dimension 0 of local size 6 .*\['a'\]"):
            put({"a": batch(6, 2)}, partition=Partition.BATCH)
        with pytest.raises(ValueError, match=r"(?s)dimension 1 of size 3 .*\['a'\]"):
            put({"a": batch(8, 3)}, partition=Partition.BATCH)
        with pytest.raises(ValueError, match=r"a scalar, and DataPartitionType\.BATCH"):
            put({"a": 3}, partition=Partition.BATCH)


@pytest.mark.parametrize("partition", [None, "full", 3, {"a": "x"}, object])
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
            match="the array has a local batch of 12 rows, and this process has 8 devices .* "
            r"pass 8 or 16 rows\ngda: at \['b'\]\[0\] of the tree$",
        ):
            put({"a": batch(8), "b": [batch(12, 3)]})
        with pytest.raises(ValueError, match="pass 8 rows$"):
            put(batch(3))
        with pytest.raises(ValueError, match=r"a scalar, and .*FULL.*REPLICATED(.|\n)*\['step'\]"):
            put({"a": batch(8), "step": 3})
        with pytest.raises(ValueError, match=r"partition is a dict with the keys \['a'\]"):
            put([batch(8)], partition={"a": P()})
        with pytest.raises(gda.DoesNotFitError) as raised:
            put({"a": np.full(8, 2**40)})
    assert raised.value.__notes__[-1] == "gda: at ['a'] of the tree"
    with pytest.raises(ValueError, match="the array is a scalar"):
        get(jnp.zeros(()), partition=Partition.FULL)
    with pytest.raises(TypeError, match="expected a GlobalArray or a jax.Array, not ndarray"):
        get({"a": batch(8)})
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


def test_a_constraint_under_a_legacy_mesh_compiles_nothing(
    auto_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("it was compiled"))
    with entered(auto_mesh):
        jaxpr = jax.make_jaxpr(lambda x: constrain(constrain(x, P("x")), P("y")))(batch(8))
    assert [str(equation.primitive) for equation in jaxpr.eqns].count("sharding_constraint") == 2


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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("size", [1, 8])
def test_a_sharding_brings_its_memory(kind: AxisType, size: int) -> None:
    mesh = mesh_of({"x": size}, kind)
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
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX moves no memory inside jit on CPU")
def test_a_sharding_brings_its_memory_inside_jit(kind: AxisType) -> None:
    mesh = mesh_of({"x": 8}, kind)
    pinned = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    x = jax.device_put(batch(8), NamedSharding(mesh, P("x")))
    assert jax.jit(lambda x: constrain(x + 1, pinned))(x).sharding == pinned
    on_device = NamedSharding(mesh, P("x"))
    back = jax.jit(lambda x: constrain(x, on_device))(jax.device_put(x, pinned))
    assert back.sharding == on_device


def test_a_traced_array_over_explicit_axes_knows_its_mesh(explicit_mesh: Mesh) -> None:
    x = jax.device_put(batch(8), NamedSharding(explicit_mesh, P()))
    y = jax.jit(lambda x: constrain(x, P("x")))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(explicit_mesh, P("x")), 1)


def test_a_constraint_under_a_gradient(auto_mesh: Mesh, under: Any) -> None:
    with under(auto_mesh):
        gradient = jax.grad(lambda x: (constrain(x, P("x")) ** 2).sum())(jnp.arange(8.0))
    np.testing.assert_array_equal(gradient, 2 * np.arange(8))


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


# Several processes. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.


NO_DEVICE = r"process 0 has no device of the mesh {'x': 4}.* the mesh has devices of process 1"


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


def check_local(order: list[int], mesh_shape: dict[str, int], specs: list[P]) -> None:
    """The part of each array that a process has, its blocks in the order of the whole."""
    mesh = ordered_mesh(order[: int(np.prod(list(mesh_shape.values())))], mesh_shape)
    if not mesh.local_devices:
        return
    tree, wanted, is_regular = [], [], True
    for number, spec in enumerate(specs):
        data = batch(8 * (number + 1), 8) + number
        tree.append(cut(data, mesh, spec).array)
        indices = tree[-1].sharding.addressable_devices_indices_map(data.shape).values()
        places = [
            [range(size)[part] for size, part in zip(data.shape, index, strict=True)]
            for index in indices
        ]
        by_dimension = [
            sorted(set(parts), key=lambda part: part.start) for parts in zip(*places, strict=True)
        ]
        is_regular &= len(set(map(tuple, places))) == np.prod(list(map(len, by_dimension)))
        wanted.append(data[np.ix_(*[np.concatenate(parts) for parts in by_dimension])])
    if not is_regular:
        with pytest.raises(ValueError, match="regular grid"):
            get(tree)
        return
    jax.tree.map(np.testing.assert_array_equal, get(tree), wanted)
    jax.tree.map(np.testing.assert_array_equal, get(tree, partition=specs), wanted)


@rarely(3)
@given(
    order=st.permutations(range(8)) | st.just(list(range(8))),
    mesh_shape=st.sampled_from([{"x": 4, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2}]),
    specs=st.lists(
        st.sampled_from([P(), P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(("y", "x"))]),
        min_size=1,
        max_size=4,
    ),
)
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)])
def test_arrays_of_any_sharding_and_size_in_one_call(
    process_pool: Callable[..., Pool],
    processes: int,
    devices: int,
    order: list[int],
    mesh_shape: dict[str, int],
    specs: list[P],
) -> None:
    process_pool(processes, devices=devices).run(check_local, order, mesh_shape, specs)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("partition", [Partition.FULL, Partition.REPLICATED, P("x"), P()], ids=str)
def test_a_process_without_a_device_of_the_mesh_is_told(partition: Any) -> None:
    mesh = ordered_mesh([4, 5, 6, 7], {"x": 4})
    data = batch(8, 2)
    with jax.set_mesh(mesh):
        if jax.process_index() == 1:
            g = put({"a": data}, partition=partition)
            assert g["a"].shape == (8, 2)
            np.testing.assert_array_equal(get(g, partition=partition)["a"], data)
            return
        for tree in ({"a": data}, {"a": data[:3]}):
            with pytest.raises(ValueError, match=NO_DEVICE) as raised:
                put(tree, partition=partition)
            assert raised.value.__notes__ == ["gda: at ['a'] of the tree"]
    specs = {Partition.FULL: P("x"), Partition.REPLICATED: P()}
    g = cut(data, mesh, specs.get(partition, partition))
    with pytest.raises(ValueError, match=NO_DEVICE):
        get({"a": g}, partition=partition)


@pytest.mark.processes(2, devices=4)
def test_replicated_and_specs_there_and_back() -> None:
    me = jax.process_index()
    for order in ORDERS.values():
        mesh = ordered_mesh(order, {"x": 8})
        tree = {"table": batch(3, 4), "step": np.int32(5)}
        with jax.set_mesh(mesh):
            g = put(tree, partition=Partition.REPLICATED)
            specs = {"rows": P("x"), "columns": P(None, "x"), "step": P()}
            parts = {"rows": batch(4) + me, "columns": batch(2, 4) - me, "step": np.int32(1)}
            by_spec = put(parts, partition=specs)
        assert g["table"].shape == (3, 4)
        jax.tree.map(np.testing.assert_array_equal, get(g, partition=Partition.REPLICATED), tree)
        assert by_spec["columns"].shape == (2, 8)
        jax.tree.map(np.testing.assert_array_equal, get(by_spec, partition=specs), parts)


@pytest.mark.processes(2, devices=4)
def test_layouts_without_rows_are_refused() -> None:
    me = jax.process_index()
    mesh = ordered_mesh(range(8), {"x": 2, "y": 4})

    def array(spec: P) -> jax.Array:
        return cut(batch(8, 8), mesh, spec).array

    rows = "0:4" if me == 0 else "4:8"
    for layouts, partition, message in [
        (
            {"a": P("x"), "b": P("y")},
            Partition.FULL,
            rf"this process has the rows {rows} of the array at \['a'\], and the rows 0:8 of this "
            r"one(.|\n)*gda: at \['b'\] of the tree$",
        ),
        ({"a": P(None, "x")}, Partition.FULL, r"only parts of its rows, \(8, 4\) in all"),
        ({"a": P("x")}, Partition.REPLICATED, r"shape \(8, 8\), and this process has \(4, 8\)"),
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

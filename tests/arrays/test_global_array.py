"""The container: attributes, shards, life cycle, and behaviour as an array."""

import copy
import gc
import inspect
import operator
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.flax
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import holding, mesh_of

import gda

DATA = np.arange(16, dtype=np.float32).reshape(8, 2)
INTEGERS = DATA.astype(np.int32)


def make(mesh: Mesh, spec: P = P("x", "y"), data: np.ndarray = DATA) -> gda.GlobalArray:
    return gda.GlobalArray.from_callback(data.shape, mesh, spec, lambda index: data[index])


# The facts about itself.


def test_it_knows_shape_type_and_layout(mesh: Mesh) -> None:
    g = make(mesh)
    assert (g.shape, g.dtype, g.ndim, g.size, g.nbytes) == ((8, 2), np.float32, 2, 16, 64)
    assert g.mesh == mesh
    assert g.spec == g.mesh_axes == P("x", "y")
    assert g.sharding == NamedSharding(mesh, P("x", "y"))
    assert g.grid == gda.ShardGrid((8, 2), {"x": 4, "y": 2}, ("x", "y"), process_of=[0] * 8)
    assert g.grid.view(0).local_shape == (8, 2)
    assert g.is_fully_addressable
    assert not g.is_fully_replicated
    assert make(mesh, P()).is_fully_replicated


def test_repr_and_str_show_the_layout_and_move_no_data(mesh: Mesh) -> None:
    g = make(mesh)
    expected = "GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))"
    with jax.transfer_guard("disallow"):
        assert repr(g) == expected
        assert str(g) == f"{g}" == "float32[8,2] P('x', 'y')"
    g.delete()
    assert repr(g) == expected
    assert (g.is_fully_replicated, g.is_fully_addressable) == (False, True)


def test_a_scalar_is_printed_as_its_value(mesh: Mesh) -> None:
    loss = gda.jit(lambda x: x.sum() + 0.5)(make(mesh))
    assert (str(loss), f"{loss}", f"{loss:.1f}") == ("120.5", "120.5", "120.5")
    loss.delete()
    assert str(loss) == repr(loss)


@pytest.mark.processes(2, devices=4)
def test_an_array_of_several_processes_is_no_numpy_array_and_has_some_local_shards() -> None:
    g = make(mesh_of({"x": 4, "y": 2}))
    with pytest.raises(RuntimeError, match=r"g.gather\(\) gives the whole value to every process"):
        np.asarray(g)
    assert str(gda.jit(lambda x: x.sum())(g)) == "120.0"
    assert (len(g.local_shards), len(g.global_shards)) == (4, 8)


def test_it_is_immutable_and_unhashable(mesh: Mesh) -> None:
    g = make(mesh)
    with pytest.raises(AttributeError, match="immutable; array cannot be set"):
        g.array = g.array
    with pytest.raises(AttributeError, match="immutable"):
        del g.array
    with pytest.raises(AttributeError, match="immutable"):
        g.anything = 1
    with pytest.raises(TypeError, match=r"\.at\[idx\]\.set"):
        g[0] = 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(g)
    assert not hasattr(g, "__dict__")
    with pytest.raises(AttributeError):
        g.local_shards[0].index = ()


# Shards.


def test_local_shards_come_in_device_order_with_index_and_replica_id(mesh: Mesh) -> None:
    g = make(mesh, P("x"))
    shards = g.local_shards
    assert [s.device for s in shards] == list(mesh.devices.flat)
    assert [s.replica_id for s in shards] == [0, 1] * 4
    for i, shard in enumerate(shards):
        assert shard.data is not None
        assert shard.data.devices() == {shard.device}
        np.testing.assert_array_equal(shard.data, DATA[shard.index])
        assert g.local_data(i) is shard.data
        assert g.addressable_data(i) is shard.data
    assert shards is g.local_shards is g.addressable_shards
    assert len(g.global_shards) == 8
    assert isinstance(shards, tuple)
    assert shards[1:3] == (shards[1], shards[2])
    assert shards[-1] is shards[7]
    assert jax.tree.map(lambda shard: shard.replica_id, shards) == (0, 1) * 4


# Made of device buffers, or of an array.


def buffers_for(mesh: Mesh, spec: P) -> list[jax.Array]:
    indices = gda.get_shard_indices(DATA.shape, mesh, spec)
    return [jax.device_put(DATA[index], device) for device, index in indices.items()]


def test_device_buffers_become_the_shards_without_a_copy(mesh: Mesh) -> None:
    buffers = buffers_for(mesh, P("x"))
    g = gda.GlobalArray((8, 2), mesh, P("x"), buffers)
    np.testing.assert_array_equal(g, DATA)
    for i, buffer in enumerate(buffers):
        assert g.local_data(i).unsafe_buffer_pointer() == buffer.unsafe_buffer_pointer()


def test_device_buffers_that_are_wrong_are_named(auto_mesh: Mesh) -> None:
    for spoil, error, message in [
        (lambda b: b[:7], ValueError, "expected 8 arrays, one per device of mesh.local_devices"),
        (
            lambda b: [b[1], b[0], *b[2:]],
            ValueError,
            rf"device_buffers\[0\] is on {jax.devices()[1]}; expected is {jax.devices()[0]}"
            r"\. Put one array on each device, in the order of mesh\.local_devices",
        ),
        (
            lambda b: [*b[:7], np.asarray(b[7])],
            TypeError,
            r"device_buffers\[7\] is a ndarray, not a jax.Array .* from_callback for host data",
        ),
        (
            lambda b: [*b[:7], jax.device_put(np.zeros((1, 2), np.float32), jax.devices()[7])],
            ValueError,
            r"the block at index \[6:8, :\] has shape \(1, 2\); a shard .* has shape \(2, 2\)",
        ),
        (
            lambda b: [*b[:7], jax.device_put(np.zeros((2, 2), np.int32), jax.devices()[7])],
            TypeError,
            r"index \[6:8, :\] has dtype int32, and its array has float32; .* cast with dtype=",
        ),
        (lambda b: b[0], TypeError, "expected a sequence of 8 arrays"),
    ]:
        with pytest.raises(error, match=message):
            gda.GlobalArray((8, 2), auto_mesh, P("x"), spoil(buffers_for(auto_mesh, P("x"))))


def test_from_array_wraps_and_copies_nothing(mesh: Mesh) -> None:
    array = make(mesh).array
    g = gda.GlobalArray.from_array(array)
    assert g.array is array
    assert gda.GlobalArray.from_array(g) is g


def test_an_array_on_one_device_has_one_shard_and_a_mesh_of_that_device() -> None:
    device = jax.devices()[3]
    g = gda.GlobalArray.from_array(jax.device_put(DATA, device))
    assert list(g.mesh.devices.flat) == [device]
    assert g.spec == P()
    (shard,) = g.local_shards
    assert (shard.device, shard.replica_id) == (device, 0)
    assert shard.index == (slice(None), slice(None))
    np.testing.assert_array_equal(shard.data, DATA)


def test_from_array_refuses_other_kinds_of_input() -> None:
    with pytest.raises(TypeError, match=r"not ndarray; .* GlobalArray\.from_source\(array, mesh, "):
        gda.GlobalArray.from_array(DATA)
    with pytest.raises(
        TypeError, match=r"on the host write GlobalArray\.from_source\(array, mesh,"
    ):
        gda.GlobalArray(DATA)


def test_an_array_is_wrapped_without_other_arguments(mesh: Mesh) -> None:
    array = make(mesh).array
    for others in ({"global_shape": (8, 2)}, {"dtype": "int8"}, {"mesh": mesh, "spec": P("x")}):
        with pytest.raises(TypeError, match=r"array= and other .* GlobalArray.from_array\(array\)"):
            gda.GlobalArray(**others, array=array)


# Its life.


def test_after_delete_every_access_to_data_says_so(mesh: Mesh) -> None:
    g = make(mesh)
    shard = g.local_shards[0]
    assert shard.data is not None  # split and cached before it goes
    assert not g.is_deleted()
    g.delete()
    assert g.is_deleted()
    uses: list[Callable[[], object]] = [
        lambda: shard.data,
        lambda: g.local_data(0),
        lambda: g.global_shards[0].data,
        lambda: np.asarray(g),
        lambda: g + 1,
        lambda: g.T,
        lambda: g.at,
        lambda: g.sum(),
        lambda: g.is_ready(),
        lambda: g.__dlpack__(),
        lambda: list(g),
        lambda: f"{g:.2f}",
        lambda: copy.deepcopy(g),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"GlobalArray\(shape=\(8, 2\), .* was deleted"):
            use()
    # Functions of jnp are jitted, so JAX finds the deleted array before the container is asked.
    with pytest.raises(RuntimeError, match=r"deleted with shape=float32\[8"):
        jnp.sin(g)


def test_the_last_reference_frees_the_array_without_the_garbage_collector(mesh: Mesh) -> None:
    g = make(mesh)
    assert g.local_shards[0].data is not None
    assert len(g.global_shards) == 8
    array, container = weakref.ref(g.array), weakref.ref(g)
    gc.disable()
    try:
        del g
        assert container() is None
        assert array() is None
    finally:
        gc.enable()


def test_a_shard_keeps_its_data_alive(mesh: Mesh) -> None:
    shard = make(mesh).local_shards[1]
    np.testing.assert_array_equal(shard.data, DATA[shard.index])
    assert len({shard, shard}) == 1
    assert jax.tree.leaves([shard]) == [shard]


def test_waiting_and_fetching_give_the_container_back(mesh: Mesh) -> None:
    g = make(mesh)
    assert g.block_until_ready() is g
    g.copy_to_host_async()
    assert jax.block_until_ready(g).array is g.array
    np.testing.assert_array_equal(g, DATA)


# As an array.

BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip
INTEGER = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]


UNARY = [operator.neg, operator.pos, operator.abs, len, lambda x: [*x], lambda x: x[1:3, 0]]


def assert_same_program(function: Callable[..., Any], g: Any, *others: Any) -> None:
    """Compare what a function computes of a container, and of the array in it, uncompiled."""
    ours, theirs = jax.make_jaxpr(function)(g, *others), jax.make_jaxpr(function)(g.array, *others)
    assert str(ours) == str(theirs)


def test_operators_are_those_of_the_array(auto_mesh: Mesh) -> None:
    g, integers = make(auto_mesh), make(auto_mesh, data=INTEGERS)
    for function in (*BINARY, divmod, *INTEGER):
        x, data = (integers, INTEGERS) if function in INTEGER else (g, DATA)
        assert_same_program(lambda x, f=function, d=data: [f(x, 2), f(d, x), f(3, x), f(x, x)], x)
    for function in UNARY:
        assert_same_program(function, g)
    assert_same_program(operator.invert, make(auto_mesh, data=DATA > 3))
    assert_same_program(lambda x: [x @ x.T, DATA.T @ x], g)
    for other in ("a", object()):
        with pytest.raises(TypeError):
            operator.add(g, other)


def test_operators_compute_where_the_data_is(auto_mesh: Mesh) -> None:
    g = make(auto_mesh)
    for left, right in [(DATA, g), (g, g), (g.array, g), (3, g)]:
        result = left - right
        assert type(result) is type(g.array)
        np.testing.assert_array_equal(result, np.asarray(left) - np.asarray(right))
    g -= 1
    assert isinstance(g, jax.Array)
    np.testing.assert_array_equal(g, DATA - 1)


def test_numpy_conversion_follows_numpy_2(mesh: Mesh) -> None:
    g = make(mesh)
    np.testing.assert_array_equal(np.asarray(g), DATA)
    assert np.asarray(g, dtype=np.float64).dtype == np.float64
    copied = np.array(g, copy=True)
    copied[:] = 0
    np.testing.assert_array_equal(g, DATA)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(g, dtype=np.float64, copy=False)


def test_scalars_convert_like_arrays(mesh: Mesh) -> None:
    scalar = make(mesh, P(), np.float32(2.5).reshape(()))
    assert (float(scalar), int(scalar), bool(scalar), complex(scalar)) == (2.5, 2, True, 2.5)
    assert f"{scalar:.2f}" == "2.50"
    assert round(scalar) == 2
    assert operator.index(make(mesh, P(), np.array(3))) == 3
    with pytest.raises(TypeError):
        operator.index(scalar)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(make(mesh))
    with pytest.raises(TypeError):
        len(scalar)


# Everything else that arrays have.

ARRAY_TYPE = type(jax.device_put(0))  # the class of arrays, which JAX does not export
# A property of the class, and none of an array: JAX's own message says what to use.
REMOVED = {"device_buffer", "device_buffers"}
# Answered by the container in its own words: shards, layout and life on the devices.
OWN = {
    "addressable_data", "addressable_shards", "block_until_ready", "copy_to_host_async", "delete",
    "global_shards", "is_deleted", "sharding",
}  # fmt: skip
# Python gives these to every class, or they would give memory away behind `__array__`.
NOT_DELEGATED = {"__dict__", "__del__", "__buffer__", "__release_buffer__"}


def public_names(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def dunders(cls: type) -> set[str]:
    return {name for name in dir(cls) if name.startswith("__") and not hasattr(object, name)}


DELEGATED = sorted((public_names(jax.Array) | public_names(ARRAY_TYPE)) - OWN - REMOVED)


def test_it_has_every_public_name_of_an_array() -> None:
    names = public_names(jax.Array) | public_names(ARRAY_TYPE)
    assert names - public_names(gda.GlobalArray) == set()
    missing = (dunders(jax.Array) | dunders(ARRAY_TYPE)) - dunders(gda.GlobalArray)
    assert missing <= NOT_DELEGATED


def test_other_protocols_are_those_of_the_array(auto_mesh: Mesh) -> None:
    g = make(auto_mesh, P("x"), DATA[:, 0].copy())
    assert g.__array_namespace__() is jnp
    assert (2.0 in g, 99.0 in g) == (True, False)
    assert not hasattr(g, "__cuda_array_interface__")  # this is a CPU
    one = gda.GlobalArray.from_array(jax.device_put(DATA, jax.devices()[0]))
    assert one.__dlpack_device__() == one.array.__dlpack_device__()
    np.testing.assert_array_equal(np.from_dlpack(one), DATA)


def test_containers_may_be_arguments_wherever_arrays_may(auto_mesh: Mesh) -> None:
    def use(g: Any, rows: Any) -> list[jax.Array]:
        assert type(g.mean()) is not gda.GlobalArray
        return [
            *(g[rows], g[rows, 0], g.take(rows, axis=0), g.take(indices=rows, axis=0)),
            *(g.at[rows].set(g[:2]), g.at[rows].add(rows), g.at[0].set(7.0), g.sum(where=g > 3)),
            *(g.mean(), g.var(axis=0), g.astype(jnp.bfloat16).sum(), g.swapaxes(0, 1)),
            *(rows.choose([rows, rows + 1], mode="clip"), g.T, g.reshape(2, -1), g.clip(g, g + 1)),
        ]

    g, rows = make(auto_mesh), make(auto_mesh, P(), np.array([3, 1]))
    ours, theirs = jax.make_jaxpr(use)(g, rows), jax.make_jaxpr(use)(g.array, rows.array)
    assert str(ours) == str(theirs)
    np.testing.assert_array_equal(g[rows], DATA[[3, 1]])


def test_methods_are_documented_as_those_of_the_array() -> None:
    assert "keepdims" in inspect.signature(gda.GlobalArray.sum).parameters
    assert gda.GlobalArray.sum.__doc__.startswith("``sum`` of the ``jax.Array`` inside.\n\nSum of")
    assert gda.GlobalArray.T.__doc__.startswith("``T`` of the ``jax.Array`` inside.\n\nCompute")
    assert all(getattr(gda.GlobalArray, name).__doc__ for name in DELEGATED)


def test_attributes_missing_in_a_trace_are_no_attributes(auto_mesh: Mesh) -> None:
    def look(g: gda.GlobalArray) -> jax.Array:
        assert not hasattr(g, "sharding")  # nor has the tracer
        assert getattr(g, "spec", "unknown") == "unknown"
        return jnp.zeros_like(g) + jax.lax.full_like(g, 2)  # which ask for it so

    np.testing.assert_array_equal(jax.jit(look)(make(auto_mesh)), np.full((8, 2), 2))


def test_copies_share_and_deep_copies_do_not(mesh: Mesh) -> None:
    g = make(mesh)
    shallow, deep = copy.copy(g), copy.deepcopy(g)
    assert shallow.array is g.array
    assert (deep.mesh, deep.spec) == (g.mesh, g.spec)
    g.delete()
    assert shallow.is_deleted()
    np.testing.assert_array_equal(deep, DATA)
    assert g.local_shards[1].index == (slice(0, 2), slice(1, 2))
    keys = jax.random.split(jax.random.key(0), 8)
    g = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i: keys[i], copy=True)
    again = copy.deepcopy(g)
    g.delete()
    np.testing.assert_array_equal(jax.random.key_data(again.array), jax.random.key_data(keys))
    nothing = make(mesh, P("x", "y"), np.zeros((0, 8), np.float32))
    assert copy.deepcopy(nothing).spec == P("x", "y")


# Pickles.


# With weak types in tests/checkpoint/test_kinds_of_leaves.py.
def test_pickling_keeps_data_and_sharding(mesh: Mesh) -> None:
    pinned = SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host")
    for g in [
        make(mesh),
        make(mesh, P(None, "y")),
        make(mesh, P("x"), jnp.arange(8, dtype=jnp.bfloat16)),
        gda.GlobalArray.from_array(jax.device_put(DATA, jax.devices()[2])),
        gda.GlobalArray.from_array(jax.device_put(DATA, pinned)),
    ]:
        again = pickle.loads(pickle.dumps(g))
        np.testing.assert_array_equal(again, g)
        assert (again.dtype, again.sharding) == (g.dtype, g.sharding)
        assert again.array.sharding.memory_kind == g.array.sharding.memory_kind
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    g = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda index: keys[index])
    again = pickle.loads(pickle.dumps(g))
    assert (again.dtype, again.spec) == (keys.dtype, P("x"))
    np.testing.assert_array_equal(jax.random.key_data(again.array), jax.random.key_data(keys))


# Every block is here.


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_process_with_every_block_gives_the_whole_value(kind: AxisType) -> None:
    mesh = mesh_of({"x": 4, "y": 2}, kind)
    whole = make(mesh, P(None, "y"))
    assert not whole.is_fully_addressable
    assert not whole.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(whole), DATA)
    assert np.asarray(whole, np.int32).dtype == np.int32
    assert np.array_equal(safetensors.numpy.load(safetensors.flax.save({"w": whole}))["w"], DATA)
    for g in (whole, make(mesh, P())):
        if jax.process_index() in (1, 2):  # nothing waits for the others
            again = pickle.loads(pickle.dumps(g))
            assert again.sharding == g.sharding
            np.testing.assert_array_equal(again, DATA)
    part = make(mesh, P("x"))
    two = mesh_of({"x": 2})  # of process 0
    few = gda.GlobalArray.from_callback((8, 2), two, P(), DATA.__getitem__, dtype=DATA.dtype)
    for g in (part, few) if jax.process_index() else (part,):
        with pytest.raises(RuntimeError, match="this process does not hold every block of Global"):
            np.asarray(g)
    with pytest.raises(TypeError, match="by a process that does not hold every block of it"):
        pickle.dumps(part)


def test_unpickling_without_the_devices_names_them(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, device = pickle.dumps(make(mesh)), jax.devices()[0]
    monkeypatch.setattr(jax, "devices", lambda platform: [device])
    with pytest.raises(RuntimeError) as caught:
        pickle.loads(text)
    assert str(caught.value) == (
        "this array was pickled on 8 cpu devices, mesh {'x': 4, 'y': 2}; this process has 1, "
        "without those with id [1, 2, 3, 4, 5, 6, 7]. Unpickle it where they are"
    )


# Around something else than an array.


SHARDING = SingleDeviceSharding(jax.devices()[0])
ODD = [None, object(), SHARDING, DATA, jax.ShapeDtypeStruct((), "f4"), P("x"), np.dtype("int8")]
ODD += [0.5, True, np.float32(2), "label", optax.MaskedNode(), holding(DATA)]
SIMPLE = [leaf for leaf in ODD if not hasattr(leaf, "shape")]


def odd_leaves() -> st.SearchStrategy[Any]:
    """Return values that functions of trees put in the place of arrays, and trees of them."""
    return st.recursive(
        st.sampled_from(ODD),
        lambda leaf: st.lists(leaf, max_size=2) | st.dictionaries(st.sampled_from("ab"), leaf),
        max_leaves=3,
    )


@given(st.lists(odd_leaves(), min_size=3, max_size=3))
def test_a_tree_keeps_its_structure_around_any_leaves(leaves: list[Any]) -> None:
    tree = {"g": holding(DATA), "p": [holding(DATA, (7, 2)), DATA]}
    structure = jax.tree.structure(tree)
    made = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(made, is_leaf=lambda node: any(node is leaf for leaf in leaves)) == (
        structure
    )
    assert type(made["g"]) is gda.GlobalArray
    assert made["g"].array is leaves[0]
    assert made["p"][0].array is leaves[1]
    # As in jax.tree.map(f, params, decay) with a tree that was made of params.
    pairs = jax.tree.map(lambda one, other: (one, other), tree, made)
    assert jax.tree.structure(pairs, is_leaf=lambda node: type(node) is tuple) == structure


def test_a_container_of_nothing_is_refused_and_one_of_none_is_not() -> None:
    with pytest.raises(TypeError, match="takes global_shape, mesh, spec and device_buffers"):
        gda.GlobalArray()
    with pytest.raises(TypeError, match="got array= and other arguments"):
        gda.GlobalArray((8,), array=None)
    assert jax.tree.map(lambda _: None, holding(DATA)).array is None


@pytest.mark.parametrize("leaf", SIMPLE, ids=lambda leaf: type(leaf).__name__)
def test_a_container_of_no_array_has_no_layout_and_says_so(mesh: Mesh, leaf: object) -> None:
    g, p = holding(leaf), holding(leaf, (2,))
    assert repr(g) == f"GlobalArray(array={leaf!r})"
    for container in (g, p):
        assert container == copy.copy(container)
        with pytest.raises(AttributeError):
            container.dtype  # noqa: B018
    for container in (g, p):
        uses = [partial(container.reshard, mesh, P()), partial(copy.deepcopy, container)]
        names = ("mesh", "spec", "sharding", "grid", "local_shards")
        for use in [*uses, *(partial(getattr, container, name) for name in names)]:
            with pytest.raises(TypeError, match=r"holds a .* and no jax.Array, .*gda.to_numpy"):
                use()


def test_a_container_of_numpy_computes_and_has_no_layout(mesh: Mesh) -> None:
    g = make(mesh)
    on_host = jax.device_get(g)
    np.testing.assert_array_equal(np.asarray(on_host), DATA)
    np.testing.assert_array_equal(on_host + 1, DATA + 1)
    for name in ("mesh", "spec", "sharding", "grid", "local_shards"):
        with pytest.raises(TypeError, match=r"holds a ndarray and no jax.Array, .*gda.to_numpy"):
            getattr(on_host, name)


def test_abstract_values_keep_shape_and_sharding(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("x"))
    g = gda.GlobalArray.from_array(jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding))
    assert (g.shape, g.dtype, g.mesh, g.spec) == ((8, 2), np.float32, mesh, P("x"))
    assert [s.replica_id for s in g.local_shards] == [0, 1] * 4
    with pytest.raises(TypeError, match="holds a ShapeDtypeStruct and no jax.Array"):
        g.local_shards[0].data  # noqa: B018


def test_traced_over_explicit_axes_it_knows_its_layout(explicit_mesh: Mesh) -> None:
    seen = []

    def look(g: gda.GlobalArray) -> jax.Array:
        seen.append((repr(g), dict(g.mesh.shape), g.spec, g.local_shards[1]))
        with pytest.raises(
            TypeError, match="is being traced, so it has no data; compute on .array"
        ):
            g.local_shards[0].data  # noqa: B018
        return g + 1

    jax.jit(look)(make(explicit_mesh))
    ((text, shape, spec, shard),) = seen
    assert "spec=P('x', 'y')" in text
    assert (shape, spec) == ({"x": 4, "y": 2}, P("x", "y"))
    assert (shard.device, shard.index, shard.replica_id) == (None, (slice(0, 2), slice(1, 2)), 0)


def test_traced_over_auto_axes_error_names_another_way(auto_mesh: Mesh) -> None:
    def look(g: gda.GlobalArray) -> jax.Array:
        assert (g.shape, g.dtype, g.ndim, g.size) == ((8, 2), np.float32, 2, 16)
        assert repr(g) == "GlobalArray(shape=(8, 2), dtype=float32, traced)"
        for name in ("mesh", "spec", "sharding", "grid", "local_shards", "global_shards"):
            with pytest.raises(TypeError, match=r"over Auto axes\. .* gda\.constrain"):
                getattr(g, name)
        return g * 2

    np.testing.assert_array_equal(jax.jit(look)(make(auto_mesh)), DATA * 2)


def test_a_mesh_of_both_kinds_of_axes_is_treated_as_unknown_in_a_trace() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def look(g: gda.GlobalArray) -> jax.Array:
        with pytest.raises(TypeError, match="over Auto and Explicit axes"):
            g.spec  # noqa: B018
        return g + 1

    jax.jit(look)(make(mesh, P("x")))

"""Checkpoints: trees of every kind go out and come back."""

import dataclasses
import re
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda
from gda.checkpoint import restore, save

DATA = batch(16, 8)
LONG = "k" * 3000


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weights: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


def assert_same(restored: Any, saved: Any) -> None:
    """Compare trees: structure, types, shardings, and every bit."""
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for got, given in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert type(got) is type(given), (got, given)
        if isinstance(given, jax.Array):
            assert (got.sharding, got.committed) == (given.sharding, given.committed)
        if isinstance(given, jax.Array | np.ndarray | np.generic):
            assert (got.shape, got.dtype) == (given.shape, given.dtype)
            assert bits(got) == bits(given)
        elif given == given:
            assert got == given
        else:
            assert repr(got) == repr(given)


def bits(array: Any) -> bytes:
    array = array.array if isinstance(array, gda.GlobalArray) else array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def state(mesh: Mesh) -> dict[str, Any]:
    """Return the state of a training run: parameters, optimiser, key, step."""
    params = {
        "w": cut(DATA, mesh, P("x", "y")),
        "layers": [{"w": cut(DATA * n, mesh, P(None, "x")), "b": None} for n in range(2)],
    }
    adam = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0, 10))
    masked = optax.masked(optax.adam(1e-3), {"w": True, "layers": False})
    chain = optax.chain(optax.clip_by_global_norm(1.0), adam, masked)
    return {
        "params": params,
        "optimiser": optax.MultiSteps(chain, 4).init(params),
        "key": jax.random.key(3),
        "step": 7,
    }


# Trees.


def test_a_training_state_comes_back_as_it_was(mesh: Mesh, tmp_path: Path) -> None:
    tree = state(mesh)
    save(tmp_path / "run", tree)
    assert_same(restore(tmp_path / "run", tree), tree)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        {**tree, "step": jnp.int32(7)},
    )
    shapes["step"] = 0
    restored = restore(tmp_path / "run", shapes)
    assert_same(restored["params"], tree["params"])
    assert restored["step"] == 7
    abstract = gda.abstract(shapes, mesh_of({"z": 2}), P())
    elsewhere = restore(tmp_path / "run", abstract)["optimiser"]
    assert jax.tree.structure(elsewhere) == jax.tree.structure(tree["optimiser"])
    for got, given in zip(*map(jax.tree.leaves, (elsewhere, tree["optimiser"])), strict=True):
        assert got.sharding.mesh.shape == {"z": 2}
        np.testing.assert_array_equal(got, given)


TREES: dict[str, tuple[Any, Any]] = {
    "an array alone": (np.arange(3), np.arange(3)),
    "a number alone": (5, 5),
    "None": (None, None),
    "nothing in a tuple": ((), ()),
    "empty containers": ({"a": {}, "b": [], "c": (), "d": None}, ...),
    "nested": ({"a": [{"b": (1, [2, {"c": 3.5}])}, "x"]}, ...),
    "integer keys": ({1: "a", -20: {0: "b"}}, ...),
    "slashes, dots, other alphabets": ({"a/b": 1, "../c": 2, "ключ": 3, "": 4, "\0": 5}, ...),
    "half a character": ({"\ud800": "\udfff"}, ...),
    "a very long key": ({LONG: np.arange(3), LONG + "2": np.arange(4)}, ...),
    "a named tuple": (Pair(1, None), {"first": 1, "second": None}),
    "a named tuple in it": (
        Pair(Pair((), 2), []),
        {"first": {"first": (), "second": 2}, "second": []},
    ),
    "a dataclass": (Layer(None, 2.0, "b"), {"weights": None, "bias": 2.0}),
    "a dataclass without leaves": (Layer({}, optax.EmptyState()), {"weights": {}, "bias": {}}),
    "ordered": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "a dict with defaults": (defaultdict(list, {"a": [1]}), {"a": [1]}),
}


def test_trees_without_and_with_like(tmp_path: Path) -> None:
    for tree, plain in TREES.values():
        save(tmp_path, tree, overwrite=True)
        assert_same(restore(tmp_path), tree if plain is ... else plain)
        assert_same(restore(tmp_path, tree), tree)


VALUES = [
    *(True, False, 0, -(10**5000), 2**999),
    *(1.5, float("inf"), float("-inf"), float("nan"), -0.0, 5e-324),
    *(complex(1, -2), complex(float("nan"), float("-inf")), complex(-0.0, 0.0)),
    *(
        "",
        "text",
        "\ud800 \udfff",
        "\ud83d\ude00",
        "\U0001f600",
        "\0\n",
        "x" * 100_000,
        b"",
        b"\xff\0" * 1000,
    ),
]


def test_values_come_back_with_their_types(tmp_path: Path) -> None:
    save(tmp_path, VALUES)
    restored = restore(tmp_path)
    assert_same(restored, VALUES)
    found, given = ([repr(x) for x in each if type(x) is not int] for each in (restored, VALUES))
    assert found == given  # -0.0 and NaN too
    assert len(str(gda.checkpoint.verify(tmp_path)).splitlines()) > len(VALUES)
    save(tmp_path, {"flag": True, "count": 1}, overwrite=True)
    with pytest.raises(ValueError, match=re.escape("at flag, it has the bool True, and like")):
        restore(tmp_path, {"flag": 1, "count": 1})


def test_numpy_arrays_of_any_order(tmp_path: Path) -> None:
    base = batch(6, 8)
    tree = {
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::-3],
        "transposed": base.T,
        "big endian": base.astype(">f4"),
        "big endian integers": np.arange(5, dtype=">i8"),
        "broadcast": np.broadcast_to(base[0], (3, 8)),
        "read-only": base.view(),
        "0-d": np.array(3.5),
        "nothing": np.zeros((0, 3)),
        "wide": np.arange(3),
        "special": np.array([np.nan, -np.inf, -0.0, 1e-45], np.float32),
        "complex": np.array([complex(np.nan, 1), complex(1, -np.inf)]),
        "flags": np.array([True, False]),
    }
    tree["read-only"].flags.writeable = False
    save(tmp_path, tree)
    restored = restore(tmp_path)
    for key, given in tree.items():
        native = given.dtype.newbyteorder("=")
        assert (restored[key].dtype, restored[key].shape) == (native, given.shape)
        assert bits(restored[key]) == bits(np.ascontiguousarray(given, native).reshape(given.shape))
        assert restored[key].flags.writeable
    assert restore(tmp_path, tree)["big endian"].dtype == np.float32


def test_numbers_of_numpy_come_back_as_such(tmp_path: Path) -> None:
    numbers = {"a": np.float32(1.5), "b": np.int64(2**40), "c": np.bool_(True), "d": np.float64(2)}
    tree = numbers | {"e": np.str_("e"), "f": np.bytes_(b"f")}
    save(tmp_path, tree)
    mesh = mesh_of({"x": 8})
    for restored in (
        restore(tmp_path),
        restore(tmp_path, tree),
        restore(tmp_path, mesh=mesh, specs=P()),
    ):
        kinds = {key: type(value) for key, value in restored.items()}
        assert kinds == {key: type(value) for key, value in tree.items()} | {"e": str, "f": bytes}
        assert restored == tree


def test_a_saved_number_is_what_its_example_is(mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"step": 7, "rate": 0.5})
    over = NamedSharding(mesh, P())
    examples = [
        np.int64(0),
        np.uint8(0),
        np.array(0, np.int16),
        jnp.int32(0),
        jax.device_put(jnp.int32(0), over),
        jax.device_put(jnp.int32(0), jax.devices()[3]),
        gda.GlobalArray.from_array(jax.device_put(jnp.int32(0), over)),
        jax.ShapeDtypeStruct((), np.int8, sharding=over),
    ]
    for example in examples:
        step = restore(tmp_path, {"step": example}, partial=True)["step"]
        if not isinstance(example, jax.ShapeDtypeStruct):
            assert type(step) is type(example)
        assert (step.dtype, step.shape, int(step)) == (example.dtype, (), 7)
        if hasattr(example, "sharding"):
            assert step.sharding == example.sharding
        if isinstance(example, jax.Array):
            assert step.committed == example.committed
    rate = restore(tmp_path, {"rate": np.float16(0)}, partial=True)["rate"]
    assert (type(rate), float(rate)) == (np.float16, 0.5)


def test_missing_leaves_are_kept(auto_mesh: Mesh, tmp_path: Path) -> None:
    w = cut(batch(8), auto_mesh, P("x"))
    save(tmp_path, {"w": w, "step": 3})
    like = {"w": w, "step": 0, "lora": jnp.ones(2), "new": {"rate": 0.5, "numpy": batch(2)}}
    restored = restore(tmp_path, like, missing="keep")
    assert restored["step"] == 3
    assert restored["lora"] is like["lora"]
    assert restored["new"] == like["new"]
    # Layouts of the whole of ``like`` also name leaves that the checkpoint lacks.
    specs = {"w": P(), "lora": P(), "new": {"numpy": P()}}
    moved = restore(tmp_path, like, mesh=auto_mesh, specs=specs, missing="keep")
    assert moved["w"].spec == P()
    assert moved["lora"] is like["lora"]
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    gone = jnp.ones(2)
    gone.delete()
    for empty, what in ((shape, "a jax.ShapeDtypeStruct"), (gone, "a deleted array")):
        with pytest.raises(ValueError, match=rf"at lora, it has no such leaf, .* {what}"):
            restore(tmp_path, {"w": w, "lora": empty}, partial=True, missing="keep")
    with pytest.raises(ValueError, match="has no leaf of like, so nothing would be restored"):
        restore(tmp_path, {"v": w}, partial=True, missing="keep")


def test_arrays_on_one_device_go_back_to_it(tmp_path: Path) -> None:
    device = jax.devices()[3]
    tree = {
        "committed": jax.device_put(batch(4), device),
        "uncommitted": jnp.asarray(batch(4)),
        "scalar": jnp.float32(2),
        "contained": gda.GlobalArray.from_array(jax.device_put(batch(4), device)),
        "jitted": jax.jit(lambda: gda.GlobalArray.from_array(jnp.ones(3)))(),
    }
    save(tmp_path, tree)
    assert_same(restore(tmp_path, tree), tree)
    struct = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(device))
    restored = restore(tmp_path, {"committed": struct}, partial=True)["committed"]
    assert (restored.devices(), restored.committed) == ({device}, True)


def test_arrays_that_jit_lays_out(auto_mesh: Mesh, tmp_path: Path) -> None:
    """Some versions of JAX give these shardings that name no mesh."""
    keys = jax.random.split(jax.random.key(0), 16)
    over_x = NamedSharding(auto_mesh, P("x"))
    fold = jax.jit(lambda x: x.reshape(2, 8, *x.shape[1:]).swapaxes(0, 1))
    tree = {"a": fold(jax.device_put(DATA, over_x)), "k": fold(jax.device_put(keys, over_x))}
    save(tmp_path, tree)
    for arguments in ({}, {"mesh": auto_mesh, "specs": P("y")}):
        restored = restore(tmp_path, **arguments)
        for name, given in tree.items():
            assert restored[name].dtype == given.dtype
            assert bits(restored[name]) == bits(given)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prng_keys(mesh: Mesh, tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(5, impl=impl), 8)
    sharded = jax.device_put(keys, NamedSharding(mesh, P("x")))
    tree = {
        "one": keys[0],
        "many": keys.reshape(2, 4),
        "sharded": sharded,
        "contained": gda.GlobalArray.from_array(sharded),
        "old": jax.random.key_data(keys[1]),
    }
    save(tmp_path, tree)
    assert_same(restore(tmp_path, tree), tree)
    specs = dict(zip(tree, [P(), P("y", "x"), P(("x", "y")), P("y"), P()], strict=True))
    restored = restore(tmp_path, mesh=mesh, specs=specs)
    plain = restore(tmp_path)
    for key, given in tree.items():
        for got in (restored[key], plain[key]):
            assert (got.dtype, got.shape, bits(got)) == (given.dtype, given.shape, bits(given))
        assert restored[key].sharding.is_equivalent_to(NamedSharding(mesh, specs[key]), given.ndim)


# Onto layouts.


def test_kinds_are_of_numpy_or_containers_or_those_of_like(auto_mesh: Mesh, tmp_path: Path) -> None:
    save(tmp_path, {"g": cut(DATA, auto_mesh, P("x")), "a": jnp.asarray(DATA), "n": DATA})
    sharding = NamedSharding(auto_mesh, P("y"))
    struct = jax.ShapeDtypeStruct(DATA.shape, DATA.dtype, sharding=sharding)
    abstract = {"g": DATA, "a": gda.GlobalArray.from_array(struct), "n": struct}
    for arguments, kinds in [
        ({}, (np.ndarray,) * 3),
        ({"mesh": auto_mesh, "specs": P("y")}, (gda.GlobalArray,) * 3),
        ({"like": abstract}, (np.ndarray, gda.GlobalArray, jax.Array)),
    ]:
        restored = restore(tmp_path, **arguments)
        for name, kind in zip("gan", kinds, strict=True):
            assert isinstance(restored[name], kind)
            assert kind is np.ndarray or restored[name].sharding == sharding
            np.testing.assert_array_equal(restored[name], DATA)


def test_shardings_in_place_of_mesh_and_specs(mesh: Mesh, tmp_path: Path) -> None:
    tree = {"a": cut(DATA, mesh, P("x")), "b": {"c": DATA, "d": jnp.ones(())}, "step": 3}
    save(tmp_path, tree)
    other = mesh_of({"z": 8})
    everywhere = NamedSharding(other, P())
    shardings = {"a": NamedSharding(mesh, P("y", "x")), "b": everywhere}  # a prefix
    restored = restore(tmp_path, mesh=shardings)
    assert restored["a"].sharding == shardings["a"]
    assert restored["b"]["d"].sharding == everywhere
    assert isinstance(restored["b"]["c"], jax.Array)
    np.testing.assert_array_equal(restored["a"], DATA)
    device = SingleDeviceSharding(jax.devices()[3])
    restored = restore(tmp_path, mesh=device, at=["b"])
    for value in restored.values():
        assert value.sharding.device_set == device.device_set


def test_donated_arrays_as_like(mesh: Mesh, tmp_path: Path) -> None:
    tree = {"g": cut(DATA, mesh, P("x")), "a": jnp.asarray(DATA)}
    save(tmp_path, tree)
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    restored = restore(tmp_path, tree)
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings
    np.testing.assert_array_equal(restored["g"], DATA)


# Parts.


def test_a_part_of_the_tree(auto_mesh: Mesh, tmp_path: Path) -> None:
    tree = state(auto_mesh)
    save(tmp_path, tree)
    restored = restore(tmp_path, tree["params"], at=["params"])
    assert_same(restored, tree["params"])
    assert_same(restore(tmp_path, tree["params"]["w"], at=("params", "w")), tree["params"]["w"])
    layer = restore(tmp_path, at=["params", "layers", 1], mesh=auto_mesh, specs={"w": P("y")})
    assert (layer["w"].spec, layer["b"]) == (P("y"), None)
    assert restore(tmp_path, at=["params", "layers", 0, "b"]) is None
    assert restore(tmp_path, at=["optimiser", "mini_step"]) == 0
    like = {"params": {"w": tree["params"]["w"]}, "step": 0}
    assert_same(restore(tmp_path, like, partial=True), {**like, "step": 7})

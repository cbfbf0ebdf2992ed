"""Trees of plain arrays and of containers, with numbers, keys and strings, in every function."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, ordered_mesh

import gda

MESH = mesh_of({"x": 4, "y": 2})
TWO = mesh_of({"z": 2})
DATA = batch(8, 4)
KEYS = jax.random.wrap_key_data(np.arange(12, dtype=np.uint32).reshape(6, 2))
VALUES = [3, 2.5, True, 1j, "adam", b"b", np.float32(0.5), np.bool_(True), np.str_("s"), None]


def kind_of(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        return "keys" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else "array"
    return type(leaf).__name__


def leaves_of(tree: Any) -> list[Any]:
    return jax.tree.leaves(
        tree, is_leaf=lambda node: isinstance(node, gda.GlobalArray | gda.PaddedArray)
    )


def kinds(tree: Any) -> list[str]:
    return [kind_of(leaf) for leaf in leaves_of(tree)]


def without_keys(tree: Any) -> list[Any]:
    """Return the leaves, with the data of keys."""
    arrays = jax.tree.leaves(tree)
    return [jax.random.key_data(leaf) if kind_of(leaf) == "keys" else leaf for leaf in arrays]


# Trees of training programs.


def nnx_state() -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    return nnx.state(Model(nnx.Rngs(0)))


def train_state() -> Any:
    from flax.training.train_state import TrainState

    params = {"w": jnp.asarray(DATA), "b": jnp.ones(8)}
    return TrainState.create(apply_fn=print, params=params, tx=optax.adam(1e-3))


def optax_state() -> Any:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(schedule))
    masked = optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "b": False})
    params = {"w": jnp.asarray(DATA), "b": jnp.ones(8)}
    return {"chain": tx.init(params), "masked": masked.init(params), "name": "adam", "no": None}


@pytest.mark.parametrize(
    ("make", "plain"), [(nnx_state, True), (train_state, False), (optax_state, True)]
)
@pytest.mark.filterwarnings("ignore:jax.(array_ref|ArrayRef):DeprecationWarning")
def test_states_of_libraries_go_through_everything(
    make: Callable[[], Any], plain: bool, tmp_path: Path
) -> None:
    given = make()
    expected = ["GlobalArray" if kind == "array" and not plain else kind for kind in kinds(given)]
    plain_given = without_keys(given)

    def check(tree: Any, kinds_of_it: list[str] = expected) -> Any:
        assert kinds(tree) == kinds_of_it
        assert jax.tree.structure(gda.to_jax(tree)) == jax.tree.structure(given)
        same = jax.tree.map(np.array_equal, *map(gda.to_numpy, (without_keys(tree), plain_given)))
        assert all(jax.tree.leaves(same))
        return tree

    placed = check(gda.load_tree(given, TWO, P(), plain=plain))
    check(gda.reshard_tree(placed, ordered_mesh([1, 0], {"z": 2}), P()))
    check(gda.constrain(placed, P()))
    check(gda.to_jax(placed), kinds(given))
    check(gda.to_numpy(placed), ["ndarray" if kind == "array" else kind for kind in kinds(given)])
    check(*gda.prefetch([given], TWO, P(), plain=plain))
    gda.check_replicas_agree(placed)
    assert jax.tree.leaves(gda.fingerprint(placed)) == jax.tree.leaves(gda.fingerprint(given))
    gda.checkpoint.save(tmp_path, placed)
    check(gda.checkpoint.restore(tmp_path, placed))


# Numbers, strings and None.


def restored(tree: Any, mesh: Mesh, specs: Any, folder: Path) -> Any:
    gda.checkpoint.save(folder, tree, overwrite=True)
    return gda.checkpoint.restore(folder, mesh=mesh, specs=specs)


WAYS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "load_tree": lambda tree, specs, _: gda.load_tree(tree, MESH, specs),
    "reshard_tree": lambda tree, specs, _: gda.reshard_tree(tree, MESH, specs),
    "prefetch": lambda tree, specs, _: next(gda.prefetch([tree], MESH, specs)),
    "restore": lambda tree, specs, folder: restored(tree, MESH, specs, folder),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_values_stay_and_need_no_spec(way: Any, tmp_path: Path) -> None:
    arrays = {"w": jnp.asarray(DATA), "key": KEYS}
    tree = {"values": VALUES, **arrays}
    asked = []

    def by_function(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        asked.append((path, leaf.shape))
        return P("y")

    for specs in (P("y"), {"values": None, "w": P("y"), "key": P("y")}, by_function):
        made = way(tree, specs, tmp_path)
        assert [type(each) for each in made["values"]][:7] == [type(each) for each in VALUES][:7]
        assert made["values"] == VALUES
        assert tuple(made["w"].sharding.spec) == tuple(made["key"].sharding.spec) == ("y",)
        assert np.array_equal(made["w"], DATA)
        assert np.array_equal(*map(jax.random.key_data, (made["key"], KEYS)))
    assert asked == [("key", (6,)), ("w", (8, 4))]
    with pytest.raises(ValueError, match=r"nothing for w\b"):
        way(tree, {"values": P(), "key": P()}, tmp_path)


def test_values_stay_in_functions_without_specs() -> None:
    placed = gda.load_tree({"values": VALUES, "w": DATA}, MESH, P("x"))
    for made in (
        gda.to_numpy(placed),
        gda.to_jax(placed),
        gda.fingerprint(placed),
        gda.constrain(placed, P("y")),
        gda.constrain(placed, {"values": None, "w": P("y")}),
    ):
        assert all(a is b for a, b in zip(made["values"], VALUES, strict=True))
    gda.check_replicas_agree(placed)


def test_keys_get_the_layout_of_the_keys() -> None:
    contained = gda.GlobalArray.from_array(KEYS)
    for source, layout, kind in (
        (KEYS, (MESH, P("y")), "keys"),
        (contained, (MESH, P("y")), "GlobalArray"),
        (contained, (NamedSharding(MESH, P("y")),), "keys"),
    ):
        made = gda.load_tree({"key": source}, *layout, dtype="bfloat16")["key"]
        assert kind_of(made) == kind
        assert (made.shape, made.dtype) == (KEYS.shape, KEYS.dtype)
        assert {shard.data.shape for shard in made.addressable_shards} == {(3,)}
        assert gda.fingerprint(made) == gda.fingerprint(KEYS)
    padded = gda.load_tree(KEYS, MESH, P("x"), pad=True)
    assert (padded.shape, padded.array.shape) == ((6,), (8,))
    with pytest.raises(ValueError, match=r"dimension 0 of size 6 is sharded 4 ways") as caught:
        gda.load_tree({"key": KEYS}, MESH, P("x"))
    assert caught.value.__notes__ == ["gda: at key of the tree"]
    with pytest.raises(ValueError, match=r"2 entries, but global shape \(6,\) has 1 dimension"):
        gda.load_tree({"key": KEYS}, MESH, P("y", "x"))
    assert kind_of(gda.to_numpy(gda.GlobalArray.from_array(KEYS))) == "keys"


# Plain arrays.


def test_sources_inside_containers_become_plain_arrays_too() -> None:
    params = {"w": gda.load_tree({"w": DATA}, TWO, P())["w"]}
    sources = jax.tree.map(lambda _: gda.storage.lazy(DATA), params)
    assert isinstance(gda.load_tree(sources, TWO, P())["w"], gda.GlobalArray)
    made = gda.load_tree(sources, TWO, P(), plain=True)["w"]
    assert isinstance(made, jax.Array)
    np.testing.assert_array_equal(made, DATA)


def test_shardings_make_plain_arrays_and_a_mesh_makes_containers(tmp_path: Path) -> None:
    sharding, tree = NamedSharding(MESH, P("x")), {"w": DATA}
    gda.checkpoint.save(tmp_path, tree)

    def made(*given: Any, **options: Any) -> set[type]:
        layout = dict(zip(("mesh", "specs"), given, strict=False))
        loaded = gda.load_tree(tree, *given, **options)
        with gda.prefetch([tree], *given, **options) as batches:
            (batch,) = batches
        restored = gda.checkpoint.restore(tmp_path, **layout, **options)
        return {type(each["w"]) for each in (loaded, batch, restored)}

    plain = {type(jax.device_put(DATA, sharding))}
    assert made(sharding) == made({"w": sharding}) == made(MESH, P("x"), plain=True) == plain
    assert made(MESH, P("x")) == made(sharding, plain=False) == {gda.GlobalArray}
    assert type(gda.load_tree(tree, sharding, pad=True)["w"]) is gda.GlobalArray
    like = {"w": gda.GlobalArray.from_array(jax.device_put(DATA, sharding))}
    as_it_is = gda.checkpoint.restore(tmp_path, like, mesh={"w": sharding})["w"]
    assert type(as_it_is) is gda.GlobalArray


def test_to_jax_copies_nothing_and_names_padding() -> None:
    g, other = cut(DATA, MESH, P("x")), object()
    tree = {"g": [g], "x": g.array, "n": DATA, "o": other}
    made = gda.to_jax(tree)
    assert made["g"][0] is g.array
    assert all(made[name] is tree[name] for name in "xno")
    padded = gda.PaddedArray.from_source(batch(6), MESH, P("x"))
    with pytest.raises(ValueError, match=r"Take p.filled\(value\) or p.array") as caught:
        gda.to_jax({"a": [padded]})
    assert caught.value.__notes__ == ["gda: at a/0 of the tree"]


def test_each_leaf_stays_what_it_is() -> None:
    g = cut(DATA, MESH, P("x"))
    struct = jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=g.sharding)
    tree = {"plain": g.array, "contained": g}
    for made in (gda.reshard_tree(tree, TWO, P("z")), gda.constrain(tree, P("y"))):
        assert kinds(made) == ["GlobalArray", "array"]
        assert gda.fingerprint(made) == gda.fingerprint(tree)
    with tempfile.TemporaryDirectory() as folder:
        saved = {"a": g, "b": g.array, "c": g, "d": g}
        gda.checkpoint.save(folder, saved)
        like = {"a": g.array, "b": g, "c": struct, "d": DATA}
        made = gda.checkpoint.restore(folder, like)
        assert kinds(made) == ["array", "GlobalArray", "array", "ndarray"]
        made = gda.checkpoint.restore(folder, like, plain=True)
        assert kinds(made) == ["array", "array", "array", "ndarray"]
        assert gda.fingerprint(made) == gda.fingerprint(saved)
        assert kinds(gda.checkpoint.restore(folder)) == ["ndarray"] * 4


def test_plain_refuses_padding_before_anything_is_read(tmp_path: Path) -> None:
    def unread(*_: Any) -> Any:
        raise AssertionError("read")

    gda.checkpoint.save(tmp_path, {"a": DATA})
    next(tmp_path.glob("data-*/*/c.*")).unlink()
    padded = {"a": gda.PaddedArray.from_source(DATA[:6], MESH, P("x"))}
    restore = gda.checkpoint.restore
    both = "plain=True and pad=True exclude each other"
    for call, message in [
        (lambda **options: gda.load_tree({"a": DATA}, MESH, unread, **options), both),
        (lambda **options: restore(tmp_path, mesh=MESH, specs=P(), **options), both),
        (lambda **_: restore(tmp_path, padded, plain=True), "a PaddedArray of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(plain=True, pad=True)
    with pytest.raises(TypeError, match="plain was given without a mesh; pass mesh= and specs="):
        restore(tmp_path, plain=True)


def test_a_state_that_was_trained_is_restored_into_a_fresh_one(tmp_path: Path) -> None:
    fresh = train_state()
    grads = jax.tree.map(jnp.ones_like, fresh.params)
    trained = jax.jit(lambda state: state.apply_gradients(grads=grads))(fresh)
    assert isinstance(trained.step, jax.Array)
    gda.checkpoint.save(tmp_path, trained)
    made = gda.checkpoint.restore(tmp_path, fresh)
    assert type(made.step) is int
    assert made.step == 1
    assert gda.fingerprint(made.params) == gda.fingerprint(trained.params)
    with pytest.raises(ValueError, match=r"at step, it has an array of shape \(\), and like"):
        gda.checkpoint.restore(tmp_path, fresh.replace(step=0.5))


# Fingerprints of trees.


def test_fingerprints_find_the_leaf_that_differs() -> None:
    padded = gda.PaddedArray.from_source(batch(6), MESH, P("x"))
    tree = {"g": cut(DATA, MESH, P("x")), "p": [padded], "n": DATA, "key": KEYS, "step": 3}
    digests = gda.fingerprint(tree)
    assert digests == {
        "g": gda.fingerprint(DATA),
        "p": [gda.fingerprint(batch(6))],
        "n": gda.fingerprint(DATA),
        "key": gda.fingerprint(KEYS),
        "step": 3,
    }
    other = DATA.copy()
    other[3, 2] += 1
    tree["g"] = cut(other, MESH, P("x"))
    changed = gda.fingerprint(tree)
    assert [name for name in digests if changed[name] != digests[name]] == ["g"]
    deleted = cut(DATA, MESH, P("x"))
    deleted.delete()
    for leaf, error in (
        (deleted, RuntimeError),
        (object(), TypeError),
        (deleted.array, RuntimeError),
    ):
        with pytest.raises(error) as caught:
            gda.fingerprint({"a": [leaf]})
        assert caught.value.__notes__ == ["gda: at a/0 of the tree"]
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: gda.fingerprint([x]))(DATA)


@pytest.mark.processes(2, devices=4)
def test_fingerprints_of_shared_arrays_are_compared_once_in_all_processes() -> None:
    me = jax.process_index()
    mesh = ordered_mesh([0, 4, 1, 5, 2, 6, 3, 7], {"x": 4, "y": 2})
    tree = {
        "rows": cut(DATA, mesh, P("x")).array,
        "padded": gda.PaddedArray.from_source(batch(6), mesh, P("x")),
        "own": np.full(3, me),
        "here": jnp.full(5, me),
        "step": me,
    }
    digests = gda.fingerprint(tree)
    assert digests["rows"] == gda.fingerprint(DATA)
    assert digests["padded"] == gda.fingerprint(batch(6))
    assert digests["own"] == gda.fingerprint(np.full(3, me))
    assert digests["here"] == gda.fingerprint(np.full(5, me, np.int32))
    assert digests["step"] == me
    columns = cut(DATA, mesh, P("y")).array
    tree = {"rows": tree["rows"] if me else columns}
    with pytest.raises(gda.DisagreementError, match=r"at rows, process 0: spec P\('y'\)"):
        gda.fingerprint(tree)
    if me:
        tree["rows"].delete()
    with pytest.raises(RuntimeError if me else gda.DisagreementError, match="deleted"):
        gda.fingerprint(tree)


# Messages.


def test_mistakes_name_their_successor(tmp_path: Path) -> None:
    for step in (200, 1000, 100):
        gda.checkpoint.save(tmp_path / f"step-{step}", {"a": DATA})
    (tmp_path / "log").mkdir()
    message = "itself; it has the checkpoints step-1000; step-200; step-100. Pass one of them"
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError, match=message):
        gda.checkpoint.restore(tmp_path)

"""Every function that takes arrays, under settings of JAX with which the user's own code is strict.

The transfers were asked for, and gda's own programs do not follow the rules of the user's.
"""

import copy
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of
from test_plain_page import CALLS, called

import gda

MESH = mesh_of({"x": 4, "y": 2})
DATA, ODD = batch(8, 4), batch(5, 4)
WEAK = jnp.asarray(2.0)
NIBBLES = cut(batch(8, 4, dtype=np.int8), MESH, P("x")).astype(jnp.int4)
KEYS = gda.GlobalArray.from_array(jax.random.split(jax.random.key(0), 8))
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
BLOCK = jax.device_put(DATA[:2])
REF = jax.new_ref(jnp.arange(8.0))
SAVED = tempfile.mkdtemp()
gda.checkpoint.save(SAVED, {"keys": KEYS}, overwrite=True)

# Others, of arrays on the host, and of containers.
MORE: list[Callable[[gda.GlobalArray, gda.PaddedArray], object]] = [
    lambda g, p: gda.load_tree({"w": DATA, "n": np.arange(8), "odd": ODD}, MESH, P("x"), pad=True),
    lambda g, p: gda.load_tree(DATA, MESH, P("x"), max_workers=2),
    lambda g, p: gda.GlobalArray.from_callback((8, 4), MESH, P("x"), DATA.__getitem__),
    lambda g, p: gda.GlobalArray.from_callback((8, 4), MESH, P(), g.array.__getitem__),
    lambda g, p: gda.GlobalArray.from_batched_callback(
        (8, 4), MESH, P("x"), lambda indices: [DATA[index].tolist() for index in indices]
    ),
    lambda g, p: gda.GlobalArray.from_process_local(DATA, MESH, P("x")),
    lambda g, p: gda.GlobalArray.from_process_local(g.array, MESH, P("y"), dtype="bf16"),
    lambda g, p: gda.PaddedArray.from_callback((5, 4), MESH, P("x"), ODD.__getitem__),
    lambda g, p: (p.mask(), p.filled(1), p.fingerprint(), p.reshard(P("y")), p.gather()),
    lambda g, p: [np.asarray(shard.data) for each in (g, p) for shard in each.local_shards],
    lambda g, p: (g.gather(), g.fingerprint(), g.reshard(P(None, "y"), max_device_bytes=1)),
    lambda g, p: (copy.deepcopy([g, p]), pickle.loads(pickle.dumps([g, p]))),
    lambda g, p: (copy.deepcopy(KEYS), pickle.loads(pickle.dumps(KEYS))),
    lambda g, p: next(gda.prefetch([{"w": DATA}], MESH, P("x"))),
    lambda g, p: gda.compat.host_local_array_to_global_array(DATA, MESH, P("x")),
    lambda g, p: gda.check_replicas_agree({"g": g, "p": p, "large": large()}),
    lambda g, p: gda.fingerprint({"p": p, "large": large()}),
    lambda g, p: (np.asarray(gda.storage.lazy(g).T[1:]), np.asarray(gda.storage.lazy(g.array))),
    lambda g, p: saved({"nibbles": NIBBLES, "keys": KEYS, "p": p}),
    lambda g, p: gda.GlobalArray.from_source(KEYS, MESH, P("y")),
    # On CPU only these are copied to the host, as all are on accelerators.
    lambda g, p: gda.load_tree([NIBBLES, gda.storage.lazy(NIBBLES)[1:]], MESH, P(None, "y")),
    lambda g, p: pulled({"nibbles": NIBBLES}),
    lambda g, p: gda.GlobalArray.from_callback((), MESH, P(), lambda _: WEAK),
    lambda g, p: gda.GlobalArray.from_callback(
        (8, 4), MESH, P("x"), lambda _: BLOCK, dtype="bfloat16"
    ),
    lambda g, p: gda.GlobalArray.from_source(gda.storage.lazy(REF), MESH, P("y")),
    lambda g, p: gda.to_numpy(REF),
    lambda g, p: (gda.GlobalArray.from_source(KEYS, EXPLICIT, P("y")), gda.checkpoint.open(SAVED)),
    lambda g, p: gda.reshard_tree({"k": KEYS, "p": p}, mesh_of({"a": 2}), P("a"), pad=True),
    lambda g, p: p.reshard(EXPLICIT, P("y")).filled(np.nan),
]

# Meshes of other devices than those of the arrays.
OTHERS = [
    Mesh(np.array(jax.devices()[7:3:-1]), ("other",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
]


def saved(tree: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        gda.checkpoint.save(folder, tree)
        return gda.checkpoint.restore(folder, mesh=MESH, specs=P())


def pulled(tree: Any) -> object:
    with gda.offer(tree) as offer:
        return gda.pull(offer.address, like=tree)


def large() -> gda.GlobalArray:
    return gda.GlobalArray.from_process_local(np.ones((512, 64), np.float16), MESH, P("x"))


def ways_under(set_mesh: Mesh) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls of all functions, by their texts or numbers, under a mesh."""
    g = cut(DATA, MESH, P("x"))
    p = gda.PaddedArray.from_source(ODD, MESH, P("x"))
    trees: list[dict[str, Any]] = [
        {"w": g, "b": jax.device_put(jnp.ones((8, 4), jnp.bfloat16), g.sharding)},
        {"w": g.array, "key": jax.random.split(jax.random.key(0), 8)},
    ]
    for call, (number, x) in itertools.product(CALLS, enumerate(trees)):
        yield f"{call} of tree {number}", lambda call=call, x=x: called(call, x, set_mesh)

    def one_more(way: Callable[[gda.GlobalArray, gda.PaddedArray], object]) -> object:
        with jax.set_mesh(set_mesh):
            return way(g, p)

    for number, way in enumerate(MORE):
        yield f"MORE[{number}]", lambda way=way: one_more(way)


def described(way: Callable[[], object]) -> list[Any]:
    """Return kinds, layouts and values of what a call returns; of an error its class."""
    try:
        leaves = jax.tree.leaves(jax.block_until_ready(way()))
    except (TypeError, ValueError, AttributeError) as error:
        return [type(error)]
    return [
        (
            type(leaf),
            getattr(leaf, "sharding", None),
            getattr(leaf, "weak_type", None),
            bits_of(leaf),
        )
        for leaf in leaves
    ]


def bits_of(leaf: Any) -> bytes | None:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes() if isinstance(leaf, jax.Array | np.ndarray) else None


@pytest.mark.parametrize("other", OTHERS, ids=["auto", "explicit"])
def test_the_mesh_of_the_user_changes_no_result(other: Mesh) -> None:
    own, under = dict(ways_under(MESH)), dict(ways_under(other))
    # The functions f, which are given to some, are the user's, and compute under that mesh.
    results = {name: described(way) for name, way in own.items() if "(f" not in name}
    assert [
        name for name in results if [*map(type, results[name])] == [type] and "MORE" in name
    ] == []
    changed = [name for name in results if described(under[name]) != results[name]]
    assert changed == []


def test_a_mask_has_its_layout_where_jit_is_disabled() -> None:
    for mesh in (MESH, EXPLICIT):
        p = gda.PaddedArray.from_source(ODD, mesh, P("x"))
        with jax.disable_jit():
            mask = p.mask()
        assert mask.sharding == p.sharding


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_no_function_is_stopped_by_settings_of_the_user(guard: str) -> None:
    failures = {}
    for name, way in ways_under(MESH):
        try:
            with jax.transfer_guard(guard), jax.numpy_rank_promotion("raise"):
                jax.block_until_ready(way())
        except Exception as error:
            if "isallow" in str(error) or "rank_promotion" in str(error):
                failures[name] = str(error)
    assert failures == {}


def test_values_that_are_not_finite_may_be_moved_where_jax_looks_for_them() -> None:
    data = np.array([1, np.nan, np.inf, 4, 5], np.float32)
    p = gda.PaddedArray.from_source(data, MESH, P("x"))
    whole = gda.GlobalArray.from_source(np.resize(data, 8), MESH, P("x"))
    ref = jax.new_ref(whole.array)
    with jax.debug_nans(True), jax.debug_infs(True):
        assert np.isnan(p.filled(np.nan)).sum() == 4
        assert np.isinf(p.filled(-np.inf)).sum() == 4
        for moved in (p.reshard(P("y")), pickle.loads(pickle.dumps(p)), p.gather()):
            assert np.array_equal(moved, data, equal_nan=True)
        assert np.isnan(gda.to_numpy(ref)).sum() == 2
        cast = gda.load_tree(np.asarray(whole), MESH, P("y"), dtype="bfloat16")
        assert gda.fingerprint(cast) == gda.fingerprint(np.asarray(cast))

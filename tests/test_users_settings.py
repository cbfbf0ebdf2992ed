"""Every function that takes arrays, under settings of JAX with which the user's own code is strict.

The transfers were asked for, and gda's own programs do not follow the rules of the user's.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of
from test_plain_page import CALLS, called

import gda

MESH = mesh_of({"x": 4, "y": 2})
DATA, ODD = batch(8, 4), batch(5, 4)
WEAK = jnp.asarray(2.0)
NIBBLES = cut(batch(8, 4, dtype=np.int8), MESH, P("x")).astype(jnp.int4)
KEYS = gda.GlobalArray.from_array(jax.random.split(jax.random.key(0), 8))

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
    lambda g, p: (g.gather(), g.fingerprint(), g.reshard(P(None, "y"), max_bytes=1)),
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


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_no_function_is_stopped_by_settings_of_the_user(guard: str) -> None:
    g = cut(DATA, MESH, P("x"))
    p = gda.PaddedArray.from_array(ODD, MESH, P("x"))
    key = jax.random.split(jax.random.key(0), 8)
    trees: list[dict[str, Any]] = [
        {"w": g, "b": jax.device_put(jnp.ones((8, 4), jnp.bfloat16), g.sharding)},
        {"w": g.array, "key": key},
    ]
    failures = {}
    ways: list[tuple[str, Callable[[], object]]] = [
        *((call, lambda call=call, x=x: called(call, x)) for call in CALLS for x in trees),
        *((f"MORE[{number}]", lambda way=way: way(g, p)) for number, way in enumerate(MORE)),
    ]
    for name, way in ways:
        try:
            with jax.transfer_guard(guard), jax.numpy_rank_promotion("raise"):
                jax.block_until_ready(way())
        except Exception as error:
            if "isallow" in str(error) or "rank_promotion" in str(error):
                failures[name] = str(error)
    assert failures == {}


def test_values_that_are_not_finite_may_be_moved_where_jax_looks_for_them() -> None:
    data = np.array([1, np.nan, np.inf, 4, 5], np.float32)
    p = gda.PaddedArray.from_array(data, MESH, P("x"))
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

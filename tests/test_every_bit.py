"""Denormals, NaNs with any payload and -0.0 go through every function that moves data, bit by bit.

XLA on CPU adds where it slices arrays of several devices, and adding changes all of these.
"""

import copy
import gc
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import is_right, mesh_of, ordered_mesh, rare_floats
from running import python

import gda
from gda import checkpoint, compat, storage

DATA, ODD = rare_floats((6, 12)), rare_floats((5, 12), 1)
THREE = ordered_mesh([5, 0, 2], {"x": 3})
SIX = ordered_mesh([1, 0, 7, 3, 4, 6], {"y": 3, "z": 2}, AxisType.Explicit)
LINE = ordered_mesh([1, 0, 7, 3, 4, 6], {"r": 6})
OTHER = ordered_mesh([4, 3], {"q": 2})
ROWS, SPEC = P("x"), P("z", "y")
TO = NamedSharding(SIX, SPEC)


def sharded(data: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(data.shape, NamedSharding(THREE, ROWS), data.__getitem__)


X = sharded(DATA)
G = gda.GlobalArray.from_array(X)
PADDED = gda.PaddedArray.from_source(ODD, OTHER, P("q"))
# XLA adds where a block is one row of an array of three devices.
TREE = {"g": G, "p": PADDED, "x": X}
ONE = jax.device_put(DATA, jax.devices()[6])


def file(folder: Path, tree: Any = TREE) -> Any:
    storage.save_safetensors(folder / "file.safetensors", tree)
    return storage.open_safetensors(folder / "file.safetensors")


def saved(folder: Path, tree: Any = TREE) -> Path:
    checkpoint.save(folder / "saved", tree)
    return folder / "saved"


def resumed(folder: Path) -> Any:
    with checkpoint.Run(folder / "run", every=1) as run:
        run.save(0, TREE)
    with checkpoint.Run(folder / "run", every=1) as run:
        return run.resume(TREE)[0]


def pulled(folder: Path) -> Any:
    with gda.offer(TREE) as offer:
        return gda.pull(offer.address, SIX, {"g": SPEC, "p": P(("y", "z")), "x": SPEC}, pad=True)


def stored(folder: Path) -> Any:
    targets = [np.zeros_like(DATA), np.zeros_like(ODD)]
    gda.store([G, PADDED], targets)
    return targets


def fetched(folder: Path) -> Any:
    with gda.prefetch([[DATA, X, ONE]], SIX, SPEC) as batches:
        return next(batches)


lazy, make = storage.lazy, gda.GlobalArray

# Each makes the values of DATA, or of ODD if it has fewer rows.
WAYS: dict[str, Callable[[Path], Any]] = {
    "GlobalArray": lambda _: make(DATA.shape, THREE, ROWS, [s.data for s in G.local_shards]),
    "GlobalArray.from_array": lambda _: make.from_array(X),
    "GlobalArray.from_source": lambda _: [
        make.from_source(each, over, spec, read_once=once)
        for each in (DATA, X, ONE, G)
        for over, spec in ((SIX, SPEC), (LINE, P("r")), (OTHER, P(None, "q")), (THREE, P()))
        for once in (False, True)
    ],
    "GlobalArray.from_callback": lambda _: [
        make.from_callback(DATA.shape, SIX, SPEC, lambda i: DATA[i]),
        make.from_callback(DATA.shape, SIX, SPEC, lambda i: jnp.asarray(DATA[i])),
        make.from_callback(
            *(DATA.shape, SIX, SPEC, lambda i, out: np.copyto(out, DATA[i])),
            dtype=np.float32,
            into=True,
        ),
        # A block over devices that are not its own.
        make.from_callback(DATA.shape, SIX, P(), lambda i: X),
    ],
    "GlobalArray.from_batched_callback": lambda _: make.from_batched_callback(
        DATA.shape, SIX, SPEC, lambda indices: [DATA[i] for i in indices]
    ),
    "GlobalArray.from_batched_callback_with_devices": lambda _: (
        make.from_batched_callback_with_devices(
            *(DATA.shape, SIX, SPEC),
            lambda at: [jax.device_put(DATA[i], device) for i, held in at for device in held],
        )
    ),
    "GlobalArray.from_process_local": lambda _: [
        make.from_process_local(each, over, spec)
        for each in (DATA, X, ONE)
        for over, spec in ((SIX, SPEC), (THREE, P(None, "x")))
    ],
    "PaddedArray": lambda _: gda.PaddedArray(PADDED.filled(1), ODD.shape),
    "PaddedArray.from_source": lambda _: [
        gda.PaddedArray.from_source(each, over, spec)
        for each in (ODD, jnp.asarray(ODD), X, ONE, lazy(ODD))
        for over, spec in ((SIX, SPEC), (OTHER, P("q")))
    ],
    "PaddedArray.from_callback": lambda _: gda.PaddedArray.from_callback(
        ODD.shape, SIX, SPEC, lambda i: ODD[i]
    ),
    "filled": lambda _: [np.asarray(PADDED.filled(0))[:5], gda.PaddedArray(X, (6, 12)).filled(0)],
    "load_tree": lambda _: [
        *gda.load_tree([DATA, X, ONE, G, lazy(X).T], SIX, [SPEC] * 4 + [P("y", "z")])[:4],
        *gda.load_tree([X, ODD, DATA], OTHER, P("q"), pad=True, read_once=True),
        *gda.load_tree([X, DATA], TO),
        *gda.load_tree([X, lazy(X)], LINE, P("r")),
    ],
    "prefetch": fetched,
    "gather": lambda _: [G.gather(), PADDED.gather()],
    "to_numpy": lambda _: gda.to_numpy(TREE),
    "to_jax": lambda _: gda.to_jax({"g": G}),
    "local_shards": lambda _: [
        np.concatenate([np.asarray(shard.data) for shard in each.local_shards])
        for each in (G, PADDED)
    ],
    "reshard": lambda _: [
        g.reshard(*to, donate=donate, max_device_bytes=most)
        for donate in (False, True)
        for most in (None, 100)
        for g in (copy.deepcopy(G), copy.deepcopy(PADDED), gda.GlobalArray.from_array(ONE + 0))
        for to in (
            [(THREE, P("x")), (OTHER, P("q")), (SIX, P())]
            if g.shape == ODD.shape and not donate
            else [(SIX, P(None, ("y", "z")))]
        )
        if g.sharding.num_devices > 1
    ],
    "reshard on the same devices": lambda _: [
        gda.GlobalArray.from_array(jax.device_put(DATA, TO)).reshard(spec)
        for spec in (P("y", "z"), P(None, "y"), P(), P(("y", "z")))
    ],
    "reshard_tree": lambda _: [
        gda.reshard_tree(TREE, *to, pad=True) for to in ((SIX, SPEC), (LINE, P("r")), (THREE, P()))
    ],
    "constrain": lambda _: [
        gda.constrain(jax.device_put(DATA, TO), spec, mesh=SIX) for spec in (P("y"), P(None, "z"))
    ],
    "jit": lambda _: gda.jit(lambda g: g, out_specs=P(None, "x"))(G),
    "copies": lambda _: [
        copy.deepcopy(TREE),
        copy.copy(G),
        pickle.loads(pickle.dumps([G, PADDED])),
    ],
    "views": lambda _: [
        lazy(X)[:],
        lazy(X).T.reshape(12, 2, 3).reshape(12, 6).T,
        storage.concatenate([lazy(X)[:3], lazy(X)[3:]]),
        storage.stack([X])[0],
        lazy(X)[::-1][::-1],
        storage.concatenate([lazy(X)[i : i + 1] for i in range(6)]),
        lazy(G),
    ],
    "store": stored,
    "save": lambda folder: [
        checkpoint.restore(saved(folder), TREE),
        checkpoint.restore(folder / "saved", mesh=SIX, specs=SPEC, pad=True),
        *map(np.asarray, [checkpoint.open(folder / "saved")[name] for name in TREE]),
    ],
    "save_async": lambda folder: (
        checkpoint.save_async(folder / "async", {"x": X, "lazy": lazy(X), "host": DATA}).result()
        and None,
        checkpoint.restore(folder / "async", mesh=OTHER, specs=P("q")),
    )[1],
    "Run": resumed,
    "offer": pulled,
    "save_safetensors": lambda folder: [file(folder)[name][:] for name in TREE],
    "open_safetensors": lambda folder: gda.load_tree(dict(file(folder)), SIX, SPEC, pad=True),
    "compat": lambda _: [
        compat.host_local_array_to_global_array(X, SIX, SPEC),
        compat.global_array_to_host_local_array(X, THREE, ROWS),
    ],
}

# They return no data of arrays; or, as the views of a checkpoint, are a part of another's row.
NO_DATA = {
    *("Prefetched", "Shard", "Index", "local_rows", "fingerprint", "show", "memory", "layouts"),
    *("assert_sharded", "storage", "Retry", "aligned_empty", "collectives", "assert_collectives"),
    *("checkpoint", "launch", "check_processes_agree", "checking_agreement"),
    *("check_replicas_agree", "abstract"),
    *("rehearse", "rehearsal_mesh", "assert_fits", "testing", "pull", "PerProcess", "Pending"),
    *("restore", "follow", "open", "inspect", "verify", "diff", "lazy", "stack", "concatenate"),
    *("open_orbax", "get_shard_shape", "get_shard_indices", "get_shard_indices_replica_ids"),
}


def check(made: Any, name: str) -> int:
    """Check every array of a tree, and return their number."""
    leaves = jax.tree.leaves(made, is_leaf=lambda x: hasattr(x, "local_shards"))
    for number, leaf in enumerate(leaves):
        data = DATA if leaf.shape == DATA.shape else ODD
        assert leaf.shape == data.shape, f"{name}, array {number}"
        if isinstance(leaf, jax.Array):
            leaf = gda.GlobalArray.from_array(leaf)
        is_whole = np.asarray(leaf).tobytes() == data.tobytes()
        assert is_whole, f"{name}, array {number}"
        assert not hasattr(leaf, "local_shards") or is_right(leaf, data), f"{name}, array {number}"
    return len(leaves)


@pytest.mark.parametrize("name", WAYS)
def test_every_function_keeps_every_bit(name: str, tmp_path: Path) -> None:
    assert check(WAYS[name](tmp_path), name) > 0
    digests = gda.fingerprint({"g": DATA, "p": ODD, "x": DATA})
    assert gda.fingerprint(TREE) == digests, "the arrays that were given have their bits"


@pytest.mark.parametrize(
    "name", ["GlobalArray.from_source", "load_tree", "views", "filled", "save"]
)
def test_a_mesh_and_checks_of_the_user_stop_nothing(name: str, tmp_path: Path) -> None:
    # Both have other devices than the arrays, which JAX refuses in its own operations.
    for mesh in (
        ordered_mesh([6, 7], {"other": 2}),
        ordered_mesh([6], {"x": 1}, AxisType.Explicit),
    ):
        with jax.set_mesh(mesh), jax.debug_nans(True):
            (folder := tmp_path / str(mesh.size)).mkdir()
            check(WAYS[name](folder), name)


def test_every_public_function_is_in_the_table() -> None:
    public = [name for name in dir(gda) if callable(getattr(gda, name)) and name in gda.__all__]
    public += [*checkpoint.__all__, *storage.__all__]
    tried = {name.partition(".")[0] for name in WAYS}
    functions = {
        name
        for name in public
        for of in [next(m for m in (gda, checkpoint, storage) if hasattr(m, name))]
        if not isinstance(getattr(of, name), type)
    }
    assert sorted(functions - tried - NO_DATA) == []


@pytest.mark.processes(2, devices=4)
def test_every_bit_goes_between_processes(tmp_path: Path) -> None:
    before, after = ordered_mesh([0, 4, 1, 5], {"x": 4}), ordered_mesh([7, 2, 3], {"y": 3})
    for data, spec in ((DATA, P("x")), (ODD, P(None, "x"))):
        g: Any = gda.PaddedArray.from_callback(data.shape, before, spec, lambda i, d=data: d[i])
        assert g.gather().tobytes() == data.tobytes()
        assert g.fingerprint() == gda.fingerprint(data)
        for to in ((after, P("y")), (after, P(None, "y")), (before, P())):
            assert is_right(g.reshard(*to), data)
        again = gda.PaddedArray.from_source(data, after, P("y"), read_once=True)
        assert is_right(again, data)


# The caches of gda, and copies on the host.

DELETED = """
import jax, numpy as np, gda
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

def all_of_it():
    for n in (8, 2**16):
        make = lambda spec: gda.GlobalArray.from_source(np.arange(n, dtype=np.float32), mesh, spec)
        g, whole, weak = make(P("x")), make(P()), jax.numpy.asarray(3.0)
        odd = gda.PaddedArray.from_source(np.ones(n - 1), mesh, P("x"))
        yield [gda.fingerprint(tree) for tree in (g, odd, {"w": weak, "n": np.arange(n)})]
        gda.check_replicas_agree({"g": g, "whole": whole, "odd": odd})
        moved = gda.reshard_tree({"g": g, "odd": odd}, mesh, P(), pad=True, donate=True)
        yield moved["odd"].filled(2).sum().item(), gda.load_tree([weak], mesh, P())[0].item()

first = [*all_of_it()]
for array in jax.live_arrays():
    array.delete()
assert [*all_of_it()] == first
"""


def test_nothing_of_gda_needs_an_array_that_the_user_deleted() -> None:
    done = python("-c", DELETED)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_source_keeps_no_copy_on_the_host(dtype: Any, mesh: Mesh) -> None:
    x = jax.block_until_ready(
        jax.device_put(np.ones((8, 2**16), dtype), NamedSharding(mesh, P("x")))
    )
    tracemalloc.start()
    try:
        for _ in range(2):
            moved = gda.load_tree({"w": x}, mesh_of({"z": 2}), P("z"))["w"]
            del moved
            gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < x.nbytes / 2

"""Specs with ``reduced`` axes stay as they are; arrays with ``unreduced`` axes are refused."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, holding, mesh_of

import gda

MESH = mesh_of({"x": 4, "y": 2}, AxisType.Explicit)
DATA, ODD = batch(8, 8), batch(5, 8)
SPEC = P("x", None, reduced={"y"})  # the None counts for JAX's caches of programs
SHARDING = NamedSharding(MESH, SPEC)
OTHER = NamedSharding(MESH, P("y"))


def restored(path: Path, **how: Any) -> Any:
    gda.checkpoint.save(path, {"x": jax.device_put(DATA, SHARDING)})
    return gda.checkpoint.restore(path, **how)["x"]


def pulled(**how: Any) -> Any:
    with gda.offer({"x": jax.device_put(DATA, SHARDING)}) as offer:
        return gda.pull(offer.address, **how)["x"]


def placed() -> jax.Array:
    return jax.device_put(DATA, SHARDING)


def elsewhere() -> jax.Array:
    return jax.device_put(DATA, OTHER)


LIKE = {"x": jax.ShapeDtypeStruct(DATA.shape, DATA.dtype, sharding=SHARDING)}

# Each returns an array of SHARDING.
MAKERS: dict[str, Callable[[Path], Any]] = {
    "from_callback": lambda _: gda.GlobalArray.from_callback((8, 8), MESH, SPEC, DATA.__getitem__),
    "from_source": lambda _: gda.GlobalArray.from_source(DATA, SHARDING),
    "from_process_local": lambda _: gda.GlobalArray.from_process_local(DATA, MESH, SPEC),
    "from_array": lambda _: gda.GlobalArray.from_array(placed()),
    "PaddedArray": lambda _: gda.PaddedArray.from_source(ODD, SHARDING),
    "load_tree": lambda _: gda.load_tree({"x": DATA}, SHARDING)["x"],
    "load_tree read once": lambda _: gda.load_tree({"x": DATA}, MESH, SPEC, read_once=True)["x"],
    "reshard_tree": lambda _: gda.reshard_tree({"x": elsewhere()}, SHARDING)["x"],
    "reshard_tree donated": lambda _: gda.reshard_tree([elsewhere()], SHARDING, donate=True)[0],
    "reshard": lambda _: gda.GlobalArray.from_array(elsewhere()).reshard(MESH, SPEC),
    "constrain": lambda _: gda.constrain(elsewhere(), SPEC),
    "jit": lambda _: gda.jit(lambda x: x, out_specs=SPEC)(elsewhere()),
    "jit of a prefix": lambda _: gda.jit(lambda x: [x], out_specs=SPEC)(elsewhere())[0],
    "prefetch": lambda _: next(gda.prefetch([DATA], SHARDING)),
    "abstract": lambda _: gda.abstract({"x": DATA}, MESH, SPEC)["x"],
    "pickle": lambda _: pickle.loads(pickle.dumps(gda.GlobalArray.from_array(placed()))),
    "deepcopy": lambda _: copy.deepcopy(gda.GlobalArray.from_array(placed())),
    "restore": lambda path: restored(path, mesh=SHARDING),
    "restore by specs": lambda path: restored(path, mesh=MESH, specs=SPEC),
    "restore like an array": lambda path: restored(path, like={"x": placed()}),
    "restore like a shape": lambda path: restored(path, like=LIKE),
    "pull": lambda _: pulled(mesh=MESH, specs=SPEC),
    "pull like a shape": lambda _: pulled(like=LIKE),
    "host_local_array_to_global_array": (
        lambda _: gda.compat.host_local_array_to_global_array(DATA, MESH, SPEC)
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_reduced_axes_are_kept(make: Callable[[Path], Any], tmp_path: Path) -> None:
    assert make(tmp_path / "saved").sharding == SHARDING


def test_a_spec_that_was_asked_for_keeps_its_spelling(auto_mesh: Any) -> None:
    wanted = NamedSharding(auto_mesh, P("x", None))
    moved = gda.reshard_tree([jax.device_put(DATA, NamedSharding(auto_mesh, P("y")))], wanted)
    assert moved[0].sharding.spec == wanted.spec


def row_of(name: str, report: Any) -> str:
    (row,) = [row for row in report.arrays if name in row.names]
    return f"{row.kind} {row.place}"


def test_an_array_with_reduced_axes_is_looked_at_saved_and_compared(tmp_path: Path) -> None:
    tree = {"x": placed()}
    assert "spec=P('x', None, reduced={'y'})" in repr(gda.GlobalArray.from_array(placed()))
    assert "P('x', None, reduced={'y'})" in row_of("tree/x", gda.memory(tree=tree))
    run = gda.checkpoint.Run(tmp_path / "run", every=1)
    run.save(1, tree)
    run.close(1, tree)
    assert gda.checkpoint.diff(f"{tmp_path / 'run'}@1", tree).are_equal
    assert "reduced={'y'}" in str(gda.checkpoint.inspect(f"{tmp_path / 'run'}@1"))
    gda.check_replicas_agree(tree)


def test_two_reduced_axes_are_written_in_one_order() -> None:
    spec = P(reduced={"c", "a", "b"})
    mesh = mesh_of({"a": 2, "b": 2, "c": 2}, AxisType.Explicit)
    array = gda.GlobalArray.from_array(jax.device_put(DATA, NamedSharding(mesh, spec)))
    assert "P(reduced={'a', 'b', 'c'})" in repr(array)


def test_keys_with_reduced_axes_are_looked_at() -> None:
    numbers = jax.device_put(np.zeros((8, 2), np.uint32), SHARDING)
    keys = jax.random.wrap_key_data(numbers)  # whose sharding and data JAX cannot tell
    assert "dtype=key" in repr(holding(keys))
    rows = [row for row in gda.memory(tree={"keys": keys}).arrays if row.kind == "uint32[8,2]"]
    assert sum(row.nbytes for row in rows) >= numbers.nbytes


# Partial sums.


def partial_sums() -> jax.Array:
    halves = [jax.device_put(DATA, NamedSharding(MESH, P(*spec))) for spec in (("x", "y"), "y")]
    product = jax.jit(
        lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", None, unreduced={"y"}))
    )
    with jax.set_mesh(MESH):
        return product(*halves)


def test_partial_sums_are_looked_at() -> None:
    array = partial_sums()
    assert "unreduced={'y'}" in repr(gda.GlobalArray.from_array(array))
    assert any("unreduced={'y'}" in row.place for row in gda.memory().arrays)
    assert "unreduced={'y'}" in row_of("tree/x", gda.memory(tree={"x": array}))


REFUSING: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda x, path: gda.checkpoint.save(path, {"x": x}),
    "save_async": lambda x, path: gda.checkpoint.save_async(path, {"x": x}).result(),
    "save_safetensors": lambda x, path: gda.storage.save_safetensors(path, {"x": x}),
    "offer": lambda x, _: gda.offer({"x": x}),
    "store": lambda x, _: gda.store({"x": x}, {"x": np.zeros((8, 8), np.float32)}),
    "load_tree": lambda x, _: gda.load_tree({"x": x}, MESH, P()),
    "padded": lambda x, _: gda.PaddedArray.from_source(x, MESH, P()),
    "prefetch": lambda x, _: next(gda.prefetch([{"x": x}], MESH, P())),
    "from_callback": lambda x, _: gda.GlobalArray.from_callback((8, 8), MESH, P(), lambda _: x),
    "lazy": lambda x, _: gda.storage.lazy(x),
    "reshard_tree": lambda x, _: gda.reshard_tree({"x": x}, MESH, P()),
    "fingerprint": lambda x, _: gda.fingerprint({"x": x}),
    "check_replicas_agree": lambda x, _: gda.check_replicas_agree({"x": x}),
    "to_numpy": lambda x, _: gda.to_numpy({"x": x}),
    "gather": lambda x, _: gda.GlobalArray.from_array(x).gather(),
    "asarray": lambda x, _: np.asarray(gda.GlobalArray.from_array(x)),
    "from_process_local": lambda x, _: gda.GlobalArray.from_process_local(x, MESH, P()),
    "global_to_host_array": lambda x, _: gda.compat.global_to_host_array(x),
    "pickle": lambda x, _: pickle.dumps(gda.GlobalArray.from_array(x)),
}


@pytest.mark.parametrize("function", REFUSING.values(), ids=REFUSING)
def test_partial_sums_are_refused(function: Callable[..., object], tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(ValueError, match=r"unreduced=\{'y'\}\) has unreduced axes"):
        function(partial_sums(), path)
    assert not path.exists()

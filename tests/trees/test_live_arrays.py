"""The live arrays by name."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda

DATA = batch(8, 6)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Keep collections of garbage from looking at what was there before: 0.1 s each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _only_arrays_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the arrays of other tests, some of which modules and caches keep."""
    live = jax.live_arrays
    others = live()  # kept, so that no new array has the id of one of them
    ids = set(map(id, others))
    monkeypatch.setattr(
        jax, "live_arrays", lambda *args: [x for x in live(*args) if id(x) not in ids]
    )


def put(mesh: Mesh, spec: Any, data: Any = DATA) -> jax.Array:
    return jax.device_put(jnp.asarray(data), NamedSharding(mesh, spec)).block_until_ready()


def rows_of(report: gda.MemoryReport) -> dict[str, gda.ArrayMemory]:
    """Return the rows of named arrays, by their names."""
    return {row.label: row for row in report.arrays if row.names}


def test_arrays_of_trees_have_their_paths(mesh: Mesh) -> None:
    w, b = cut(DATA, mesh, P("x", "y")), put(mesh, P("x"))
    padded = gda.PaddedArray.from_source(batch(5), mesh, P("x"))
    params = {"layers": [{"w": w, "b": b}], "p": padded, "step": 3, "host": DATA, "none": None}
    rows = rows_of(gda.memory(params=params, opt=(jnp.zeros(4),)))
    assert {name: row[2:] for name, row in rows.items()} == {
        "params/layers/0/w": ((8, 6), "float32", "P('x', 'y') on x=4,y=2", None, 192, 24),
        "params/layers/0/b": ((8, 6), "float32", "P('x') on x=4,y=2", None, 384, 48),
        "params/p": ((8,), "float32", "P('x') on x=4,y=2", None, 64, 8),
        "opt/0": ((4,), "float32", "CPU 0", None, 16, 16),
    }


def test_unnamed_arrays_are_grouped_and_sums_agree(mesh: Mesh) -> None:
    shape = (8, 314)  # of no other test
    kept = [put(mesh, P("x"), np.full(shape, i)) for i in range(3)] + [jnp.ones(shape)]
    report = gda.memory(w=kept[0])
    each = 8 * 314 * 4
    assert [
        (row.label, row.layout, row.nbytes, row.nbytes_per_device)
        for row in report.arrays
        if row.shape == shape
    ] == [
        ("2 unnamed", "P('x') on x=4,y=2", 4 * each, 4 * each // 8),
        ("w", "P('x') on x=4,y=2", 2 * each, 2 * each // 8),
        ("1 unnamed", "CPU 0", each, each),
    ]
    sizes = [row.nbytes for row in report.arrays]
    assert sum(sizes) == report.nbytes == sum(each.nbytes for each in report.devices)
    for device in report.devices:
        assert sum(device.by_tree.values()) == device.nbytes
        assert device.by_tree["w"] == each // 4
    assert [each.device for each in report.devices] == [f"CPU {i}" for i in range(8)]


def test_the_row_of_an_array_has_the_bytes_of_its_parts() -> None:
    pair = Mesh(np.array(jax.devices()[:2]), ("x",))
    shape = (6, 317)  # of no other test
    whole = put(pair, P("x"), np.ones(shape))
    parts = [shard.data for shard in whole.addressable_shards]
    rows = [row for row in gda.memory().arrays if row.shape in (shape, parts[0].shape)]
    assert [(row.shape, row.nbytes) for row in rows] == [(shape, whole.nbytes)]


def renamed(array: jax.Array) -> jax.Array:
    """Return an array with the same buffers over a mesh with other kinds of axes."""
    sharding: Any = array.sharding
    mesh = sharding.mesh
    is_explicit = AxisType.Explicit in mesh.axis_types
    kind = AxisType.Auto if is_explicit else AxisType.Explicit
    other = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
    return jax.device_put(array, NamedSharding(other, sharding.spec))


def rebuilt(array: jax.Array) -> jax.Array:
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def put_back(array: jax.Array) -> jax.Array:
    return jax.device_put(renamed(array), array.sharding)


def test_arrays_that_share_all_buffers_are_one(mesh: Mesh) -> None:
    w = put(mesh, P("x"))
    before = gda.memory(w=w)
    for share in (renamed, rebuilt, put_back):
        other = share(w)
        assert other is not w
        both = gda.memory(w=[w, w], other=gda.GlobalArray.from_array(other))
        assert rows_of(both)["w/0 = w/1 = other"].nbytes == 384
        assert both.nbytes == gda.memory(w=w).nbytes == before.nbytes
        del other, both


def test_shards_are_part_of_their_array(mesh: Mesh) -> None:
    w = put(mesh, P("x"))
    before = gda.memory(w=w)
    shards = [shard.data for shard in w.addressable_shards]
    report = gda.memory(w=w, first=shards[0])
    assert (report.nbytes, len(report.arrays)) == (before.nbytes, len(before.arrays) + 1)
    rows = rows_of(report)
    assert (rows["w"].nbytes, rows["first"].nbytes) == (384, 0)
    # With the shards named first, the array has the rest.
    rows = rows_of(gda.memory(first=shards[0], w=w))
    assert (rows["w"].nbytes, rows["first"].nbytes) == (336, 48)
    w.delete()
    assert gda.memory(w=w).nbytes == before.nbytes - 384 + sum(
        0 if shard.is_deleted() else 48 for shard in shards
    )


def test_deleted_arrays_take_nothing(mesh: Mesh) -> None:
    w, kept = put(mesh, P("x")), put(mesh, P("x"))
    w.delete()
    report = gda.memory(params={"w": w, "kept": kept}, ema=gda.GlobalArray.from_array(w))
    assert rows_of(report).keys() == {"params/kept"}


def test_kinds_of_memory_are_apart(mesh: Mesh) -> None:
    kind, w = "pinned_host", put(mesh, P("x"))
    host = jax.device_put(w, NamedSharding(mesh, P("x"), memory_kind=kind))
    report = gda.memory(w=w, host=host)
    rows = rows_of(report)
    assert (rows["w"].memory_kind, rows["host"].memory_kind) == (None, kind)
    assert (rows["w"].nbytes, rows["host"].nbytes) == (384, 384)
    pinned = [each for each in report.devices if each.memory_kind == kind]
    assert {each.by_tree["host"] for each in pinned} == {48}
    assert [each.device for each in pinned] == [f"CPU {i}" for i in range(8)]
    assert f"CPU 0-7 {kind}" in str(report)


def test_odd_arrays(mesh: Mesh) -> None:
    tree = {
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))),
        "int4": jnp.zeros(7, jnp.int4),
        "empty": put(mesh, P("x"), np.zeros((0, 3), np.float32)),
        "replicated": put(mesh, P()),
    }
    rows = rows_of(gda.memory(t=tree))
    sizes = {"t/keys": 128, "t/int4": 4, "t/empty": 0, "t/replicated": 8 * 192}
    assert {name: row.nbytes for name, row in rows.items()} == sizes
    assert rows["t/keys"].dtype == "uint32"


# Many processes.


@pytest.mark.processes(2, devices=4)
def test_a_process_counts_its_own_devices() -> None:
    w = cut(batch(8, 1000), mesh_of({"x": 4, "y": 2}), P("x", "y"))
    report = gda.memory(w=w)
    assert rows_of(report)["w"].nbytes == 16000
    assert rows_of(report)["w"].nbytes_per_device == 4000
    assert [each.device for each in report.devices] == [
        f"CPU {device.id}" for device in jax.local_devices()
    ]


# Mistakes, and places where it must work.


def test_a_traced_array_is_refused(mesh: Mesh) -> None:
    @jax.jit
    def step(w: Any) -> Any:
        with pytest.raises(TypeError, match=r"^params/w is being traced, so it has no data"):
            gda.memory(params={"w": w})
        return w

    step.eval_shape(cut(DATA, mesh, P("x")))


def test_it_adds_nothing_to_a_program(mesh: Mesh) -> None:
    arrays = [put(mesh, P("x")), put(mesh, P("x", None)), jax.random.key(0)]
    arrays.append(renamed(arrays[0]))

    def step(x: jax.Array) -> jax.Array:
        assert "arrays/0 = arrays/3" in rows_of(gda.memory(arrays=arrays))
        return x + 1

    jaxpr = jax.make_jaxpr(step)(np.ones(4))
    assert [str(equation.primitive) for equation in jaxpr.eqns] == ["add"]
    jax.eval_shape(jax.vmap(step), np.ones(4))
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x")), arrays[0])
    with jax.set_mesh(mesh):
        step(jnp.ones(4))


def test_an_array_that_did_not_fit_is_not_listed() -> None:
    """The computation waits, so the array is there before its memory is asked for."""
    gate = threading.Event()

    def wait() -> np.ndarray:
        gate.wait(60)
        return np.zeros((), np.float32)

    def late(w: jax.Array) -> jax.Array:
        return w + jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32))

    def too_large(w: jax.Array) -> jax.Array:
        return jnp.sort(jnp.cos(jnp.arange(2**48, dtype=np.float32) + w[0, 0]))[: 2**20]

    w = put(mesh_of({"x": 2}), P())
    step, wait_first = [jax.jit(each).lower(w).compile() for each in (too_large, late)]
    failed = step(wait_first(w))
    gate.set()
    with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE_EXHAUSTED"):
        failed.block_until_ready()
    report = str(gda.memory(w=w))
    assert "w      float32[8,6]" in report
    assert "float32[1048576]" not in report
    assert [row.nbytes for row in gda.memory(failed=failed).arrays if row.names] == [0]

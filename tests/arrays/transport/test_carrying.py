"""Arrays that go between any devices of several processes arrive as NumPy has them, bit by bit."""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from meshes import batch, cut, is_right, ordered_mesh
from trials import Trials, tried

import gda
from gda.arrays.transport import carrying, staging
from gda.layout.reshard import lanes
from gda.testing import Pool

P = PartitionSpec
DATA = batch(16, 6)
DTYPES = [
    *map(np.dtype, ("float32", "int8", "bool", "complex64", "int64", "float16")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)),
]


def absent(mesh: Mesh, spec: Any, data: np.ndarray = DATA) -> gda.GlobalArray:
    """Return the array as a process has it that knows its layout alone."""
    layout = NamedSharding(mesh, P(*spec))
    return gda.GlobalArray.from_array(jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=layout))


# Any two layouts.


class Layout(NamedTuple):
    mesh: Mesh
    spec: Any


def some_layout(chance: random.Random, rank: int) -> Layout:
    """Return some devices in some order, as a mesh of up to three axes, and a spec over them."""
    count = chance.choice([1, 2, 3, 4, 6, 8])
    devices = chance.sample(range(jax.device_count()), count)
    shape = {}
    while count > 1 and len(shape) < 2:
        ways = chance.choice([w for w in range(1, count + 1) if count % w == 0])
        shape["xy"[len(shape)]] = ways
        count //= ways
    shape["z"] = count
    kind = chance.choice([AxisType.Auto, AxisType.Explicit])
    dimensions: list[list[str]] = [[] for _ in range(rank)]
    for axis in chance.sample(list(shape), len(shape)):
        if rank and chance.random() < 0.7:
            chance.choice(dimensions).append(axis)
    return Layout(ordered_mesh(devices, shape, kind), P(*[tuple(axes) for axes in dimensions]))


def divides(shape: tuple[int, ...], layouts: list[Layout]) -> bool:
    try:
        for mesh, spec in layouts:
            gda.ShardGrid(shape, mesh.shape, spec)
    except ValueError:
        return False
    return True


def move_at_random(seed: int) -> str:
    """Run in every process: move an array from some layout to another one, and compare."""
    chance = random.Random(seed)
    rank = chance.randint(0, 3)
    shape = tuple(chance.choice([0, 1, 2, 4, 6, 8, 12, 13, 24]) for _ in range(rank))
    dtype = chance.choice(DTYPES)
    before, after = layouts = [some_layout(chance, rank) for _ in range(2)]
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype in (np.dtype(bool), np.dtype(ml_dtypes.int4)):
        bits %= 2
    data = bits.view(dtype).reshape(shape)
    # No warnings of narrowing: the numbers of 64 bits are to arrive too.
    with jax.enable_x64(True):
        if divides(shape, layouts):
            g: Any = cut(data, *before)
        else:
            g = gda.PaddedArray.from_callback(
                shape, *before, lambda index: data[index], dtype=dtype, fill=1
            )
    is_absent, donate = chance.random() < 0.5, chance.random() < 0.3
    if is_absent and not g.local_shards:
        layout = jax.ShapeDtypeStruct(g.array.shape, g.dtype, sharding=g.sharding)
        g = jax.tree.map(lambda _: layout, g)
    max_device_bytes = chance.choice([None, None, 1, 300])
    moved = g.reshard(*after, donate=donate, max_device_bytes=max_device_bytes)
    assert type(moved) is type(g)
    assert moved.mesh == after.mesh
    assert moved.grid.spec == gda.ShardGrid(shape, after.mesh.shape, after.spec, pad=True).spec
    assert moved.dtype == dtype
    assert is_right(moved, data)
    assert donate or not isinstance(g.array, jax.Array) or is_right(g, data)
    padding = [shard.data for shard in moved.array.addressable_shards]
    for block, shard in zip(padding, moved.local_shards, strict=True):
        inside = np.zeros(block.shape, bool)
        inside[tuple(map(slice, shard.data.shape))] = True
        assert not np.asarray(block)[~inside].astype(bool).any(), "new padding is 0"
    return "padded" if type(g) is gda.PaddedArray else "even"


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), (4, 2), pytest.param(8, 1, marks=pytest.mark.torture)]
)
@tried("an array moves between any two meshes of several processes", sample=2, full=1000)
def test_any_layout_becomes_any_other(
    trials: Trials, process_pool: Any, processes: int, devices: int
) -> None:
    pool = process_pool(processes, devices=devices)
    # The sample is the same in every run, because every move compiles programs of its own.
    is_sample = trials.most < 1000
    for seed in range(trials.most if is_sample else 334):
        seed += 0 if is_sample else trials.chance.randrange(2**32)
        (kind,) = set(pool.run(move_at_random, seed, timeout=600))
        trials.count(kind)


# In other memory, of other things.


@pytest.mark.processes(2, devices=4)
def test_the_copies_on_devices_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "HostStaging", staging.DeviceStaging)
    # Every shape of a piece compiles programs on every device.
    before = ordered_mesh([6, 1, 4, 3], {"x": 4}, AxisType.Explicit)
    after = ordered_mesh([0, 1, 7, 5], {"y": 2, "z": 2}, AxisType.Explicit)
    data = np.arange(16 * 6).reshape(16, 6).astype(np.int8).astype(ml_dtypes.int4)
    g = cut(data, before, P("x"))
    with jax.set_mesh(before):
        assert is_right(g.reshard(after, P("y", "z"), max_device_bytes=250), data)


@pytest.mark.processes(2, devices=4)
def test_keys_and_other_memory_move_too() -> None:
    before, after = ordered_mesh([0, 1, 2], {"x": 3}), ordered_mesh([7, 5], {"y": 2})
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 6)
    numbers = np.asarray(jax.random.key_data(keys))
    g = gda.GlobalArray.from_callback((6,), before, P("x"), lambda i: keys[i], dtype=keys.dtype)
    moved = g.reshard(after, P("y"))
    for shard in moved.local_shards:
        assert np.array_equal(jax.random.key_data(shard.data), numbers[shard.index])
        assert jax.random.key_impl(shard.data) == "rbg"
    pinned = cut(DATA, after, P("y")).reshard(NamedSharding(before, P(), memory_kind="pinned_host"))
    assert pinned.sharding.memory_kind == "pinned_host"
    assert is_right(pinned, DATA)
    assert is_right(pinned.reshard(after, P("y")), DATA)


@pytest.mark.processes(4, devices=2)
def test_weights_go_from_trainers_to_a_sampler() -> None:
    trainers, sampler = ordered_mesh(range(4), {"x": 4}), ordered_mesh([4, 5], {"y": 2})
    process = jax.process_index()
    if process == 3:
        return  # without devices of either mesh, it need not call anything
    g = cut(DATA, trainers, P("x")) if process < 2 else absent(trainers, P("x"))
    moved = g.reshard(sampler, P(None, "y"))
    assert [shard.data.shape for shard in moved.local_shards] == [(16, 3)] * 2 * (process == 2)
    assert is_right(moved, DATA)


@pytest.mark.filterwarnings("error")
def test_numbers_of_64_bits_stay_without_the_setting_for_them(mesh: Mesh) -> None:
    data = np.arange(16, dtype=np.int64) << 40
    with jax.enable_x64(True):
        g = cut(data, mesh, P("x"))
    few = ordered_mesh([6, 2], {"z": 2}, mesh.axis_types[0])
    for donate in (False, True):
        moved = g.reshard(few, P("z"), donate=donate)
        assert moved.dtype == np.int64
        assert is_right(moved, data)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_donated_array_is_gone_and_shares_nothing(mesh: Mesh, dtype: Any) -> None:
    data = DATA.astype(dtype)
    kind = mesh.axis_types[0]
    four = ordered_mesh(range(4), {"z": 4}, kind)
    more = ordered_mesh(range(8), {"r": 2, "z": 4}, kind)
    few = ordered_mesh([0, 5], {"z": 2}, kind)
    for before, after in [
        ((four, P("z")), (more, P("z"))),  # all blocks stay
        ((four, P()), (few, P())),
        ((four, P("z")), (four, P("z"))),
        ((mesh, P("x")), (four, P("z"))),
    ]:
        for old in (
            cut(data, *before),
            gda.PaddedArray.from_source(data[:15], *before),
            cut(data, *before).array,
        ):
            new = gda.reshard_tree({"x": old}, *after, donate=True)["x"]
            assert old.is_deleted()
            old.delete()
            assert np.asarray(new).tobytes() == data[: new.shape[0]].tobytes()


def test_a_donated_tree_may_have_an_array_twice(mesh: Mesh) -> None:
    few = ordered_mesh([6, 1], {"z": 2}, mesh.axis_types[0])
    for max_device_bytes in (None, 1):
        for over in (few, mesh):
            g = cut(DATA, mesh, P("x"))
            tree = {"a": g, "b": cut(DATA, mesh, P()), "c": g}
            moved = gda.reshard_tree(
                tree, over, P(over.axis_names[0]), max_device_bytes=max_device_bytes, donate=True
            )
            assert all(leaf.is_deleted() for leaf in tree.values())
            assert all(is_right(leaf, DATA) for leaf in moved.values())


@pytest.mark.processes(2, devices=4)
def test_a_donated_array_is_gone_in_all_processes() -> None:
    # All blocks of process 0 stay, and process 1 had none.
    half, all_of = ordered_mesh(range(4), {"x": 4}), ordered_mesh(range(8), {"r": 2, "x": 4})
    g = cut(DATA, half, P("x")) if jax.process_index() == 0 else absent(half, P("x"))
    moved = g.reshard(all_of, P("x"), donate=True)
    if jax.process_index() == 0:
        assert g.is_deleted()
        g.delete()
    assert is_right(moved, DATA)
    same = moved.reshard(P("x"), donate=True)
    assert moved.is_deleted()
    assert is_right(same, DATA)


def test_bad_arguments_are_refused(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    with pytest.raises(ValueError, match="max_device_bytes must be 1 or more, not 0"):
        g.reshard(P(), max_device_bytes=0)
    with pytest.raises(ValueError, match="must give the array and not a jax.ShapeDtypeStruct"):
        absent(mesh, P("x")).reshard(mesh, P())
    with pytest.raises(gda.LayoutUnknownError, match="names no mesh and spec"):
        gda.GlobalArray.from_array(jax.ShapeDtypeStruct((8,), np.float32)).reshard(mesh, P())


# Its cost.


def sent_programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mesh, Any, Any]]:
    """Return a list to which each round adds its mesh, exchange and buffers."""
    programs = []
    exchange_of = carrying.exchange_of

    def recorded(mesh: Mesh, move: Any) -> Any:
        exchange: Any = exchange_of(mesh, move)

        def send(flats: Any) -> Any:
            programs.append((mesh, exchange, flats))
            return exchange.send(flats)

        return exchange and exchange._replace(send=send)

    monkeypatch.setattr(carrying, "exchange_of", recorded)
    return programs


@pytest.mark.processes(4, devices=2)
def test_even_traffic_goes_by_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_NEARLY", 1)  # that this is even enough for 8 devices
    programs = sent_programs(monkeypatch)
    data = batch(48, 40)
    g = cut(data, ordered_mesh(range(8), {"x": 8}), P("x"))
    moved = g.reshard(ordered_mesh([3, 1, 7, 0, 2, 6, 5, 4], {"y": 8}), P(None, "y"))
    assert is_right(moved, data)
    ((mesh, exchange, flats),) = programs
    assert [each.kind for each in gda.collectives(exchange.send, flats, mesh=mesh)] == [
        "all-to-all"
    ]
    assert [flat.shape for flat in flats] == [(48 * 40,)]


@pytest.mark.processes(4, devices=2)
def test_no_more_is_sent_than_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = sent_programs(monkeypatch)
    data, max_device_bytes = batch(400, 57), 16_000
    before, after = ordered_mesh(range(8), {"x": 8}), ordered_mesh([7, 0, 3, 1, 5, 2], {"y": 6})
    p = gda.PaddedArray.from_source(data, before, P("x"))
    moved = p.reshard(after, P(None, "y"), max_device_bytes=max_device_bytes)
    assert is_right(moved, data)
    ids = [[device.id for device in mesh.devices.flat] for mesh in (before, after)]
    plan = gda.ReshardPlan(p.grid, moved.grid, itemsize=4, source_ids=ids[0], target_ids=ids[1])
    mesh, exchange, flats = programs[0]
    found = gda.collectives(exchange.send, flats, mesh=mesh)
    assert {each.kind for each in found} == {"collective-permute"}
    sent = 0
    for _, exchange, flats in programs:
        assert 4 * sum(flat.nbytes // 8 for flat in flats) <= max_device_bytes
        lanes = zip(flats, exchange.routes.pairs, strict=True)
        sent += sum(flat.nbytes // 8 * len(pairs) for flat, pairs in lanes)
    assert len({tuple(flat.shape for flat in flats) for _, _, flats in programs}) <= 2
    assert plan.nbytes_between_processes <= sent <= 1.05 * plan.nbytes_between_processes


# Faults.


@pytest.mark.processes(2, devices=4)
def test_processes_that_want_different_moves_are_told() -> None:
    g = cut(DATA, ordered_mesh(range(8), {"x": 8}), P("x"))
    after = ordered_mesh([4, 1] if jax.process_index() else [1, 4], {"y": 2})
    with pytest.raises(gda.DisagreementError, match=r"reshard .*device order"):
        g.reshard(after, P("y"))
    spec = P("y") if jax.process_index() else P(None, "y")
    with pytest.raises(gda.DisagreementError, match=r"reshard .*spec"):
        g.reshard(ordered_mesh(range(8), {"x": 4, "y": 2}), spec)
    own = gda.GlobalArray.from_array(jnp.asarray(DATA))
    with pytest.raises(gda.DisagreementError, match=r"reshard .*device order"):
        own.reshard(ordered_mesh(range(8), {"x": 8}), P("x"))


def no_memory(*args: Any) -> None:
    raise MemoryError("no memory for a buffer")


def fail_in_one_process() -> str:
    """Run in every process: return what each one raises."""
    g = cut(batch(16, 8), ordered_mesh(range(8), {"x": 8}), P("x"))
    if jax.process_index() == 2:
        staging.HostStaging.flat = no_memory
    try:
        g.reshard(P(None, "x"))
    except (MemoryError, gda.DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failure_in_one_process_ends_all() -> None:
    # In processes of its own: those that wait in the transport keep it busy for half a minute.
    with Pool(4, devices=2) as pool:
        said = pool.run(fail_in_one_process)
    assert said.pop(2) == "MemoryError: no memory for a buffer"
    for each in said:
        assert each.startswith("DisagreementError: reshard (test_carrying.py:")
        assert each.endswith("process 2 failed: MemoryError: no memory for a buffer")

"""Moves of data to other layouts and to the hosts, over every order of devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from meshes import ORDERS, cut, ordered_mesh
from trials import rarely

import gda
from gda.arrays import buffers
from gda.layout.grid import ShardGrid
from gda.multihost.allgather import all_gather
from gda.testing.strategies import mesh_shapes, sharded_cases

P = PartitionSpec
DATA = np.arange(16 * 6, dtype=np.float32).reshape(16, 6)


def is_right(g: gda.GlobalArray, data: np.ndarray = DATA) -> bool:
    return all(np.array_equal(shard.data, data[shard.index]) for shard in g.local_shards)


# One process.


def test_another_spec_over_the_same_mesh(mesh: Mesh) -> None:
    g = cut(DATA[:8, :2], mesh, P("x")).reshard(P(None, "y"))
    assert g.grid.spec == (None, "y")
    assert g.mesh == mesh
    assert is_right(g, DATA[:8, :2])


def test_another_mesh_of_fewer_devices(mesh: Mesh) -> None:
    other = Mesh(mesh.devices[:3:2, 1], ("z",))
    g = cut(DATA, mesh, P("x")).reshard(other, ["z"])
    assert g.mesh == other
    assert is_right(g)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_sharding_in_place_of_mesh_and_spec(mesh: Mesh, kind: str) -> None:
    g = cut(DATA, mesh, P("x"))
    for other in (mesh, ordered_mesh([5, 0, 3, 6], {"z": 4}, mesh.axis_types[0])):
        sharding = NamedSharding(other, P(None, other.axis_names[-1]), memory_kind=kind)
        if other is not mesh:
            sharding = NamedSharding(other, P("z"), memory_kind=kind)
        moved = g.reshard(sharding)
        assert moved.sharding == sharding
        assert is_right(moved)
        assert moved.reshard(P()).sharding.memory_kind == kind
        assert moved.reshard(NamedSharding(mesh, P())).sharding.memory_kind == "device"
    alone = g.reshard(SingleDeviceSharding(jax.devices()[3]))
    assert alone.array.devices() == {jax.devices()[3]}
    assert is_right(alone)


def test_an_array_of_one_device_goes_to_a_mesh(mesh: Mesh) -> None:
    g = gda.GlobalArray.from_array(jnp.asarray(DATA)).reshard(mesh, P(("y", "x")))
    assert is_right(g)


def test_keys_are_moved(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    g = gda.GlobalArray.from_array(keys).reshard(mesh, P("x"))
    assert np.array_equal(jax.random.key_data(g.array), jax.random.key_data(keys))


def test_a_spec_that_does_not_fit_is_refused(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    with pytest.raises(ValueError, match="global shape .* cannot be sharded by P\\(None, 'x'\\)"):
        g.reshard(P(None, "x"))
    with pytest.raises(TypeError, match=r"write g.reshard\(spec\), g.reshard\(mesh, spec\) or"):
        g.reshard("x", P("x"))
    with pytest.raises(TypeError, match=r"write g.reshard\(spec\), g.reshard\(mesh, spec\) or"):
        g.reshard(mesh)
    with pytest.raises(TypeError, match="the spec .* was given with NamedSharding"):
        g.reshard(NamedSharding(mesh, P()), P("x"))


def test_in_a_trace_there_is_nothing_to_move(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    with pytest.raises(TypeError, match="gda.constrain"):
        jax.jit(lambda g: g.reshard(P("y")))(g)
    with pytest.raises(TypeError, match="is being traced, so it has no data"):
        jax.jit(lambda g: g.gather())(g)


def test_gather_in_one_process_is_a_copy(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    value = g.gather()
    value[0] = -1
    assert is_right(g)
    assert np.array_equal(g.gather(process=0), DATA)


def test_gather_refuses_impossible_arguments(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    with pytest.raises(ValueError, match="process must be None or from 0 to 0, not 1"):
        g.gather(process=1)
    with pytest.raises(ValueError, match="max_bytes must be 1 or more, not 0"):
        g.gather(max_bytes=0)
    with pytest.raises(TypeError, match="gather the numbers of the keys"):
        gda.GlobalArray.from_array(jax.random.split(jax.random.key(0), 8)).gather()
    g.delete()
    with pytest.raises(RuntimeError, match="was deleted"):
        g.gather()


# Many processes.


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", ORDERS)
def test_gather_gives_everybody_the_whole(order: str, kind: AxisType) -> None:
    mesh = ordered_mesh(ORDERS[order], {"x": 4, "y": 2}, kind)
    for spec in (P("x"), P(("y", "x")), P("x", "y"), P(None, "y"), P()):
        g = cut(DATA, mesh, spec)
        assert np.array_equal(g.gather(), DATA)
        one = g.gather(process=1)
        assert (one is not None) == (jax.process_index() == 1)
        assert one is None or np.array_equal(one, DATA)


@pytest.mark.processes(2, devices=4)
def test_gather_without_memory_names_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cut(DATA, ordered_mesh(ORDERS["shuffled"], {"x": 8}), P("x"))
    memory = buffers.Memory
    monkeypatch.setattr(buffers, "Memory", lambda n, dtype: memory(n and 2**60, dtype))
    with pytest.raises(MemoryError) as caught:
        g.gather()
    assert caught.value.__notes__ == [
        "gda: no memory for an array of shape (16, 6) and dtype float32, 384 B"
    ]


@pytest.mark.processes(2, devices=4)
def test_gather_in_rounds_of_a_few_rows() -> None:
    g = cut(DATA, ordered_mesh(ORDERS["shuffled"], {"x": 2, "y": 4}), P("x"))
    for max_bytes in (1, 100, 7 * 24 * 2):
        assert np.array_equal(g.gather(max_bytes=max_bytes), DATA)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((n, d), marks=pytest.mark.processes(n, devices=d), id=f"{n} x {d}")
        for n, d in [(2, 4), (4, 2), (8, 1)]
    ],
)
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("y", "x"))])
def test_gather_hands_no_more_than_max_bytes_to_a_device(
    monkeypatch: pytest.MonkeyPatch, spec: P, size: tuple[int, int]
) -> None:
    handed: list[int] = []

    def spy(*arguments: Any) -> Any:
        received = all_gather(*arguments)
        handed.append(received.nbytes)
        return received

    monkeypatch.setattr("gda.multihost.roll.all_gather", spy)
    processes = jax.process_count()
    assert (processes, jax.local_device_count()) == size
    g = cut(DATA, ordered_mesh(ORDERS["contiguous"], {"x": 4, "y": 2}), spec)
    row = g.local_shards[0].data[0].nbytes
    rounds = []
    for max_bytes in (1, row * processes, row * processes * 2, row * processes * 2 + 1, 10**6):
        handed.clear()
        assert np.array_equal(g.gather(max_bytes=max_bytes), DATA)
        # At least a row of a block goes from each process in a round.
        assert max(handed) <= max(max_bytes, row * processes)
        rounds.append(len(handed))
    assert rounds[0] == rounds[1] >= 2 * rounds[2] or g.grid.shard_shape[0] == 1
    assert rounds[2] == rounds[3] >= rounds[4]


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "bfloat16", "float8_e4m3fn", "int4", "complex64"]
)
def test_gather_of_every_kind_of_number(dtype: str) -> None:
    data = (np.arange(16) % 5).astype(jnp.dtype(dtype))
    g = cut(data, ordered_mesh(range(8), {"x": 8}), P("x"))
    value = g.gather()
    assert value.dtype == data.dtype
    assert value.tobytes() == data.tobytes()


@pytest.mark.processes(2, devices=4)
def test_gather_of_scalars_and_of_nothing() -> None:
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2})
    assert cut(np.float32(3), mesh, P()).gather() == 3
    empty = cut(np.zeros((0, 4), np.float32), mesh, P("x")).gather()
    assert empty.shape == (0, 4)


@pytest.mark.processes(2, devices=4)
def test_gather_with_a_process_that_has_no_device_of_the_mesh() -> None:
    mesh = ordered_mesh([4, 5], {"x": 2})
    g = cut(DATA, mesh, P("x"))
    if jax.process_index() == 1:
        assert np.array_equal(g.gather(), DATA)  # a local array of its own
    else:
        with pytest.raises(ValueError, match="only process 1 holds"):
            g.gather()


@pytest.mark.processes(4, devices=2)
def test_gather_to_processes_outside_the_mesh() -> None:
    g = cut(DATA, ordered_mesh([2, 6, 3, 7], {"x": 4}), P("x"))  # processes 1 and 3
    assert np.array_equal(g.gather(), DATA)


@pytest.mark.processes(2, devices=4)
def test_gather_under_a_mesh_that_is_set() -> None:
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert np.array_equal(cut(DATA, mesh, P("x")).gather(), DATA)


@pytest.mark.processes(2, devices=4)
def test_gather_without_jit_and_under_a_transfer_guard() -> None:
    g = cut(DATA, ordered_mesh(range(8), {"x": 4, "y": 2}), P("x"))
    with jax.disable_jit():
        assert np.array_equal(g.gather(), DATA)
    with jax.transfer_guard("disallow"):
        assert np.array_equal(g.gather(), DATA)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("order", ORDERS)
def test_reshard_between_processes(order: str) -> None:
    g = cut(DATA, ordered_mesh(ORDERS["contiguous"], {"x": 4, "y": 2}), P("x"))
    assert is_right(g.reshard(P(None, "y")))
    moved = g.reshard(ordered_mesh(ORDERS[order], {"x": 2, "y": 2, "z": 2}), P(("z", "x"), None))
    assert is_right(moved)
    assert is_right(moved.reshard(ordered_mesh(range(8), {"x": 8}, AxisType.Explicit), P()))


def test_reshard_over_explicit_axes_to_a_mesh_of_other_sizes() -> None:
    g = cut(DATA, ordered_mesh(range(2), {"x": 2}, AxisType.Explicit), P("x"))
    assert is_right(g.reshard(ordered_mesh(range(4), {"x": 4}, AxisType.Explicit), P("x")))
    one = cut(DATA[:1], ordered_mesh(range(1), {"x": 1}, AxisType.Explicit), P("x"))
    wider = one.reshard(ordered_mesh(range(2), {"x": 2}, AxisType.Explicit), P())
    assert np.array_equal(wider, DATA[:1])


@pytest.mark.processes(4, devices=2)
def test_reshard_with_a_process_that_has_no_device_of_the_mesh() -> None:
    g = cut(DATA, ordered_mesh([2, 3, 4, 5], {"x": 4}), P("x"))
    moved = g.reshard(ordered_mesh([5, 2, 4, 3], {"x": 2, "y": 2}), P("y", "x"))
    assert moved.spec == P("y", "x")
    assert is_right(moved)
    assert len(moved.local_shards) == (2 if jax.process_index() in (1, 2) else 0)


@pytest.mark.processes(2, devices=4)
def test_processes_that_want_different_layouts_are_told() -> None:
    g = cut(DATA, ordered_mesh(range(8), {"x": 4, "y": 2}), P("x"))
    spec = P("y") if jax.process_index() else P(None, "y")
    with (
        gda.checking_agreement(timeout=20),
        pytest.raises(gda.DisagreementError, match="GlobalArray.reshard .*spec"),
    ):
        g.reshard(spec)


def gather_and_reshard(grid: ShardGrid, order: list[int], back: list[int]) -> None:
    """Run in every process: build, move to another order of devices, and gather."""
    data = np.arange(np.prod(grid.global_shape), dtype=np.int32).reshape(grid.global_shape)
    devices = np.array(jax.devices())
    sizes, names = tuple(grid.mesh_shape.values()), tuple(grid.mesh_shape)
    meshes = [Mesh(devices[np.array(o)].reshape(sizes), names) for o in (order, back)]
    g = cut(data, meshes[0], grid.spec)
    assert is_right(g, data)
    if len({device.process_index for device in meshes[0].devices.flat}) == 1:
        return  # of one process, which has it all
    np.testing.assert_array_equal(g.gather(), data)
    moved = g.reshard(meshes[1], ())
    assert is_right(moved, data)


@rarely(2)
@given(data=st.data())
def test_any_layout_is_gathered_and_moved(process_pool: Any, data: st.DataObject) -> None:
    grid = data.draw(sharded_cases(mesh_shapes(max_devices=8))).grid
    order = data.draw(st.permutations(range(8)))[: grid.num_devices]
    process_pool(2, devices=4).run(
        gather_and_reshard, grid, order, data.draw(st.permutations(order))
    )

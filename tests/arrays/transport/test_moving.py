"""Moves of data to other layouts and to the hosts, over every order of devices."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from meshes import ORDERS, batch, cut, is_right, ordered_mesh
from running import python
from trials import rarely

import gda
from gda.layout.grid import ShardGrid
from gda.multihost.allgather import all_gather
from gda.testing.strategies import mesh_shapes, sharded_cases

P = PartitionSpec
DATA = batch(16, 6)


# One process.


def test_another_spec_or_a_mesh_of_fewer_devices(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    same, other = g.reshard(P(None, "y")), Mesh(mesh.devices[:3:2, 1], ("z",))
    assert (same.mesh, same.grid.spec) == (mesh, (None, "y"))
    fewer = g.reshard(other, ["z"])
    assert fewer.mesh == other
    assert is_right(same, DATA)
    assert is_right(fewer, DATA)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_sharding_in_place_of_mesh_and_spec(mesh: Mesh, kind: str) -> None:
    g = cut(DATA, mesh, P("x"))
    for other in (mesh, ordered_mesh([5, 0, 3, 6], {"z": 4}, mesh.axis_types[0])):
        sharding = NamedSharding(other, P(None, other.axis_names[-1]), memory_kind=kind)
        if other is not mesh:
            sharding = NamedSharding(other, P("z"), memory_kind=kind)
        moved = g.reshard(sharding)
        assert moved.sharding == sharding
        assert is_right(moved, DATA)
        assert moved.reshard(P()).sharding.memory_kind == kind
        assert moved.reshard(NamedSharding(mesh, P())).sharding.memory_kind == "device"
    alone = g.reshard(SingleDeviceSharding(jax.devices()[3]))
    assert alone.array.devices() == {jax.devices()[3]}
    assert is_right(alone, DATA)


MOVES = """
import ctypes, json
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import gda
from kill_program import status

devices = np.array(jax.devices())
mesh = Mesh(devices.reshape(4, 2), ("x", "y"))
few, all_in_line = Mesh(devices[:3], ("z",)), Mesh(devices, ("z",))
shape, rows = (2040, 4104), P(("x", "y"))

def build(mesh, spec):
    return gda.GlobalArray.from_callback(
        shape, mesh, spec, lambda index, out: out.fill(1), dtype=np.float32, into=True
    ).block_until_ready()

def moved(tree, mesh, spec, **options):
    return gda.reshard_tree(tree, mesh, spec, max_device_bytes=2**20, **options)

found = {}
for name, old, new, way in [
    ("columns", rows, (mesh, P(None, ("x", "y"))), moved),
    ("columns, donated", rows, (mesh, P(None, ("x", "y"))), lambda *a: moved(*a, donate=True)),
    ("fewer", rows, (few, P("z")), lambda g, *to: g.reshard(*to, max_device_bytes=2**20)),
    ("other blocks", P("x"), (mesh, P(None, ("y", "x"))), lambda g, m, s: gda.constrain(g, s)),
    ("no replicas", P("x"), (all_in_line, P("z")), moved),
]:
    g = build(mesh, old)
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    before = status("VmRSS")
    after = way(g, *new).block_until_ready()
    found[name] = (status("VmHWM") - before - after.nbytes) / 2**20
    assert (np.asarray(after.local_shards[-1].data) == 1).all()
    del g, after
print(json.dumps(found))
"""


def test_a_move_in_one_process_holds_max_bytes_beside_the_result() -> None:
    done = python("-c", MOVES, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The array has 32 MiB, and 1 MiB for each of 8 devices are allowed.
    assert max(found.values()) < 20, found


@pytest.mark.parametrize(
    ("dtype", "donate"),
    [(np.float32, True), (jnp.bfloat16, False), (jnp.int4, True), (np.complex64, False)],
)
def test_pieces_in_one_process_are_of_any_dtype_and_size(
    mesh: Mesh, dtype: Any, donate: bool
) -> None:
    data = (batch(16, 6) % 7).astype(dtype)
    other = ordered_mesh([5, 0, 3], {"z": 3}, mesh.axis_types[0])
    for to in ((mesh, P(None, "y")), (other, P(None, "z")), (other, P())):
        moved = cut(data, mesh, P("x")).reshard(*to, max_device_bytes=1, donate=donate)
        assert moved.spec == to[1]
        assert is_right(moved, data)


def test_an_array_of_one_device_goes_to_a_mesh(mesh: Mesh) -> None:
    g = gda.GlobalArray.from_array(jnp.asarray(DATA)).reshard(mesh, P(("y", "x")))
    assert is_right(g, DATA)


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


def test_gather_in_one_process_is_a_copy(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    value = g.gather()
    value[0] = -1
    assert is_right(g, DATA)
    assert np.array_equal(g.gather(process=0), DATA)


def test_gather_refuses_impossible_arguments(mesh: Mesh) -> None:
    g = cut(DATA, mesh, P("x"))
    with pytest.raises(ValueError, match="process must be None or from 0 to 0, not 1"):
        g.gather(process=1)
    with pytest.raises(ValueError, match="max_device_bytes must be 1 or more, not 0"):
        g.gather(max_device_bytes=0)
    with pytest.raises(TypeError, match="key_data"):
        gda.GlobalArray.from_array(jax.random.split(jax.random.key(0), 8)).gather()


# Many processes.


@pytest.mark.processes(2, devices=4)
def test_gather_hands_no_more_than_max_bytes_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []

    def spy(*arguments: Any) -> Any:
        received = all_gather(*arguments)
        handed.append(received.nbytes)
        return received

    monkeypatch.setattr("gda.arrays.transport.exchanging.all_gather", spy)
    data = DATA.reshape(2, 1, 48)
    g = cut(data, ordered_mesh(ORDERS["shuffled"], {"x": 4, "y": 2}), P(None, None, ("y", "x")))
    for max_device_bytes in (20, 10**6):
        handed.clear()
        for process in (None, 1):
            value = g.gather(process, max_device_bytes=max_device_bytes)
            is_wanted = process in (None, jax.process_index())
            assert np.array_equal(value, data) if is_wanted else value is None
        assert 0 < max(handed) <= max_device_bytes


@pytest.mark.processes(4, devices=2)
def test_gather_to_processes_outside_the_mesh() -> None:
    g = cut(DATA, ordered_mesh([2, 6, 3, 7], {"x": 4}), P("x"))  # processes 1 and 3
    assert np.array_equal(g.gather(), DATA)


def test_reshard_over_explicit_axes_to_a_mesh_of_other_sizes() -> None:
    g = cut(DATA, ordered_mesh(range(2), {"x": 2}, AxisType.Explicit), P("x"))
    assert is_right(g.reshard(ordered_mesh(range(4), {"x": 4}, AxisType.Explicit), P("x")), DATA)
    one = cut(DATA[:1], ordered_mesh(range(1), {"x": 1}, AxisType.Explicit), P("x"))
    wider = one.reshard(ordered_mesh(range(2), {"x": 2}, AxisType.Explicit), P())
    assert np.array_equal(wider, DATA[:1])


def gather(grid: ShardGrid, order: list[int]) -> None:
    """Run in every process: build an array over these devices, and gather it."""
    data = batch(*grid.global_shape, dtype=np.int32)
    g = cut(data, ordered_mesh(order, dict(grid.mesh_shape)), grid.spec)
    assert is_right(g, data)
    if len({device.process_index for device in g.mesh.devices.flat}) > 1:
        np.testing.assert_array_equal(g.gather(), data)


@rarely(5)
@given(data=st.data())
def test_any_layout_is_gathered(process_pool: Any, data: st.DataObject) -> None:
    grid = data.draw(sharded_cases(mesh_shapes(max_devices=8))).grid
    order = data.draw(st.permutations(range(8)))[: grid.num_devices]
    process_pool(2, devices=4).run(gather, grid, order)

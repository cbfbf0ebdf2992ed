"""The part of an array in one process, to the array and back."""

from collections.abc import Callable
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, ordered_mesh
from trials import rarely

import gda
from gda.arrays.buffers import aligned_empty
from gda.arrays.process_local import local_array_of
from gda.testing import Pool
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

build = gda.GlobalArray.from_process_local


# One process, for which local and global are the same.


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_a_sharding_stands_in_place_of_mesh_and_spec(mesh: Mesh, kind: str) -> None:
    data = batch(16, 8)
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    for local in (data, data[:, ::-1], jnp.asarray(data), jax.device_put(data, sharding)):
        for g in (build(local, sharding), build(local, sharding, (16, 8))):
            assert g.sharding == sharding
            np.testing.assert_array_equal(np.asarray(g), local)
    keys = jax.random.split(jax.random.key(0), 8)
    assert np.array_equal(*map(jax.random.key_data, (build(keys, sharding).array, keys)))


def test_memory_of_the_caller_does_not_become_that_of_the_array(mesh: Mesh) -> None:
    memory = aligned_empty((64, 64), np.float32)
    for data in (memory, memory[:, 1:]):  # aligned and not
        data[:] = 1
        g = build(data, NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
        data[:] = 2
        assert (np.asarray(g) == 1).all()


@given(sharded_cases(max_dims=3))
def test_agrees_with_jax_on_the_same_data(case: ShardedCase) -> None:
    data = batch(*case.global_shape, dtype=np.int32)
    sharding = NamedSharding(case.mesh, P(*case.spec))
    g = build(data, case.mesh, case.spec)
    theirs = jax.make_array_from_process_local_data(sharding, data)
    np.testing.assert_array_equal(g.array, data)
    assert g.array.sharding == theirs.sharding
    for ours, shard in zip(g.array.addressable_shards, theirs.addressable_shards, strict=True):
        assert (ours.device, ours.index) == (shard.device, shard.index)
        np.testing.assert_array_equal(ours.data, shard.data)


def test_scalars_and_lists_are_data_too(auto_mesh: Mesh) -> None:
    for value in [3, 2.5, np.float32(1), np.array(7, np.int8), [[1, 2], [3, 4]]]:
        np.testing.assert_array_equal(np.asarray(build(value, auto_mesh, P())), value)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        *(((64, 32), P("x")), ((64, 32), P(None, "x")), ((16, 3), P(("x", "y"))), ((8,), P())),
        ((64, 32), P(("x", "y"))),  # the usual batch; with the offset, JAX copies every block
    ],
)
@pytest.mark.parametrize("offset", [0, 16])
def test_the_callers_memory_may_be_written_to_afterwards(
    auto_mesh: Mesh, shape: tuple[int, ...], spec: P, offset: int
) -> None:
    wanted = batch(*shape)
    memory = aligned_empty(wanted.nbytes + offset, np.uint8)[offset:]
    data = memory.view(np.float32).reshape(shape)
    data[...] = wanted
    g = build(data, auto_mesh, spec)
    data[...] = -1
    np.testing.assert_array_equal(np.asarray(g), wanted)


def test_without_a_copy_the_caller_has_promised_to_leave_it_alone(auto_mesh: Mesh) -> None:
    data = aligned_empty((64, 32), np.float32)
    data[...] = batch(64, 32)
    g = build(data, auto_mesh, P("x"), copy=False)
    assert np.shares_memory(np.asarray(g.local_shards[0].data), data)
    assert not np.shares_memory(
        np.asarray(build(data, auto_mesh, P("x"), copy=True).local_shards[0].data), data
    )


def test_values_must_fit_the_dtype_of_jax_in_any_layout_of_memory(
    auto_mesh: Mesh,
) -> None:
    data = np.arange(8)
    assert build(data, auto_mesh, P("x")).dtype == np.int32
    data[5] = 2**40
    with pytest.raises(gda.DoesNotFitError, match=r"value 1099511627776 at \(5,\) of the array"):
        build(data, auto_mesh, P("x"))
    assert build(data, auto_mesh, P("x"), dtype=np.float32).dtype == np.float32
    with jax.enable_x64(True):
        wide = jnp.arange(8) + 2**40
    with pytest.raises(gda.DoesNotFitError):
        build(wide, auto_mesh, P("x"))
    data = batch(16, 8)
    for view in (data.T, data[::2], data[:, ::-1], np.asfortranarray(data)):
        np.testing.assert_array_equal(np.asarray(build(view, auto_mesh, P("x"))), view)
    big_endian = np.arange(8, dtype=">i4")
    np.testing.assert_array_equal(np.asarray(build(big_endian, auto_mesh, P("x"))), np.arange(8))


@pytest.mark.filterwarnings("ignore:.*broadcast_arrays:FutureWarning")
def test_data_that_cannot_be_written_to(auto_mesh: Mesh) -> None:
    read_only = np.arange(8, dtype=np.float32)
    read_only.flags.writeable = False
    # NumPy says that it can be written to, and its buffer cannot.
    repeated, _ = np.broadcast_arrays(np.arange(8, dtype=np.float32), np.zeros((1, 8)))
    for local in read_only, repeated[0]:
        g = gda.GlobalArray.from_process_local(local, auto_mesh, P("x"))
        np.testing.assert_array_equal(g, local)


def test_bad_local_data(auto_mesh: Mesh) -> None:
    with pytest.raises(TypeError, match="which JAX does not have"):
        build(np.array(["a"] * 4), auto_mesh, P("x"))
    with pytest.raises(TypeError, match="masked array"):
        build(np.ma.masked_array(np.zeros(4), [1, 0, 0, 0]), auto_mesh, P("x"))
    with pytest.raises(TypeError, match="being traced"):
        jax.jit(lambda x: build(x, auto_mesh, P("x")))(np.zeros(4))
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        build(np.zeros(4), auto_mesh.abstract_mesh, P("x"))
    with pytest.raises(ValueError, match=r"local shape \(6,\) of process 0 .* not divisible by 4"):
        build(np.zeros(6), auto_mesh, P("x"))
    with pytest.raises(ValueError, match=r"has local size 4; expected is 8, the 4 blocks"):
        build(np.zeros(4), auto_mesh, P("x"), (8,))
    with pytest.raises(ValueError, match="the same number of dimensions"):
        build(np.zeros(4), auto_mesh, P("x"), (4, 1))


# jax.Arrays of this process.


@pytest.mark.parametrize("spec", [P("x"), pytest.param(P("x", "y"), marks=pytest.mark.torture)])
def test_a_buffer_behind_a_jax_array_may_be_filled_again(mesh: Mesh, spec: P) -> None:
    buffer = aligned_empty((64, 64), np.uint32)
    buffer[...] = 1
    sharding = NamedSharding(mesh, spec)
    placed = jax.device_put(buffer, sharding)
    keys = jax.random.wrap_key_data(jax.device_put(buffer.reshape(-1, 2)))
    arrays = [
        *(build(placed, mesh, spec), build(placed, mesh, spec, copy=True)),
        *(build(placed, mesh, spec, dtype=np.float32), build(jax.device_put(buffer), mesh, spec)),
    ]
    drawn = build(keys, mesh, P())
    buffer[...] = 2
    for g in (*arrays, jax.random.key_data(drawn.array)):
        assert (np.asarray(g) == 1).all()


@pytest.mark.parametrize("spec", [P(), P("x"), P("y", "x")])
def test_arrays_that_are_elsewhere_are_moved(mesh: Mesh, spec: P) -> None:
    for local in (jnp.arange(32.0).reshape(8, 4), jax.device_put(batch(8, 4), jax.devices()[5])):
        g = build(local, mesh, spec)
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        np.testing.assert_array_equal(np.asarray(g), local)
    assert build(jnp.arange(8), mesh, P("x"), dtype=np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(build(g, mesh, spec)), np.asarray(g))


def test_keys(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    g = build(keys, mesh, P("x"))
    assert g.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(g.array), jax.random.key_data(keys))
    assert build(jax.random.key(1), mesh, P()).shape == ()


# Several processes. Devices 0 to 3 belong to process 0, and 4 to 7 to process 1.

MESHES = [({"x": 8}, P("x")), ({"x": 4, "y": 2}, P(("x", "y"))), ({"x": 2, "y": 4}, P(None))]


def has_local_mesh(mesh: Mesh) -> bool:
    """Return True if the devices of this process form a subcube of the mesh."""
    try:
        return mesh.local_mesh is not None
    except ValueError:
        return False


@pytest.mark.processes(2, devices=4)
def test_every_row_stays_with_its_process() -> None:
    me, kinds = jax.process_index(), cycle([AxisType.Auto, AxisType.Explicit])
    for order, (shape, spec) in zip(ORDERS.values(), MESHES[:2] * 2, strict=True):
        mesh = ordered_mesh(order, shape, next(kinds))
        data = batch(8, 3) + 100 * me
        g = build(data, mesh, spec)
        assert g.shape == (16, 3)
        rows = [np.asarray(shard.data) for shard in g.local_shards]
        np.testing.assert_array_equal(np.concatenate(rows), data)
        if not has_local_mesh(mesh):
            continue
        local = local_array_of(g.array, mesh, spec)
        assert local.is_fully_addressable
        assert local.sharding.device_set == set(mesh.local_devices)
        np.testing.assert_array_equal(local, data)


def check_round_trip(
    global_shape: tuple[int, ...], mesh_shape: dict[str, int], spec: P, order: list[int]
) -> None:
    """Cut the local array out of a whole, build the global array of it, and compare."""
    size = int(np.prod(list(mesh_shape.values())))
    mesh = ordered_mesh(order[:size], mesh_shape)
    process_of = [device.process_index for device in mesh.devices.flat]
    grid = gda.ShardGrid(global_shape, mesh_shape, spec, process_of=process_of)
    view = grid.view(jax.process_index())
    whole = batch(*global_shape, dtype=np.int32)
    # The processes may fail one by one here: whether blocks are regular depends on the process.
    with gda.checking_agreement(False):
        if not view.is_regular:
            with pytest.raises(ValueError, match="no device of|do not form a regular grid"):
                build(np.zeros((8,) * whole.ndim), mesh, spec)
            return
        local = np.empty(view.local_shape, np.int32)
        for here, there in zip(view.indices_within(view.local_shape), view.indices, strict=True):
            local[here] = whole[there]
        for data in (local, jnp.asarray(local.copy()), whole):
            array = build(data, mesh, spec, None if data.shape != whole.shape else whole.shape)
            assert array.shape == whole.shape
            for shard in array.local_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])
            if has_local_mesh(mesh):
                np.testing.assert_array_equal(local_array_of(array.array, mesh, spec), local)


@rarely(5)
@given(sharded_cases(mesh_shapes(max_devices=8), max_dims=3), st.permutations(range(8)))
def test_local_arrays_of_any_mesh(
    process_pool: Callable[..., Pool], case: ShardedCase, order: list[int]
) -> None:
    pool = process_pool(2, devices=4)
    pool.run(check_round_trip, case.global_shape, dict(case.mesh_shape), case.spec, order)


@pytest.mark.processes(2, devices=4)
def test_blocks_that_form_no_regular_grid_are_shown() -> None:
    # Process 0 has blocks (0, 0), (0, 1), (1, 0) and (2, 0).
    mesh = ordered_mesh([0, 1, 2, 4, 3, 5, 6, 7], {"x": 4, "y": 2})
    with gda.checking_agreement(False), pytest.raises(ValueError, match="regular grid") as raised:
        build(np.zeros((4, 4)), mesh, P("x", "y"))
    expected = "(0, 0); (0, 1); (1, 0); (2, 0)" if jax.process_index() == 0 else "(1, 1); (2, 1)"
    assert f"process {jax.process_index()} holds the blocks {expected}" in str(raised.value)
    # With the size of the whole in one dimension the blocks can be told apart.
    whole = batch(8, 4)
    rows = whole[:6] if jax.process_index() == 0 else whole[2:]
    with gda.checking_agreement(False):
        g = build(rows, mesh, P("x", "y"), (8, 4))
    for shard in g.local_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.processes(2, devices=4)
def test_a_size_that_is_none_is_inferred() -> None:
    mesh = ordered_mesh(range(8), {"x": 4, "y": 2})
    rows = batch(8, 4)[4 * jax.process_index() :][:4]
    for sizes in [(None, 4), (8, None), (None, None), iter([8, None])]:
        g = build(rows, mesh, P("x", "y"), sizes)
        assert g.shape == (8, 4)
        for shard in g.local_shards:
            np.testing.assert_array_equal(shard.data, batch(8, 4)[shard.index])
    with pytest.raises((TypeError, ValueError), match=r"None, None, None"):
        build(rows, mesh, P("x"), (None, None, None))


@pytest.mark.processes(2, devices=4)
def test_a_process_without_a_device_says_shape_and_dtype() -> None:
    mesh = Mesh(np.array(jax.devices())[:4], ("x",))
    if jax.process_index() == 0:
        assert build(np.zeros(4, np.float32), mesh, P("x")).shape == (4,)
        return
    with pytest.raises(ValueError, match=r"process 1 has no device of the mesh {'x': 4}"):
        build(np.zeros(4, np.float32), mesh, P("x"))
    with pytest.raises(ValueError, match="pass dtype="):
        build(np.zeros(4, np.float32), mesh, P("x"), (4,))
    g = build(None, mesh, P("x"), (4,), dtype=np.float32)
    assert (g.shape, g.dtype, len(g.local_shards)) == ((4,), np.float32, 0)


@pytest.mark.processes(2, devices=4)
def test_a_global_array_is_no_local_data() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    g = build(np.zeros(4), mesh, P("x"))
    with pytest.raises(ValueError, match="is a global array already"):
        build(g, mesh, P("x"))


@pytest.mark.processes(2, devices=4)
def test_processes_that_disagree_are_named() -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    me = jax.process_index()
    with pytest.raises(gda.DisagreementError, match=r"process 0: shape \(8,\), process 1: \(16,\)"):
        build(np.zeros(4 + 4 * me), mesh, P("x"))
    with pytest.raises(ValueError, match="not divisible by 4"):
        build(np.zeros(5 if me else 4), mesh, P("x"))


@pytest.mark.processes(2, devices=4)
def test_keys_of_several_processes() -> None:
    mesh = ordered_mesh(ORDERS["reversed"], {"x": 8})
    keys = jax.random.split(jax.random.key(jax.process_index()), 4)
    g = build(keys, mesh, P("x"))
    assert (g.shape, g.dtype) == ((8,), keys.dtype)
    local = local_array_of(g.array, mesh, P("x"))
    np.testing.assert_array_equal(jax.random.key_data(local), jax.random.key_data(keys))
    # Devices 0 and 1 hold the same block; each other block is held once.
    mesh = ordered_mesh([0, 1, 2, 4, 3, 5, 6, 7], {"x": 4, "y": 2})
    uneven = keys[:3]
    for data, shape in ((uneven, None), (uneven, (4,)), (keys, (4,))):
        g = build(data, mesh, P("x"), shape)
        assert (g.shape, g.dtype) == ((4,), keys.dtype)
        for shard in g.local_shards:
            start = shard.index[0].start - (jax.process_index() if data is uneven else 0)
            wanted = jax.random.key_data(data)[start : start + 1]
            np.testing.assert_array_equal(jax.random.key_data(shard.data), wanted)

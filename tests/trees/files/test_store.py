"""Arrays written to storage, from one process and from several."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr
from counting import Counting
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import ORDERS, batch, cut, mesh_of, ordered_mesh
from trials import rarely

import gda
from gda.layout.spec import Index
from gda.testing import Pool
from gda.testing.strategies import ShardedCase, global_arrays, mesh_shapes, sharded_cases

DATA = batch(16, 8)
SPECS = [P(), P("x"), P("x", "y"), P(("y", "x")), P(None, "y")]
DRIVERS = ["zarr3", "n5"]


def target_of(
    *shape: int, dtype: Any = np.float32, before: Callable[[Any], object] | None = None
) -> Counting:
    """Return a target; ``before`` is called with the index of each block before it is written."""
    target = Counting(np.zeros(shape, dtype))
    target.before = before or target.before
    return target


def open_tensorstore(path: Path, driver: str, shape: Any = (16, 8), chunks: Any = None, **o: Any):
    layout = ts.ChunkLayout(chunk_shape=chunks) if chunks else None
    options = {"create": True, "dtype": ts.float32, "shape": shape, "chunk_layout": layout} | o
    return ts.open({"driver": driver, "kvstore": f"file://{path}/"}, **options).result()


# One process.


def test_plain_arrays_of_jax_are_written_too(auto_mesh: Mesh, tmp_path: Path) -> None:
    sharded = jax.device_put(DATA, NamedSharding(auto_mesh, P("y")))
    pinned = jax.device_put(DATA, sharded.sharding.with_memory_kind("pinned_host"))
    for array in (jnp.asarray(DATA), pinned, sharded):
        target = np.zeros_like(DATA)
        gda.store(array, target)
        np.testing.assert_array_equal(target, DATA)
    mapped = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (16, 8))
    gda.store(array, mapped)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), DATA)


@pytest.mark.parametrize(("chunks", "workers"), [((3, 5), None), ((2, 4), 4)])
@pytest.mark.parametrize("kind", ["zarr", "hdf5", "zarr3", "n5"])
def test_libraries_with_chunks(
    auto_mesh: Mesh, tmp_path: Path, kind: str, chunks: tuple[int, int], workers: int | None
) -> None:
    for number, spec in enumerate([P("x", "y"), P(None, "y")]):
        path, g = tmp_path / str(number), cut(DATA, auto_mesh, spec)
        if kind == "hdf5":
            with h5py.File(path, "w") as file:
                # One lock is around every call of HDF5.
                target = file.create_dataset("a", (16, 8), "f4", chunks=chunks)
                gda.store(g, target, max_workers=4)
                gda.store(g, file.create_dataset("b", (16, 8), "f4"), max_workers=workers)
                for data in file.values():
                    np.testing.assert_array_equal(data[:], DATA)
        elif kind == "zarr":
            target = zarr.create_array(store=path, shape=(16, 8), chunks=chunks, dtype="f4")
            gda.store(g, target, max_workers=workers)
            np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], DATA)
        else:
            gda.store(g, open_tensorstore(path, kind, chunks=list(chunks)), max_workers=workers)
            again = ts.open({"driver": kind, "kvstore": f"file://{path}/"}).result()
            np.testing.assert_array_equal(again.read().result(), DATA)


def test_a_part_of_a_tensorstore(auto_mesh: Mesh, tmp_path: Path) -> None:
    whole = open_tensorstore(tmp_path, "zarr3", (32, 8), [5, 3])
    gda.store(cut(DATA, auto_mesh, P("x", "y")), whole[7:23])
    np.testing.assert_array_equal(whole.read().result()[7:23], DATA)
    assert (whole.read().result()[:7] == 0).all()


@pytest.mark.parametrize("shape", [(), (0,), (8, 0, 2)])
def test_scalars_and_empty_arrays(auto_mesh: Mesh, tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = np.full(shape, 7, np.float32)
    g = cut(data, auto_mesh, P("x") if shape else P())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for target in [
            np.zeros(shape, np.float32),
            zarr.create_array(store=tmp_path / "z", shape=shape, dtype="f4"),
            file.create_dataset("a", shape, "f4"),
            open_tensorstore(tmp_path / "t", "zarr3", shape),
        ]:
            gda.store(g, target, max_workers=3)
            np.testing.assert_array_equal(np.asarray(target[()]), data)


def test_a_dtype_that_holds_the_values_takes_them(auto_mesh: Mesh, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "int4", "bool", "complex64", "uint8"):
        same = np.arange(16).reshape(8, 2).astype(jnp.dtype(dtype))
        gda.store(cut(same, auto_mesh, P("x")), target := np.zeros((8, 2), same.dtype))
        np.testing.assert_array_equal(target, same)
    g = cut(DATA.astype(jnp.bfloat16), auto_mesh, P("x"))
    for target in (
        np.zeros((16, 8), ">f8"),
        open_tensorstore(tmp_path, "zarr3", dtype=ts.float32),
        target_of(16, 8, dtype=np.float64),
    ):
        gda.store(g, target)
        values = target.data if isinstance(target, Counting) else np.asarray(target)
        np.testing.assert_array_equal(values, DATA)


@given(global_arrays(), st.sampled_from([None, 1, 3]), st.sampled_from([None, 1, 100]))
def test_any_array_arrives_as_it_is(
    g: gda.GlobalArray, max_workers: int | None, max_bytes: int | None
) -> None:
    target = target_of(*g.shape, dtype=g.dtype)
    gda.store(g, target, max_workers=max_workers, max_bytes=max_bytes)
    assert target.data.tobytes() == np.asarray(g).tobytes()
    assert (target.counts == 1).all()


# Workers, memory.


def test_workers_write_at_a_time_and_are_gone_afterwards(auto_mesh: Mesh) -> None:
    before = set(threading.enumerate())
    together = threading.Barrier(4, timeout=60)
    target = target_of(16, 8, before=lambda _: together.wait())
    gda.store(cut(DATA, auto_mesh, P("x", "y")), target, max_workers=4)
    np.testing.assert_array_equal(target.data, DATA)
    assert len(target.threads) == 4
    assert set(threading.enumerate()) <= before


# Errors while writing.


def fill_the_disk(index: Index) -> None:
    if index[0].start == 8:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("max_workers", [None, 3])
def test_an_error_names_the_index_and_ends_the_writing(
    auto_mesh: Mesh, max_workers: int | None
) -> None:
    before = set(threading.enumerate())
    target = target_of(16, 8, before=fill_the_disk)
    with pytest.raises(OSError, match="No space left") as raised:
        gda.store(cut(DATA, auto_mesh, P("x")), target, max_workers=max_workers)
    assert raised.value.__notes__ == ["gda: while writing index [8:12, :]"]
    assert max_workers or [index[0].start for index in target.asked] == [0, 4]
    assert set(threading.enumerate()) <= before
    tree = {"w": [cut(DATA, auto_mesh, P("x"))]}
    with pytest.raises(OSError, match="No space left") as raised:
        gda.store(tree, {"w": [target]}, max_workers=max_workers)
    assert raised.value.__notes__ == ["gda: while writing index [8:12, :] of w/0"]


def test_an_error_of_a_tensorstore_names_the_index(auto_mesh: Mesh, tmp_path: Path) -> None:
    target = open_tensorstore(tmp_path / "t", "zarr3", chunks=[4, 8])
    # A folder where the file of a chunk is to be.
    for row in range(4):
        (tmp_path / "t" / "c" / str(row) / "0").mkdir(parents=True)
    with pytest.raises(Exception, match="(?i)directory") as raised:
        gda.store({"w": cut(DATA, auto_mesh, P("x"))}, {"w": target})
    assert raised.value.__notes__[0].startswith("gda: while writing index [")
    assert raised.value.__notes__[0].endswith(" of w")
    # The next attempt does not meet the last.
    for row in range(4):
        (tmp_path / "t" / "c" / str(row) / "0").rmdir()
    gda.store(cut(DATA + 1, auto_mesh, P("x")), target)
    time.sleep(0.05)
    np.testing.assert_array_equal(target.read().result(), DATA + 1)


# Trees.


def test_a_tree(auto_mesh: Mesh) -> None:
    tree = {
        "layers": [cut(DATA + i, auto_mesh, spec) for i, spec in enumerate(SPECS)],
        "step": jnp.int32(7),
        "nothing": None,
    }
    targets: Any = {
        "layers": [target_of(16, 8) for _ in SPECS],
        "step": np.zeros((), np.int64),
        "nothing": None,
    }
    gda.store(tree, targets)
    for i, target in enumerate(targets["layers"]):
        np.testing.assert_array_equal(target.data, DATA + i)
        assert (target.counts == 1).all()
        assert len(target.asked) == tree["layers"][i].grid.num_shards
        assert target.threads == {threading.current_thread().name}
    assert targets["step"] == 7
    # It keeps the containers of the tree, around what is no array of JAX.
    made = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    gda.store(tree, made)
    np.testing.assert_array_equal(made["layers"][1].array, DATA + 1)


def test_nothing_is_written_before_all_is_checked(auto_mesh: Mesh) -> None:
    good = cut(DATA, auto_mesh, P("x"))
    first = target_of(16, 8)
    for bad, target, error, message in [
        (good, np.zeros((8, 16), np.float32), ValueError, r"\(16, 8\), and the target \(8, 16\)"),
        (good, np.zeros((16, 8), np.float16), ValueError, "cannot hold all of its values"),
        (good, [1, 2], TypeError, "a list is not a target"),
        (DATA, np.zeros((16, 8)), TypeError, "expected a GlobalArray or a jax.Array"),
    ]:
        with pytest.raises(error, match=message) as raised:
            gda.store({"a": good, "b": {"c": bad}}, {"a": first, "b": {"c": target}})
        assert raised.value.__notes__ == ["gda: at b/c of the tree"]
    with pytest.raises(ValueError, match=r"targets has nothing for b"):
        gda.store({"a": good, "b": good}, {"a": first})
    assert not first.asked


# Bad input.


def test_values_that_are_no_array_are_refused(auto_mesh: Mesh) -> None:
    target = target_of(16, 8)
    with pytest.raises(
        TypeError, match=r"not \w+; for a NumPy array that every process has, let one"
    ):
        gda.store(1.0, target)
    for other in ({"a": cut(DATA, auto_mesh, P())}, None):
        with pytest.raises(ValueError, match="targets must have the structure of the tree"):
            gda.store(other, target)
    with pytest.raises(TypeError, match=r"no target holds key<fry>.*jax\.random\.key_data"):
        gda.store(jax.random.split(jax.random.key(0), 16), target_of(16))
    assert not target.asked


def test_two_threads_are_not_let_into_one_chunk(auto_mesh: Mesh, tmp_path: Path) -> None:
    g = cut(DATA, auto_mesh, P("x", "y"))
    target = zarr.create_array(store=tmp_path / "z", shape=(16, 8), chunks=(3, 8), dtype="f4")
    with pytest.raises(ValueError, match="so that two threads would write one chunk") as raised:
        gda.store(g, target, max_workers=2)
    assert str(raised.value).endswith("use chunks of (4, 4), or max_workers=1")
    assert (target[:] == 0).all()
    fitting = zarr.create_array(store=tmp_path / "y", shape=(16, 8), chunks=(4, 4), dtype="f4")
    gda.store(g, fitting, max_workers=2)


# Several processes.


def created_by_process_0(create: Callable[[], Any], open_again: Callable[[], Any]) -> Any:
    """Return the target that process 0 creates, as every process opens it."""
    target = create() if jax.process_index() == 0 else None
    gda.check_processes_agree({}, name="created")
    return open_again() if target is None else target


def memory_map(path: Path, chunks: tuple[int, ...]) -> Any:
    return created_by_process_0(
        lambda: np.lib.format.open_memmap(path, "w+", np.float32, (16, 8)),
        lambda: np.load(path, mmap_mode="r+"),
    )


def zarr_array(path: Path, chunks: tuple[int, ...]) -> Any:
    return created_by_process_0(
        lambda: zarr.create_array(store=path, shape=(16, 8), chunks=chunks, dtype="f4"),
        lambda: zarr.open_array(path, mode="r+"),
    )


def tensorstore(driver: str) -> Callable[[Path, tuple[int, ...]], Any]:
    # Each process may create it; the first does.
    return lambda path, chunks: open_tensorstore(path, driver, chunks=list(chunks), open=True)


KINDS_OF_AXES = [AxisType.Auto, AxisType.Explicit]
SHARED = {"memory map": memory_map, "zarr": zarr_array}
SHARED |= {f"tensorstore, {driver}": tensorstore(driver) for driver in DRIVERS}


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("kind", SHARED)
def test_many_processes_write_one_target(kind: str, shared_tmp_path: Path) -> None:
    orders = itertools.cycle(ORDERS.values())
    for number, (spec, order) in enumerate(zip(SPECS[::2], orders, strict=False)):
        mesh = ordered_mesh(order, {"x": 4, "y": 2}, KINDS_OF_AXES[number % 2])
        g = cut(DATA + number, mesh, spec)
        target = SHARED[kind](shared_tmp_path / f"{number}.npy", g.grid.shard_shape)
        workers = 2 if kind == "zarr" else None
        gda.store(g, target, max_workers=workers)
        gda.check_processes_agree({}, name="written")
        written = target.read().result() if "tensorstore" in kind else target[:]
        np.testing.assert_array_equal(written, DATA + number, err_msg=str(number))
        gda.check_processes_agree({}, name="read")


@pytest.mark.processes(2, devices=4)
def test_chunks_that_processes_would_share_are_refused(shared_tmp_path: Path) -> None:
    mesh = ordered_mesh(range(8), {"x": 2, "y": 4})
    g = cut(DATA, mesh, P("x", "y"))

    message = (
        r"chunks of shape \(5, 3\), and the blocks have shape \(8, 2\), so that processes 0, 1 "
        r"would write one chunk .* use chunks of \(8, 2\)$"
    )
    with pytest.raises(ValueError, match=message):
        gda.store(g, zarr_array(shared_tmp_path / "a", (5, 3)))
    store = open_tensorstore(shared_tmp_path / "t", "zarr3", chunks=[5, 3], open=True)
    with pytest.raises(ValueError, match=message):
        gda.store(g, store)
    whole = open_tensorstore(shared_tmp_path / "w", "zarr3", (32, 8), chunks=[4, 3], open=True)
    with pytest.raises(ValueError, match=r"chunks of \(8, 2\), the first at the first element"):
        gda.store(g, whole[2:18])
    # The columns of a process may share chunks, and what it writes alone may have any.
    target = zarr_array(shared_tmp_path / "b", (4, 3))
    gda.store(g, target)
    gda.check_processes_agree({}, name="written")
    np.testing.assert_array_equal(target[:], DATA)
    target = zarr_array(shared_tmp_path / "c", (5, 3))
    gda.store(cut(DATA, mesh, P()), target)
    gda.check_processes_agree({}, name="written")
    np.testing.assert_array_equal(target[:], DATA)


@pytest.mark.processes(2, devices=4)
def test_an_hdf5_file_has_one_writer(tmp_path: Path) -> None:
    mesh = ordered_mesh(range(8), {"x": 8})
    with h5py.File(tmp_path / "a.h5", "w") as file:  # one for each process
        target = file.create_dataset("a", (16, 8), "f4")
        with pytest.raises(
            ValueError, match=r"an HDF5 file, .* but processes 0, 1 have blocks to write; gather"
        ):
            gda.store(cut(DATA, mesh, P("x")), target)
        gda.store(cut(DATA, mesh, P()), target)
        written = target[:].any()
        gda.store(jnp.asarray(DATA), target)
        np.testing.assert_array_equal(target[:], DATA)
    assert written == (jax.process_index() == 0)


def counts_of(case: Any, order: list[int]) -> np.ndarray:
    """Store in this process, and return how often it wrote each element."""
    size = int(np.prod(list(case.mesh_shape.values())))
    mesh = ordered_mesh(order[:size], dict(case.mesh_shape))
    data = batch(*case.global_shape, dtype=np.int32) + 1
    with gda.checking_agreement(False):
        g = cut(data, mesh, case.spec)
        targets = [target_of(*g.shape, dtype=np.int32) for _ in range(3)]
        gda.store([g] * 3, targets, max_workers=2)
    for target in targets:
        np.testing.assert_array_equal(target.data, np.where(target.counts, data, 0))
    return np.stack([target.counts for target in targets])


@rarely(2)
@given(sharded_cases(mesh_shapes(max_devices=8), max_dims=3), st.permutations(range(8)))
def test_over_all_processes_every_element_is_written_once(
    process_pool: Callable[..., Pool], case: ShardedCase, order: list[int]
) -> None:
    counts = process_pool(4, devices=2).run(counts_of, case, order)
    assert (np.sum(counts, axis=0) == 1).all()


@pytest.mark.processes(2, devices=4)
def test_a_process_stores_its_blocks_without_the_others() -> None:
    g, target = cut(DATA, mesh_of({"x": 8}), P("x")), target_of(16, 8)
    if jax.process_index() == 0:
        gda.store(g, target)
        assert len(target.asked) == 4

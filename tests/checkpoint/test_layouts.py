"""Checkpoints across layouts and processes: each chunk is written once and read once."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import limit_sizes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, is_right, mesh_of, ordered_mesh
from trials import rarely

import gda
from gda.checkpoint import restore, save
from gda.storage.stores.directory import FileStore
from gda.testing import Pool
from gda.testing.strategies import mesh_shapes, meshes, partition_specs
from gda.trees.records.arrivals import Arrival

DATA = batch(16, 8)


class Noted:
    """The chunks that are written and read while ``noting`` is entered.

    Attributes:
      written: bytes of each chunk that this process wrote, by array and chunk.
      reads: the number of reads of each chunk by this process.
    """

    def __init__(self) -> None:
        self.written: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()


@contextlib.contextmanager
def noting(packed_below: int = 2**20, chunk: int = 2**24, pack: int = 2**22) -> Iterator[Noted]:
    """Note what saves and restores do; sizes are as said."""
    noted, write, read_into = Noted(), FileStore.write_sealed, FileStore.read_into

    def noted_write(store: FileStore, name: str, payload: Any) -> int:
        noted.written[name.partition("/")[2]] += payload.nbytes + 4
        return write(store, name, payload)

    def noted_read(store: FileStore, name: str, *buffers: Any) -> tuple[int, int]:
        if not name.endswith("zarr.json"):
            noted.reads[name] += 1
        return read_into(store, name, *buffers)

    with pytest.MonkeyPatch.context() as patch:
        limit_sizes(patch, packed_below, chunk, max(pack, packed_below))
        patch.setattr(FileStore, "write_sealed", noted_write)
        patch.setattr(FileStore, "read_into", noted_read)
        yield noted


# One process.


Layout = tuple[Any, P]  # a mesh, or the shape of one, and a spec


@st.composite
def moves(draw: st.DrawFn, a_mesh: st.SearchStrategy[Any]) -> tuple[Any, Layout, Layout]:
    """Draw a shape, and two layouts that it fits."""
    source, target = draw(a_mesh), draw(a_mesh)
    specs = [draw(partition_specs(mesh)) for mesh in (source, target)]
    rank = draw(st.integers(max(map(len, specs)), 3))
    shape = []
    for dimension in range(rank):
        parts = [
            parts_of(mesh, spec, dimension)
            for mesh, spec in zip((source, target), specs, strict=True)
        ]
        shape.append(math.lcm(*parts) * draw(st.sampled_from([1, 2, 3, 0])))
    return tuple(shape), (source, specs[0]), (target, specs[1])


def parts_of(mesh: Any, spec: P, dimension: int) -> int:
    entry = spec[dimension] if dimension < len(spec) else None
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    sizes = dict(mesh.shape if isinstance(mesh, Mesh) else mesh)
    return math.prod(sizes[name] for name in names)


@rarely(5)
@given(
    cases=st.lists(moves(meshes()), min_size=1, max_size=2),
    dtype=st.sampled_from(
        [
            *["float32", "int8", "bfloat16", "bool", "complex64", "int4", "float16", "uint32"],
            *["uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"],
        ]
    ),
    limits=st.tuples(
        st.sampled_from([1, 24, 2**20]), st.sampled_from([1, 32, 2**24]), st.sampled_from([64, 999])
    ),
    workers=st.sampled_from([None, 1, 3]),
)
def test_any_tree_onto_any_layout(
    tmp_path_factory: pytest.TempPathFactory,
    cases: Any,
    dtype: str,
    limits: tuple[int, int, int],
    workers: int | None,
) -> None:
    path = tmp_path_factory.mktemp("run")
    arrays = [
        (np.arange(math.prod(shape)).reshape(shape) % 7).astype(jnp.dtype(dtype))
        for shape, *_ in cases
    ]
    tree = [cut(data, *source) for data, (_, source, _) in zip(arrays, cases, strict=True)]
    like = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(*target))
        for shape, _, target in cases
    ]
    with noting(*limits) as noted:
        save(path, tree, max_workers=workers, max_bytes=100)
        assert not noted.reads
        written = set(noted.written)
        restored = restore(path, like, max_workers=workers, max_bytes=100)
        assert {name.partition("/")[2] for name in noted.reads} == written
        assert set(noted.reads.values()) <= {1}
        host = restore(path)
    for got, whole, data, struct in zip(restored, host, arrays, like, strict=True):
        assert (got.sharding, got.dtype) == (struct.sharding, struct.dtype)
        assert np.asarray(got).tobytes() == np.asarray(whole).tobytes() == data.tobytes()


def test_only_needed_chunks_are_read(tmp_path: Path) -> None:
    data = batch(64, 16)
    with noting(packed_below=1) as noted:
        save(tmp_path, {"a": cut(data, mesh_of({"x": 8}), P("x")), "b": batch(9)})
        assert sorted(noted.written) == ["00000.a/" + f"c.{i}.0" for i in range(8)] + [
            "00001.b/c.0"
        ]
        restore(tmp_path, at=["b"])
    assert [name.partition("/")[2] for name in noted.reads] == ["00001.b/c.0"]


def test_restored_arrays_are_the_memory_that_was_read_into(
    auto_mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[int] = []
    finish = Arrival.finish

    def noted(arrival: Any) -> None:
        buffers.extend(block.ctypes.data for block in arrival.blocks)
        finish(arrival)

    monkeypatch.setattr(Arrival, "finish", noted)
    tree = {"big": cut(batch(512, 1024), auto_mesh, P("x", "y")), "n": batch(2**19)}
    tree |= {"small": cut(batch(64, 8), auto_mesh, P("x", "y"))}
    save(tmp_path, tree)
    restored = restore(tmp_path, tree, mesh=auto_mesh, specs=P("x", "y"))
    placed = {
        shard.data.unsafe_buffer_pointer()
        for name in ("big", "small")
        for shard in restored[name].local_shards
    }
    assert placed | {restored["n"].ctypes.data} == set(buffers)


def addresses(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.local_shards]


def test_small_arrays_stay_in_the_chunk_that_they_share(auto_mesh: Mesh, tmp_path: Path) -> None:
    tree = {name: cut(batch(16, 16) + n, auto_mesh, P("x")) for n, name in enumerate("abc")}
    save(tmp_path, tree)
    restored = restore(tmp_path, tree)
    first = addresses(restored["a"])[0]
    for n, name in enumerate("abc"):
        within = [address - first for address in addresses(restored[name])]
        assert within == [1024 * n + 256 * (i // 2) for i in range(8)]
    step = jax.jit(lambda x: x * 0, donate_argnums=0)
    jax.block_until_ready(step(restored["a"].array))
    restored["b"].delete()
    np.testing.assert_array_equal(restored["c"], batch(16, 16) + 2)
    np.testing.assert_array_equal(restore(tmp_path, tree)["a"], batch(16, 16))


def test_a_small_array_does_not_keep_the_chunk_of_others(auto_mesh: Mesh, tmp_path: Path) -> None:
    tree = {name: cut(batch(16, 16), auto_mesh, P("x")) for name in "abcde"}
    save(tmp_path, tree)
    alone = restore(tmp_path, {"b": tree["b"]}, partial=True)["b"]
    assert (np.diff(addresses(alone)[::2]) == 256).all()  # in a buffer of its own
    np.testing.assert_array_equal(alone, batch(16, 16))


def test_small_arrays_of_odd_sizes_are_aligned(auto_mesh: Mesh, tmp_path: Path) -> None:
    for shape in ((), (3,), (8, 3), (16, 16)):
        tree = {str(n): cut(batch(*shape) + n, auto_mesh, P()) for n in range(5)}
        save(tmp_path, tree, overwrite=True)
        restored = restore(tmp_path, tree)
        for n in range(5):
            np.testing.assert_array_equal(restored[str(n)], batch(*shape) + n)
            assert not any(address % 64 for address in addresses(restored[str(n)]))


def test_progress(auto_mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"a": cut(batch(64, 64), auto_mesh, P("x", "y")), "b": batch(10), "c": 3}
    seen: list[tuple[int, int]] = []
    with noting(packed_below=1000, chunk=1024):
        save(tmp_path, tree, progress=lambda *said: seen.append(said))
        assert {total for _, total in seen} == {16424}
        done = [0, *(done for done, _ in seen)]
        # Chunks are done in any order, the small one of 40 bytes too.
        assert sorted(after - before for before, after in pairwise(done)) == [40] + [1024] * 16
        seen.clear()
        restore(tmp_path, mesh=auto_mesh, specs=P(), progress=lambda *said: seen.append(said))
        assert [total for _, total in seen] == [16424] * 17
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (16424, 16424)
    assert capsys.readouterr().err == ""
    save(tmp_path, tree, overwrite=True, progress=True)
    assert "save" in capsys.readouterr().err
    restore(tmp_path, progress=True)
    assert "restore" in capsys.readouterr().err


# Several processes.


def laid_out(layout: Layout, order: list[int]) -> Layout:
    shape, spec = layout
    return ordered_mesh(order[: math.prod(shape.values())], dict(shape)), spec


UNEVEN = batch(13, 5)


def padded(order: list[int]) -> gda.PaddedArray:
    """Return an array that its mesh does not divide."""
    mesh = ordered_mesh(order, {"x": 4, "y": 2})
    return gda.PaddedArray.from_callback(UNEVEN.shape, mesh, P("x", "y"), lambda i: UNEVEN[i])


def saved(path: str, shape: Any, layout: Layout, order: list[int], limits: Any) -> dict[str, int]:
    """Save in this process; return the bytes of each chunk that it wrote."""
    data = batch(*shape, dtype=np.int32) + 1
    mesh, spec = laid_out(layout, order)
    with noting(*limits) as noted:
        arrays = [cut(data + n, mesh, spec) for n in range(2)]
        tree = {"arrays": arrays, "own": np.arange(10), "one": jnp.float32(3), "step": 7}
        save(path, tree | {"padded": padded(order)}, overwrite=True)
    return noted.written


def restored(
    path: str, shape: Any, layout: Layout, order: list[int], limits: Any
) -> dict[str, int]:
    """Restore in this process, look at its shards; return how often it read each chunk."""
    mesh, spec = laid_out(layout, order)
    struct = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, spec))
    with noting(*limits) as noted:
        like = {
            "arrays": [gda.GlobalArray.from_array(struct)] * 2,
            "own": np.arange(10),
            "one": jnp.float32(0),
            "padded": padded(order),
            "step": 0,
        }
        tree = restore(path, like)
    assert isinstance(tree["padded"], gda.PaddedArray)
    # With its padding, because each device compiles the program that cuts it off.
    blocks = [tree["padded"].array.addressable_shards, like["padded"].array.addressable_shards]
    for found, expected in zip(*blocks, strict=True):
        np.testing.assert_array_equal(found.data, expected.data)
    for n, g in enumerate(tree["arrays"]):
        assert g.sharding == struct.sharding
        assert len(g.local_shards) == len(mesh.local_devices)
        assert is_right(g, batch(*shape, dtype=np.int32) + 1 + n)
    np.testing.assert_array_equal(tree["own"], np.arange(10))
    assert (float(tree["one"]), tree["step"]) == (3.0, 7)
    return noted.reads


@rarely(5)
@given(
    moves(mesh_shapes(max_devices=8)),
    st.permutations(range(8)),
    st.permutations(range(8)),
    st.sampled_from([(1, 64, 64), (10**6, 10**6, 10**6)]),
    st.sampled_from([((2, 4), (4, 2)), ((4, 2), (2, 4))]),
)
def test_between_numbers_of_processes(
    process_pool: Callable[..., Pool],
    tmp_path_factory: pytest.TempPathFactory,
    move: tuple[Any, Layout, Layout],
    order: list[int],
    other: list[int],
    limits: tuple[int, int, int],
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    path = str(tmp_path_factory.mktemp("run"))
    shape, source, target = move
    some, others = [process_pool(n, devices=devices) for n, devices in sizes]
    written = some.run(saved, path, shape, source, order, limits)
    gda.checkpoint.verify(path)
    names = [name for of_process in written for name in of_process]
    assert len(set(names)) == len(names)
    reads = [
        *others.run(restored, path, shape, target, other, limits),
        restored(path, shape, target, other, limits),  # in one process
    ]
    for of_process in reads:
        assert {name.partition("/")[2] for name in of_process} <= set(names)
        assert set(of_process.values()) <= {1}
    saved(path, shape, target, other, limits)
    some.run(restored, path, shape, source, order, limits)


# With more sizes and specs in tests/trees/files/test_store.py.
@pytest.mark.processes(2, devices=4)
def test_arrays_of_some_processes_and_of_each(shared_tmp_path: Path) -> None:
    me = jax.process_index()
    of_first = Mesh(np.array(jax.devices()[:4]), ("x",))
    of_second = Mesh(np.array(jax.devices()[4:]), ("x",))
    keys = jax.random.split(jax.random.key(1), 8)
    everywhere = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(everywhere, P("x"))
    tree = {
        "first": cut(DATA, of_first, P("x")),
        "second": cut(DATA + 1, of_second, P("x")),
        "keys": jax.jit(lambda: keys, out_shardings=sharding)(),
        "own": jnp.asarray(DATA + 2),
        "old": np.asarray(DATA + 3),
    }
    with noting() as noted:
        save(shared_tmp_path, tree)
    assert {name.split("/")[0] for name in noted.written} >= {f"packed.float32.{me}"}
    restored = restore(shared_tmp_path, tree)
    for name, data, process in [("first", DATA, 0), ("second", DATA + 1, 1)]:
        assert len(restored[name].local_shards) == (4 if process == me else 0)
        assert is_right(restored[name], data)
    for shard in restored["keys"].addressable_shards:
        assert shard.data.dtype == keys.dtype
        got = jax.random.key_data(shard.data)
        np.testing.assert_array_equal(got, jax.random.key_data(keys)[shard.index])
    np.testing.assert_array_equal(restored["own"], DATA + 2)
    assert isinstance(restored["old"], np.ndarray)
    # Onto a mesh that each process has by itself.
    mine = Mesh(np.array(jax.local_devices()), ("x",))
    restored = restore(shared_tmp_path, mesh=mine, specs=P())
    np.testing.assert_array_equal(restored["second"], DATA + 1)
    # And back into processes that hold nothing.
    restored = restore(shared_tmp_path, mesh=of_first, specs=P())
    assert len(restored["second"].local_shards) == (4 if me == 0 else 0)


@pytest.mark.processes(2, devices=4)
def test_host_values_that_differ_between_processes_are_not_saved(shared_tmp_path: Path) -> None:
    tree = {
        "same": np.ones(3),
        "step": jax.process_index(),
        "own": np.arange(3) * jax.process_index(),
        "long": "x" * 999 + str(jax.process_index()),
    }
    with pytest.raises(gda.DisagreementError, match=r"at own, process 0: value an array with") as e:
        save(shared_tmp_path, tree)
    assert "at step, process 0: value 0, process 1: 1" in str(e.value)
    assert "at long" in str(e.value)
    assert not (shared_tmp_path / "manifest.json").exists()

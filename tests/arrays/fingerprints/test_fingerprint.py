"""The fingerprint of a sharded array, which equals NumPy's for the whole array under any layout."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshes import batch, cut, mesh_of, ordered_mesh
from trials import rarely

import gda
from gda import fingerprint
from gda.arrays.fingerprints import fingerprint as fp
from gda.arrays.fingerprints import on_devices, on_host
from gda.arrays.fingerprints.formula import (
    add,
    digest_of,
    fingerprint_of_numpy,
    sums_of_numpy,
)
from gda.layout.grid import ShardGrid
from gda.testing.strategies import (
    mesh_shapes,
    sharded_cases,
)

P = PartitionSpec


def is_of_jax(dtype: str) -> bool:
    """Return True if JAX can make arrays of it; 0.10 knows float6 by name, and cannot."""
    try:
        return bool(jax.device_put(np.zeros(1, getattr(ml_dtypes, dtype))).size)
    except (TypeError, jax.errors.JaxRuntimeError):
        return False


OF_NEW_VERSIONS = [*filter(is_of_jax, ("int1", "float6_e2m3fn", "float6_e3m2fn"))]
# On devices numbers are words of 1, 2 or 4 bytes: a dtype of each width and kind, beside those of
# test_bits_of_every_kind_of_nan.
ON_DEVICES = ["bool", "uint16", "float4_e2m1fn", *OF_NEW_VERSIONS[:2]]
# Types of 64 bits have their own test.
DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16"),
    *("uint32", "float16", "float32", "bfloat16", "complex64", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
    *OF_NEW_VERSIONS,
]


@pytest.fixture(params=["by the program", "on devices", "all at once", "by NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way to make sums: in a save on CPU, of large arrays on CPU, of others, of small."""
    if request.param != "by NumPy":
        monkeypatch.setattr(on_host, "SMALL", 0)
        monkeypatch.setattr(on_host, "BY_NUMPY", 0)
    if request.param == "by the program":
        monkeypatch.setattr(fp, "begin_blocks", partial(fp.begin_blocks, for_all_shapes=True))
    if request.param != "all at once":
        yield request.param
        return
    monkeypatch.setattr(on_devices, "by_loop", on_devices.by_reduction)
    on_devices.program.cache_clear()
    yield request.param
    on_devices.program.cache_clear()


two_ways = pytest.mark.parametrize("way", ["on devices", "by NumPy"], indirect=True)


# However it is cut.


@pytest.mark.parametrize(
    ("way", "shape", "spec"),
    [
        ("by the program", (4 * 5003,), P(("x", "y"))),  # blocks that begin and end amid a chunk
        ("by the program", (32, 4096), P("x", "y")),  # that begin and end with one
        ("by the program", (2, 2 * 5001), P("x", "y")),
        ("by the program", (4, 3, 5000, 2), P("x", None, "y", None)),
        ("by the program", (6000, 6), P("y")),
        ("by the program", (4, 1024, 1100), P("x", None, "y")),  # windows that are full, and others
        ("on devices", (4 * 5003,), P(("x", "y"))),
        ("on devices", (32, 4096), P("x", "y")),
        pytest.param("on devices", (2, 2 * 5001), P("x", "y"), marks=pytest.mark.torture),
        ("on devices", (4, 3, 5000, 2), P("x", None, "y", None)),
        pytest.param("on devices", (6000, 6), P("y"), marks=pytest.mark.torture),
        pytest.param("all at once", (4, 2 * 5001), P("x", "y"), marks=pytest.mark.torture),
        ("all at once", (2, 3, 5000, 2), P("x", None, "y")),
    ],
    indirect=["way"],
)
def test_blocks_of_several_rows(
    way: str, shape: tuple[int, ...], spec: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_devices, "_ROWS_PER_TURN", 8)  # as without conftest.py
    data = np.random.default_rng(1).integers(0, 2**32, shape, dtype=np.uint32)
    assert cut(data, mesh_of({"x": 2, "y": 2}), spec).fingerprint() == fingerprint_of_numpy(data)


# Zeros, infinities and NaNs of both signs, quiet and signalling, as floats of 32 and of 16 bits.
SPECIAL = [0, 0x80000000, 0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7F800001, 0x7FA00000]
SPECIAL += [0x7E00FE00, 0x7E017D01, 0x7FC17F81, 0xFF818000, 0x7C00FC00]


def special(dtype: str) -> np.ndarray:
    """Return two rows of such bits and of others, in the shape that several tests compile for."""
    raw = np.array(SPECIAL * 2, "<u4").tobytes() + np.random.default_rng(7).bytes(8000)
    return np.frombuffer(raw, jnp.dtype(dtype)).reshape(2, -1)


@pytest.mark.parametrize(
    ("way", "dtypes"),
    [
        ("by the program", ["float32", "bfloat16", "float8_e5m2", "complex64"]),
        ("by the program", ["float16", "float8_e4m3"]),
        ("on devices", ["float32", "bfloat16", "float8_e5m2"]),
        pytest.param("on devices", ["float16", "float8_e4m3"], marks=pytest.mark.torture),
        ("on devices", ["complex64"]),
        # Narrower ones reach the devices of this platform as integers.
        ("all at once", ["complex64"]),
    ],
    indirect=["way"],
)
def test_bits_of_every_kind_of_nan(way: str, dtypes: list[str]) -> None:
    for dtype in dtypes:
        data = special(dtype)
        assert cut(data, mesh_of({"x": 2}), P("x")).fingerprint() == fingerprint_of_numpy(data)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1 << 20,), "int8"),
        pytest.param((256, 5000), "complex64", marks=pytest.mark.torture),
    ],
)
def test_blocks_are_not_copied(shape: tuple[int, ...], dtype: str) -> None:
    block = jax.device_put(np.zeros(shape, jnp.dtype(dtype)), jax.devices()[0])
    program, (words, keys) = on_devices.prepared([block], [(0,) * len(shape)])
    (taken,) = words.addressable_shards
    assert taken.data.unsafe_buffer_pointer() == block.unsafe_buffer_pointer()
    used = program.lower(words, keys).compile().memory_analysis()
    assert used.temp_size_in_bytes < block.nbytes / 2


def test_a_save_of_many_shapes_compiles_one_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[int] = []

    def compiling(word_bytes: int, device: Any) -> Future[Any]:
        compiled.append(word_bytes)
        return compile_it(word_bytes, device)

    compile_it = on_host._compiling
    monkeypatch.setattr(on_host, "BY_NUMPY", 0)
    monkeypatch.setattr(on_host, "_programs", {})
    monkeypatch.setattr(on_host, "_compiling", compiling)
    monkeypatch.setattr(on_devices, "program", None)  # of one shape
    mesh = mesh_of({"x": 2})
    tree = {str(size): cut(batch(size, 1024), mesh, P("x")) for size in (512, 520, 600)}
    gda.checkpoint.save(tmp_path / "run", tree)
    assert compiled == [4]
    monkeypatch.undo()
    gda.checkpoint.verify(tmp_path / "run")
    assert not gda.checkpoint.diff(tmp_path / "run", tree)


def test_the_program_takes_the_memory_of_a_window_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "BY_NUMPY", 0)
    whole = gda.aligned_empty((2 * on_host.ROWS, on_host.COLUMNS), np.float32)
    whole[...] = 1
    given: list[int] = []

    def program(window: np.ndarray, _: Any) -> np.ndarray:
        given.append(window.ctypes.data)
        return np.zeros((2, 1), np.uint32)

    compiled: Future[Any] = Future()
    compiled.set_result(program)
    on_host._made_by(compiled, whole, (0, 0))
    assert given == [whole.ctypes.data, whole[on_host.ROWS :].ctypes.data]


def test_few_words_are_summed_up_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "_programs", {})
    monkeypatch.setattr(on_host, "_summed", Counter())
    data = np.arange(2 * on_host.SMALL, dtype=np.uint16)
    many = on_host.BY_NUMPY // data.size
    for _ in range(many):
        on_host.prepare([(data.dtype, data.size)])
    on_host.prepare([(data.dtype, data.size), (np.dtype(np.float32), on_host.BY_NUMPY)])
    assert np.array_equal(on_host.begin_on_host(data, (5,))(), sums_of_numpy(data, (5,)))
    assert not on_host._programs
    monkeypatch.setattr(on_host, "BY_NUMPY", 2 * data.size)
    on_host.sums_on_host(data, (0,))
    assert not on_host._programs
    on_host.prepare([(data.dtype, 1)])
    assert [*on_host._programs] == [2]


@pytest.mark.parametrize("way", ["by the program", "on devices"], indirect=True)
def test_a_block_far_out_in_a_long_dimension(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a dimension that 32 bits cannot count, no array is at hand.
    monkeypatch.setattr(on_devices, "MAX_COLUMNS", 64)
    block, start = np.arange(300).astype(np.int8), (2**33 + 12345,)
    assert [part.chunks for part in on_devices.folding_of(block.shape, 1).parts()] == [4, 1]
    if way == "on devices":
        found = on_devices.started([jnp.asarray(block)], [start])
    else:
        found = on_host.sums_on_host(block, start)
    assert np.array_equal(found, sums_of_numpy(block, start))


@two_ways
def test_every_kind_of_number(way: str) -> None:
    mesh, found, expected = mesh_of({"x": 2}), {}, {}
    for dtype in DTYPES if way == "by NumPy" else ON_DEVICES:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        data = np.arange(-3, 13).astype(np.float32).astype(kind)
        found[dtype] = cut(data, mesh, P("x")).fingerprint()
        expected[dtype] = fingerprint_of_numpy(data)
    assert found == expected


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("by the program", "int64"),
        ("by the program", "complex128"),
        ("on devices", "int64"),
        pytest.param("on devices", "complex128", marks=pytest.mark.torture),
        ("all at once", "complex128"),
        ("by NumPy", "float64"),
    ],
    indirect=["way"],
)
def test_numbers_of_64_bits(way: str, dtype: str) -> None:
    data = (np.arange(-3, 13) * 2.0**40).astype(dtype)
    with jax.enable_x64(True):
        g = cut(data, mesh_of({"x": 2}), P("x"))
        assert g.fingerprint() == fingerprint_of_numpy(data)
    assert g.fingerprint() == fingerprint_of_numpy(data)  # made with x64, which is off now


@two_ways
def test_keys_by_their_numbers(way: str, explicit_mesh: Mesh) -> None:
    digests = set()
    kinds = ("threefry2x32", "rbg") if way == "by NumPy" else ("rbg",)
    for impl in kinds:
        keys = jax.random.split(jax.random.key(3, impl=impl), 8)
        sums = sums_of_numpy(np.asarray(jax.random.key_data(keys)))
        expected = digest_of(keys.shape, keys.dtype, sums)
        g = gda.GlobalArray.from_array(jax.device_put(keys, NamedSharding(explicit_mesh, P("x"))))
        assert g.fingerprint() == fingerprint(keys) == expected
        digests.add(expected)
        if impl == "rbg":  # it compiles again
            with jax.set_mesh(explicit_mesh):
                assert g.fingerprint() == expected
    assert len(digests) == len(kinds)


@two_ways
def test_one_number_and_no_numbers(way: str, explicit_mesh: Mesh) -> None:
    for data in (np.float32(3), np.zeros((0, 8), np.float32), np.zeros((8, 0), np.float32)):
        assert cut(data, explicit_mesh, P()).fingerprint() == fingerprint_of_numpy(np.asarray(data))
    nothing = np.zeros((0, 8), np.float32)
    assert cut(nothing, explicit_mesh, P("x")).fingerprint() == fingerprint_of_numpy(nothing)


@two_ways
def test_arrays_in_the_memory_of_the_host(way: str, auto_mesh: Mesh) -> None:
    data = batch(8, 8)
    sharding = NamedSharding(auto_mesh, P("x", "y"), memory_kind="pinned_host")
    assert fingerprint(jax.device_put(data, sharding)) == fingerprint_of_numpy(data)


@two_ways
def test_whatever_is_set(way: str, explicit_mesh: Mesh) -> None:
    g, expected = cut(batch(8, 8), explicit_mesh, P("x")), fingerprint_of_numpy(batch(8, 8))
    guard = partial(jax.transfer_guard, "disallow")
    for setting in (partial(jax.set_mesh, explicit_mesh), jax.disable_jit, guard):
        with setting():
            assert g.fingerprint() == expected


@rarely(5)
@given(
    case=sharded_cases(),
    columns=st.sampled_from([2, 3, 8]),
    dtype=st.sampled_from(["float32", "int8", "bfloat16", "complex64"]),
    by_numpy=st.booleans(),
)
def test_any_layout_is_taken_apart_as_numpy_does(
    case: Any, columns: int, dtype: str, by_numpy: bool
) -> None:
    data = np.random.default_rng(2).integers(-99, 99, case.global_shape).astype(jnp.dtype(dtype))
    with pytest.MonkeyPatch.context() as patch:
        if not by_numpy:
            patch.setattr(on_host, "SMALL", 0)
            patch.setattr(on_host, "BY_NUMPY", 0)
            patch.setattr(on_host, "NARROW", 0)
        patch.setattr(on_devices, "MAX_COLUMNS", columns)
        g = cut(data, case.mesh, case.spec)
        assert g.fingerprint() == fingerprint_of_numpy(data)
        patch.setattr(fp, "begin_blocks", partial(fp.begin_blocks, for_all_shapes=True))
        assert g.fingerprint() == fingerprint_of_numpy(data)


# In steps.


@two_ways
def test_sums_of_blocks_add_up(way: str) -> None:
    data = special("float32")
    g = cut(data, mesh_of({"x": 2}), P("x"))
    shards = gda.arrays.process_local.distinct_shards(g.array, g.grid)
    parts = [fp.begin_blocks({block: shards[block]}, g.grid).result() for block in range(2)]
    together = [fp.begin_blocks(some, g.grid) for some in ({1: shards[1], 0: shards[0]}, {})]
    whole = sums_of_numpy(data)
    assert np.array_equal(add(parts), whole)
    assert np.array_equal(add(pending.result() for pending in together), whole)
    for block, sums in enumerate(parts):
        index = g.grid.block_index(block)
        starts = [part.start or 0 for part in index]
        assert np.array_equal(sums, sums_of_numpy(data[index], starts))
    assert digest_of(data.shape, "float32", whole) == g.fingerprint()


@two_ways
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_array_may_be_donated_after_begin(way: str, dtype: str) -> None:
    data = special(dtype)
    expected = sums_of_numpy(data)
    g = cut(data, mesh_of({"x": 2}), P("x"))
    pending = fp.begin(g.array, g.grid)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(g.array))
    # The sums of narrow floats are made from views by NumPy. JAX copies a donated array of which
    # NumPy has a view, and JAX 0.11.2 does not delete it.
    assert g.is_deleted() or dtype == "bfloat16"
    g.delete()
    assert np.array_equal(pending.result(), expected)


# Errors.


def test_tracers_deleted_arrays_and_other_things_have_none(auto_mesh: Mesh) -> None:
    g = cut(batch(8), auto_mesh, P("x"))
    with pytest.raises(TypeError, match="call this outside jit"):
        jax.jit(lambda x: fp.begin(x, g.grid))(g.array)
    g.delete()
    with pytest.raises(RuntimeError, match=r"jax.Array\(shape=\(8,\), .* was deleted"):
        fp.begin(g.array, g.grid)
    message = r"expected a GlobalArray or a jax.Array, not int; .* gda.fingerprint\(numpy.asarray"
    with pytest.raises(TypeError, match=message):
        fingerprint(1)
    with pytest.raises(TypeError, match="a fingerprint is of numbers, not of object"):
        gda.fingerprint(np.array([None]))


def test_a_numpy_array_has_the_fingerprint_of_the_sharded_one(auto_mesh: Mesh) -> None:
    data = batch(8, 8)
    g = cut(data, auto_mesh, P("x", "y"))
    assert g.fingerprint() == gda.fingerprint(g) == gda.fingerprint(g.array)
    assert g.fingerprint() == gda.fingerprint(data) == gda.fingerprint(np.asfortranarray(data))
    assert gda.fingerprint(data[0, 0]) == gda.fingerprint(data[:1, 0].reshape(()))


# Many processes.


def fingerprint_everywhere(grid: ShardGrid, order: list[int], expected: str) -> None:
    """Run in every process: build an array over these devices, and take its fingerprint."""
    data = batch(*grid.global_shape, dtype=np.int32)
    g = cut(data, ordered_mesh(order, dict(grid.mesh_shape)), grid.spec)
    if len({device.process_index for device in g.mesh.devices.flat}) > 1:
        assert g.fingerprint() == expected


@rarely(5)
@given(data=st.data())
def test_any_layout_over_processes(process_pool: Any, data: st.DataObject) -> None:
    grid = data.draw(sharded_cases(mesh_shapes(max_devices=8))).grid
    order = data.draw(st.permutations(range(8)))[: grid.num_devices]
    expected = fingerprint_of_numpy(batch(*grid.global_shape, dtype=np.int32))
    process_pool(4, devices=2).run(fingerprint_everywhere, grid, order, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_parts_on_the_host_have_the_sums_of_numpy(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "SMALL", 0)
    monkeypatch.setattr(on_host, "BY_NUMPY", 0)
    part = batch(6, 70).astype(np.dtype(jnp.dtype(dtype)))
    whole = gda.aligned_empty((6, 70), part.dtype)
    whole[...] = part
    for each, start in [(part, (0, 0)), (whole[2:, 3:], (2, 3)), (part[:, ::2], (0, 1))]:
        found = on_host.sums_on_host(each, start)
        assert np.array_equal(found, sums_of_numpy(each, start))

"""The three constructors with a callback: number of reads, ownership of memory, dtypes."""

import ctypes
import math
import mmap
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from trials import rarely

import gda
from gda.arrays.construction import placing
from gda.arrays.construction.blocks import LARGE_BYTES, BlockReader, BorrowedBlock
from gda.layout.spec import Index
from gda.mesh import Device
from gda.testing.strategies import ShardedCase, sharded_cases

DATA = np.arange(16, dtype=np.float32).reshape(8, 2)
SPECS = [P("x", "y"), P("x"), P("y"), P(None, "y"), P(("y", "x")), P()]


def place(request: list[tuple[gda.Index, tuple[Device, ...]]], data: Any) -> list[jax.Array]:
    return [jax.device_put(data[index], d) for index, devices in request for d in devices]


def aligned_block(index: gda.Index) -> np.ndarray:
    """Return what ``DATA`` holds at ``index``, in aligned memory of its own."""
    block = gda.aligned_empty(DATA[index].shape, DATA.dtype)
    block[:] = DATA[index]
    return block


# The blocks that are read, and how often.


@pytest.mark.parametrize("spec", SPECS)
def test_each_callback_gets_its_indices_once(mesh: Mesh, spec: P) -> None:
    calls: list[Any] = []

    def read(index: gda.Index) -> np.ndarray:
        calls.append(index)
        return DATA[index]

    def read_on_devices(request: list[tuple[gda.Index, tuple[Device, ...]]]) -> list[jax.Array]:
        calls.append(request)
        return place(request, DATA)

    make, over = gda.GlobalArray, ((8, 2), mesh, spec)
    by_device = gda.get_shard_indices(*over)
    expected = list(by_device.values())
    np.testing.assert_array_equal(make.from_callback(*over, read), DATA)
    assert calls == [index for i, index in enumerate(expected) if index not in expected[:i]]
    calls.clear()
    np.testing.assert_array_equal(
        make.from_batched_callback(*over, lambda i: [*map(read, i)]), DATA
    )
    assert calls == expected
    calls.clear()
    g = make.from_batched_callback_with_devices(*over, read_on_devices)
    np.testing.assert_array_equal(g, DATA)
    (request,) = calls
    assert {device: index for index, devices in request for device in devices} == by_device
    assert len(request) == g.grid.num_shards
    assert all(len(devices) == g.grid.num_replicas for _, devices in request)


@given(sharded_cases())
def test_all_constructors_agree_with_jax(case: ShardedCase) -> None:
    shape, mesh, spec = case.global_shape, case.mesh, case.spec
    data = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    trimmed = P(*tuple(spec)[: len(shape)])
    expected = jax.make_array_from_callback(shape, NamedSharding(mesh, trimmed), lambda i: data[i])
    for g in [
        gda.GlobalArray.from_callback(shape, mesh, spec, lambda index: data[index]),
        gda.GlobalArray.from_callback(
            shape, mesh, spec, lambda i, out: np.copyto(out, data[i]), dtype=np.int32, into=True
        ),
        gda.GlobalArray.from_batched_callback(
            shape, mesh, spec, lambda indices: [data[index] for index in indices]
        ),
        gda.GlobalArray.from_batched_callback_with_devices(
            shape, mesh, spec, lambda request: place(request, data)
        ),
    ]:
        assert g.array.sharding == expected.sharding
        np.testing.assert_array_equal(g, data)
        for ours, theirs in zip(g.local_shards, expected.addressable_shards, strict=True):
            assert (ours.device, ours.index) == (theirs.device, theirs.index)
            assert ours.replica_id == theirs.replica_id
            np.testing.assert_array_equal(ours.data, theirs.data)


# Whatever a callback returns.

DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.float16, np.float32,
    np.complex64, jnp.int4, jnp.uint4, jnp.int2, jnp.uint2, jnp.bfloat16, jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.float8_e5m2fnuz, jnp.float8_e3m4,
    jnp.float8_e4m3, jnp.float8_e8m0fnu, jnp.float4_e2m1fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_dtype_of_jax_goes_through(auto_mesh: Mesh, dtype: Any) -> None:
    data = np.array([0, 1] * 8).reshape(8, 2).astype(dtype)
    expected = jax.make_array_from_callback(
        (8, 2), NamedSharding(auto_mesh, P("x")), lambda index: data[index]
    )
    for g in [
        gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), lambda index: data[index]),
        gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), lambda i: data[i], dtype=dtype),
        gda.GlobalArray.from_callback(
            (8, 2), auto_mesh, P("x"), lambda i, o: np.copyto(o, data[i]), dtype=dtype, into=True
        ),
    ]:
        assert g.dtype == expected.dtype == np.dtype(dtype)
        assert np.asarray(g).tobytes() == np.asarray(expected).tobytes() == data.tobytes()


@dataclass
class _ArrayLike:
    data: np.ndarray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.data


@dataclass
class _JaxArrayLike:
    data: np.ndarray

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.data)


@pytest.mark.parametrize(
    "convert",
    [
        lambda block: block,
        lambda block: block.tolist(),
        lambda block: tuple(map(tuple, block)),
        lambda block: np.asfortranarray(block),
        lambda block: memoryview(np.ascontiguousarray(block)),
        lambda block: _ArrayLike(block),
        lambda block: _JaxArrayLike(block),
        lambda block: jnp.asarray(block),
        lambda block: jax.device_put(block, jax.devices()[5]),
        lambda block: gda.GlobalArray.from_array(jnp.asarray(block)),
        lambda block: jax.device_put(
            block, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), P("d"))
        ),
        lambda block: block if block[0, 0] else jax.device_put(block, jax.devices()[5]),
    ],
    ids=[
        "array", "list", "tuple", "fortran", "memoryview", "array-like", "jax-array-like", "jax",
        "jax-elsewhere", "container", "jax-sharded", "mixed",
    ],
)  # fmt: skip
@pytest.mark.parametrize("spec", [P("x"), P()])
def test_callbacks_may_return_any_kind_of_array(
    auto_mesh: Mesh, spec: P, convert: Callable[[np.ndarray], Any]
) -> None:
    g = gda.GlobalArray.from_callback(
        (8, 2), auto_mesh, spec, lambda i: convert(DATA[i]), dtype="f4"
    )
    np.testing.assert_array_equal(g, DATA)
    assert g.array.committed
    batched = gda.GlobalArray.from_batched_callback(
        (8, 2), auto_mesh, spec, lambda indices: (convert(DATA[i]) for i in indices), dtype="f4"
    )
    np.testing.assert_array_equal(batched, DATA)


def test_other_byte_orders_are_turned(mesh: Mesh) -> None:
    for dtype, ours in [(">f4", np.float32), (">i2", np.int16), (">i8", np.int32)]:
        data = np.arange(8).astype(dtype)
        g = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i, data=data: data[i])
        assert g.dtype == ours
        np.testing.assert_array_equal(g, np.arange(8))
    asked = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i: [1, 2], dtype=">f4")
    assert asked.dtype == np.float32
    np.testing.assert_array_equal(asked, [1, 2] * 4)


def test_bfloat16_saved_by_numpy_is_read_back(mesh: Mesh, tmp_path: Path) -> None:
    data = np.arange(8).astype(jnp.bfloat16)
    np.save(tmp_path / "data.npy", data)
    raw = np.load(tmp_path / "data.npy")
    assert raw.dtype == "V2"
    g = gda.GlobalArray.from_callback(
        (8,), mesh, P("x"), lambda index: raw[index], dtype=jnp.bfloat16
    )
    np.testing.assert_array_equal(g, data)
    with pytest.raises(TypeError, match=r"dtype \|V2, .* such as dtype=jax\.numpy\.bfloat16"):
        gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda index: raw[index])
    with pytest.raises(ValueError, match="float32|cast|setting"):
        gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i: raw[i], dtype=np.float32)


def test_prng_keys_go_through(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    for dtype in (None, keys.dtype):
        g = gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i: keys[i], dtype=dtype)
        assert g.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(g.array), jax.random.key_data(keys))
    with pytest.raises(TypeError, match=r"index \[0:2\] has dtype key<fry>; .*key_data\(block\)"):
        gda.GlobalArray.from_callback((8,), mesh, P("x"), lambda i: keys[i], dtype=np.float32)
    with pytest.raises(TypeError, match="NumPy has no key<fry>"):
        gda.GlobalArray.from_callback(
            (8,), mesh, P("x"), lambda i, out: None, dtype=keys.dtype, into=True
        )
    with pytest.raises(TypeError, match=r"index \[0:2\] has dtype uint32; .*wrap_key_data"):
        gda.GlobalArray.from_callback(
            (8,), mesh, P("x"), lambda _: np.zeros(2, np.uint32), dtype=keys.dtype
        )


def test_numbers_make_scalars(mesh: Mesh) -> None:
    for number, dtype in [(3, np.int32), (2.5, np.float32), (True, np.bool_), (1j, np.complex64)]:
        g = gda.GlobalArray.from_callback((), mesh, P(), lambda _, n=number: n)
        assert (g.dtype, np.asarray(g)[()]) == (dtype, number)


# Whose memory it is.


def unaligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return a view that starts 4 bytes after a multiple of 64."""
    memory = gda.aligned_empty(int(np.prod(shape)) + 1, np.float32)
    return memory[1:].reshape(shape)


sizes = st.sampled_from([8, 64, 4096])


@rarely(2)
@given(st.sampled_from([P("x"), P("x", "y"), P("y"), P()]), st.booleans(), st.booleans(), sizes)
def test_writing_to_the_source_afterwards_changes_nothing(
    spec: P, aligned: bool, batched: bool, rows: int
) -> None:
    mesh, shape = mesh_of({"x": 4, "y": 2}), (rows, 16)
    source = gda.aligned_empty(shape, np.float32) if aligned else unaligned(shape)
    source[:] = np.arange(source.size).reshape(shape)
    before = source.copy()
    if batched:
        g = gda.GlobalArray.from_batched_callback(
            shape, mesh, spec, lambda indices: [source[index] for index in indices]
        )
    else:
        g = gda.GlobalArray.from_callback(shape, mesh, spec, lambda index: source[index])
    source[:] = -1
    np.testing.assert_array_equal(g, before)


@rarely(2)
@given(st.sampled_from([P("x"), P("x", "y"), P(("y", "x"))]), st.booleans(), st.booleans(), sizes)
def test_a_scratch_buffer_may_be_used_for_every_block(
    spec: P, aligned: bool, hidden: bool, rows: int
) -> None:
    mesh, shape = mesh_of({"x": 4, "y": 2}), (rows, 16)
    data = np.arange(rows * 16, dtype=np.float32).reshape(shape)
    block_shape = gda.get_shard_shape(shape, mesh, spec)
    scratch = gda.aligned_empty(block_shape, np.float32) if aligned else unaligned(block_shape)

    def read(index: gda.Index) -> Any:
        scratch[:] = data[index]
        return _ArrayLike(scratch) if hidden else scratch

    g = gda.GlobalArray.from_callback(shape, mesh, spec, read)
    batched = gda.GlobalArray.from_batched_callback(shape, mesh, spec, lambda i: map(read, i))
    scratch[:] = -1
    for built in (g, batched):
        np.testing.assert_array_equal(built, data)


def test_an_array_over_memory_of_somebody_else_is_copied(auto_mesh: Mesh) -> None:
    scratch = gda.aligned_empty((2, 2), np.float32)

    class Foreign:
        __array_interface__ = scratch.__array_interface__

    def read(index: gda.Index) -> np.ndarray:
        scratch[:] = DATA[index]
        return np.asarray(Foreign())

    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), read)
    scratch[:] = -1
    np.testing.assert_array_equal(g, DATA)


def over_memory_of_c(array: np.ndarray) -> np.ndarray:
    """Return an array that owns nothing and refers to nothing, as C code makes it."""
    pointer, number, of_python = ctypes.c_void_p, ctypes.c_int, ctypes.py_object
    capsule = ctypes.PYFUNCTYPE(pointer, of_python, ctypes.c_char_p)
    table = capsule(("PyCapsule_GetPointer", ctypes.pythonapi))(
        np._core.multiarray._ARRAY_API, None
    )
    new = ctypes.PYFUNCTYPE(
        *(of_python, of_python, number, pointer, number),
        *(pointer, pointer, number, number, pointer),
    )(ctypes.cast(table, ctypes.POINTER(pointer))[93])  # PyArray_New
    sizes = (ctypes.c_ssize_t * array.ndim)(*array.shape)
    is_usual = 0x501  # in C order, aligned, writeable
    parts = (array.ndim, sizes, array.dtype.num, None, array.ctypes.data, 0, is_usual, None)
    return new(np.ndarray, *parts)


@pytest.mark.parametrize("form", [lambda block: block, lambda block: block[:]])
def test_an_array_over_memory_of_c_code_is_copied(auto_mesh: Mesh, form: Any) -> None:
    scratch = gda.aligned_empty((2, 2), np.float32)

    def read(index: gda.Index) -> np.ndarray:
        scratch[:] = DATA[index]
        block = over_memory_of_c(scratch)
        assert block.base is None
        return form(block)

    callback, batched = gda.GlobalArray.from_callback, gda.GlobalArray.from_batched_callback
    built = [
        callback((8, 2), auto_mesh, P("x"), read),
        callback((8, 2), auto_mesh, P("x"), read, max_workers=1),
        batched((8, 2), auto_mesh, P("x"), lambda indices: map(read, indices)),
    ]
    scratch[:] = -1
    for array in built:
        np.testing.assert_array_equal(array, DATA)


@pytest.mark.parametrize(
    "made", [lambda n: mmap.mmap(-1, n), lambda n: (ctypes.c_char * n)(), bytearray]
)
def test_an_array_over_memory_of_another_library_is_copied(
    auto_mesh: Mesh, made: Callable[[int], Any]
) -> None:
    memory = made(DATA.nbytes)
    foreign = np.frombuffer(memory, DATA.dtype).reshape(DATA.shape)
    foreign[:] = DATA

    def block(index: gda.Index) -> np.ndarray:
        rows = index[0].indices(len(DATA))
        return np.ndarray((2, 2), DATA.dtype, memory, rows[0] * DATA.strides[0])

    build = gda.GlobalArray
    built = [
        build.from_callback(DATA.shape, auto_mesh, P("x"), block),
        build.from_callback(DATA.shape, auto_mesh, P("x"), block, max_workers=2),
        build.from_batched_callback(DATA.shape, auto_mesh, P("x"), lambda i: map(block, i)),
        build.from_batched_callback(DATA.shape, auto_mesh, P("x"), lambda i: [*map(block, i)]),
        build.from_process_local(foreign, auto_mesh, P("x")),
        build.from_source(foreign, auto_mesh, P("x")),
    ]
    foreign[:] = -1
    for array in built:
        np.testing.assert_array_equal(array, DATA)


@pytest.mark.parametrize("keep", [lambda block: lambda: block, weakref.ref])
def test_a_block_that_the_callback_keeps_is_copied(auto_mesh: Mesh, keep: Any) -> None:
    kept = []

    def read(index: gda.Index) -> np.ndarray:
        block = aligned_block(index)
        kept.append(keep(block))
        return block

    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), read)
    for reference in kept:
        if (block := reference()) is not None:
            block[:] = -1
    np.testing.assert_array_equal(g, DATA)


@pytest.mark.parametrize("keep", [lambda out: out, lambda out: out[:1], lambda out: out.ravel()])
def test_a_filled_buffer_that_the_callback_keeps_is_copied(
    auto_mesh: Mesh, keep: Callable[[np.ndarray], np.ndarray]
) -> None:
    kept = []

    def fill(index: gda.Index, out: np.ndarray) -> None:
        out[:] = DATA[index]
        kept.append(keep(out))

    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), fill, dtype=np.float32, into=True)
    for block in kept:
        block[:] = -1
    np.testing.assert_array_equal(g, DATA)


def pointers(g: gda.GlobalArray) -> list[int]:
    return [g.local_data(i).unsafe_buffer_pointer() for i in range(len(g.local_shards))]


def test_fresh_aligned_blocks_are_adopted_unless_a_copy_is_asked_for(auto_mesh: Mesh) -> None:
    addresses = []

    def read(index: gda.Index) -> np.ndarray:
        block = aligned_block(index)
        addresses.append(block.ctypes.data)
        return block

    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), read)
    assert pointers(g) == [address for address in addresses for _ in range(2)]
    np.testing.assert_array_equal(g, DATA)
    addresses.clear()
    copied = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), read, copy=True)
    assert not set(pointers(copied)) & set(addresses)
    np.testing.assert_array_equal(copied, DATA)


def test_replicas_share_one_buffer_also_of_unaligned_blocks(auto_mesh: Mesh) -> None:
    def read(index: gda.Index) -> np.ndarray:
        refused = []  # kept, or NumPy would offer them again
        while (block := np.empty((2, 2), np.float32)).ctypes.data % 64 == 0:
            refused.append(block)
        block[:] = DATA[index]
        return block

    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), read)
    np.testing.assert_array_equal(g, DATA)
    assert pointers(g)[::2] == pointers(g)[1::2]


def test_copy_false_adopts_views_and_arrays_that_are_kept(auto_mesh: Mesh) -> None:
    source = gda.aligned_empty((8, 32), np.float32)
    source[:] = 1
    g = gda.GlobalArray.from_callback(
        (8, 32), auto_mesh, P("x"), lambda index: source[index], copy=False
    )
    assert pointers(g)[::2] == [source[i:].ctypes.data for i in (0, 2, 4, 6)]
    block = on_device((slice(None), slice(None)))
    g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P(), lambda _: block, copy=False)
    assert pointers(g)[-1] == block.unsafe_buffer_pointer()


def on_device(index: gda.Index) -> jax.Array:
    """Return what ``DATA`` holds at ``index``, on the last device."""
    return jax.device_put(DATA[index], jax.devices()[-1], may_alias=False)


def constructors_of(make: Callable[[gda.Index], Any]) -> list[Callable[..., gda.GlobalArray]]:
    """Return the constructors that take what ``make`` returns, each with mesh and spec to come."""
    return [
        partial(build_by, make),
        partial(build_by, make, max_workers=2),
        lambda mesh, spec, **options: gda.GlobalArray.from_batched_callback(
            (8, 2), mesh, spec, lambda indices: [make(index) for index in indices], **options
        ),
        lambda mesh, spec, **options: gda.GlobalArray.from_batched_callback(
            (8, 2), mesh, spec, lambda indices: (make(index) for index in indices), **options
        ),
    ]


def build_by(
    make: Callable[[gda.Index], Any], mesh: Mesh, spec: P, **options: Any
) -> gda.GlobalArray:
    return gda.GlobalArray.from_callback((8, 2), mesh, spec, make, **options)


increment = jax.jit(lambda x: x + 1, donate_argnums=0)


@pytest.mark.parametrize("way", range(5))
def test_an_array_outlives_the_jax_arrays_that_the_callback_kept(auto_mesh: Mesh, way: int) -> None:
    kept = []

    def make(index: gda.Index) -> Any:
        kept.append(on_device(index))
        return kept[-1]

    def in_container(index: gda.Index) -> gda.GlobalArray:
        return gda.GlobalArray.from_array(make(index))

    for spec in (P("x"), P()):
        for end in (lambda block: block.delete(), increment):
            g = [*constructors_of(make), partial(build_by, in_container)][way](auto_mesh, spec)
            for block in kept:
                end(block)
                assert block.is_deleted()
            kept.clear()
            for shard in g.local_shards:
                np.testing.assert_array_equal(shard.data, DATA[shard.index])


def test_keys_and_casts_outlive_data_of_the_callback(auto_mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    held = on_device((slice(None), slice(None)))
    expected = np.asarray(jax.random.key_data(keys))
    g = gda.GlobalArray.from_callback((8,), auto_mesh, P(), lambda _: keys)
    cast = gda.GlobalArray.from_callback((8, 2), auto_mesh, P(), lambda _: held, dtype=jnp.bfloat16)
    sliced = gda.GlobalArray.from_source(held, auto_mesh, P())
    for array in (keys, held):
        array.delete()
    np.testing.assert_array_equal(jax.random.key_data(g.array), expected)
    for made in (cast, sliced):
        np.testing.assert_array_equal(made, DATA)


# On CPU JAX takes the memory of an aligned buffer as it is, and computes later.
OVER_NUMPY: dict[str, Callable[[np.ndarray], Any]] = {
    "placed": jax.device_put,
    "elsewhere": lambda buffer: jax.device_put(buffer, jax.devices()[-1]),
    "on several": lambda buffer: jax.device_put(
        buffer, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("d",)), P())
    ),
    "computed": jax.jit(lambda block: block + 0),
    "in a container": lambda buffer: gda.GlobalArray.from_array(jnp.asarray(buffer)),
    "keys": lambda buffer: jax.random.wrap_key_data(jax.device_put(buffer)),
}


@dataclass
class _Scratch:
    """A source, and a callback, that gives its blocks as JAX's over one buffer."""

    data: np.ndarray
    rows: int
    over: Callable[[np.ndarray], Any]

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.data.shape, self.data.dtype
        self.buffer = gda.aligned_empty(self.shape, self.dtype)

    def __getitem__(self, index: gda.Index) -> Any:
        block = self.data[index]
        self.buffer[: len(block)] = block
        return self.over(self.buffer[: len(block)])

    def padded(self, index: gda.Index) -> Any:
        return self[index] if index[0].stop - index[0].start == self.rows else self.data[index]

    def batch(self, indices: list[gda.Index]) -> Iterator[Any]:
        return map(self.__getitem__, indices)


@pytest.mark.parametrize("over", OVER_NUMPY.values(), ids=OVER_NUMPY)
def test_a_scratch_buffer_may_be_behind_every_jax_array(
    mesh: Mesh, over: Callable[[np.ndarray], Any]
) -> None:
    data = np.arange(2**12, dtype=np.uint32).reshape(64, 64)
    is_of_keys = over is OVER_NUMPY["keys"]
    if is_of_keys:
        data = data.reshape(-1, 2)
    shape = data.shape[:1] if is_of_keys else data.shape
    scratch = _Scratch(data, len(data) // 4, over)
    callback, batched = gda.GlobalArray.from_callback, gda.GlobalArray.from_batched_callback
    built: list[Any] = [
        *(callback(shape, mesh, P("x"), scratch.__getitem__, max_workers=n) for n in (None, 1)),
        callback(shape, mesh, P("x"), scratch.__getitem__, copy=True),
        batched(shape, mesh, P("x"), scratch.batch),
    ]
    if not is_of_keys:
        built += [
            callback(shape, mesh, P("x"), scratch.__getitem__, dtype=np.float32),
            callback(shape, mesh, P("x"), scratch.__getitem__, dtype=np.float32, max_workers=1),
            gda.GlobalArray.from_source(scratch, mesh, P("x")),
            gda.load_tree({"w": scratch}, mesh, P("x"), plain=True, max_workers=1)["w"],
            gda.PaddedArray.from_callback((61, 64), mesh, P("x"), scratch.padded),
        ]
    scratch.buffer[...] = 0
    for array in built:
        numbers = jax.random.key_data(array.array) if is_of_keys else np.asarray(array)
        np.testing.assert_array_equal(numbers, data[: len(numbers)])


def test_into_hands_out_aligned_buffers_that_become_the_array(auto_mesh: Mesh) -> None:
    outs = []

    def fill(index: gda.Index, out: np.ndarray) -> np.ndarray:
        outs.append((out.shape, out.dtype, out.ctypes.data, out.flags.c_contiguous))
        out[:] = DATA[index]
        return out

    g = gda.GlobalArray.from_callback(
        (8, 2), auto_mesh, P("x"), fill, dtype=jnp.bfloat16, into=True
    )
    np.testing.assert_array_equal(g, DATA)
    assert [out[:2] for out in outs] == [((2, 2), jnp.bfloat16)] * 4
    assert all(address % 64 == 0 and contiguous for *_, address, contiguous in outs)
    assert pointers(g)[::2] == [address for _, _, address, _ in outs]


# Types: no silently wrong values.


def build(mesh: Mesh, data: Any, **options: Any) -> gda.GlobalArray:
    data = np.asarray(data)
    return gda.GlobalArray.from_callback(data.shape, mesh, P("x"), lambda i: data[i], **options)


def test_64_bit_values_that_fit_are_narrowed(auto_mesh: Mesh) -> None:
    for wide, narrow in [
        (np.int64, np.int32), (np.uint64, np.uint32), (np.float64, np.float32),
        (np.complex128, np.complex64),
    ]:  # fmt: skip
        g = build(auto_mesh, np.arange(8).astype(wide))
        assert g.dtype == narrow
        np.testing.assert_array_equal(g, np.arange(8))
    limits = np.array([-(2**31), 2**31 - 1] * 4)
    np.testing.assert_array_equal(build(auto_mesh, limits), limits)


def test_floats_round_as_jax_rounds_them(auto_mesh: Mesh) -> None:
    data = np.array([0.1, 1e-50, np.inf, -np.inf, np.nan, 3.4e38, 1 + 1e-12, -0.0])
    expected = np.asarray(jnp.asarray(data))
    assert np.asarray(build(auto_mesh, data)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.int64(2**31), r"\[4:6\] has dtype int64, .* to int32 .* value 2147483648 at \(5,\)"),
        (np.int64(-(2**40)), r"\[4:6\] .* to int32 .* value -1099511627776 at \(5,\)"),
        (np.uint64(2**32), r"\[4:6\] .* to uint32 .* value 4294967296 at \(5,\)"),
        (np.float64(1e39), r"\[4:6\] .* to float32 .* value 1e\+39 at \(5,\)"),
        (np.complex128(1e39j), r"\[4:6\] .* to complex64 .* value 1e\+39j at \(5,\)"),
        (np.complex128(complex(np.inf, 1e39)), r"to complex64 .* at \(5,\)"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_names_it(
    auto_mesh: Mesh, bad: Any, message: str
) -> None:
    data = np.zeros(8, type(bad))
    data[5] = bad
    with pytest.raises(gda.DoesNotFitError, match=message) as caught:
        build(auto_mesh, data)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OverflowError)
    with pytest.raises(gda.DoesNotFitError):
        gda.GlobalArray.from_batched_callback(
            (8,), auto_mesh, P("x"), lambda indices: [data[i] for i in indices]
        )


def test_python_numbers_that_do_not_fit_are_errors_too(auto_mesh: Mesh) -> None:
    for number in (2**31, 2**40, -(2**40), 2**63, 1e300):
        with pytest.raises(gda.DoesNotFitError):
            gda.GlobalArray.from_callback((), auto_mesh, P(), lambda _, n=number: n)
    g = gda.GlobalArray.from_callback((), auto_mesh, P(), lambda _: 2**70, dtype=np.float32)
    assert float(g) == 2.0**70


def test_an_explicit_dtype_is_a_cast(auto_mesh: Mesh) -> None:
    data = np.array([5, 129, 255, 0, 1, 2, 3, 4])
    for dtype in (np.int32, np.uint8, np.float32, jnp.bfloat16, np.bool_):
        g = build(auto_mesh, data, dtype=dtype)
        assert g.dtype == dtype
        np.testing.assert_array_equal(g, data.astype(dtype))
    for block in (np.array([0, 300]), jnp.array([0, 300]), [0, 300]):
        with pytest.raises(gda.DoesNotFitError, match=r"cast to int8, .* value 300 at \(1,\)"):
            gda.GlobalArray.from_callback(
                (2,), auto_mesh, P(), lambda _, block=block: block, dtype=np.int8
            )
    on_device = gda.GlobalArray.from_callback(
        (8,), auto_mesh, P("x"), lambda i: jax.device_put(data[i] % 5), dtype=jnp.float16
    )
    assert on_device.dtype == np.float16
    whole = jax.device_put(np.arange(8), NamedSharding(auto_mesh, P("x")))
    with jax.transfer_guard("disallow_explicit"), jax.disable_jit():
        of_many = gda.GlobalArray.from_callback(
            (8,), auto_mesh, P(), lambda _: whole, dtype=np.float32
        )
    np.testing.assert_array_equal(of_many, np.arange(8))
    placed = gda.GlobalArray.from_batched_callback_with_devices(
        (8, 2), auto_mesh, P("x"), lambda request: place(request, DATA), dtype=jnp.bfloat16
    )
    assert placed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(placed, DATA)


def test_asking_for_64_bits_without_x64_warns_and_checks(auto_mesh: Mesh) -> None:
    with pytest.warns(UserWarning, match="dtype=float64 is not available without jax_enable_x64"):
        g = build(auto_mesh, np.arange(8), dtype=np.float64)
    assert g.dtype == np.float32
    with pytest.warns(UserWarning, match="int64") as caught:
        gda.GlobalArray.from_batched_callback((), auto_mesh, P(), lambda i: [0] * 8, dtype="i8")
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="int64"), pytest.raises(gda.DoesNotFitError):
        build(auto_mesh, np.arange(8) * 2**40, dtype=np.int64)


def test_with_x64_nothing_is_narrowed(auto_mesh: Mesh) -> None:
    with jax.enable_x64(True):
        for data in (np.arange(8) * 2**40, np.arange(8) * 1e300):
            for options in ({}, {"max_workers": 2}):  # also in threads
                g = build(auto_mesh, data, **options)
                assert g.dtype == data.dtype
                np.testing.assert_array_equal(g, data)


# Mistakes.


def test_a_block_that_cannot_be_is_named(auto_mesh: Mesh) -> None:
    for returned, error, message in [
        (np.zeros(3), ValueError, r"index \[0:2\] has shape \(3,\); a shard .* shape \(2,\)"),
        (None, TypeError, r"returned None for index \[0:2\]; it must return the block"),
        (np.array(["a", "b"]), TypeError, r"index \[0:2\] has dtype <U1, which JAX does not have"),
        (np.zeros(2, "m8[s]"), TypeError, r"timedelta64\[s\], which .* with \.astype\('int64'\)"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), TypeError, r"masked array .*filled"),
        (np.array([1, None], object), TypeError, r"\[0:2\] is no array of numbers; .* or dtype="),
        ({"a": 1}, TypeError, r"\[0:2\] is no array of numbers; return one, a number or a list"),
        (np.zeros(8), ValueError, r"shape \(8,\); .* the whole array: return array\[index\]"),
    ]:
        with pytest.raises(error, match=message):
            gda.GlobalArray.from_callback((8,), auto_mesh, P("x"), lambda _, block=returned: block)


def test_blocks_of_differing_dtypes_are_named(auto_mesh: Mesh) -> None:
    def read(index: gda.Index) -> np.ndarray:
        return np.zeros(2, np.float32 if index[0].start < 4 else np.int32)

    with pytest.raises(TypeError, match=r"index \[4:6\] has dtype int32, and its array has float"):
        gda.GlobalArray.from_callback((8,), auto_mesh, P("x"), read)
    g = gda.GlobalArray.from_callback((8,), auto_mesh, P("x"), read, dtype=np.int8)
    assert g.dtype == np.int8


class DiskError(Exception):
    pass


def test_a_lazy_batch_that_fails_is_noted_with_its_own_index(auto_mesh: Mesh) -> None:
    for fails_at, text in [(1, "[0:2, :]"), (4, "[4:6, :]"), (7, "[6:8, :]")]:

        def read(indices: list[gda.Index], fails_at: int = fails_at) -> Iterator[np.ndarray]:
            yield from (DATA[index] for index in indices[:fails_at])
            raise DiskError("disk")

        with pytest.raises(DiskError) as caught:
            gda.GlobalArray.from_batched_callback((8, 2), auto_mesh, P("x"), read)
        (note,) = caught.value.__notes__
        assert note.startswith(f"gda: while reading index {text} of ShardGrid")


def test_options_are_checked_before_anything_is_read(auto_mesh: Mesh) -> None:
    for options, error, message in [
        ({"into": True}, ValueError, "into=True needs dtype="),
        ({"into": True, "dtype": "f4", "copy": True}, ValueError, "omit it with into=True"),
        ({"copy": "maybe"}, TypeError, "copy must be True, False or None, not 'maybe'"),
        ({"dtype": "floot32"}, TypeError, "'floot32' is not a dtype; a dtype is such"),
        ({"dtype": "U3"}, TypeError, "dtype=<U3, which JAX does not have"),
    ]:
        calls = []
        with pytest.raises(error, match=message):
            gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), calls.append, **options)
        if options.keys() == {"dtype"}:
            with pytest.raises(error, match=message):
                gda.GlobalArray.from_batched_callback_with_devices(
                    (8, 2), auto_mesh, P("x"), calls.append, **options
                )
        assert calls == []


def test_shapes_and_specs_are_checked_before_anything_is_read(auto_mesh: Mesh) -> None:
    calls = []
    for constructor in (
        gda.GlobalArray.from_callback,
        gda.GlobalArray.from_batched_callback,
        gda.GlobalArray.from_batched_callback_with_devices,
    ):
        with pytest.raises(ValueError, match="dimension 0 of size 6 is sharded 4 ways by mesh"):
            constructor((6, 2), auto_mesh, P("x"), calls.append)
    assert calls == []


def test_into_takes_a_view_of_out_and_no_data(auto_mesh: Mesh) -> None:
    for returned in (lambda out: out[:1], lambda out: out.nbytes):  # as `readinto` does

        def fill(index: gda.Index, out: np.ndarray, returned: Any = returned) -> Any:
            out[:] = DATA[index]
            return returned(out)

        g = gda.GlobalArray.from_callback((8, 2), auto_mesh, P("x"), fill, dtype="f4", into=True)
        np.testing.assert_array_equal(g, DATA)
    for data in ([[1, 2], [3, 4]], np.float32(1), jnp.zeros((2, 2)), DATA[:2]):
        kind = type(data).__name__
        with pytest.raises(TypeError, match=f"data of its own, an? {kind}; write `out"):
            gda.GlobalArray.from_callback(
                (8, 2), auto_mesh, P("x"), lambda i, out, d=data: d, dtype="f4", into=True
            )


def test_a_64_bit_jax_array_is_looked_at_when_x64_is_off(auto_mesh: Mesh) -> None:
    with jax.enable_x64(True):
        large, small = jnp.array([2**40, 1]), jnp.array([7, 1])
    assert large.dtype == np.int64
    for dtype in (None, np.int32):
        g = gda.GlobalArray.from_callback((8,), auto_mesh, P("x"), lambda i: small, dtype=dtype)
        np.testing.assert_array_equal(g, [7, 1] * 4)
    with pytest.raises(gda.DoesNotFitError, match=r"value 1099511627776 at \(0,\)"):
        gda.GlobalArray.from_callback((8,), auto_mesh, P("x"), lambda i: large)


def test_result_of_a_batched_callback_is_checked(auto_mesh: Mesh) -> None:
    for returned, error, message in [
        ([DATA[:2]] * 3, ValueError, "expected 8 arrays, one per index, repeats included, not 3"),
        (DATA, TypeError, "a sequence of 8 arrays, one per index, repeats included, not ndarray"),
        (iter([DATA[:2]] * 3), ValueError, "expected 8 arrays, one per index, .* not 3"),
        (iter([DATA[:2]] * 9), ValueError, "expected 8 arrays, one per index, .* not more"),
        ([DATA[i : i + 1] for i in range(8)], ValueError, r"index \[0:2, :\] has shape \(1, 2\)"),
    ]:
        with pytest.raises(error, match=message):
            gda.GlobalArray.from_batched_callback(
                (8, 2), auto_mesh, P("x"), lambda _, block=returned: block
            )


# A process without a device of the mesh.


@pytest.mark.processes(2, devices=4)
def test_a_process_without_a_device_of_the_mesh_needs_a_dtype() -> None:
    mesh = Mesh(np.array([d for d in jax.devices() if d.process_index == 1]), ("x",))
    make = gda.GlobalArray
    reads: list[Index] = []

    def read(index: Index) -> np.ndarray:
        reads.append(index)
        return np.zeros(2, np.float32)

    if jax.process_index() == 1:
        g = make.from_callback((8,), mesh, P("x"), read)
        assert [shard.index for shard in g.local_shards] == reads
        assert reads == [(slice(i, i + 2),) for i in range(0, 8, 2)]
        return
    message = "process 0 has no elements on the mesh {'x': 4}, so no block tells the dtype"
    for construct in (
        make.from_callback,
        make.from_batched_callback,
        make.from_batched_callback_with_devices,
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            construct((8,), mesh, P("x"), read)
        for spec in (P("x"), P()):
            g = construct((8,), mesh, spec, read, dtype=np.float32)
            assert (g.shape, g.dtype, g.spec) == ((8,), np.float32, spec)
            assert (len(g.local_shards), len(g.global_shards)) == (0, 4)
            assert [shard.data for shard in g.global_shards] == [None] * 4
            assert not g.is_fully_addressable
    assert reads == []
    with pytest.raises(ValueError, match=re.escape(message)):
        make((8,), mesh, P("x"), [])
    g = make((8,), mesh, P("x"), [], dtype=np.float32)
    assert (g.shape, g.dtype, len(g.local_shards)) == ((8,), np.float32, 0)


def test_the_dtype_of_buffers_may_be_given(auto_mesh: Mesh) -> None:
    buffers = [jax.device_put(DATA[:2], device) for device in auto_mesh.devices.flat]
    assert gda.GlobalArray((8, 2), auto_mesh, P("x"), buffers, dtype="f4").dtype == np.float32
    with pytest.raises(TypeError, match="device_buffers have dtype float32, not int32"):
        gda.GlobalArray((8, 2), auto_mesh, P("x"), buffers, dtype=np.int32)


# A sharding in place of mesh and spec.


KINDS = pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])


def is_in(g: gda.GlobalArray, sharding: NamedSharding, data: np.ndarray = DATA) -> bool:
    """Return whether an array has this sharding, memory kind included, and every value."""
    kinds = {shard.data.sharding.memory_kind for shard in g.local_shards}
    return (
        g.sharding == sharding
        and kinds == {sharding.memory_kind}
        and np.array_equal(np.asarray(g), data)
    )


def single_buffers(sharding: NamedSharding) -> list[jax.Array]:
    kind = sharding.memory_kind
    return [
        jax.device_put(DATA[index], SingleDeviceSharding(device, memory_kind=kind))
        for device, index in gda.get_shard_indices(DATA.shape, sharding).items()
    ]


@KINDS
def test_a_sharding_stands_in_place_of_mesh_and_spec(mesh: Mesh, kind: str) -> None:
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    make = gda.GlobalArray
    read = DATA.__getitem__

    def placed(request: Any) -> list[jax.Array]:
        of = [SingleDeviceSharding(d, memory_kind=kind) for _, ds in request for d in ds]
        return jax.device_put([DATA[index] for index, ds in request for _ in ds], of)

    assert is_in(make.from_callback(DATA.shape, sharding, read), sharding)
    assert is_in(make.from_callback(DATA.shape, mesh=sharding, data_callback=read), sharding)
    assert is_in(make.from_callback(DATA.shape, sharding, read, max_workers=2), sharding)
    assert is_in(
        make.from_batched_callback(DATA.shape, sharding, lambda all_: list(map(read, all_))),
        sharding,
    )
    assert is_in(make.from_batched_callback_with_devices(DATA.shape, sharding, placed), sharding)
    assert is_in(make.from_source(DATA, sharding), sharding)
    assert is_in(make.from_source(DATA, sharding, max_workers=2), sharding)
    assert is_in(make(DATA.shape, sharding, single_buffers(sharding)), sharding)


@KINDS
def test_blocks_placed_early_go_to_the_memory_of_the_sharding(
    mesh: Mesh, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "places_early", lambda _: True)
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    assert is_in(gda.GlobalArray.from_source(DATA, sharding), sharding)


@KINDS
def test_large_blocks_are_borrowed_for_the_memory_of_devices_alone(
    mesh: Mesh, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "places_early", lambda _: True)
    data = np.zeros((8, LARGE_BYTES), np.int8)
    plan = placing.local_blocks_of(data.shape, NamedSharding(mesh, P("x"), memory_kind=kind))
    (block,) = BlockReader(plan, borrows=True).read(data.__getitem__, plan.distinct[:1])
    assert isinstance(block, BorrowedBlock) == (kind == "device")


@KINDS
def test_keys_go_into_the_memory_of_a_sharding(mesh: Mesh, kind: str) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    sharding = NamedSharding(mesh, P("x"), memory_kind=kind)
    g = gda.GlobalArray.from_callback((8,), sharding, lambda index: keys[index])
    for made in (g, pickle.loads(pickle.dumps(g))):
        assert made.sharding == sharding
        np.testing.assert_array_equal(jax.random.key_data(made.array), jax.random.key_data(keys))


def test_a_single_device_has_its_sharding_too() -> None:
    device = jax.devices()[5]
    sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
    g = gda.GlobalArray.from_callback(DATA.shape, sharding, DATA.__getitem__)
    assert g.array.devices() == {device}
    assert g.sharding.memory_kind == "pinned_host"
    wrapped = gda.GlobalArray.from_array(jax.device_put(DATA, sharding))
    assert wrapped.sharding == g.sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("shape", "spec"), [((), P(("a", "b"))), ((8,), ["x", ["a"]])])
def test_surplus_axes_of_size_1_shard_nothing(
    shape: tuple[int, ...], spec: Any, kind: AxisType
) -> None:
    mesh = mesh_of({"a": 1, "x": 4, "b": 1}, kind)
    data = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    g = gda.GlobalArray.from_callback(shape, mesh, spec, lambda index: data[index])
    assert g.grid.spec == ("x",)[: len(shape)]
    np.testing.assert_array_equal(np.asarray(g), data)
    local = gda.GlobalArray.from_process_local(data, mesh, spec)
    assert local.sharding == g.sharding
    assert g.reshard(spec).sharding == g.sharding
    assert gda.constrain(g, spec).sharding == g.sharding
    assert gda.jit(lambda x: x, out_specs=P(*spec))(g).grid == g.grid


@pytest.mark.parametrize("form", [lambda block: block, lambda block: block[:], jax.device_put])
def test_one_buffer_for_several_indices_is_refused(mesh: Mesh, form: Any) -> None:
    def one_buffer(indices: list[gda.Index]) -> Iterator[Any]:
        buffer = gda.aligned_empty((2, 2), np.float32)
        for index in indices:
            buffer[:] = DATA[index][:2]
            yield form(buffer)

    text = r"returned one buffer for the indices \[0:2, :\] and \[2:4, :\]; .* Return array.copy"
    with pytest.raises(ValueError, match=text):
        gda.GlobalArray.from_batched_callback(DATA.shape, mesh, P("x"), lambda i: [*one_buffer(i)])
    g = gda.GlobalArray.from_batched_callback(
        (2, 2), mesh, P(), lambda indices: [*one_buffer(indices[:1])] * 8
    )
    np.testing.assert_array_equal(np.asarray(g), DATA[:2])


def test_one_array_of_jax_may_be_every_block(mesh: Mesh) -> None:
    zeros = jnp.zeros((2, 2))
    g = gda.GlobalArray.from_batched_callback((8, 2), mesh, P("x"), lambda i: [zeros] * len(i))
    assert not np.asarray(g).any()


@pytest.mark.parametrize("form", [np.asarray, lambda block: block[:], np.atleast_3d])
def test_a_block_that_cannot_be_written_to_may_be_every_block(mesh: Mesh, form: Any) -> None:
    shape, block = (8, 2, 1), form(np.full((2, 2, 1), 7.0, np.float32))
    build = gda.GlobalArray.from_batched_callback
    with pytest.raises(ValueError, match=r"one buffer for .* first set block.flags.writeable = F"):
        build(shape, mesh, P("x"), lambda i: [block[:]] * len(i))
    block.flags.writeable = False
    g = build(shape, mesh, P("x"), lambda i: [block] * len(i))
    np.testing.assert_array_equal(g, np.full(shape, 7))


def test_rows_of_a_broadcast_array_are_blocks(mesh: Mesh) -> None:
    rows = np.broadcast_to(DATA[0], DATA.shape)
    build = gda.GlobalArray
    batch = {"a": rows, "b": rows}
    (prefetched,) = gda.prefetch([batch], mesh, P("x"))
    for g in (
        build.from_batched_callback(DATA.shape, mesh, P("x"), lambda i: [rows[j] for j in i]),
        build.from_batched_callback(DATA.shape, mesh, P("x"), lambda i: (rows[j] for j in i)),
        build.from_callback(DATA.shape, mesh, P("x"), rows.__getitem__, max_workers=2),
        build.from_process_local(rows, mesh, P("x")),
        *prefetched.values(),
    ):
        np.testing.assert_array_equal(g, rows)


# What JAX knows of a block beside its values.


def test_blocks_of_a_weak_type_make_an_array_of_one(mesh: Mesh) -> None:
    def weak(device: Device) -> jax.Array:
        return jax.device_put(jnp.asarray(2.0), device)

    def placed(request: list[tuple[gda.Index, tuple[Device, ...]]]) -> list[jax.Array]:
        return [weak(device) for _, devices in request for device in devices]

    build = gda.GlobalArray
    for g in (
        build.from_callback((), mesh, P(), lambda _: jnp.asarray(2.0)),
        build.from_callback((), mesh, P(), lambda _: jnp.asarray(2.0), max_workers=2),
        build.from_batched_callback((), mesh, P(), lambda i: [jnp.asarray(2.0)] * len(i)),
        build.from_batched_callback_with_devices((), mesh, P(), placed),
        build((), mesh, P(), [weak(device) for device in mesh.local_devices]),
    ):
        assert g.weak_type
        assert (g.array + jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
        assert float(g) == 2
    for strong in (
        build.from_callback((), mesh, P(), lambda _: jnp.asarray(2.0), dtype=np.float32),
        build.from_callback((), mesh, P(), lambda _: jnp.float32(2)),
        build.from_callback(
            (8,), mesh, P("x"), lambda i: jnp.full(2, 2.0) if i[0].start else DATA[:2, 0]
        ),
    ):
        assert not strong.weak_type


def test_an_array_that_is_not_committed_stays_so(mesh: Mesh) -> None:
    g = gda.GlobalArray.from_array(jnp.ones(3))
    assert not g.committed
    assert (g + jax.device_put(np.ones(3), NamedSharding(mesh, P()))).sharding.mesh == mesh


async def a_block(*_: Any) -> np.ndarray:
    return np.zeros(2)


def test_an_async_callback_is_refused(mesh: Mesh) -> None:
    build = gda.GlobalArray
    for work in (
        lambda: build.from_callback((8,), mesh, P("x"), a_block),
        lambda: build.from_callback((8,), mesh, P("x"), a_block, dtype="f4", into=True),
        lambda: build.from_batched_callback((8,), mesh, P("x"), a_block),
        lambda: build.from_batched_callback((8,), mesh, P("x"), lambda i: map(a_block, i)),
        lambda: build.from_batched_callback_with_devices((8,), mesh, P("x"), a_block),
    ):
        with pytest.raises(TypeError, match="returned a coroutine, and gda waits for none; pass a"):
            work()


@pytest.mark.parametrize("of", [lambda keys: keys, gda.GlobalArray.from_array])
def test_keys_are_a_source(mesh: Mesh, of: Any) -> None:
    keys = jax.random.split(jax.random.key(0), (8, 3))
    g = gda.GlobalArray.from_source(of(keys), mesh, P("x"))
    assert (g.shape, g.dtype, g.spec[0]) == (keys.shape, keys.dtype, "x")
    np.testing.assert_array_equal(jax.random.key_data(g.array), jax.random.key_data(keys))
    p = gda.PaddedArray.from_source(of(keys[:5]), mesh, P("x"))
    assert (p.shape, p.padded_shape) == ((5, 3), (8, 3))
    assert p.fingerprint() == gda.fingerprint(keys[:5])
    with pytest.raises(TypeError, match=r"dtype key<fry>, of PRNG keys; omit dtype="):
        gda.GlobalArray.from_source(of(keys), mesh, P("x"), dtype="float32")
    with pytest.raises(ValueError, match="3 entries, but global shape .* 2 dimensions"):
        gda.GlobalArray.from_source(of(keys), mesh, P(None, None, "y"))

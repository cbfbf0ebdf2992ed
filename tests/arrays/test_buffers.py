"""Aligned memory: addresses, slabs and references."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

import gda
from gda.arrays.buffers import ALIGNMENT, Buffers


@given(
    array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=200),
    st.sampled_from([np.float32, np.int8, np.complex64, np.bool_, jnp.bfloat16, jnp.int4]),
)
def test_memory_begins_at_a_multiple_of_64_bytes(shape: tuple[int, ...], dtype: Any) -> None:
    block = gda.aligned_empty(shape, dtype)
    assert (block.shape, block.dtype) == (shape, np.dtype(dtype))
    assert block.size == 0 or block.ctypes.data % ALIGNMENT == 0
    assert block.flags.c_contiguous
    assert block.flags.writeable


def test_jax_takes_it_without_a_copy() -> None:
    block = gda.aligned_empty((3, 5), np.float32)
    block[:] = 1
    placed = jax.device_put(block, jax.devices("cpu")[0], may_alias=True)
    assert placed.unsafe_buffer_pointer() == block.ctypes.data


BYTES = np.dtype(np.uint8)


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=20))
def test_buffers_do_not_overlap(sizes: list[int]) -> None:
    buffers = Buffers(count=20)
    blocks = [buffers.empty((size,), BYTES) for size in sizes]
    for i, block in enumerate(blocks):
        block[:] = i
    for i, block in enumerate(blocks):
        assert (block == i).all()
        assert block.size == 0 or block.ctypes.data % ALIGNMENT == 0


def test_small_and_medium_buffers_share_slabs_and_large_ones_do_not() -> None:
    for size in (100, 2**20):
        buffers = Buffers(count=20)
        one, other, large = (buffers.empty((n,), BYTES) for n in (size, size, 2**22))
        assert one.base is other.base
        assert large.base is not one.base
    passing = Buffers(count=20, are_kept=False)
    assert passing.empty((2**20,), BYTES).base is not passing.empty((2**20,), BYTES).base


def test_large_buffers_and_slabs_begin_at_a_huge_page() -> None:
    large = gda.aligned_empty((2**22 + 1,), np.uint8)
    first = Buffers(count=10_000).empty((2**20,), BYTES)
    assert {each.ctypes.data % 2**21 for each in (large, first)} == {0}


def test_buffers_of_several_dtypes_share_a_slab() -> None:
    buffers = Buffers(count=2)
    one, other = buffers.empty((3,), BYTES), buffers.empty((2, 3), np.dtype(np.float32))
    assert one.base is other.base
    assert other.ctypes.data - one.ctypes.data == ALIGNMENT


def test_slabs_are_no_larger_than_the_arrays_need() -> None:
    assert gda.aligned_empty((64,), np.uint8).base.size <= 128
    few = Buffers(count=3)
    assert few.empty((64,), BYTES).base.size <= 4 * 64
    many = Buffers(count=10_000)
    assert many.empty((1000,), BYTES).base.size <= 2**20 + 64
    eight = Buffers(count=8)
    assert eight.empty((2**20,), BYTES).base.size <= 2**23 + 2**21
    medium = Buffers(count=10_000)
    assert medium.empty((2**20,), BYTES).base.size <= 2**25 + 2**21


def test_a_view_of_a_buffer_refers_to_the_buffer() -> None:
    block = gda.aligned_empty((4, 4), np.float32)
    before = sys.getrefcount(block)
    views = [block[1:], block.ravel()[2:], block.view(np.int32), memoryview(block)]
    assert sys.getrefcount(block) == before + len(views)


def test_one_size_may_be_a_number() -> None:
    assert gda.aligned_empty(7, "f4").shape == (7,)
    assert gda.aligned_empty(np.array([2, 3]), "f4").shape == (2, 3)


def test_bad_arguments_are_errors() -> None:
    for shape, dtype, error, message in [
        ((-1,), "f4", ValueError, r"shape \(-1,\) has a negative size"),
        ((2,), object, TypeError, "Python objects cannot be placed on a device"),
        ((2.5,), "f4", TypeError, r"a sequence of integers .* not \(2\.5,\)"),
        ((2,), "nonsense", TypeError, "nonsense"),
    ]:
        with pytest.raises(error, match=message):
            gda.aligned_empty(shape, dtype)

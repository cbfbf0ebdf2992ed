"""The digest of an array or of its parts, which follows the formula and shows every change."""

import math
from hashlib import sha256
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from meshes import batch
from trials import rarely

from gda.arrays.fingerprints import formula
from gda.arrays.fingerprints.formula import add, digest_of, fingerprint_of_numpy, sums_of_numpy

NARROW = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
NARROW |= {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
    *(name for name in NARROW if hasattr(ml_dtypes, name)),
]


# The formula as it stands in docs/design/fingerprint.md, one word at a time.


def constant(lane: int, dimension: int, bit: int) -> int:
    text = f"gda fingerprint: lane {lane}, dimension {dimension}, bit {bit}"
    return int.from_bytes(sha256(text.encode()).digest()[:4], "little")


def key(lane: int, dimension: int, coordinate: int) -> int:
    bits = [bit for bit in range(64) if coordinate >> bit & 1]
    return sum(constant(lane, dimension, bit) for bit in bits)


def mix(word: int, key: int) -> int:
    x = (word + key) % 2**32
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * (key | 1) % 2**32
    return x ^ x >> 15


def words_of(number: np.generic) -> list[int]:
    raw, bits = number.tobytes(), NARROW.get(number.dtype.name, 32)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    return [word % 2**bits for word in words]


def sums_by_the_formula(data: np.ndarray, start: tuple[int, ...]) -> list[int]:
    sums = [0, 0]
    for lane in range(2):
        for point in np.ndindex(data.shape):
            keys = [key(lane, -1, 1)]
            keys += [key(lane, d, start[d] + at) for d, at in enumerate(point)]
            for number, word in enumerate(words_of(data[point])):
                sums[lane] += mix(word, sum(keys) + key(lane, -2, number))
    return [total % 2**32 for total in sums]


def by_the_formula(data: np.ndarray) -> str:
    sums = sums_by_the_formula(data, (0,) * data.ndim)
    shape = ",".join(map(str, data.shape))
    head = sha256(f"gda fingerprint 2: {data.dtype.name} [{shape}]".encode()).digest()[:8]
    ends = b"".join(total.to_bytes(4, "little") for total in sums)
    return bytes(a ^ b for a, b in zip(head, ends, strict=True)).hex()


@pytest.mark.parametrize("shape", [(), (7,), (4, 6, 3), (1, 2, 1, 2, 3), (3, 0)])
def test_fingerprint_follows_the_formula(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).standard_normal(shape)
    for dtype in (np.float32, np.complex128):
        array = np.asarray(data, dtype)
        assert fingerprint_of_numpy(array) == by_the_formula(array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number(dtype: str) -> None:
    data = np.arange(-3, 13).astype(np.float32).astype(getattr(ml_dtypes, dtype, dtype))
    assert fingerprint_of_numpy(data) == by_the_formula(data)
    assert digest_of(data.shape, dtype, sums_of_numpy(data)) == by_the_formula(data)
    assert digest_of(data.shape, data.dtype.type, sums_of_numpy(data)) == by_the_formula(data)


def test_it_never_changes() -> None:
    # Digests that checkpoints have recorded. If one of these fails, the formula has changed.
    golden = {
        "float32": "bfda0894f8164650",
        "bfloat16": "94d061090ea78612",
        "int4": "5090609cb3ab6d20",
        "complex64": "343453da23ff7d76",
    }
    for dtype, recorded in golden.items():
        data = (np.arange(64) % 5 - 2).reshape(8, 8).astype(getattr(ml_dtypes, dtype, dtype))
        assert fingerprint_of_numpy(data) == recorded
    assert fingerprint_of_numpy(np.asarray(np.float32(1))) == "e5056c2f3c9ecd6e"


def test_arrays_of_any_layout_in_memory() -> None:
    data = batch(300, 7, 50)
    expected = fingerprint_of_numpy(data)
    assert fingerprint_of_numpy(np.asfortranarray(data)) == expected
    assert fingerprint_of_numpy(np.repeat(data, 2, 1)[:, ::2]) == expected
    assert fingerprint_of_numpy(data[::-1].copy()[::-1]) == expected
    assert fingerprint_of_numpy(data.astype(">f4")) == expected


def test_keys_of_prng_have_the_dtype_of_their_kind() -> None:
    keys = jax.random.key(3)
    sums = sums_of_numpy(np.asarray(jax.random.key_data(keys)))
    assert digest_of((), keys.dtype, sums) == digest_of((), "key<fry>", sums)
    assert digest_of((), keys.dtype, sums) != digest_of((), "key<rbg>", sums)


# Of parts.


def test_a_part_far_out_in_a_long_dimension() -> None:
    part, start = np.arange(60).astype(np.int16).reshape(30, 2), (2**33 + 12345, 2**40 - 1)
    assert sums_of_numpy(part, start).tolist() == sums_by_the_formula(part, start)


@rarely(3)
@given(data=st.data(), shape=hnp.array_shapes(max_dims=4, max_side=9))
def test_any_parts_add_up(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = np.random.default_rng(1).integers(0, 2**32, shape, dtype=np.uint32)
    pieces = [(whole, (0,) * whole.ndim)]
    for axis, size in enumerate(shape):
        at = data.draw(st.integers(0, size))
        pieces = [half for piece in pieces for half in halves_of(*piece, axis, at)]
    expected = sums_of_numpy(whole)
    assert np.array_equal(add(sums_of_numpy(*piece) for piece in pieces), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formula, "AT_A_TIME", data.draw(st.integers(1, 50)))
        assert np.array_equal(sums_of_numpy(whole), expected)


def halves_of(piece: np.ndarray, start: tuple[int, ...], axis: int, at: int) -> list[Any]:
    below, above = np.split(piece, [at], axis)
    return [(below, start), (above, (*start[:axis], start[axis] + at, *start[axis + 1 :]))]


# Whatever changes.


@given(data=st.data(), dtype=st.sampled_from([np.bool_, np.int8, np.float32, np.complex128]))
def test_any_change_of_one_element_is_seen(data: st.DataObject, dtype: Any) -> None:
    shape = data.draw(hnp.array_shapes(max_dims=3))
    value = np.random.default_rng(2).integers(0, 2, shape).astype(dtype)
    before = sums_of_numpy(value)
    at = data.draw(st.integers(0, value.nbytes - 1))
    raw = value.reshape(-1).view(np.uint8)
    raw[at] ^= 1 if value.dtype == bool else data.draw(st.integers(1, 255))
    assert (sums_of_numpy(value) != before).all()


def test_shape_dtype_and_order_count() -> None:
    data = batch(4, 6)
    others = [data.reshape(6, 4), data.reshape(24), data.reshape(4, 6, 1), data.T, data[::-1]]
    others += [data.view(np.int32), data.view(ml_dtypes.bfloat16), np.roll(data, 1), data + 0 * 1j]
    others += [np.zeros_like(data), np.zeros((0, 6)), np.zeros((6, 0)), np.zeros((0, 6), bool)]
    assert len({fingerprint_of_numpy(array) for array in [data, *others]}) == 1 + len(others)


def test_bits_count_and_not_values() -> None:
    zeros, nans = [0, 0x80000000], [0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7F800001, 0x7FA00000]
    floats = np.array(zeros + nans, np.uint32).view(np.float32)
    halves = np.array([0x7E00, 0xFE00, 0x7E01, 0x7D01, 0x7FC1, 0x7F81, 0xFF81, 0x8000], np.uint16)
    for data in (floats, halves.view(np.float16), halves.view(ml_dtypes.bfloat16)):
        assert len({fingerprint_of_numpy(part) for part in np.split(data, len(data))}) == len(data)


def test_changes_of_two_elements_are_as_good_as_random() -> None:
    # In each lane two changes cancel out with a chance of 2**-31 or less if their sums are as good
    # as random odd multiples. That is seen in how often two sums are equal, and the low bits zero.
    rng, count = np.random.default_rng(5), 1 << 17
    here = np.unique(rng.integers(0, 2**32, count + 1000, dtype=np.uint32))
    here = rng.permutation(here)[:count]
    there = rng.permutation(here)
    pairs = {"sign": (0x3F800000, 0xBF800000), "bit": (0, 1), "one": (0x3F800000, 0), "up": (5, 6)}
    for old, new in pairs.values():
        first = mixed(new, here) - mixed(old, here)
        for second in (mixed(old, there) - mixed(new, there), 0):
            sums = np.sort(first + second)
            equal, expected = int((sums[1:] == sums[:-1]).sum()), count**2 / 2**33
            assert equal < 2 * expected + 6 * math.sqrt(2 * expected)
            for width in (4, 8, 12):
                zeros, expected = int((sums % 2**width == 0).sum()), count / 2**width
                assert zeros < 2 * expected + 6 * math.sqrt(2 * expected)


def test_exchanged_rows_are_as_good_as_random() -> None:
    # The rows (old, new) and (new, old): the key of the fourth element follows from the others.
    count = 1 << 18
    rows, columns = np.random.default_rng(6).integers(0, 2**32, (2, 2, count), dtype=np.uint32)
    for old, new in [(0, 1), (0, 0x3F800000), (0x3F800000, 0xBF800000), (5, 6)]:
        total = np.zeros(count, np.uint32)
        for row, column in np.ndindex(2, 2):
            before, after = (old, new) if row == column else (new, old)
            key = rows[row] + columns[column]
            total += mixed(after, key) - mixed(before, key)
        for part in (total & 0xFFF, total >> 20):
            zeros, expected = int((part == 0).sum()), count / 2**12
            assert abs(zeros - expected) < 6 * math.sqrt(expected)


def mixed(word: int, key: np.ndarray) -> np.ndarray:
    mixed = np.uint32(word) + key
    formula.mix(mixed, key, np.empty_like(mixed))
    return mixed


# Errors.


def test_other_dtypes_than_numbers_are_refused() -> None:
    structured = np.zeros(1, [("a", "f4")])
    for strange in (np.array(["a"]), np.array([None]), np.zeros(2, "V2"), structured):
        with pytest.raises(TypeError, match=r"is of numbers, not of .*; view raw bytes"):
            fingerprint_of_numpy(strange)
    for times in (np.zeros(1, "M8[s]"), np.zeros(1, "m8[s]")):
        with pytest.raises(TypeError, match=r"is of numbers, not of (datetime|timedelta)64"):
            fingerprint_of_numpy(times)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (0, 2), (200, 300)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", ml_dtypes.bfloat16])
def test_sums_of_a_stack_are_those_of_each(shape: tuple[int, ...], dtype: str) -> None:
    parts = np.random.default_rng(0).integers(0, 2, (4, *shape)).astype(dtype)
    start = tuple(range(3, 3 + len(shape)))
    each = [formula.sums_of_numpy(part, start) for part in parts]
    assert np.array_equal(formula.sums_of_each([*parts], start), each)
    assert np.array_equal(formula.sums_of_each([*parts[:1]], start), each[:1])


def test_arrays_of_64_dimensions_have_a_digest() -> None:
    data = np.arange(6, dtype=np.float32)
    sums = sums_of_numpy(data.reshape((1,) * 62 + (2, 3)))
    parts = [
        sums_of_numpy(row.reshape((1,) * 63 + (3,)), (*(0,) * 62, i, 0))
        for i, row in enumerate(data.reshape(2, 3))
    ]
    assert (add(parts) == sums).all()
    assert (sums_of_numpy(data.reshape((1,) * 61 + (2, 1, 3))) != sums).any()

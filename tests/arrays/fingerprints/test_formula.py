"""The digest of an array or of its parts, which follows the formula and shows every change."""

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
        patch.setattr(formula, "_FEW", 0)
        for limit in ("AT_A_TIME", "_COLUMNS", "_COPIED"):
            patch.setattr(formula, limit, data.draw(st.integers(1, 50)))
        assert np.array_equal(sums_of_numpy(whole), expected)


def halves_of(piece: np.ndarray, start: tuple[int, ...], axis: int, at: int) -> list[Any]:
    below, above = np.split(piece, [at], axis)
    return [(below, start), (above, (*start[:axis], start[axis] + at, *start[axis + 1 :]))]


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

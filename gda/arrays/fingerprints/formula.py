"""The formula of a fingerprint: equal for equal arrays, however they are sharded.

Every element is mixed with the position it has in the whole array, in two *lanes*, and each lane
is summed up modulo 2**32: ``docs/design/fingerprint.md``. ``on_host`` and ``on_devices`` do the
same with XLA.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape

LANES = 2

Words = npt.NDArray[np.uint32]
AnyNDArray = np.ndarray[Any, Any]

# Elements that are mixed at a time: they and their keys stay in the cache.
AT_A_TIME = 1 << 15
_FEW = 1 << 12  # words whose keys are kept


def fingerprint_of_numpy(array: AnyNDArray) -> str:
    """Return the fingerprint of a NumPy array: that of a sharded array with the same content.

    Needs no device, and copies only a part at a time, also of a memory map.
    """
    array = np.asarray(array)
    return digest_of(array.shape, array.dtype, sums_of_numpy(array))


def digest_of(shape: Sequence[int], dtype: Any, sums: npt.ArrayLike) -> str:
    """Return the digest, 16 hex digits, of a whole array, of the sums of all parts.

    >>> digest_of((2, 0), 'float32', add([]))
    'a9c67c6ed3926209'
    """
    total = np.asarray(sums, np.uint32).reshape(-1, LANES).sum(0, dtype=np.uint32)
    # Not a hash of both, so that other sums always give another digest.
    return (_head_of(tuple(shape), dtype) ^ total).astype("<u4").tobytes().hex()


@lru_cache(maxsize=1024)
def _head_of(shape: Shape, dtype: Any) -> Words:
    sizes = ",".join(str(operator.index(size)) for size in shape)
    # NumPy lacks the dtypes of PRNG keys; their text is their name.
    name = np.dtype(dtype).name if isinstance(dtype, np.dtype | type) else str(dtype)
    head = sha256(f"gda fingerprint 2: {name} [{sizes}]".encode()).digest()
    return np.frombuffer(head[: 4 * LANES], "<u4")


def add(sums: Iterable[Words]) -> Words:
    """Return the sum of the sums of parts that do not overlap: uint32 ``[LANES]``."""
    total = np.zeros(LANES, np.uint32)
    for part in sums:
        total += part
    return total


def sums_of_numpy(array: AnyNDArray, start: Sequence[int] = ()) -> Words:
    """Return the sums over a part of an array: uint32 ``[LANES]``, to be added to other sums.

    Of PRNG keys take the numbers. ``start`` is the first element in the whole array.

    >>> whole = np.arange(6, dtype=np.float32)
    >>> halves = [sums_of_numpy(whole[:2]), sums_of_numpy(whole[2:], start=(2,))]
    >>> (add(halves) == sums_of_numpy(whole)).all()
    np.True_
    """
    array = np.asarray(array)
    width_of(array.dtype)
    start = tuple(map(operator.index, start)) or (0,) * array.ndim
    if not array.size:
        return add([])  # its other sizes may be too large for the keys of all positions
    return add(
        sums_of_words(words[None], _keys(words.shape, first))[0]
        for piece, first in _pieces(array, start)
        for words in [_words_of_numpy(piece)]
    )


def sums_of_each(parts: Sequence[AnyNDArray], start: Sequence[int]) -> Words:
    """Return the sums over each of some parts of one shape and dtype: uint32 ``[count, LANES]``.

    As ``sums_of_numpy`` of each, but many small ones take a tenth of the time together.
    """
    if parts[0].size > AT_A_TIME:
        return np.stack([sums_of_numpy(part, start) for part in parts])
    sizes = _words_of_numpy(parts[0]).shape
    keys = [*_keys(sizes, start)]
    step = max(1, AT_A_TIME // max(parts[0].size, 1))
    stacks = (np.stack(parts[first : first + step]) for first in range(0, len(parts), step))
    return np.concatenate([sums_of_words(_words_of_numpy(stack), keys) for stack in stacks])


def _pieces(array: AnyNDArray, start: Shape) -> Iterator[tuple[AnyNDArray, Shape]]:
    if array.size <= AT_A_TIME:
        yield array, start
        return
    axis = next(axis for axis, size in enumerate(array.shape) if size > 1)
    step = max(1, AT_A_TIME * array.shape[axis] // array.size)
    for begin in range(0, array.shape[axis], step):
        part = array[(slice(None),) * axis + (slice(begin, begin + step),)]
        yield from _pieces(part, (*start[:axis], start[axis] + begin, *start[axis + 1 :]))


def _words_of_numpy(piece: AnyNDArray) -> Words:
    # Of the other byte order, a dtype is not the same to NumPy as the native one of that name.
    piece = np.ascontiguousarray(piece, piece.dtype.newbyteorder("<")).reshape(piece.shape)
    words = piece[..., None].view(f"<u{min(piece.dtype.itemsize, 4)}").astype(np.uint32, copy=False)
    bits, _ = width_of(piece.dtype)
    return words if bits >= 8 else words & np.uint32((1 << bits) - 1)


def _keys(sizes: Shape, start: Sequence[int]) -> Iterable[Words]:
    is_small = math.prod(sizes) <= _FEW
    return _few_keys(sizes, tuple(start)) if is_small else _keys_of(sizes, start)


@lru_cache(maxsize=64)  # most small arrays of a tree have the shapes of others
def _few_keys(sizes: Shape, start: Shape) -> list[Words]:
    return [*_keys_of(sizes, start)]


def _keys_of(sizes: Shape, start: Sequence[int]) -> Iterator[Words]:
    """Yield, for each lane, the keys of the words of a part that begins at ``start``."""
    rank = len(start)
    sides = [
        keys_from(constants_of(dimension), first, size).reshape(LANES, -1, *(1,) * (rank - axis))
        for axis, (dimension, first, size) in enumerate(
            zip((*range(rank), WORD), (*start, 0), sizes, strict=True)
        )
    ]
    for lane, shared in enumerate(key_at(constants_of(ORIGIN), 1)[:, 0]):
        keys: Any = sum((side[lane] for side in sides), start=shared)
        yield keys


def sums_of_words(words: Words, keys: Iterable[Words]) -> Words:
    """Return the sums over each of some parts, ``[count, *sizes]``: ``[count, LANES]``.

    ``keys`` are those of a part, for each lane.
    """
    sums = np.empty((len(words), LANES), np.uint32)
    mixed = np.empty_like(words)
    shifted = np.empty_like(words)
    for lane, key in enumerate(keys):
        mix(np.add(words, key, out=mixed), key, shifted)
        sums[:, lane] = mixed.reshape(len(words), -1).sum(1, dtype=np.uint32)
    return sums


# The keys of positions. Each bit of each coordinate has a constant for each lane, and the key of a
# position is the sum of the constants of the bits that are set. So wherever a dimension is
# split, the key is a sum of one part for the row and one for the column.

ORIGIN = -1  # a constant of every position
WORD = -2  # those of the number of a word in its element


@lru_cache(maxsize=64)
def constants_of(dimension: int) -> Words:
    """Return the constants of the bits of a coordinate: uint32 ``[LANES, 64]``."""
    digests = [
        sha256(f"gda fingerprint: lane {lane}, dimension {dimension}, bit {bit}".encode()).digest()
        for lane in range(LANES)
        for bit in range(64)
    ]
    words = np.frombuffer(b"".join(digest[:4] for digest in digests), "<u4").astype(np.uint32)
    return words.reshape(LANES, 64)


def key_at(constants: Words, coordinate: int) -> Words:
    """Return the key of one coordinate: uint32 ``[LANES, 1]``."""
    key = np.zeros((LANES, 1), np.uint32)
    for bit in range(coordinate.bit_length()):
        if coordinate >> bit & 1:
            key += constants[:, bit, None]
    return key


def keys_from(constants: Words, start: int, count: int) -> Words:
    """Return the keys of ``count`` coordinates from ``start`` on: uint32 ``[LANES, count]``."""
    width = max(count - 1, 0).bit_length()
    first = start >> width << width
    all_sums = _all_sums if count <= AT_A_TIME else _all_sums.__wrapped__
    low = all_sums(constants[:, :width].tobytes())
    keys = low + key_at(constants, first)
    if start > first:
        keys = np.concatenate([keys, low + key_at(constants, first + (1 << width))], 1)
    return keys[:, start - first :][:, :count]


@lru_cache(maxsize=64)
def _all_sums(constants: bytes) -> Words:
    sums = np.zeros((LANES, 1), np.uint32)
    for constant in np.frombuffer(constants, np.uint32).reshape(LANES, -1).T:
        sums = np.concatenate([sums, sums + constant[:, None]], 1)
    return sums


def outer_sums(*parts: Words) -> Words:
    """Return all sums of one key of each part, row-major: uint32 ``[LANES, product]``."""
    total = np.zeros((LANES, 1), np.uint32)
    for part in parts:
        total = (total[:, :, None] + part[:, None, :]).reshape(LANES, -1)
    return total


# The first two shifts and the factor are those of a mix in Christopher Wellons' hash-prospector.
# Its second factor is a constant too: with that, differences of two elements came out equal up to
# 90 times too often, and with one that the key chooses, twice.
SHIFTS = (16, 15, 15)
FACTOR = 0x21F0AAAD


def mix(x: Words, key: Words, shifted: Words) -> None:
    """Permute words to which their keys were added, in place; ``shifted`` is memory to work in."""
    for shift, factor in zip(SHIFTS, (np.uint32(FACTOR), key | np.uint32(1)), strict=False):
        x ^= np.right_shift(x, np.uint32(shift), out=shifted)
        x *= factor
    x ^= np.right_shift(x, np.uint32(SHIFTS[-1]), out=shifted)

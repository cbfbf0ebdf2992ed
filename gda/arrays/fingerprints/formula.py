"""The formula of a fingerprint: equal for equal arrays, however they are sharded.

Every element is mixed with the position it has in the whole array, in two *lanes*, and each lane
is summed up modulo 2**32: ``docs/design/fingerprint.md``. ``on_host`` and ``on_devices`` do the
same with XLA.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape

LANES = 2

Words = npt.NDArray[np.uint32]
AnyNDArray = np.ndarray[Any, Any]

# Words that are mixed at a time: they, their keys and what becomes of them stay in the cache.
AT_A_TIME = 1 << 16
_COLUMNS = 1 << 12  # the most words of a row, if that can be
_COPIED = 1 << 20  # elements of a copy
_FEW = 1 << 12  # elements of a part whose keys are kept


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
    total = np.asarray(sums, np.uint32)
    if total.shape != (LANES,):
        total = total.reshape(-1, LANES).sum(0, dtype=np.uint32)
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
    if array.size <= _FEW:
        return sums_of_each([array], start)[0]
    return add(
        sums_of_rows(rows)
        for piece, first in _pieces(array, start)
        for rows in rows_of(piece, first, _COLUMNS)
    )


def sums_of_each(parts: Sequence[AnyNDArray], start: Sequence[int]) -> Words:
    """Return the sums over each of some parts of one shape and dtype: uint32 ``[count, LANES]``.

    As ``sums_of_numpy`` of each, but many small ones take a tenth of the time together.
    """
    size, words = parts[0].size, width_of(parts[0].dtype)[1]
    if size * words > AT_A_TIME // 2:
        return np.stack([sums_of_numpy(part, start) for part in parts])
    if not size:
        return np.zeros((len(parts), LANES), np.uint32)  # other sizes may be too large for keys
    keys_of = _keys_of if size <= _FEW else _keys_of.__wrapped__
    keys = keys_of(parts[0].shape, tuple(start), words)
    step = AT_A_TIME // (size * words)
    memory = np.empty((2, LANES * min(step, len(parts)) * size * words), np.uint32)
    stacks = (np.stack(parts[first : first + step]) for first in range(0, len(parts), step))
    some = (words_of(stack).reshape(len(stack), -1) for stack in stacks)
    return np.concatenate([sums_of_words(each, keys, memory) for each in some])


@lru_cache(maxsize=64)  # most small arrays of a tree have the shapes of others
def _keys_of(shape: Shape, start: Shape, words: int) -> Words:
    dimensions = zip((*range(len(shape)), WORD), (*start, 0), (*shape, words), strict=True)
    sides = [keys_from(constants_of(dimension), *of) for dimension, *of in dimensions]
    return outer_sums(key_at(constants_of(ORIGIN), 1), *sides)


def _pieces(array: AnyNDArray, start: Shape) -> Iterator[tuple[AnyNDArray, Shape]]:
    if array.size <= _COPIED:
        yield array, start
        return
    axis = next(axis for axis, size in enumerate(array.shape) if size > 1)
    step = max(1, _COPIED * array.shape[axis] // array.size)
    for begin in range(0, array.shape[axis], step):
        part = array[(slice(None),) * axis + (slice(begin, begin + step),)]
        yield from _pieces(part, (*start[:axis], start[axis] + begin, *start[axis + 1 :]))


def words_of(array: AnyNDArray) -> AnyNDArray:
    """Return the words of a part, each as narrow as its element; a view, if that is possible."""
    # Of the other byte order, a dtype is not the same to NumPy as the native one of that name.
    bits, _ = width_of(array.dtype)
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if bits < 8:
        values = values.view(np.uint8) & np.uint8((1 << bits) - 1)
    return values.reshape(-1).view(f"<u{min(values.dtype.itemsize, 4)}")


class EqualRows(NamedTuple):
    """Some rows of a part, of one width. The key of a word is that of its row and its column."""

    words: AnyNDArray  # [leads, rows of a lead, width]
    keys: Words  # [LANES, leads, rows of a lead]
    columns: Words  # [LANES, width]


def rows_of(array: AnyNDArray, start: Shape, columns: int) -> Iterator[EqualRows]:
    """Yield all rows of a part that begins at ``start``, of at most some words if they can be.

    A row has all that comes after one dimension, ``axis``, and of that a chunk, which begins in
    the whole array at a multiple of a power of two, or a part of such a chunk at an edge of the
    block. A *lead* is the elements at one place in the dimensions before ``axis``.
    """
    shape, start, words = array.shape or (1,), start or (0,), width_of(array.dtype)[1]
    axis, trail = len(shape) - 1, words
    while axis and trail * shape[axis] <= columns:
        trail *= shape[axis]
        axis -= 1
    bits = (columns // trail).bit_length() - 1
    sides = [
        keys_from(constants_of(dimension), start[dimension], shape[dimension])
        for dimension in range(len(shape))
        if dimension != axis
    ]
    leads = outer_sums(key_at(constants_of(ORIGIN), 1), *sides[:axis])
    trails = outer_sums(*sides[axis:], keys_from(constants_of(WORD), 0, words))
    of_leads = words_of(array).reshape(leads.shape[1], -1)
    begin, end = start[axis], start[axis] + shape[axis]
    first = min(-(-begin >> bits << bits), end)
    last = max(end >> bits << bits, first)
    head, tail = (begin, first, first - begin), (last, end, end - last)
    for low, high, size in (head, (first, last, 1 << bits), tail):
        if low == high:
            continue
        count, constants = (high - low) // size, constants_of(axis)
        keys = outer_sums(leads, keys_from(constants[:, bits:], low >> bits, count))
        of_row = outer_sums(keys_from(constants, low & (1 << bits) - 1, size), trails)
        taken = of_leads[:, (low - begin) * trail : (high - begin) * trail]
        # All rows of leads that are taken whole are those of one.
        sizes = (1, -1) if taken.shape == of_leads.shape else (len(taken), count)
        rows = taken.reshape(*sizes, size * trail)
        yield EqualRows(rows, keys.reshape(LANES, *sizes), of_row)


def windows_of(rows: EqualRows, most: int) -> Iterator[tuple[AnyNDArray, Words]]:
    """Yield at most so many rows, ``[rows, width]``, and their keys, ``[LANES, rows]``."""
    leads, count, width = rows.words.shape
    step = min(count, most)
    for lead, row in itertools.product(range(0, leads, most // step), range(0, count, step)):
        some = slice(lead, lead + most // step), slice(row, row + step)
        yield rows.words[some].reshape(-1, width), rows.keys[:, *some].reshape(LANES, -1)


def sums_of_rows(rows: EqualRows) -> Words:
    """Return the sums over some rows: uint32 ``[LANES]``."""
    width, total = rows.columns.shape[1], np.zeros(LANES, np.uint32)
    most = max(1, AT_A_TIME // width)
    # For all windows: the system clears new memory.
    memory = np.empty((3, LANES * min(rows.words.size, most * width)), np.uint32)
    for words, of_rows in windows_of(rows, most):
        keys = memory[0, : LANES * words.size].reshape(LANES, -1, width)
        np.add(of_rows[:, :, None], rows.columns[:, None], out=keys)
        total += sums_of_words(words[None], keys, memory[1:])[0]
    return total


def sums_of_words(words: Words, keys: Words, memory: Words | None = None) -> Words:
    """Return the sums over each of some parts, ``[count, *sizes]``: ``[count, LANES]``.

    ``keys`` are those of a part, ``[LANES, *sizes]``. ``memory`` to work in has two rows.
    """
    size = LANES * words.size
    if memory is None:
        memory = np.empty((2, size), np.uint32)
    words, keys = words.reshape(len(words), -1), keys.reshape(LANES, 1, -1)
    mixed, shifted = memory[:, :size].reshape(2, LANES, *words.shape)
    mix(np.add(words, keys, out=mixed), keys, shifted)
    return mixed.sum(2, dtype=np.uint32).T


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


def mix(x: Words, key: Words, memory: Words) -> None:
    """Permute words to which their keys were added, in place; ``memory`` of their shape is used."""
    first, second, last = map(np.uint32, SHIFTS)
    x ^= np.right_shift(x, first, out=memory)
    x *= np.uint32(FACTOR)
    x ^= np.right_shift(x, second, out=memory)
    x *= np.bitwise_or(key, np.uint32(1), out=memory)
    x ^= np.right_shift(x, last, out=memory)

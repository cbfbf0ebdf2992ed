"""The sums of blocks in the memory of the host, by one program for blocks of every shape.

A program for each shape takes longer to compile than a save of 256 MiB, and most processes save a
model once, which has many shapes. So the program knows only the bytes of a word. It takes a window
of words in rows, and the keys of its rows and columns. ``on_devices`` is two to three times as
quick when it is compiled.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from gda.arrays.fingerprints.formula import (
    LANES,
    ORIGIN,
    WORD,
    AnyNDArray,
    Words,
    add,
    constants_of,
    key_at,
    keys_from,
    outer_sums,
    sums_of_numpy,
    sums_of_words,
)
from gda.arrays.fingerprints.on_devices import mixed
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.mesh import own_settings
from gda.multihost.background import in_thread

T = TypeVar("T")

# The most elements of a block that NumPy sums up at once: the program takes as long for any window.
SMALL = 1 << 16
# The words that NumPy sums up in a process, in 60 ms, before the program is compiled, in 80 to 120.
BY_NUMPY = 1 << 23
COLUMNS = 256  # words of a row
ROWS = 4096  # of a window
# Words of a row that NumPy sums up in the time that the program takes for a whole row.
NARROW = 24
# Words that the program adds up; NumPy adds up these sums. With 8, it is hardly faster, and takes a
# third longer to compile; as a loop over all rows, a fifth faster, and three times as long.
_WORDS_PER_TURN = 4


def sums_on_host(array: AnyNDArray, start: Shape) -> Words | Callable[[], Words]:
    """Return the sums over a part of an array, as ``sums_of_numpy``, or a function that makes them.

    The program makes those of many elements in a tenth of the time. If it is still being compiled,
    the function waits for it, and holds the array until then. Any thread may call this.
    """
    program = None
    if array.size > SMALL and array.dtype.isnative:
        program = program_for(array.dtype, array.size)
    if program is None:
        return sums_of_numpy(array, start)
    later = cache(lambda: _sums_by(program.result(), array, start))
    return later() if program.done() else later


def _sums_by(program: Any, array: AnyNDArray, start: Shape) -> Words:
    return _in_worker(lambda: _made_by(program, array, start)).result()


def _in_worker(work: Callable[[], T]) -> Future[T]:
    """Begin some work in the one thread of this module.

    The allocator keeps memory for each thread that has had windows, and each save has its own.
    """
    try:
        return _worker(os.getpid()).submit(work)
    except RuntimeError:  # at exit
        return in_thread("gda-fingerprints", work)


@cache
def _worker(_: int) -> ThreadPoolExecutor:
    """Return the thread of a process; a forked one does not have that of its parent."""
    return ThreadPoolExecutor(1, "gda-fingerprints")


def _made_by(program: Any, array: AnyNDArray, start: Shape) -> Words:
    bits, words = width_of(array.dtype)
    values = np.ascontiguousarray(array)
    if bits < 8:
        values = values.view(np.uint8) & np.uint8((1 << bits) - 1)
    flat = values.reshape(-1).view(f"u{_word_bytes(array.dtype)}")
    with own_settings():
        return add(
            sums
            for rows in _rows_of(flat, array.shape, start, words)
            for sums in _sums_of_rows(program, rows)
        )


# The rows of a block.


class _EqualRows(NamedTuple):
    """Some rows of a block, of one width. The key of a word is that of its row and its column."""

    words: AnyNDArray  # [leads, rows of a lead, width]
    keys: Words  # [LANES, leads, rows of a lead]
    columns: Words  # [LANES, width]


def _rows_of(flat: AnyNDArray, shape: Shape, start: Shape, words: int) -> Iterator[_EqualRows]:
    """Yield all rows of a block that begins at ``start``, of elements of some words.

    A row has all that comes after one dimension, ``axis``, and of that a chunk, which begins in
    the whole array at a multiple of a power of two, or a part of such a chunk at an edge of the
    block. A *lead* is the elements at one place in the dimensions before ``axis``.
    """
    shape, start = shape or (1,), start or (0,)
    axis, trail = len(shape) - 1, words
    while axis and trail * shape[axis] <= COLUMNS:
        trail *= shape[axis]
        axis -= 1
    bits = (COLUMNS // trail).bit_length() - 1
    sides = [
        keys_from(constants_of(dimension), start[dimension], shape[dimension])
        for dimension in range(len(shape))
        if dimension != axis
    ]
    leads = outer_sums(key_at(constants_of(ORIGIN), 1), *sides[:axis])
    trails = outer_sums(*sides[axis:], keys_from(constants_of(WORD), 0, words))
    of_leads = flat.reshape(leads.shape[1], -1)
    begin, end = start[axis], start[axis] + shape[axis]
    first = min(-(-begin >> bits << bits), end)
    last = max(end >> bits << bits, first)
    head, tail = (begin, first, first - begin), (last, end, end - last)
    for low, high, size in (head, (first, last, 1 << bits), tail):
        if low == high:
            continue
        count, constants = (high - low) // size, constants_of(axis)
        keys = outer_sums(leads, keys_from(constants[:, bits:], low >> bits, count))
        columns = outer_sums(keys_from(constants, low & (1 << bits) - 1, size), trails)
        taken = of_leads[:, (low - begin) * trail : (high - begin) * trail]
        # All rows of leads that are taken whole are those of one.
        sizes = (1, -1) if taken.shape == of_leads.shape else (len(taken), count)
        rows = taken.reshape(*sizes, size * trail)
        yield _EqualRows(rows, keys.reshape(LANES, *sizes), columns)


def _sums_of_rows(program: Any, rows: _EqualRows) -> Iterator[Words]:
    leads, count, width = rows.words.shape
    step = min(count, ROWS)
    for lead, row in itertools.product(range(0, leads, ROWS // step), range(0, count, step)):
        some = slice(lead, lead + ROWS // step), slice(row, row + step)
        words, keys = rows.words[some].reshape(-1, width), rows.keys[:, *some].reshape(LANES, -1)
        if width < NARROW or words.size <= SMALL:
            of_lanes = (key[:, None] + lane for key, lane in zip(keys, rows.columns, strict=True))
            yield sums_of_words(words[None].astype(np.uint32), of_lanes)[0]
            continue
        more = ROWS - len(words), COLUMNS - width
        if any(more):  # zeros with keys of zero, which are sums too
            words = np.pad(words, [(0, each) for each in more])
            yield -_sums_of_zeros(rows.columns) * np.uint32(more[0])
            yield -_sums_of_zeros(keys) * np.uint32(more[1])
        table = np.zeros((LANES, ROWS + COLUMNS), np.uint32)
        table[:, : keys.shape[1]] = keys
        table[:, ROWS : ROWS + width] = rows.columns
        sums = np.asarray(program(words.reshape(-1).view(np.uint32), table))
        yield sums.reshape(LANES, -1).sum(1, dtype=np.uint32)


def _sums_of_zeros(keys: Words) -> Words:
    return sums_of_words(np.zeros((1, keys.shape[1]), np.uint32), keys)[0]


# The program.


def program_for(dtype: np.dtype[Any], count: int) -> Future[Any] | None:
    """Return the program for elements of a dtype, which a thread compiles.

    Returns ``None`` if NumPy is quicker, because this process has few such elements so far, with
    the next ``count``.
    """
    word_bytes = _word_bytes(dtype)
    with _guard:
        _expected[word_bytes] += count * width_of(dtype)[1]
        if _expected[word_bytes] <= BY_NUMPY or (device := _cpu_device()) is None:
            return None
        if word_bytes not in _programs:
            _programs[word_bytes] = _compiling(word_bytes, device)
        return _programs[word_bytes]


_guard = threading.Lock()
_expected: Counter[int] = Counter()
_programs: dict[int, Future[Any]] = {}


@cache
def _cpu_device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes it
        return None


def _compiling(word_bytes: int, device: Any) -> Future[Any]:
    sharding = SingleDeviceSharding(device)
    size = ROWS * COLUMNS * word_bytes // 4
    window = jax.ShapeDtypeStruct((size,), np.uint32, sharding=sharding)
    table = jax.ShapeDtypeStruct((LANES, ROWS + COLUMNS), np.uint32, sharding=sharding)

    def compiled() -> Any:
        with own_settings():
            program = jax.jit(_sums_of_window, static_argnums=0)
            return program.lower(word_bytes, window, table).compile()

    return _in_worker(compiled)


def _word_bytes(dtype: np.dtype[Any]) -> int:
    return min(dtype.itemsize, 4)


def _sums_of_window(word_bytes: int, window: jax.Array, table: jax.Array) -> jax.Array:
    """Return sums of some columns of a window: uint32 ``[LANES, ...]``.

    Narrow words are given by fours or twos: XLA makes slow code of numbers of 8 and 16 bits.
    """
    of_number = 4 // word_bytes
    turns = _WORDS_PER_TURN // of_number
    numbers = window.reshape(turns, -1, COLUMNS // of_number)
    keys = table[:, :ROWS].reshape(LANES, turns, -1, 1)
    columns = table[:, ROWS:].reshape(LANES, 1, -1, of_number)
    total = jnp.uint32(0)
    for turn, word in itertools.product(range(turns), range(of_number)):
        words = numbers[turn] >> 8 * word_bytes * word
        if of_number > 1:
            words &= (1 << 8 * word_bytes) - 1
        total += mixed(words[None], keys[:, turn] + columns[..., word])
    return total

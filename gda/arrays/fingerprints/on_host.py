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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from gda.arrays.fingerprints.formula import (
    LANES,
    AnyNDArray,
    EqualRows,
    Words,
    add,
    rows_of,
    sums_of_numpy,
    sums_of_rows,
    sums_of_words,
    windows_of,
)
from gda.arrays.fingerprints.on_devices import mixed
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.mesh import own_settings
from gda.multihost.background import in_thread
from gda.storage.sources import apart

T = TypeVar("T")

# The most elements of a block that NumPy sums up at once: JAX takes as long to start a program.
SMALL = 1 << 17
# The words that NumPy sums up in a process, in the time that it takes to compile the program.
BY_NUMPY = 1 << 25
COLUMNS = 256  # words of a row
ROWS = 4096  # of a window
# Words of a row that NumPy sums up in the time that the program takes for a whole row.
NARROW = 64
# Words that the program adds up; NumPy adds up these sums. With 8, it is hardly faster, and takes a
# third longer to compile; as a loop over all rows, a fifth faster, and three times as long.
_WORDS_PER_TURN = 4


def sums_on_host(array: AnyNDArray, start: Shape) -> Words:
    """Return the sums over a part of an array, as ``sums_of_numpy``; any thread may call this."""
    program = _program_for(array)
    if program is None:
        return sums_of_numpy(array, start)
    return _in_worker(lambda: _made_by(program, array, start)).result()


def begin_on_host(block: AnyNDArray | jax.Array, start: Shape) -> Callable[[], Words]:
    """Begin ``sums_on_host`` in a thread, which holds the block; return what waits for the sums.

    Below a byte, NumPy's elements are a copy, which is made when its turn has come.
    """
    program = _program_for(block)
    return _in_worker(lambda: _made_by(program, _in_numpy(block), start)).result


def _in_numpy(block: AnyNDArray | jax.Array) -> AnyNDArray:
    if isinstance(block, np.ndarray):
        return block
    with own_settings():
        return np.asarray(apart(block))


def _in_worker(work: Callable[[], T]) -> Future[T]:
    """Begin some work in the one thread of this module.

    The allocator keeps the memory of windows for each thread, and each save has threads of its own.
    """
    try:
        return _worker(os.getpid()).submit(work)
    except RuntimeError:  # at exit
        return in_thread("gda-fingerprints", work)


@cache
def _worker(_: int) -> ThreadPoolExecutor:
    """Return the thread of a process; a forked one does not have that of its parent."""
    return ThreadPoolExecutor(1, "gda-fingerprints")


def _made_by(program: Future[Any] | None, array: AnyNDArray, start: Shape) -> Words:
    if program is None:
        return sums_of_numpy(array, start)
    of_rows = (_sums_of_rows(program.result(), rows) for rows in rows_of(array, start, COLUMNS))
    with own_settings():
        return add(itertools.chain.from_iterable(of_rows))


def _sums_of_rows(program: Any, rows: EqualRows) -> Iterator[Words]:
    width = rows.columns.shape[1]
    if width < NARROW or rows.words.size <= SMALL:
        yield sums_of_rows(rows)
        return
    for words, keys in windows_of(rows, ROWS):
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


def prepare(elements: Iterable[tuple[np.dtype[Any], int]]) -> None:
    """Begin to compile the programs for numbers of elements whose sums are made soon."""
    words: Counter[int] = Counter()
    for dtype, count in elements:
        words[_word_bytes(dtype)] += count * width_of(dtype)[1]
    with _guard:
        for word_bytes, count in words.items():
            _program_after(word_bytes, _summed[word_bytes] + count)


def _program_for(array: AnyNDArray | jax.Array) -> Future[Any] | None:
    """Return the program for an array, or ``None`` if NumPy is quicker."""
    if array.size <= SMALL or not array.dtype.isnative:
        return None
    word_bytes = _word_bytes(array.dtype)
    with _guard:
        _summed[word_bytes] += array.size * width_of(array.dtype)[1]
        return _program_after(word_bytes, _summed[word_bytes])


def _program_after(word_bytes: int, words: int) -> Future[Any] | None:
    """Return the program, which the worker compiles, if this process sums up many words."""
    if word_bytes not in _programs and words > BY_NUMPY and (device := _cpu_device()) is not None:
        _programs[word_bytes] = _compiling(word_bytes, device)
    return _programs.get(word_bytes)


_guard = threading.Lock()
_summed: Counter[int] = Counter()  # words, by their bytes
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

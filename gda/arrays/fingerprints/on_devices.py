"""The sums of blocks, made on the devices that hold them.

A block is folded into rows of the same length (``RowFolding``). Every element has a key, which its
place in the whole array determines; ``gda/arrays/fingerprints/formula.py`` says what a sum is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.arrays.bits import as_unsigned
from gda.arrays.dtypes import is_narrow
from gda.arrays.fingerprints.formula import (
    FACTOR,
    LANES,
    ORIGIN,
    SHIFTS,
    WORD,
    Words,
    add,
    constants_of,
    key_at,
    keys_from,
    outer_sums,
)
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.mesh import Device, memory_kind_of, own_settings

Made = TypeVar("Made")  # a tree of arrays

# The most columns of a row, and the rows of one turn of the loop: the keys and the sums of all
# columns then stay in the cache.
MAX_COLUMNS = 4096
_ROWS_PER_TURN = 8
# The most words of a row that one lane takes before the other does: they stay in the first cache.
_WORDS_AT_A_TIME = 512


# The rows and columns of a block.


class _Rows(NamedTuple):
    """A part of a block, as rows of the same length: ``chunks`` of each lead, one after another.

    A *lead* is the elements at one place in the dimensions before ``axis``.
    """

    first: int  # element in a lead
    chunks: int
    columns: int  # elements of a row


class RowFolding(NamedTuple):
    """The rows and columns of a block, the same for every block of a shape.

    ``axis`` is taken in chunks of a power of two, and a chunk with all that comes after it is a
    row. The rest of ``axis`` after the last chunk makes a shorter row of each lead.
    """

    shape: Shape
    axis: int
    chunk: int
    words: int  # of 32 bits, in an element

    @property
    def leads(self) -> int:
        return math.prod(self.shape[: self.axis])

    @property
    def trail(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    def parts(self) -> list[_Rows]:
        chunks, rest = divmod(self.shape[self.axis], self.chunk)
        columns = self.chunk * self.trail
        parts = [_Rows(0, chunks, columns), _Rows(chunks * columns, 1, rest * self.trail)]
        return [part for part in parts if part.chunks * part.columns]


def folding_of(shape: Shape, words: int) -> RowFolding:
    shape = shape or (1,)
    axis, trail = len(shape) - 1, 1
    while axis and trail * shape[axis] <= MAX_COLUMNS:
        trail *= shape[axis]
        axis -= 1
    return RowFolding(shape, axis, 1 << (MAX_COLUMNS // trail).bit_length() - 1, words)


class Keys(NamedTuple):
    """The keys of some rows; their sum is that of an element. Each is uint32 ``[LANES, ...]``."""

    leads: Any
    chunks: Any  # one more than there are
    columns: Any
    carry: Any  # the word from which on a row has the key of the next chunk; None: no row has


def _keys_of(folding: RowFolding, start: Shape) -> list[Keys]:
    start = start or (0,)
    axis, chunk = folding.axis, folding.chunk
    constants = [constants_of(dimension) for dimension in range(len(start))]
    sides = [
        keys_from(*of) if dimension != axis else np.zeros((LANES, 1), np.uint32)
        for dimension, of in enumerate(zip(constants, start, folding.shape, strict=True))
    ]
    leads = outer_sums(key_at(constants_of(ORIGIN), 1), *sides[:axis])
    trail = outer_sums(*sides[axis:], keys_from(constants_of(WORD), 0, folding.words))
    keys = []
    for part in folding.parts():
        first = start[axis] + part.first // folding.trail
        if part.columns == chunk * folding.trail:
            # Wherever a block begins, the lower bits of its coordinates are the same in all chunks.
            offset = first % chunk
            low = np.roll(keys_from(constants[axis], 0, chunk), -offset, 1)
            bits = chunk.bit_length() - 1
            high = keys_from(constants[axis][:, bits:], first >> bits, part.chunks + 1)
        else:
            offset = 0
            low = keys_from(constants[axis], first, part.columns // folding.trail)
            high = np.zeros((LANES, 2), np.uint32)
        carry = np.full((LANES, 1), (chunk - offset) * folding.trail * folding.words, np.uint32)
        keys.append(Keys(leads, high, outer_sums(low, trail), carry))
    return keys


class PendingSums:
    """The share of some blocks in a fingerprint, which devices or this host may still compute."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Words | jax.Array | Callable[[], Words]) -> None:
        self._parts = parts

    def result(self) -> Words:
        """Wait, and return the sums: uint32 ``[LANES]``. Raises the error of the computation."""
        with own_settings():
            made = [part() if callable(part) else np.asarray(part) for part in self._parts]
            return add(sums for part in made for sums in part.reshape(-1, LANES))


# On the devices. All devices that hold blocks of an array run one program, because JAX compiles for
# each set of devices anew.


def started(blocks: Sequence[jax.Array], starts: Sequence[Shape]) -> jax.Array:
    """Begin the sums of each block on its device: uint32 ``[LANES * blocks]``."""
    run, arguments = prepared(blocks, starts)
    sums = run(*arguments)
    sums.copy_to_host_async()
    return sums


def prepared(
    blocks: Sequence[jax.Array], starts: Sequence[Shape]
) -> tuple[Any, tuple[jax.Array, list[Keys]]]:
    """Return the program for blocks of one shape on different devices, and its arguments."""
    joined = side_by_side(blocks)
    sharding: Any = joined.sharding
    folding = folding_of(blocks[0].shape, width_of(joined.dtype)[1])
    keys = placed_keys(sharding.mesh, folding, tuple(starts))
    return program(sharding.mesh, folding, sharding.spec), (joined, keys)


def side_by_side(blocks: Sequence[jax.Array], waits: bool = True) -> jax.Array:
    """Return the blocks as an array over a line of devices, with bits that XLA can sum up.

    Only blocks in the memory of the host are moved. With ``waits``, floats below 32 bits on CPU are
    waited for, and become integers without a copy.
    """
    parts = [_for_xla(block, waits) for block in blocks]
    devices = tuple(map(device_of, parts))
    if memory_kind_of(parts[0].sharding) is not None:
        kind = devices[0].default_memory().kind
        own = [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        parts = jax.device_put(parts, own)
    shape, spec = parts[0].shape, PartitionSpec()
    if shape:
        shape, spec = (shape[0] * len(parts), *shape[1:]), PartitionSpec("block")
    sharding = NamedSharding(_line_of(devices), spec)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def device_of(part: jax.Array) -> Any:
    (device,) = part.devices()
    return device


@lru_cache(maxsize=256)
def _line_of(devices: tuple[Device, ...]) -> Mesh:
    return Mesh(np.array(devices), ("block",))


def cache_of_arrays(maxsize: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Cache the arrays that a function makes, until the user deletes ``jax.live_arrays()``."""

    def decorate(function: Callable[..., Made]) -> Callable[..., Made]:
        cached = lru_cache(maxsize)(function)

        @wraps(function)
        def made(*arguments: Hashable) -> Made:
            arrays = cached(*arguments)
            if any(array.is_deleted() for array in jax.tree.leaves(arrays)):
                cached.cache_clear()
                arrays = cached(*arguments)
            return arrays

        return made

    return decorate


@cache_of_arrays(256)  # they take a thousandth of the memory of a block
def placed_keys(mesh: Mesh, folding: RowFolding, starts: tuple[Shape, ...]) -> list[Keys]:
    """Return the keys of each block on its device: uint32 ``[LANES * blocks, ...]``."""
    of_blocks = [_keys_of(folding, start) for start in starts]
    together = jax.tree.map(lambda *keys: np.concatenate(keys), *of_blocks)
    # Most blocks begin with a chunk; without a choice between two keys, a sum takes a fifth less.
    together = [
        keys._replace(carry=None) if (keys.carry >= keys.columns.shape[1]).all() else keys
        for keys in together
    ]
    return jax.device_put(together, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))


@lru_cache(maxsize=1024)
def program(mesh: Mesh, folding: RowFolding, spec: PartitionSpec) -> Any:
    """Return the program from blocks and their keys to the sums, uint32 ``[LANES * blocks]``."""
    by_device = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            partial(sums_of_block, folding, mesh.devices.flat[0].platform == "cpu"),
            mesh=mesh,
            in_specs=(spec, by_device),
            out_specs=by_device,
            check_vma=False,
        )
    )


def sums_of_block(
    folding: RowFolding, is_on_cpu: bool, block: jax.Array, keys: list[Keys]
) -> jax.Array:
    # XLA reduces on CPU one element at a time: 5 times slower than a loop over vectors of sums. On
    # other devices a loop would run one row at a time.
    sums_of_rows = by_loop if is_on_cpu else by_reduction
    # Before any slicing, for which XLA might take such floats through 32 bits.
    elements = (as_unsigned(block) if is_narrow(block.dtype) else block).reshape(folding.leads, -1)
    parts = zip(folding.parts(), keys, strict=True)
    return sum([sums_of_rows(elements, *part) for part in parts], jnp.uint32(0))


def by_loop(elements: jax.Array, rows: _Rows, keys: Keys) -> jax.Array:
    count = elements.shape[0] * rows.chunks
    per_turn = next(n for n in range(_ROWS_PER_TURN, 0, -1) if not count % n)
    row_at = _row_getter(elements, rows)
    width = keys.columns.shape[1]
    at_a_time = next(n for n in range(_WORDS_AT_A_TIME, 0, -1) if not width % n)
    if at_a_time < _WORDS_AT_A_TIME // 8:
        at_a_time = width
    # Both lanes in one array: XLA would make a loop of each, which reads the words again.
    sizes = (width // at_a_time, LANES, at_a_time)
    columns = keys.columns.reshape(LANES, -1, at_a_time).swapaxes(0, 1)
    stays = None
    if keys.carry is not None:
        stays = (jnp.arange(width, dtype=jnp.uint32) < keys.carry[0]).reshape(-1, 1, at_a_time)

    # A table: JAX 0.10 divides for every word unless the number of chunks is a power of two.
    places = jnp.stack(jnp.divmod(jnp.arange(count), rows.chunks), 1)

    def turn(i: jax.Array, carried: jax.Array) -> jax.Array:
        sums = carried[0]
        for row in range(per_turn):
            place = lax.dynamic_index_in_dim(places, i * per_turn + row)
            lead, chunk = place[0, 0], place[0, 1]
            words = words_of(row_at(lead, chunk)).reshape(-1, 1, at_a_time)
            of_lead = lax.dynamic_slice(keys.leads, (0, lead), (LANES, 1))
            high = lax.dynamic_slice(keys.chunks, (0, chunk), (LANES, 2)) + of_lead
            key = high[:, :1] if stays is None else jnp.where(stays, high[:, :1], high[:, 1:])
            sums += mixed(words, columns + key)
        # In place: XLA divides what makes a whole array among threads, which takes as long as the
        # sums themselves.
        return lax.dynamic_update_slice(carried, sums[None], (0, 0, 0, 0))

    sums = lax.fori_loop(0, count // per_turn, turn, jnp.zeros((2, *sizes), jnp.uint32))
    return sums.sum((0, 1, 3), dtype=jnp.uint32)


def _row_getter(elements: jax.Array, rows: _Rows) -> Any:
    taken = rows.chunks * rows.columns
    # Beyond 2**31 JAX cannot count, and a copy is made.
    if elements.shape[1] == taken or elements.shape[1] >= 2**31:
        flat = elements[:, rows.first : rows.first + taken].reshape(-1, rows.columns)
        return lambda lead, chunk: flat[lead * rows.chunks + chunk]

    def row_at(lead: jax.Array, chunk: jax.Array) -> jax.Array:
        begin = rows.first + chunk * rows.columns
        return lax.dynamic_slice(elements, (lead, begin), (1, rows.columns))[0]

    return row_at


def by_reduction(elements: jax.Array, rows: _Rows, keys: Keys) -> jax.Array:
    taken = elements[:, rows.first : rows.first + rows.chunks * rows.columns]
    words = words_of(taken).reshape(elements.shape[0], rows.chunks, -1)
    sums = []
    for lane in range(LANES):
        key = keys.chunks[lane, :-1, None]
        if keys.carry is not None:
            stays = jnp.arange(words.shape[2], dtype=jnp.uint32) < keys.carry[0]
            key = jnp.where(stays, key, keys.chunks[lane, 1:, None])
        key += keys.columns[lane]
        of_lane = mixed(words, key + keys.leads[lane, :, None, None])
        sums.append(of_lane.sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def mixed(words: jax.Array, key: jax.Array) -> jax.Array:
    """Permute words with their keys, as ``formula.mix`` does with NumPy."""
    x = words + key
    x = (x ^ (x >> SHIFTS[0])) * jnp.uint32(FACTOR)
    x = (x ^ (x >> SHIFTS[1])) * (key | jnp.uint32(1))
    return x ^ (x >> SHIFTS[2])


# The bits of an element.


def _for_xla(block: jax.Array, waits: bool) -> jax.Array:
    """Return a block, or unsigned integers of the same bits if XLA would change these.

    XLA cannot take elements of 1 and of 6 bits apart. In loops on CPU it takes floats of 16 and 8
    bits through 32, for which it copies the whole block, and changes NaNs. Without ``waits`` they
    stay as they are: NumPy's view of their memory has to wait for them.
    """
    bits, device = width_of(block.dtype)[0], device_of(block)
    is_changed = is_narrow(block.dtype) and device.platform == "cpu"
    if bits not in (1, 6) and not (waits and is_changed):
        return block
    values = np.asarray(block).view(f"u{block.dtype.itemsize}")
    return jax.device_put(values if bits >= 8 else values & np.uint8((1 << bits) - 1), device)


def words_of(elements: jax.Array) -> jax.Array:
    """Return the words of elements, one after another in the last dimension: uint32."""
    shape = elements.shape[:-1]
    if jnp.issubdtype(elements.dtype, jnp.complexfloating):
        elements = jnp.stack([elements.real, elements.imag], -1).reshape(*shape, -1)
    if width_of(elements.dtype)[1] > 1:
        return lax.bitcast_convert_type(elements, jnp.uint32).reshape(*shape, -1)
    return as_unsigned(elements).astype(jnp.uint32)

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
from gda.mesh import Device, own_settings

Made = TypeVar("Made")  # a tree of arrays

MAX_COLUMNS = 4096  # the most of a row


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

    def to_json(self) -> list[int]:
        """Wait, and return the sums for other processes; ``digest_of`` takes those of all."""
        return self.result().tolist()


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


def side_by_side(blocks: Sequence[jax.Array]) -> jax.Array:
    """Return the blocks as an array over a line of devices, with bits that XLA can sum up.

    Only blocks in the memory of the host are moved.
    """
    parts = [*map(_for_xla, blocks)]
    devices = tuple(map(device_of, parts))
    if not is_near(parts[0]):
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


def is_near(array: jax.Array) -> bool:
    kind = array.sharding.memory_kind
    return kind is None or kind == next(iter(array.devices())).default_memory().kind


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
            partial(sums_of_block, folding),
            mesh=mesh,
            in_specs=(spec, by_device),
            out_specs=by_device,
            check_vma=False,
        )
    )


def sums_of_block(folding: RowFolding, block: jax.Array, keys: list[Keys]) -> jax.Array:
    # Before any slicing, for which XLA might take such floats through 32 bits.
    elements = (as_unsigned(block) if is_narrow(block.dtype) else block).reshape(folding.leads, -1)
    parts = zip(folding.parts(), keys, strict=True)
    return sum([_sums_of_rows(elements, *part) for part in parts], jnp.uint32(0))


def _sums_of_rows(elements: jax.Array, rows: _Rows, keys: Keys) -> jax.Array:
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


def _for_xla(block: jax.Array) -> jax.Array:
    """Return a block, or integers of its bits if XLA cannot take these apart: 1 and 6 bits."""
    bits, device = width_of(block.dtype)[0], device_of(block)
    if bits not in (1, 6):
        return block
    values = np.asarray(block).view(f"u{block.dtype.itemsize}")
    return jax.device_put(values & np.uint8((1 << bits) - 1), device)


def words_of(elements: jax.Array) -> jax.Array:
    """Return the words of elements, one after another in the last dimension: uint32."""
    shape = elements.shape[:-1]
    if jnp.issubdtype(elements.dtype, jnp.complexfloating):
        elements = jnp.stack([elements.real, elements.imag], -1).reshape(*shape, -1)
    if width_of(elements.dtype)[1] > 1:
        return lax.bitcast_convert_type(elements, jnp.uint32).reshape(*shape, -1)
    return as_unsigned(elements).astype(jnp.uint32)

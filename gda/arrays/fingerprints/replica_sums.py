"""The sums of every replica of the blocks of many arrays, each made on the device that holds it.

Each block is summed up as an array of its own, with its padding. One program takes all small blocks
as one line of words; large ones are summed up as for a fingerprint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.bits import as_unsigned
from gda.arrays.dtypes import is_extended
from gda.arrays.fingerprints.formula import LANES, ORIGIN, Words, constants_of, key_at, keys_from
from gda.arrays.fingerprints.on_devices import (
    cache_of_arrays,
    mixed,
    side_by_side,
    started,
    words_of,
)
from gda.arrays.process_local import data_by_device
from gda.layout.cover import groups_within
from gda.layout.dtype_names import width_of
from gda.mesh import local_positions, memory_kind_of, own_settings, sharding_of

# The most elements of a block that is summed up together with others; on CPU, a program without a
# copy is quicker from about twice as many on.
SMALL = 1 << 14
# The most rows of small blocks that a device copies side by side at a time: 32 MiB.
_MOST_ROWS = 1 << 16
_BITS_OF_ROW = 7  # of the number of a word in a row; each block begins a new row


def sums_of_replicas(arrays: Sequence[jax.Array]) -> list[Words]:
    """Return the sums of each array over all blocks of this process, with replicas.

    They are uint32 ``[devices of this process, LANES]``. Never communicates. PRNG keys count by
    their numbers.
    """
    found: list[Words] = []
    begun: list[tuple[Sequence[int], jax.Array]] = []  # numbers of arrays, and their sums
    small: defaultdict[Mesh, dict[int, jax.Array]] = defaultdict(dict)
    with own_settings():
        for number, array in enumerate(arrays):
            found.append(np.zeros((len(local_positions(_mesh_of(array))), LANES), np.uint32))
            if not found[number].size or not array.size:
                continue
            if math.prod(array.sharding.shard_shape(array.shape)) > SMALL:
                blocks = _blocks_of(array)
                begun.append(([number], started(blocks, [(0,) * blocks[0].ndim] * len(blocks))))
            else:
                line = _for_line(array)
                small[_mesh_of(line)][number] = line
        for mesh, lines in small.items():
            for numbers in groups_within([*lines], [*map(_rows_of, lines.values())], _MOST_ROWS):
                begun.append((numbers, _sums_of(mesh, [lines[number] for number in numbers])))
        for numbers, sums in begun:
            by_array = np.asarray(sums).reshape(-1, len(numbers), LANES).swapaxes(0, 1)
            for number, of_devices in zip(numbers, by_array, strict=True):
                found[number] = of_devices
    return found


def _mesh_of(array: jax.Array) -> Mesh:
    return sharding_of(array).mesh  # pyright: ignore[reportReturnType]


def _blocks_of(array: jax.Array) -> list[jax.Array]:
    data_on = data_by_device(array)
    blocks = [data_on[device] for device in local_positions(_mesh_of(array))]
    return [*map(jax.random.key_data, blocks)] if is_extended(array.dtype) else blocks


def _for_line(array: jax.Array) -> jax.Array:
    """Return an array, or its blocks in this process as one, with bits that XLA can sum up."""
    is_odd = is_extended(array.dtype) or width_of(array.dtype)[0] in (1, 6)
    is_elsewhere = memory_kind_of(array.sharding) is not None
    if is_odd or is_elsewhere or not array.is_fully_addressable:
        return side_by_side(_blocks_of(array), waits=False)
    return array


def _rows_of(array: jax.Array) -> int:
    """Return the number of rows of a block in a line of words."""
    words = math.prod(array.sharding.shard_shape(array.shape)) * width_of(array.dtype)[1]
    return -(-words >> _BITS_OF_ROW)


# Many small blocks at once. Their words stand in one line, each block in rows of its own, and have
# the keys of the elements of a one-dimensional array of 32 bits.


def _sums_of(mesh: Mesh, arrays: list[jax.Array]) -> jax.Array:
    """Return the sums of each array on each device, uint32 ``[devices * arrays, LANES]``."""
    keys = _keys_of_rows(mesh, sum(map(_rows_of, arrays)))
    sums = _program(mesh, tuple([sharding_of(array).spec for array in arrays]))(keys, arrays)
    sums.copy_to_host_async()
    return sums


@lru_cache(maxsize=256)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    return jax.jit(
        jax.shard_map(
            _sums_in_line,
            mesh=mesh,
            in_specs=(PartitionSpec(), list(specs)),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
    )


@cache_of_arrays(64)
def _keys_of_rows(mesh: Mesh, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys of rows and those of columns: uint32 ``[LANES, ...]`` on every device."""
    constants = constants_of(0)
    columns = keys_from(constants, 0, 1 << _BITS_OF_ROW) + key_at(constants_of(ORIGIN), 1)
    rows = keys_from(constants[:, _BITS_OF_ROW:], 0, count)
    return jax.device_put((rows, columns), NamedSharding(mesh, PartitionSpec()))


def _sums_in_line(keys: tuple[jax.Array, jax.Array], blocks: list[jax.Array]) -> jax.Array:
    rows, columns = keys
    # As integers at once: XLA takes floats below 32 bits through 32 where it moves them.
    each = [words_of(as_unsigned(block).reshape(1, -1))[0] for block in blocks]
    line = jnp.concatenate([jnp.pad(words, (0, -words.size % columns.shape[1])) for words in each])
    words = line.reshape(rows.shape[1], -1)
    counts = [-(-words.size // columns.shape[1]) for words in each]
    block_of_row = np.repeat(np.arange(len(blocks)), counts)
    of_rows = [
        mixed(words, rows[lane][:, None] + columns[lane]).sum(1, dtype=jnp.uint32)
        for lane in range(LANES)
    ]
    return jax.ops.segment_sum(
        jnp.stack(of_rows, 1), block_of_row, len(blocks), indices_are_sorted=True
    )

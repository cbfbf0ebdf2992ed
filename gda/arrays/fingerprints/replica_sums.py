"""The sums of every replica of the blocks of many arrays, each made on the device that holds it.

Each block is summed up as an array of its own, with its padding. One program takes all small blocks
as one line of words; a large block has a program of its own, which does not copy it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.bits import as_unsigned
from gda.arrays.dtypes import is_extended
from gda.arrays.fingerprints.formula import LANES, ORIGIN, Words, constants_of, key_at, keys_from
from gda.arrays.fingerprints.on_devices import (
    RowFolding,
    cache_of_arrays,
    folding_of,
    is_near,
    mixed,
    placed_keys,
    side_by_side,
    sums_of_block,
    words_of,
)
from gda.arrays.process_local import shards_by_position
from gda.layout.dtype_names import width_of
from gda.layout.spec import Shape
from gda.mesh import local_positions, own_settings, sharding_of

# The most elements of a block that is summed up together with others; on CPU, a program without a
# copy is quicker from about twice as many on.
SMALL = 1 << 14
# The most rows of small blocks that a device copies side by side at a time: 32 MiB.
_MOST_ROWS = 1 << 16
_BITS_OF_ROW = 7  # of the number of a word in a row; each block begins a new row


def sums_of_replicas(arrays: Sequence[jax.Array]) -> list[Words]:
    """Return the sums of each array over all blocks of this process, replicas too.

    They are uint32 ``[devices of this process, LANES]``. Never communicates. PRNG keys count by
    their numbers.
    """
    found: list[Words] = []
    bundles: dict[tuple[Mesh, int], list[_Taken]] = defaultdict(list)
    rows: Counter[Mesh] = Counter()
    with own_settings():
        for number, array in enumerate(arrays):
            size = len(local_positions(_mesh_of(array)))
            found.append(np.zeros((size, LANES), np.uint32))
            if not size or not array.size:
                continue
            taken = _taken(number, array)
            mesh = _mesh_of(taken.array)
            if math.prod(taken.block) <= SMALL:
                bundles[mesh, rows[mesh] // _MOST_ROWS].append(taken)
                rows[mesh] += taken.rows
            else:
                bundles[mesh, -1 - number].append(taken)  # alone
        started = [(bundle, _started(mesh, bundle)) for (mesh, _), bundle in bundles.items()]
        for bundle, sums in started:
            by_array = np.asarray(sums).reshape(-1, len(bundle), LANES).swapaxes(0, 1)
            for taken, of_devices in zip(bundle, by_array, strict=True):
                found[taken.number] = of_devices
    return found


class _Taken(NamedTuple):
    number: int
    array: jax.Array
    block: Shape  # of a block
    rows: int  # that a block has in a line of words


def _taken(number: int, array: jax.Array) -> _Taken:
    """Return an array, or its blocks in this process as one, with bits that XLA can sum up."""
    whole, are_keys = array, is_extended(array.dtype)
    is_odd = are_keys or width_of(array.dtype)[0] in (1, 6) or not is_near(array)
    if is_odd or not array.is_fully_addressable:
        blocks = shards_by_position(array).values()
        whole = side_by_side([jax.random.key_data(x) if are_keys else x for x in blocks], False)
    block = whole.sharding.shard_shape(whole.shape)
    rows = -(-math.prod(block) * width_of(whole.dtype)[1] >> _BITS_OF_ROW)
    return _Taken(number, whole, block, rows)


def _mesh_of(array: jax.Array) -> Mesh:
    return sharding_of(array).mesh  # pyright: ignore[reportReturnType]


def _started(mesh: Mesh, bundle: list[_Taken]) -> jax.Array:
    first, folding = bundle[0], None
    if math.prod(first.block) <= SMALL:
        keys: Any = _keys_of_rows(mesh, sum(taken.rows for taken in bundle))
    else:
        folding = folding_of(first.block, width_of(first.array.dtype)[1])
        keys = placed_keys(mesh, folding, ((0,) * len(first.block),) * mesh.size)
    run = _program(mesh, folding, tuple([sharding_of(taken.array).spec for taken in bundle]))
    sums = run(keys, [taken.array for taken in bundle])
    sums.copy_to_host_async()
    return sums


@lru_cache(maxsize=256)
def _program(mesh: Mesh, folding: RowFolding | None, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return the program from keys and arrays to uint32 ``[devices * arrays, LANES]``.

    ``folding`` is that of one large block, and ``None`` for many small ones.
    """
    by_device = PartitionSpec(mesh.axis_names)

    def sums(keys: Any, blocks: list[jax.Array]) -> jax.Array:
        if folding is None:
            return _sums_in_line(keys, blocks)
        is_on_cpu = mesh.devices.flat[0].platform == "cpu"
        return sums_of_block(folding, is_on_cpu, blocks[0], keys)[None]

    of_keys = PartitionSpec() if folding is None else by_device
    return jax.jit(
        jax.shard_map(
            sums,
            mesh=mesh,
            in_specs=(of_keys, list(specs)),
            out_specs=by_device,
            check_vma=False,
        )
    )


# Many small blocks at once. Their words stand in one line, each block in rows of its own, and have
# the keys of the elements of a one-dimensional array of 32 bits.


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

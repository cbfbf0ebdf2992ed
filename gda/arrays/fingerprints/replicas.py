"""The sums of every replica of the blocks of many arrays, each made on the device that holds it.

Replicas are compared with each other only. So each block is summed up as an array of its own, which
lets all blocks of a shape share one program; and in the first two lanes of a fingerprint: a change
of one word changes both, always, and another change is missed once in 2**64.

Small blocks of many arrays are summed up by one program, as one line of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.bits import as_unsigned
from gda.arrays.dtypes import is_extended
from gda.arrays.fingerprints.formula import ORIGIN, Words, constants_of, key_at, keys_from
from gda.arrays.fingerprints.on_devices import (
    as_one,
    device_of,
    line_of,
    mixed,
    spec_of_blocks,
    started,
    words_of,
)
from gda.arrays.process_local import elements_of_block, shards_by_position
from gda.layout.dtype_names import width_of
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape
from gda.mesh import Device

LANES = 2
# The most elements of a block that is summed up together with others. Larger ones have a program of
# their own, which does not copy them; on CPU it is quicker from about twice as many on.
SMALL = 1 << 14
# The most rows of small blocks that a device copies side by side at a time: 32 MiB.
_MOST_ROWS = 1 << 16
_BITS_OF_ROW = 7  # of the number of a word in a row; each block begins a new row


class _Unit(NamedTuple):
    """Blocks of one shape, of one array, each on another device."""

    number: int  # of the array
    ranks: list[int]  # of the devices, among those of this process
    blocks: list[jax.Array]

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(map(device_of, self.blocks))

    @property
    def is_small(self) -> bool:
        """True if the program of many blocks can take these."""
        some = self.blocks[0]
        kind = device_of(some).default_memory().kind
        is_near = some.sharding.memory_kind in (None, kind)
        return some.size <= SMALL and is_near and width_of(some.dtype)[0] not in (1, 6)


class PendingReplicas:
    """Sums of every replica that devices are working on."""

    __slots__ = ("_parts", "_sizes")

    def __init__(self, sizes: list[int], parts: list[tuple[list[_Unit], jax.Array]]) -> None:
        # Not the units, which hold the blocks.
        self._sizes = sizes
        self._parts: list[Any] = [([unit[:2] for unit in units], sums) for units, sums in parts]

    @property
    def arrays(self) -> list[jax.Array]:
        """The sums on the devices."""
        return [sums for _, sums in self._parts]

    def is_ready(self) -> bool:
        """Return whether ``result`` would return at once."""
        return all(sums.is_ready() for _, sums in self._parts)

    def result(self) -> list[Words]:
        """Wait, and return the sums of each array: uint32 ``[devices of this process, LANES]``.

        Raises:
          Exception: whatever the computation of an array itself raised.
        """
        found = [np.zeros((size, LANES), np.uint32) for size in self._sizes]
        with jax.transfer_guard("allow"):
            for units, sums in self._parts:
                of_units = np.asarray(sums).reshape(-1, len(units), LANES)
                for place, (number, ranks) in enumerate(units):
                    found[number][ranks] = of_units[:, place]
        return found


def begin_replicas(arrays: Sequence[tuple[jax.Array, ShardGrid]]) -> PendingReplicas:
    """Start the sums over all blocks that this process holds, replicas too.

    Never communicates. Does not wait, not even for the arrays to be computed, except for elements
    of 1 or 6 bits. Afterwards the arrays may be donated or deleted. Copies small blocks, and on CPU
    those of floats below 32 bits.

    Args:
      arrays: each with its grid, or the padded one without the padding. An array may have no block
        in this process. PRNG keys count by their numbers.

    >>> from gda.mesh import grid_of_array
    >>> x = jnp.arange(6)
    >>> (sums,) = begin_replicas([(x, grid_of_array(x))]).result()
    >>> sums.shape
    (1, 2)
    """
    sizes: list[int] = []
    large: list[_Unit] = []
    small: dict[tuple[Device, ...], list[_Unit]] = {}
    # Overrides the settings of the user: see gda/multihost/allgather.py.
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        for number, (array, grid) in enumerate(arrays):
            shards = shards_by_position(array)
            sizes.append(len(shards))
            for unit in _units(number, array, grid, shards):
                chosen = small.setdefault(unit.devices, []) if unit.is_small else large
                chosen.append(unit)
        parts = [([unit], _sums_of_large(unit)) for unit in large]
        for units in small.values():
            parts += [(bundle, _sums_of_small(bundle)) for bundle in _bundles(units)]
    return PendingReplicas(sizes, parts)


def _units(
    number: int, array: jax.Array, grid: ShardGrid, shards: dict[int, jax.Array]
) -> list[_Unit]:
    """Return the blocks of an array that have elements, by their shape without padding."""
    by_shape: dict[Shape, _Unit] = {}
    are_keys = is_extended(array.dtype)
    for rank, (position, data) in enumerate(shards.items()):
        if array.shape != grid.global_shape:
            data = elements_of_block(data, array, grid, grid.block_id(position))
        if are_keys:
            data = jax.random.key_data(data)
        if data.size:
            unit = by_shape.setdefault(data.shape, _Unit(number, [], []))
            unit.ranks.append(rank)
            unit.blocks.append(data)
    return list(by_shape.values())


def _sums_of_large(unit: _Unit) -> jax.Array:
    starts = [(0,) * unit.blocks[0].ndim] * len(unit.blocks)
    return started(unit.blocks, starts, lanes=LANES, waits=False)


# Many small blocks at once. Their words stand in one line, each block in rows of its own, and have
# the keys of the elements of a one-dimensional array of 32 bits.


def _rows_of(block: jax.Array) -> int:
    return -(-block.size * width_of(block.dtype)[1] >> _BITS_OF_ROW)


def _bundles(units: list[_Unit]) -> Iterator[list[_Unit]]:
    """Yield units that one program sums up together."""
    bundle: list[_Unit] = []
    rows = 0
    for unit in units:
        more = _rows_of(unit.blocks[0])
        if bundle and rows + more > _MOST_ROWS:
            yield bundle
            bundle, rows = [], 0
        bundle.append(unit)
        rows += more
    yield bundle


def _sums_of_small(units: list[_Unit]) -> jax.Array:
    """Return the sums of the blocks of each unit: uint32 ``[devices * units, LANES]``."""
    mesh = line_of(units[0].devices)
    rows = sum(_rows_of(unit.blocks[0]) for unit in units)
    are_scalars = tuple(not unit.blocks[0].ndim for unit in units)
    joined = [as_one(unit.blocks, mesh) for unit in units]
    with jax.set_mesh(mesh):
        sums = _program_of_small(mesh, are_scalars)(_keys_of_rows(mesh, rows), joined)
    sums.copy_to_host_async()
    return sums


@lru_cache(maxsize=64)
def _keys_of_rows(mesh: Mesh, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys of rows and those of columns: uint32 ``[LANES, ...]`` on every device."""
    constants = constants_of(0)
    columns = keys_from(constants, 0, 1 << _BITS_OF_ROW) + key_at(constants_of(ORIGIN), 1)
    rows = keys_from(constants[:, _BITS_OF_ROW:], 0, count)
    return jax.device_put((rows[:LANES], columns[:LANES]), NamedSharding(mesh, PartitionSpec()))


@lru_cache(maxsize=64)
def _program_of_small(mesh: Mesh, are_scalars: tuple[bool, ...]) -> Any:
    """Return what takes keys and blocks of many arrays, and returns the sums of each block."""
    specs = list(map(spec_of_blocks, are_scalars))
    return jax.jit(
        jax.shard_map(
            _sums_in_line,
            mesh=mesh,
            in_specs=(PartitionSpec(), specs),
            out_specs=PartitionSpec("block"),
            check_vma=False,
        )
    )


def _sums_in_line(keys: tuple[jax.Array, jax.Array], blocks: list[jax.Array]) -> jax.Array:
    rows, columns = keys
    # As integers at once: XLA takes floats below 32 bits through 32 where it moves them.
    each = [words_of(as_unsigned(block).reshape(1, -1))[0] for block in blocks]
    line = jnp.concatenate([jnp.pad(words, (0, -words.size % columns.shape[1])) for words in each])
    words = line.reshape(rows.shape[1], -1)
    counts = list(map(_rows_of, blocks))
    block_of_row = np.repeat(np.arange(len(blocks)), counts)
    of_rows = [
        mixed(words + (rows[lane][:, None] + columns[lane])).sum(1, dtype=jnp.uint32)
        for lane in range(LANES)
    ]
    return jax.ops.segment_sum(
        jnp.stack(of_rows, 1), block_of_row, len(blocks), indices_are_sorted=True
    )

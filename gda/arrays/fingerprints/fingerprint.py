"""A digest of shape, dtype and content: equal for equal arrays, however they are sharded.

A caller can do other work between its steps: ``begin_blocks`` starts the sums of blocks on their
devices, and ``digest_of`` makes the text of those of all processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from gda.arrays.dtypes import is_extended
from gda.arrays.fingerprints import on_host
from gda.arrays.fingerprints.formula import Words, add, digest_of, sums_of_numpy
from gda.arrays.fingerprints.on_devices import PendingSums, device_of, started
from gda.arrays.liveness import check_held, live
from gda.arrays.process_local import distinct_shards
from gda.layout.grid import ShardGrid
from gda.layout.indices import start_of
from gda.layout.spec import Shape
from gda.mesh import own_settings, processes_of, sharding_of
from gda.multihost.agreement import check_same_call, watching

OTHERWISE = "of anything else take gda.fingerprint(numpy.asarray(x))"


def fingerprint_of(array: jax.Array, grid: ShardGrid) -> str:
    name = "GlobalArray.fingerprint"
    check_held(array, "fingerprint()")
    if not array.is_fully_addressable:
        check_same_call(name, array, {"shape": grid.global_shape})
    return fingerprints_of([(array, grid)], name)[0]


def fingerprints_of(arrays: Sequence[tuple[jax.Array, ShardGrid]], name: str) -> list[str]:
    """Return the fingerprint of each array with its grid; communicates once if any is shared.

    The processes have compared the call, of the function ``name``, and have equally many arrays,
    also ones that a single other process holds.
    """
    shared = [not array.is_fully_addressable for array, _ in arrays]

    def sums() -> Words:
        begun = [begin(*each) for each in arrays]
        return np.stack([each.result() for each in begun])

    if not any(shared):
        totals = sums() if arrays else ()
    else:
        with watching(name, tuple(range(jax.process_count()))) as watch:
            totals = sums()
            received = watch.all_gather(totals.astype("<u4").view(np.uint8).reshape(-1))
        of_all = received.view("<u4").reshape(-1, *totals.shape)
        for number in np.flatnonzero(shared).tolist():
            # In place of an array of one process, the others may have arrays of their own.
            holders = processes_of(sharding_of(arrays[number][0]).mesh).numbers
            totals[number] = of_all[list(holders), number].sum(0, dtype=np.uint32)
    return [
        digest_of(grid.global_shape, array.dtype, total)
        for (array, grid), total in zip(arrays, totals, strict=True)
    ]


def begin(array: jax.Array, grid: ShardGrid) -> PendingSums:
    """Start the sums over the blocks that this process writes, on the first device of each."""
    shards = distinct_shards(live(array, OTHERWISE), grid)
    return begin_blocks({number: shards[number] for number in _written_here(grid)}, grid)


@lru_cache(maxsize=256)  # most arrays of a tree have the layouts of others
def _written_here(grid: ShardGrid) -> tuple[int, ...]:
    return grid.view(jax.process_index()).written_blocks()


def begin_blocks(
    blocks: Mapping[int, Any], grid: ShardGrid, for_all_shapes: bool = False
) -> PendingSums:
    """Start the sums over some blocks by their numbers, or over copies of them.

    Never communicates. Waits only for elements of 1 or 6 bits, and on CPU for small blocks and
    floats below 32 bits. Afterwards the array may be donated or deleted. Copies only blocks that
    are small or not in the devices' own memory.

    ``grid`` is that of the array, with its processes; blocks of a padded one have no padding. PRNG
    keys may be given by their numbers. With ``for_all_shapes``, blocks in the memory of the host,
    which may be NumPy arrays, have one program: most processes save a model of many shapes once. A
    thread waits for these, and they must stay as they are until the result is there.
    """
    if not blocks or not math.prod(grid.shard_shape):
        return PendingSums(add([]))
    chosen = dict(blocks)
    some = next(iter(chosen.values()))
    with own_settings():
        if is_extended(some.dtype):
            chosen = {number: jax.random.key_data(block) for number, block in chosen.items()}
        is_here = isinstance(some, np.ndarray) or device_of(some).platform == "cpu"
        if is_here and len(chosen) * math.prod(grid.shard_shape) <= on_host.SMALL:
            return PendingSums(_by_numpy(chosen, grid))
        if is_here and for_all_shapes:
            return PendingSums(
                *[
                    on_host.begin_on_host(block, _starts(grid, number, block.ndim))
                    for number, block in chosen.items()
                    if block.size
                ]
            )
        by_shape: dict[Shape, list[int]] = {}
        for number, block in chosen.items():
            if block.size:
                by_shape.setdefault(block.shape, []).append(number)
        return PendingSums(
            *[
                started(
                    [chosen[number] for number in numbers],
                    [_starts(grid, number, len(shape)) for number in numbers],
                )
                for shape, numbers in by_shape.items()
            ]
        )


def _starts(grid: ShardGrid, number: int, rank: int) -> Shape:
    """Return the first element of a block; the dimensions of a key's numbers begin with 0."""
    starts = start_of(grid.block_index(number))
    return starts + (0,) * (rank - len(starts))


def _by_numpy(blocks: dict[int, Any], grid: ShardGrid) -> Words:
    """Return the sums of small blocks; if they are the whole array, they are joined first."""
    if len(blocks) < grid.num_shards:
        return add(
            sums_of_numpy(np.asarray(block), _starts(grid, number, block.ndim))
            for number, block in blocks.items()
            if block.size
        )
    first, *rest = blocks.values()
    if not rest:
        return sums_of_numpy(np.asarray(first))
    whole = np.empty((*grid.global_shape, *first.shape[len(grid.global_shape) :]), first.dtype)
    for number, block in blocks.items():
        whole[grid.block_index(number)] = block
    return sums_of_numpy(whole)

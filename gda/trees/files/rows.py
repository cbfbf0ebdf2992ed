"""Moves of arrays to layouts whose blocks are long runs of bytes in C order, for writing files.

A matrix sharded by columns over many processes lies in a file as short runs of each in turn. To
write a run of 4 KiB takes five times as long as to copy it, and hosts that share a page of a file
wait for each other. So processes exchange the data first: devices do that faster than a disk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import PartitionSpec

from gda.arrays.transport.carrying import Relayout
from gda.arrays.transport.moving import reshard_all
from gda.layout.cover import groups_within
from gda.layout.grid import ShardGrid
from gda.layout.indices import start_of
from gda.mesh import MeshAndSpec, sharding_of
from gda.storage.new_files import axis_of_runs
from gda.trees.written_blocks import WrittenArray, written_arrays

_SHORT_RUN = 16 * 2**10  # bytes
_MANY_RUNS = 256
# On a device, of new blocks; and of pieces on their way.
_MAX_BYTES, _PIECE_BYTES = 32 * 2**20, 24 * 2**20


def is_scattered(leaf: WrittenArray) -> bool:
    """Return True if processes would write many short runs; the same in all of them."""
    grid, processes = leaf.grid, jax.process_count()
    if grid is None or leaf.is_local or processes == 1 or grid.num_processes < processes:
        return False
    run = _run_bytes(grid, leaf.array.dtype.itemsize, leaf.turn)
    return run < _SHORT_RUN and leaf.array.nbytes > run * _MANY_RUNS


def _run_bytes(grid: ShardGrid, itemsize: int, turn: int) -> int:
    """Return the most bytes that process 0 writes side by side."""
    axis = axis_of_runs(grid.global_shape, grid.shard_shape)
    blocks = grid.view(0).written_blocks(turn)
    starts = [start_of(grid.block_index(block)) for block in blocks]
    beside = Counter((*start[:axis], *start[axis + 1 :]) for start in starts)
    return math.prod(grid.shard_shape[axis:]) * itemsize * max(beside.values(), default=1)


def groups_in_rows(leaves: Mapping[int, WrittenArray]) -> Iterator[dict[int, Relayout]]:
    """Return the moves of arrays into rows; those of a group hold at most 32 MiB on a device."""
    relayouts = {number: _in_rows(leaf) for number, leaf in leaves.items()}
    sizes = [
        math.prod(each.target.shard_shape) * each.array.dtype.itemsize
        for each in relayouts.values()
    ]
    return map(dict, groups_within(relayouts.items(), sizes, _MAX_BYTES))


def in_rows(group: Mapping[int, Relayout], name: str) -> dict[int, WrittenArray]:
    """Move a group of arrays into rows, for the function ``name``; all processes must call it."""
    arrays = reshard_all([*group.values()], name, _PIECE_BYTES)
    grids = [relayout.target for relayout in group.values()]
    return dict(zip(group, written_arrays(arrays, grids, are_copies=True), strict=True))


def _in_rows(leaf: WrittenArray) -> Relayout:
    """Return the move to a layout that shards only dimensions before the runs."""
    mesh, grid = sharding_of(leaf.array).mesh, leaf.grid
    assert grid is not None
    names: list[list[str]] = [[] for _ in range(axis_of_runs(grid.global_shape, grid.shard_shape))]
    dimension, ways = 0, 1
    for axis, size in mesh.shape.items():
        while dimension < len(names) and ways * size > grid.global_shape[dimension]:
            dimension, ways = dimension + 1, 1
        if dimension < len(names):
            names[dimension].append(axis)
            ways *= size
    spec = PartitionSpec(*map(tuple, names))
    return Relayout(leaf.array, MeshAndSpec(mesh, spec, None), grid.global_shape)

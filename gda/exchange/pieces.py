"""The pieces of an offered array that this process pulls, each from one process that has it.

A *piece* is the overlap of a block of this process and a block of the offer. Each distinct block of
this process is pulled once, even if several of its devices hold it. Of the devices that hold a
block of the offer, those on this machine come first. The requests for the block, of all its pieces
and all processes that need it, go to these in turn, by the formula of ``gda.layout.reshard.lanes``:
so each process computes its own requests alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.construction.placing import LocalBlocks
from gda.layout.cover import holders_of
from gda.layout.grid import ShardGrid
from gda.layout.indices import Tiling, index_at, start_of, within
from gda.layout.numbering import IntArray
from gda.layout.reshard.flow import Holding, tiling_of
from gda.layout.reshard.lanes import Lanes
from gda.layout.reshard.overlaps import Pieces
from gda.layout.spec import Index, Shape
from gda.mesh import processes_of


class PulledPiece(NamedTuple):
    """A piece: its sender, its block in this process, and its index in the array and the block."""

    server: int
    block: int
    start: Shape
    shape: Shape
    place: Index


class Needed(NamedTuple):
    """The blocks of an array that a process needs.

    Attributes:
      tiling: the blocks of all processes.
      starts: the first element of each block of this process.
      turns: for each of them, the place of this process among those that need it.
      most: the most processes that need one block.
    """

    tiling: Tiling
    starts: tuple[Shape, ...]
    turns: tuple[int, ...]
    most: int


def _whole_array(shape: Shape) -> Needed:
    """Return the one block of an array that every process needs whole."""
    whole = Tiling(shape, (1,) * len(shape))
    return Needed(whole, ((0,) * len(shape),), (jax.process_index(),), jax.process_count())


def _needed_blocks(plan: LocalBlocks) -> Needed:
    """Return the blocks that the devices of this process need."""
    grid, mesh = plan.grid, plan.sharding.mesh
    holders = holders_of(grid, processes_of(mesh))
    starts = tuple([start_of(index) for index in plan.distinct])
    tiling = tiling_of(grid)
    turns = [holders[tiling.block_at(start)].index(jax.process_index()) for start in starts]
    return Needed(tiling, starts, tuple(turns), max(map(len, holders), default=1))


@lru_cache(maxsize=256)  # a sampler pulls the same layouts again and again
def own_pieces(
    source: ShardGrid, plan: LocalBlocks | None, near: frozenset[int]
) -> list[PulledPiece]:
    """Return the pieces that this process pulls: of its blocks, or of all without a plan."""
    needed = _whole_array(source.global_shape) if plan is None else _needed_blocks(plan)
    return pulled_pieces(source, needed, near)


def pulled_pieces(source: ShardGrid, needed: Needed, near: frozenset[int]) -> list[PulledPiece]:
    """Return the pieces of the blocks that a process needs.

    Args:
      source: the grid of the offer, with its processes.
      near: those processes of the offer that are on this machine.
    """
    if 0 in source.global_shape or not needed.starts:
        return []
    pieces = Pieces(tiling_of(source), needed.tiling)
    numbers = np.array([needed.tiling.block_at(start) for start in needed.starts])
    # In the order of the numbers, as Pieces lists them.
    listed = pieces.listed(numbers)
    turns = np.array(needed.turns)[listed.rows]
    lanes = Lanes(pieces, source.num_replicas, needed.most)
    requests = lanes.requests(listed.segments, turns).numbers
    servers = _servers(source, listed.source_blocks, requests, near)
    sides: list[tuple[Any, Any]] = [
        (each.starts[segment].tolist(), each.lengths[segment].tolist())
        for each, segment in zip(pieces.dimensions, listed.segments, strict=True)
    ]
    count = len(listed.rows)
    starts = zip(*[start for start, _ in sides], strict=True) if sides else [()] * count
    shapes = zip(*[length for _, length in sides], strict=True) if sides else [()] * count
    found = zip(servers.tolist(), listed.rows.tolist(), starts, shapes, strict=True)
    return [
        PulledPiece(
            server, block, start, shape, within(index_at(start, shape), needed.starts[block])
        )
        for server, block, start, shape in found
    ]


def _servers(
    source: ShardGrid, blocks: IntArray, requests: IntArray, near: frozenset[int]
) -> IntArray:
    """Return the process that sends each piece."""
    processes: Any = source.processes
    holders = processes.process_of[Holding(source).devices].reshape(-1, source.num_replicas)
    are_near = np.isin(holders, [*near])
    near_first = np.take_along_axis(holders, np.argsort(~are_near, axis=1, kind="stable"), 1)
    counts = are_near.sum(axis=1)
    counts = np.where(counts > 0, counts, source.num_replicas)[blocks]
    # As Lanes.holders: the same requests to other blocks begin with other holders.
    turns = requests + requests // counts + blocks * counts // source.num_shards
    return near_first[blocks, turns % counts]

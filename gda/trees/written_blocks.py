"""The blocks of arrays and sources that this process writes: each block has one writer.

Array after array, processes divide the replicated blocks, and the blocks of sources. A process
that offers arrays to another program has all blocks that it holds instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gda.arrays.bits import without_padding
from gda.arrays.process_local import data_by_device, first_holders
from gda.arrays.transport.source_blocks import SourceArray, SourceBlock
from gda.arrays.transport.to_host import BlockData, is_host
from gda.layout.cover import writing_of_grid
from gda.layout.dtype_names import width_of
from gda.layout.grid import ShardGrid
from gda.layout.indices import bounded, index_at, is_empty, shape_at, start_of
from gda.layout.numbering import IntArray
from gda.layout.processes import turns_of
from gda.layout.spec import Index, Shape
from gda.mesh import sharding_of
from gda.storage.read_boxes import writers_of


class OwnBlock(NamedTuple):
    """A block that this process writes, of all arrays of one layout and turn."""

    box: Index  # with every start and stop
    start: Shape
    device: Any  # the first of this process that holds it; None if none does


@dataclass(frozen=True, eq=False)
class WrittenArray:
    """An array, and the blocks of it that this process writes."""

    array: jax.Array | np.ndarray[Any, Any] | SourceArray  # with its padding
    # Without padding. None for a NumPy array, which is one block, and for a source.
    grid: ShardGrid | None
    turn: int  # as for ProcessView.written_blocks
    is_local: bool  # every process has the whole array, and one of them writes it
    own: Mapping[int, OwnBlock]  # by number; none is of padding alone

    @property
    def shape(self) -> Shape:
        return self.array.shape if self.grid is None else self.grid.global_shape

    @property
    def block_shape(self) -> Shape:
        """The shape of every block but those at the edges."""
        if self.grid is not None:
            return self.grid.shard_shape
        return self.array.block_shape if isinstance(self.array, SourceArray) else self.array.shape

    def index(self, number: int) -> Index:
        """Return the index of a block of ``own``, for messages and targets."""
        return self.own[number].box if self.grid is None else self.grid.block_index(number)

    @property
    def has_several_writers(self) -> bool:
        """True if several processes may write blocks."""
        if self.grid is None:
            return jax.process_count() > 1
        return self.grid.processes is not None and len(self.grid.processes.numbers) > 1

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of blocks along each dimension; not of a NumPy array."""
        grid: Any = self.grid
        return self.array.parts if isinstance(self.array, SourceArray) else grid.parts

    def writers(self) -> IntArray:
        """Return the process that writes each block that has elements; not of a NumPy array."""
        if isinstance(self.array, SourceArray):
            writers = writers_of(self.array.num_blocks, jax.process_count(), self.turn)
            return writers.reshape(self.parts)
        grid: Any = self.grid
        sizes = zip(grid.global_shape, grid.shard_shape, strict=True)
        with_elements = tuple([slice(-(-size // step)) for size, step in sizes])
        blocks = np.arange(grid.num_shards).reshape(self.parts)[with_elements]
        writing = writing_of_grid(grid, grid.processes)
        return writing.writers(blocks.ravel(), self.turn).reshape(blocks.shape)

    def blocks(self) -> dict[int, BlockData]:
        """Return the data of each block of ``own``: a view if it is in memory of the host.

        While a view lives, a step to which the array is donated copies the block instead.
        """
        array, own = self.array, self.own
        if isinstance(array, SourceArray):
            return {number: array.block(number) for number in own}
        if isinstance(array, np.ndarray) or not own:
            return dict.fromkeys(own, array)
        data_on = dict.fromkeys(array.devices(), array) if self.is_local else data_by_device(array)
        blocks: dict[int, BlockData] = {n: data_on[each.device] for n, each in own.items()}
        # NumPy stores elements of less than a byte in another form, for which JAX makes a copy.
        if width_of(array.dtype)[0] >= 8 and is_host(next(iter(data_on))):
            blocks = dict(zip(blocks, map(np.asarray, blocks.values()), strict=True))
        if array.shape != self.shape:
            for number, data in blocks.items():
                blocks[number] = _first_of(data, shape_at(own[number].box, self.shape))
        return blocks


def written_arrays(
    arrays: Sequence[jax.Array | np.ndarray[Any, Any] | SourceArray],
    grids: Sequence[ShardGrid | None],
    *,
    are_copies: bool,
    are_held: bool = False,
) -> list[WrittenArray]:
    """Return the blocks of the arrays of a tree that this process writes; copies nothing.

    With ``are_copies``, one process writes an array that all have on devices of their own. With
    ``are_held``, a process has all the blocks that its devices hold.
    """
    shardings = [getattr(array, "sharding", None) for array in arrays]
    # All processes have the same mesh; an array without one is local to its process.
    layouts = [each if isinstance(each, NamedSharding) else None for each in shardings]
    kinds = [
        SourceArray if isinstance(array, SourceArray) else layout
        for array, layout in zip(arrays, layouts, strict=True)
    ]
    turns = turns_of([array.nbytes for array in arrays], kinds)
    has_others = are_copies and jax.process_count() > 1
    written = []
    for array, grid, turn, layout in zip(arrays, grids, turns, layouts, strict=True):
        is_source = isinstance(array, SourceArray)
        is_local = not is_source and (grid is None or (has_others and layout is None))
        if is_source:
            plan = _plan_of_source(array, turn)
        elif grid is None or is_local:
            plan = _plan_of_local(array, jax.process_index() if are_held else turn)
        else:
            shares_out = jax.process_count() > 1 and not are_held
            processes: Any = grid.processes
            turn = turn % writing_of_grid(grid, processes).period if shares_out else 0
            plan = _plan_of(grid, sharding_of(array).mesh, turn, are_held)
        written.append(WrittenArray(array, grid, turn, is_local, plan))
    return written


def _plan_of_local(array: Any, turn: int) -> dict[int, OwnBlock]:
    if turn % jax.process_count() != jax.process_index():
        return {}
    start = (0,) * array.ndim
    (device,) = getattr(array, "devices", set)() or [None]
    return {0: OwnBlock(index_at(start, array.shape), start, device)}


def _plan_of_source(array: SourceArray, turn: int) -> dict[int, OwnBlock]:
    writers = writers_of(array.num_blocks, jax.process_count(), turn)
    numbers = np.flatnonzero(writers == jax.process_index()).tolist()
    indices = {number: array.index(number) for number in numbers}
    return {number: OwnBlock(index, start_of(index), None) for number, index in indices.items()}


@lru_cache(maxsize=256)  # a tree has many arrays of few layouts, and is saved again
def _plan_of(grid: ShardGrid, mesh: Any, turn: int, are_held: bool) -> dict[int, OwnBlock]:
    own: dict[int, OwnBlock] = {}
    if 0 in grid.global_shape:
        return own
    view, holders = grid.view(jax.process_index()), first_holders(grid, mesh)
    for number in view.block_ids if are_held else view.written_blocks(turn):
        index = bounded(grid.block_index(number), grid.global_shape)
        if not is_empty(index):  # of padding alone
            own[number] = OwnBlock(index, start_of(index), holders[number])
    return own


def _first_of(data: BlockData, shape: Shape) -> BlockData:
    if isinstance(data, np.ndarray):
        return data[tuple(map(slice, shape))]
    assert not isinstance(data, SourceBlock)
    return without_padding(data, shape)

"""The blocks of arrays that this process writes: over all processes, every block once.

Processes share replicated blocks out, array after array, so that process 0 does not write all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from gda.arrays.construction.placing import is_empty
from gda.arrays.process_local import distinct_shards
from gda.arrays.transport.to_host import BlockData
from gda.layout.grid import ShardGrid
from gda.layout.processes import turns_of
from gda.layout.spec import Index, Shape, bounded
from gda.mesh import view_of_array


@dataclass(frozen=True, eq=False)
class WrittenArray:
    """An array, and the blocks of it that this process writes."""

    array: jax.Array | np.ndarray[Any, Any]  # with its padding
    grid: ShardGrid | None  # without padding; None for a NumPy array, which is one block
    turn: int  # as for ProcessView.written_blocks
    is_local: bool  # every process has the whole array, and one of them writes it
    numbers: tuple[int, ...]  # of the blocks that this process writes; none of padding alone

    @property
    def shape(self) -> Shape:
        """Its sizes without padding."""
        return self.array.shape if self.grid is None else self.grid.global_shape

    @cached_property
    def indices(self) -> dict[int, Index]:
        """The index of each block of ``numbers``, with every start and stop."""
        if self.grid is None:
            return dict.fromkeys(
                self.numbers, bounded((slice(None),) * self.array.ndim, self.shape)
            )
        return {n: bounded(self.grid.block_index(n), self.shape) for n in self.numbers}

    def blocks(self) -> dict[int, BlockData]:
        """Return the data of each block of ``numbers``; at the edge of a padded array, a copy."""
        if self.grid is None or self.is_local:
            return dict.fromkeys(self.numbers, self.array)
        data = distinct_shards(self.array, self.grid) if self.numbers else {}  # pyright: ignore
        return {number: data[number] for number in self.numbers}


def written_arrays(
    arrays: Sequence[jax.Array | np.ndarray[Any, Any]],
    grids: Sequence[ShardGrid | None],
    *,
    are_copies: bool,
) -> list[WrittenArray]:
    """Return the blocks of the arrays of a tree that this process writes; copies nothing.

    With ``are_copies``, arrays on the devices of one process are the same in all processes, so that
    one writes them. Otherwise each writes its own.
    """
    shardings = [getattr(array, "sharding", None) for array in arrays]
    # All processes have the same mesh; an array without one is local to its process.
    layouts = [each if isinstance(each, NamedSharding) else None for each in shardings]
    turns = turns_of([array.nbytes for array in arrays], layouts)
    has_others = are_copies and jax.process_count() > 1
    written = []
    for array, grid, turn, layout in zip(arrays, grids, turns, layouts, strict=True):
        is_local = grid is None or (has_others and layout is None)
        if grid is None or is_local:
            numbers = (0,) if turn % jax.process_count() == jax.process_index() else ()
        else:
            numbers = _numbers(array, grid, turn)
        written.append(WrittenArray(array, grid, turn, is_local, numbers))
    return written


def _numbers(array: Any, grid: ShardGrid, turn: int) -> tuple[int, ...]:
    if not array.size:
        return ()
    if not grid.is_padded:
        return view_of_array(array).written_blocks(turn)
    numbers = grid.view(jax.process_index()).written_blocks(turn)
    return tuple([each for each in numbers if not is_empty(grid.block_index(each))])

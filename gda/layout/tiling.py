"""The places of the blocks of a shape: block numbers, block coordinates and indices.

Pure integers: no mesh, no devices. ``numbering`` has the block of each device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

from gda.layout.spec import Index, Shape

# The slices of a dimension that is not sharded, and of one of size 0 that is.
_NOT_SHARDED = (slice(None),)
_EMPTY = (slice(0, 0),)


class Tiling:
    """A shape divided into parts of one size along each dimension; immutable.

    If that size does not divide the whole, the last parts are shorter or empty.

    Blocks are numbered row-major over their *coordinates*, one part per dimension. All parts of a
    dimension of size 0 are equal, so its coordinate is 0, and it does not count for the number.

    Args:
      global_shape: sizes of the whole.
      shard_shape: sizes of the largest block, ``shard_shape_of(global_shape, parts)``.
      parts: the number of parts along each dimension.
    """

    def __init__(self, global_shape: Shape, shard_shape: Shape, parts: Sequence[int]) -> None:
        self.global_shape = global_shape
        self.shard_shape = shard_shape
        self.parts = parts
        # For each dimension, the last first: parts, sizes of one and of all, and the slice if all
        # parts have the same.
        dims = []
        for ways, step, size in zip(parts, shard_shape, global_shape):  # noqa: B905
            same = _NOT_SHARDED[0] if ways == 1 else None if step else _EMPTY[0]
            dims.append((ways, step, size, same))
        dims.reverse()
        self._dims: list[tuple[int, int, int, slice | None]] = dims

    @cached_property
    def is_even(self) -> bool:
        """True if all blocks have ``shard_shape``."""
        return all(ways * step == size for ways, step, size, _ in self._dims)

    def index(self, block: int) -> Index:
        """Return the elements of a block as one slice per dimension.

        >>> Tiling((8, 2, 5), (2, 2, 3), (4, 1, 2)).index(3)
        (slice(2, 4, None), slice(None, None, None), slice(3, 5, None))
        """
        slices = []
        for parts, step, size, same in self._dims:
            if same is None:
                block, part = divmod(block, parts)
                start = part * step
                if (stop := start + step) > size:
                    start, stop = min(start, size), size
                slices.append(slice(start, stop))
            else:
                slices.append(same)
        slices.reverse()
        return tuple(slices)

    def coordinates(self, block: int) -> tuple[int, ...]:
        """Return the coordinates of a block: the number of its part along each dimension.

        >>> Tiling((8, 2, 6), (2, 2, 3), (4, 1, 2)).coordinates(3)
        (1, 0, 1)
        """
        return tuple([column[0] for column in self.columns([block])])

    def columns(self, blocks: Sequence[int]) -> list[list[int]]:
        """Return, for each dimension, the coordinates of some blocks in it.

        >>> Tiling((8, 2, 6), (2, 2, 3), (4, 1, 2)).columns([3, 0])
        [[1, 0], [0, 0], [1, 0]]
        """
        columns = []
        for parts, _, _, same in self._dims:
            if same is None:
                columns.append([block % parts for block in blocks])
                blocks = [block // parts for block in blocks]
            else:
                columns.append([0] * len(blocks))
        columns.reverse()
        return columns

    def slice_at(self, dimension: int, coordinate: int) -> slice:
        """Return the elements of one part of a dimension, as they stand in an index.

        >>> Tiling((8, 2, 6), (2, 2, 3), (4, 1, 2)).slice_at(0, 3)
        slice(6, 8, None)
        """
        same = self._dims[~dimension][-1]
        return slice(*self.bounds(dimension, coordinate)) if same is None else same

    def bounds(self, dimension: int, coordinate: int) -> tuple[int, int]:
        """Return start and stop of one part of a dimension.

        >>> tiling = Tiling((5,), (2,), (4,))
        >>> [tiling.bounds(0, part) for part in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
        """
        _, step, size, _ = self._dims[~dimension]
        return min(coordinate * step, size), min(coordinate * step + step, size)


def shard_shape_of(global_shape: Shape, parts: Sequence[int]) -> Shape:
    """Return the sizes of the largest block: each size divided by its parts, rounded up.

    >>> shard_shape_of((8, 5, 0), (4, 2, 3))
    (2, 3, 0)
    """
    return tuple([-(-size // ways) for size, ways in zip(global_shape, parts)])  # noqa: B905


def all_blocks(global_shape: Shape, shard_shape: Shape, parts: Sequence[int]) -> list[Index]:
    """Return the index of every block, in the order of the block numbers; equal slices are shared.

    A function, because a grid needs it once: making a ``Tiling`` first would be noticed.

    >>> all_blocks((4, 4), (4, 2), (1, 2))[1]
    (slice(None, None, None), slice(2, 4, None))
    """
    slices = []
    for size, step, ways in zip(global_shape, shard_shape, parts):  # noqa: B905
        if ways == 1:
            slices.append(_NOT_SHARDED)
        elif not step:
            slices.append(_EMPTY)
        elif step * ways == size:
            slices.append([slice(start, start + step) for start in range(0, size, step)])
        else:
            ends = [min(part * step, size) for part in range(ways + 1)]
            slices.append(list(map(slice, ends[:-1], ends[1:])))
    return list(itertools.product(*slices))

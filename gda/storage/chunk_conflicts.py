"""Chunks of a store that contain elements of several blocks of an array, which lead to conflicts.

Pure integers: no devices, no files. A store reads, changes and writes whole chunks, so of two
writers in one chunk, one can overwrite the data of the other.

Comparing neighbours is enough. A chunk touches a run of blocks in each dimension, and all their
combinations. If these blocks have two writers, two of them that are neighbours in one dimension
have different writers, and the chunk crosses the boundary between those two. In the other
dimensions some chunk touches every block. So each dimension is checked alone: there is a conflict
exactly where a chunk crosses a boundary and the blocks on its two sides have different writers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Shape


def are_aligned(
    shard_shape: Shape, parts: Sequence[int], chunk_shape: Shape, origin: Shape
) -> bool:
    """Return True if no chunk has elements of two blocks; no size is 0.

    At ``origin``, which may lie outside the array, a chunk begins.

    >>> are_aligned((4, 8), (2, 1), (2, 3), (0, 0)), are_aligned((4, 8), (2, 1), (3, 8), (0, 0))
    (True, False)
    """
    dimensions = zip(shard_shape, parts, chunk_shape, origin, strict=True)
    return not any(len(_crossed(*dimension)) for dimension in dimensions)


def first_conflict(
    writers: IntArray, shard_shape: Shape, chunk_shape: Shape, origin: Shape
) -> tuple[int, int] | None:
    """Return two writers of one chunk, of neighbouring blocks; None if no chunk has two.

    ``writers`` has the writer of each block; the rest is as for ``are_aligned``. Costs O(blocks)
    for each dimension in which a chunk crosses a boundary.

    >>> first_conflict(np.array([[0, 0], [0, 1]]), (4, 8), (3, 8), (0, 0))
    (0, 1)
    """
    dimensions = zip(shard_shape, writers.shape, chunk_shape, origin, strict=True)
    for dimension, (step, ways, chunk, first) in enumerate(dimensions):
        later = _crossed(step, ways, chunk, first)
        before = np.take(writers, later - 1, axis=dimension)
        after = np.take(writers, later, axis=dimension)
        if (differ := before != after).any():
            return int(before[differ][0]), int(after[differ][0])
    return None


def _crossed(step: int, parts: int, chunk: int, origin: int) -> IntArray:
    """Return the numbers of the blocks, along a dimension, that begin inside a chunk."""
    if step % chunk == 0 and origin % chunk == 0:
        return np.empty(0, np.int64)
    later = np.arange(1, parts)
    # Modulo the chunk first, so that the product does not overflow int64.
    return later[(later * (step % chunk) - origin % chunk) % chunk != 0]

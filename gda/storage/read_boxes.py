"""The boxes in which a source is read to be written: what is read once is written once.

Pure integers. A source with chunks reads whole chunks, and so does one that is a view of another: a
box with half of a chunk would read all of it, and the next box would read it again. A target with
chunks writes whole chunks. So a box consists of whole chunks of both where memory allows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Shape

# Of a box: large enough for a disk, and several fit into every default of max_bytes.
BOX_BYTES = 8 * 2**20
# Targets store whole boxes: this share of a side may lie beyond the edge of the array.
_SPARE = 1 / 16


def box_shape_of(
    shape: Shape,
    itemsize: int,
    max_bytes: int,
    *,
    read: Shape | None = None,
    written: Shape | None = None,
    order: Sequence[int] | None = None,
) -> Shape:
    """Return the shape of equal boxes of about ``BOX_BYTES``, of which two fit into ``max_bytes``.

    Args:
      shape: sizes of the source, none of them 0.
      itemsize: bytes of an element.
      max_bytes: bound on memory. One chunk is always allowed.
      read: the chunks of the source.
      written: the chunks of the target. A box never has a part of one.
      order: the dimensions of the source, those in which neighbours lie close together first; by
        default from the last to the first.

    >>> box_shape_of((4096, 8192), 4, 2**26)  # rows
    (256, 8192)
    >>> box_shape_of((4096, 8192), 4, 2**26, read=(4096, 1))  # a transposed view
    (4096, 512)
    >>> box_shape_of((4096, 8192), 4, 2**26, read=(4096, 1), written=(100, 100))
    (4096, 500)
    """
    unit = _unit_of(shape, itemsize, max_bytes, read, written)
    box = [*unit]
    most = min(BOX_BYTES, max(max_bytes // 2, 1))
    for axis in range(len(shape))[::-1] if order is None else order:
        count = -(-shape[axis] // unit[axis])
        room = min(most // (math.prod(box) * itemsize), count)
        box[axis] = min(_even(count, room) * unit[axis], shape[axis])
        if box[axis] < shape[axis]:
            break
    for axis, size in enumerate(shape):
        wider = [*box[:axis], size, *box[axis + 1 :]]
        is_wasteful = -(-size // box[axis]) * box[axis] > size * (1 + _SPARE)
        if is_wasteful and math.prod(wider) * itemsize <= max_bytes:
            box = wider
    if read is not None and math.prod(map(_covered, shape, box)) > 2 * math.prod(shape):
        # Few chunks, most of each beyond the edge: files of such would be mostly empty.
        return box_shape_of(shape, itemsize, max_bytes, written=written, order=order)
    return tuple(box)


def _unit_of(
    shape: Shape, itemsize: int, max_bytes: int, read: Shape | None, written: Shape | None
) -> list[int]:
    """Return the smallest box of whole chunks of both, or of the target if that is too large."""
    ones = (1,) * len(shape)
    chunks = [read or ones, written or ones]
    of_read, of_written = ([*map(min, each, shape)] for each in chunks)
    both = [*map(min, map(math.lcm, *chunks), shape)]
    most = max(math.prod(of_read) * itemsize, max_bytes)
    if math.prod(both) * itemsize <= most:
        return both
    unit = of_written
    for axis, size in enumerate(both):
        # As much of each side as fits: of a chunk of the source, a part costs as much as all of it.
        room = max_bytes // (math.prod(unit) * itemsize)
        if of_read[axis] > unit[axis] and room > 1:
            unit[axis] = min(room * unit[axis], size)
    return unit


def _even(count: int, room: int) -> int:
    """Return a number to take of ``count`` at a time, at most ``room``; the last time lacks few."""
    for some in range(room, room // 2, -1):
        if count % some == 0:  # one shape for all, for which one program makes fingerprints
            return some
    for some in range(room, 1, -1):
        parts = -(-count // some)
        if parts * some <= count * (1 + _SPARE):
            return -(-count // parts)
    return 1


def _covered(size: int, part: int) -> int:
    return -(-size // part) * part


def writers_of(count: int, processes: int, turn: int) -> IntArray:
    """Return the process that writes each of ``count`` boxes; each writes a run of about as many.

    >>> writers_of(5, 2, turn=0), writers_of(1, 4, turn=3)
    (array([0, 0, 0, 1, 1]), array([3]))
    """
    return (np.arange(count) * processes // max(count, 1) + turn) % processes

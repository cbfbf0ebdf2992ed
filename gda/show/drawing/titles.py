"""The hover texts of a drawing: index, devices, processes and bytes of blocks."""

from __future__ import annotations

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.text import format_bytes, format_index, format_processes
from gda.show.subject import Subject
from gda.show.words import format_devices, padding_of, processes_at

_REPLICAS_NAMED = 8


def hover_text(subject: Subject, blocks: IntArray) -> str:
    """Return some lines about the blocks of these numbers, ``[rows, columns]``, a rectangle.

    >>> from gda.layout.grid import ShardGrid
    >>> subject = Subject(ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x',)), dtype=np.dtype('float32'))
    >>> print(hover_text(subject, np.array([[1]])))
    [2:4, :]
    device 2 (replica 0), device 3 (replica 1)
    16 B on each device
    """
    first, last = int(blocks[0, 0]), int(blocks[-1, -1])
    grid = subject.grid
    index = format_index(grid.block_index(first), grid.block_index(last))
    holders = subject.holders[blocks].ravel()
    if blocks.size > 1:
        in_order = holders[np.argsort(subject.numbers(holders))]
        lines = [f"{index}, {blocks.size:,} blocks", format_devices(subject, in_order)]
    else:
        lines = [index, _replicas(subject, holders)]
    if grid.process_of is not None:
        lines.append(format_processes(processes_at(subject, holders)))
    if subject.block_bytes is not None:
        lines.append(f"{format_bytes(subject.block_bytes)} on each device")
    if subject.has_padding:
        padding, total = _padding_of(subject, first, last, blocks.size)
        lines += [f"{padding:,} of {total:,} elements are padding"] if padding else []
    return "\n".join(lines)


def _padding_of(subject: Subject, first: int, last: int, num_blocks: int) -> tuple[int, int]:
    """Return the elements of padding, and all elements, of the blocks between two blocks."""
    ends = zip(*map(subject.grid.block_index, (first, last)), strict=True)
    index = tuple(slice(start.start, stop.stop) for start, stop in ends)
    return padding_of(subject, index, num_blocks)


def _replicas(subject: Subject, holders: IntArray) -> str:
    if len(holders) == 1:
        return format_devices(subject, holders)
    is_all = len(holders) <= _REPLICAS_NAMED
    chosen = range(len(holders)) if is_all else (0, 1, len(holders) - 1)
    named = [
        f"{format_devices(subject, holders[replica : replica + 1])} (replica {replica})"
        for replica in chosen
    ]
    if is_all:
        return ", ".join(named)
    return f"{len(holders):,} devices: {named[0]}, {named[1]}, …, {named[2]}"

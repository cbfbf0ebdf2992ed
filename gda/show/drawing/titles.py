"""The hover texts of a drawing: index, devices, processes and bytes of blocks."""

from __future__ import annotations

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.text import format_bytes, format_index, format_processes
from gda.show.subject import Subject
from gda.show.words import format_devices, padding_of, processes_at

_REPLICAS_NAMED = 8


def hover_text(subject: Subject, blocks: IntArray) -> str:
    """Return some lines about the blocks of these numbers, ``[rows, columns]``, a rectangle."""
    grid = subject.grid
    first, last = (grid.block_index(int(block)) for block in (blocks[0, 0], blocks[-1, -1]))
    index = tuple(slice(a.start, b.stop) for a, b in zip(first, last, strict=True))
    text = format_index(index)
    holders = subject.holders[blocks].ravel()
    if blocks.size > 1:
        in_order = holders[np.argsort(subject.numbers(holders))]
        lines = [f"{text}, {blocks.size:,} blocks", format_devices(subject, in_order)]
    else:
        lines = [text, _replicas(subject, holders)]
    if grid.process_of is not None:
        lines.append(format_processes(processes_at(subject, holders)))
    if subject.block_bytes is not None:
        lines.append(f"{format_bytes(subject.block_bytes)} on each device")
    if subject.has_padding:
        padding, total = padding_of(subject, index, blocks.size)
        lines += [f"{padding:,} of {total:,} elements are padding"] if padding else []
    return "\n".join(lines)


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

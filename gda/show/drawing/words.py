"""What a drawing says of blocks in words: their index, who holds them, how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gda.layout import IntArray
from gda.show.subject import Subject
from gda.spec import Index
from gda.wording import format_bytes

_REPLICAS_NAMED = 8
_RUNS_NAMED = 4


def describe(subject: Subject, blocks: IntArray) -> str:
    """Return some lines about the blocks of these numbers, ``[rows, columns]``, a rectangle.

    >>> from gda.grid import ShardGrid
    >>> subject = Subject(ShardGrid((8, 2), {'x': 4, 'y': 2}, ('x',)), dtype=np.dtype('float32'))
    >>> print(describe(subject, np.array([[1]])))
    [2:4, :]
    device 2 (replica 0), device 3 (replica 1)
    16 B on each device
    """
    first, last = int(blocks[0, 0]), int(blocks[-1, -1])
    grid = subject.grid
    lines = [format_index(grid.block_index(first), grid.block_index(last))]
    holders = subject.holders[blocks].ravel()
    if blocks.size > 1:
        lines[0] += f", {blocks.size:,} blocks"
        lines.append(f"devices {format_runs(holders.tolist())}")
    else:
        lines.append(_replicas(subject, holders))
    if grid.process_of is not None:
        lines.append(format_processes(sorted({*subject.owners[blocks].ravel().tolist()})))
    if subject.block_bytes is not None:
        lines.append(f"{format_bytes(subject.block_bytes)} on each device")
    return "\n".join(lines)


def format_index(first: Index, last: Index) -> str:
    """Return the index of all from one block to another, in brackets.

    >>> format_index((slice(0, 2), slice(None)), (slice(2, 4), slice(None)))
    '[0:4, :]'
    """
    slices = [
        ":" if one.start is None else f"{one.start}:{other.stop}"
        for one, other in zip(first, last, strict=True)
    ]
    return f"[{', '.join(slices)}]"


def format_runs(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, and how many they are where not all are said.

    >>> format_runs([3, 0, 1, 2, 8]), format_runs(range(0, 20, 2))
    ('0-3, 8', '0, 2, 4, …, 18 (10 in all)')
    """
    ordered = np.unique(np.fromiter(numbers, np.int64))
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 2) != 1)
    lasts = np.append(firsts[1:], len(ordered)) - 1
    many = len(firsts) > _RUNS_NAMED
    chosen = [0, 1, 2, -1] if many else range(len(firsts))
    runs = [_run(int(ordered[firsts[i]]), int(ordered[lasts[i]])) for i in chosen]
    if not many:
        return ", ".join(runs)
    return f"{', '.join(runs[:3])}, …, {runs[-1]} ({len(ordered):,} in all)"


def format_processes(numbers: Sequence[int]) -> str:
    """Return ``process 3`` or ``processes 0-63``."""
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    return f"processes {format_runs(numbers)}"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """Return how many there are of a thing.

    >>> counted(1, 'block'), counted(4096, 'block'), counted(2, 'process', 'processes')
    ('1 block', '4,096 blocks', '2 processes')
    """
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def label_of(subject: Subject, position: int) -> str:
    """Return the number of a device: ``3`` of ``TPU 3``."""
    return subject.device_name(position).rpartition(" ")[2]


def _run(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}-{last}"


def _replicas(subject: Subject, holders: IntArray) -> str:
    if len(holders) == 1:
        return _name(subject, int(holders[0]))
    is_all = len(holders) <= _REPLICAS_NAMED
    chosen = range(len(holders)) if is_all else (0, 1, len(holders) - 1)
    named = [f"{_name(subject, int(holders[replica]))} (replica {replica})" for replica in chosen]
    if is_all:
        return ", ".join(named)
    return f"{len(holders):,} devices: {named[0]}, {named[1]}, …, {named[2]}"


def _name(subject: Subject, position: int) -> str:
    name = subject.device_name(position)
    return f"device {position}" if subject.device_names is None else name

"""How blocks, devices, processes and amounts are written, wherever a picture tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Index
from gda.layout.text import counted, format_bytes
from gda.show.subject import Subject

# Runs of numbers that are all written; of more, the first ones and how many are left.
_MOST_RUNS = 8
_FIRST_RUNS = 6
_FEWEST_STEPS = 4


def format_index(first: Index, last: Index | None = None) -> str:
    """Return an index as it stands between square brackets, or that of all from one to another.

    >>> format_index((slice(0, 2), slice(None))), format_index((slice(0, 2),), (slice(4, 6),))
    ('0:2, :', '0:6')
    """
    return ", ".join(map(format_slice, first, first if last is None else last))


def format_slice(first: slice, last: slice) -> str:
    """Return ``0:2``, or ``:`` for the whole of a dimension."""
    return ":" if first.start is None else f"{first.start}:{last.stop}"


def format_numbers(numbers: IntArray | Sequence[int]) -> str:
    """Return numbers in their order: runs as ``0-7``, equal steps as ``0, 8, … 56``.

    More than eight runs without a rule end in how many numbers are left out.

    >>> format_numbers([0, 1, 2, 3, 8]), format_numbers(range(0, 64, 8))
    ('0-3, 8', '0, 8, … 56')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    # Most blocks have a few devices, of which Python's lists are quicker than NumPy's arrays.
    values = numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)
    starts = [i for i in range(len(values)) if not i or values[i] - values[i - 1] != 1]
    stops = [*starts[1:], len(values)]
    if len(starts) > _FEWEST_STEPS and _are_even(values, starts, stops):
        first, second, last = (_run(values, starts[i], stops[i], "-") for i in (0, 1, -1))
        return f"{first}, {second}, … {last}"
    written = len(starts) if len(starts) <= _MOST_RUNS else _FIRST_RUNS
    parts = [_run(values, starts[i], stops[i], ", ") for i in range(written)]
    left = len(values) - stops[written - 1]
    return ", ".join(parts) + (f", {format_more(left)}" if left else "")


def _are_even(values: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Return whether runs are equally long and their starts equally far apart."""
    lengths = {stop - start for start, stop in zip(starts, stops, strict=True)}
    steps = {values[second] - values[first] for first, second in pairwise(starts)}
    return len(lengths) == len(steps) == 1


def _run(values: Sequence[int], start: int, stop: int, between_two: str) -> str:
    first, last = values[start], values[stop - 1]
    between = "-" if stop - start > 2 else between_two
    return str(first) if stop - start == 1 else f"{first}{between}{last}"


def format_more(count: int) -> str:
    """Return what stands for things left out: ``… 4,090 more``."""
    return f"… {count:,} more"


def format_devices(subject: Subject, positions: IntArray) -> str:
    """Return ``TPU 0-3``; ``device 0`` or ``devices 0-3`` where they have no names."""
    is_word = len(positions) > 1 and subject.device_ids is None
    kind = f"{subject.device_kind}s" if is_word else subject.device_kind
    return f"{kind} {format_numbers(subject.numbers(positions))}"


def processes_at(subject: Subject, positions: IntArray) -> IntArray:
    """Return the processes of some devices, ascending; none where the grid knows none."""
    process_of = subject.grid.process_of
    if process_of is None:
        return np.zeros(0, np.int64)
    processes = process_of[positions]
    return processes if len(processes) == 1 else np.unique(processes)


def format_processes(processes: IntArray) -> str:
    """Return ``process 1`` or ``processes 0-3``."""
    word = "process" if len(processes) == 1 else "processes"
    return f"{word} {format_numbers(processes)}"


def title(subject: Subject) -> str:
    """Return what it is: kind, shape and dtype."""
    dtype = "" if subject.dtype is None else f" {subject.dtype}"
    return f"{subject.kind} {subject.shape}{dtype}"


def facts(subject: Subject) -> list[tuple[str, str]]:
    """Return what there is to say of it beside its kind, shape and dtype, by key words.

    >>> from gda.show.subject import subject_of
    >>> facts(subject_of((8, 2), {'x': 4, 'y': 2}, ('x',), dtype='float32'))[-1]
    ('bytes', '16 B per device, 128 B in all, 64 B without replicas')
    """
    found = [("mesh", _mesh(subject)), ("spec", subject.spec), ("blocks", _blocks(subject))]
    if subject.block_bytes is not None:
        found.append(("bytes", _bytes(subject, subject.block_bytes)))
    if subject.memory_kind is not None:
        found.append(("memory", subject.memory_kind))
    return found


def _mesh(subject: Subject) -> str:
    grid = subject.grid
    devices = counted(grid.num_devices, "device")
    if grid.processes is not None:
        devices += f", {counted(grid.num_processes, 'process', 'processes')}"
    return f"{subject.mesh}: {devices}"


def _blocks(subject: Subject) -> str:
    grid = subject.grid
    if grid.num_shards == 1:
        return f"1, the whole, {where_held(subject)}"
    return f"{grid.num_shards:,} of {grid.shard_shape}, {where_held(subject)}"


def where_held(subject: Subject) -> str:
    """Return on how many devices each block is, or the one block there is."""
    grid = subject.grid
    if grid.num_shards > 1:
        return f"each on {counted(grid.num_replicas, 'device')}"
    on_each = "each of " if grid.num_devices > 1 else ""
    return f"on {on_each}{counted(grid.num_devices, 'device')}"


def _bytes(subject: Subject, each: int) -> str:
    grid = subject.grid
    text = f"{format_bytes(each)} per device, {format_bytes(each * grid.num_devices)} in all"
    once = format_bytes(each * grid.num_shards)
    return text if grid.num_replicas == 1 else f"{text}, {once} without replicas"

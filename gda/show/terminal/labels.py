"""How blocks, devices and processes are written, wherever a picture names them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gda.layout import IntArray
from gda.show.subject import Subject
from gda.spec import Index
from gda.wording import format_bytes

# Runs of numbers that are all written; of more, the first ones and how many are left.
_MOST_RUNS = 8
_FIRST_RUNS = 6
_FEWEST_STEPS = 4


def format_index(index: Index) -> str:
    """Return an index as it stands between square brackets; ``()`` for that of a scalar.

    >>> format_index((slice(0, 2), slice(None)))
    '0:2, :'
    """
    return ", ".join(map(format_slice, index)) or "()"


def format_slice(part: slice) -> str:
    """Return ``0:2``, or ``:`` for the whole of a dimension."""
    return ":" if part.start is None else f"{part.start}:{part.stop}"


def format_numbers(numbers: IntArray | Sequence[int]) -> str:
    """Return numbers in their order: runs as ``0-7``, equal steps as ``0, 8, … 56``.

    More than eight runs without a rule end in how many numbers are left out.

    >>> format_numbers([0, 1, 2, 3, 8]), format_numbers(range(0, 64, 8))
    ('0-3, 8', '0, 8, … 56')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    values = np.asarray(numbers, np.int64)
    cuts = (np.flatnonzero(values[1:] - values[:-1] != 1) + 1).tolist()
    bounds = list(zip([0, *cuts], [*cuts, len(values)], strict=True))
    if len(bounds) > _FEWEST_STEPS and _are_even(values, bounds):
        first, second, last = (_run(values, *bounds[i], "-") for i in (0, 1, -1))
        return f"{first}, {second}, … {last}"
    written = bounds if len(bounds) <= _MOST_RUNS else bounds[:_FIRST_RUNS]
    parts = [_run(values, start, stop, ", ") for start, stop in written]
    left = len(values) - written[-1][1]
    return ", ".join(parts) + (f", {format_more(left)}" if left else "")


def _are_even(values: IntArray, bounds: Sequence[tuple[int, int]]) -> bool:
    """Return whether runs are equally long and their starts equally far apart."""
    starts = values[[start for start, _ in bounds]]
    is_even = len({stop - start for start, stop in bounds}) == 1
    return is_even and bool((np.diff(starts) == starts[1] - starts[0]).all())


def _run(values: IntArray, start: int, stop: int, between_two: str) -> str:
    first, last = values[start], values[stop - 1]
    between = "-" if stop - start > 2 else between_two
    return str(first) if stop - start == 1 else f"{first}{between}{last}"


def format_more(count: int) -> str:
    """Return what stands for things left out: ``… 4,090 more``."""
    return f"… {count:,} more"


def format_devices(subject: Subject, positions: IntArray, *, is_short: bool = False) -> str:
    """Return ``TPU 0-3``, or ``devices 0-3`` where they have no names; ``0-3`` if short."""
    if subject.device_names is None:
        word = "device" if len(positions) == 1 else "devices"
        return format_numbers(positions) if is_short else f"{word} {format_numbers(positions)}"
    names = [subject.device_names[position] for position in positions.tolist()]
    if len(names) == 1:
        return names[0].rpartition(" ")[2] if is_short else names[0]
    kinds, _, numbers = zip(*(name.rpartition(" ") for name in names), strict=True)
    if len(set(kinds)) > 1 or not all(number.isdecimal() for number in numbers):
        more = [format_more(len(names) - _MOST_RUNS)] if len(names) > _MOST_RUNS else []
        return ", ".join([*names[:_MOST_RUNS], *more])
    text = format_numbers(list(map(int, numbers)))
    return text if is_short or not kinds[0] else f"{kinds[0]} {text}"


def processes_at(subject: Subject, positions: IntArray) -> IntArray:
    """Return the processes of some devices, ascending; none where the grid knows none."""
    process_of = subject.grid.process_of
    if process_of is None:
        return np.zeros(0, np.int64)
    processes = process_of[positions]
    return processes if len(processes) == 1 else np.unique(processes)


def format_processes(processes: IntArray, *, is_short: bool = False) -> str:
    """Return ``process 1`` or ``processes 0-3``; ``p1`` or ``p0-3`` if short; of none nothing."""
    if not len(processes):
        return ""
    word = "p" if is_short else "process " if len(processes) == 1 else "processes "
    return word + format_numbers(processes)


def facts(subject: Subject) -> list[tuple[str, str]]:
    """Return what there is to say beside the drawing, as pairs of a word and a text."""
    grid = subject.grid
    axes = ", ".join(f"{name}={size}" for name, size in grid.mesh_shape.items()) or "no axes"
    devices = _count(grid.num_devices, "device")
    if grid.processes is not None:
        devices += f", {_count(grid.num_processes, 'process', 'processes')}"
    return [
        ("mesh", f"{axes}: {devices}"),
        ("spec", subject.spec),
        ("blocks", _blocks(subject)),
        *([("bytes", bytes_text)] if (bytes_text := _bytes(subject)) else []),
    ]


def title(subject: Subject) -> str:
    """Return what it is: kind, shape and dtype."""
    dtype = "" if subject.dtype is None else f" {subject.dtype}"
    return f"{subject.kind} {subject.shape}{dtype}"


def _blocks(subject: Subject) -> str:
    grid = subject.grid
    if grid.num_shards == 1:
        on_each = "each of " if grid.num_devices > 1 else ""
        return f"1, the whole, on {on_each}{_count(grid.num_devices, 'device')}"
    where = f"each on {_count(grid.num_replicas, 'device')}"
    return f"{grid.num_shards:,} of {grid.shard_shape}, {where}"


def _bytes(subject: Subject) -> str:
    each = subject.block_bytes
    if each is None:
        return ""
    grid = subject.grid
    text = f"{format_bytes(each)} per device, {format_bytes(each * grid.num_devices)} in all"
    once = format_bytes(each * grid.num_shards)
    return text if grid.num_replicas == 1 else f"{text}, {once} without replicas"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"

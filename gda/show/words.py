"""The words of a picture for devices, facts about an array and omitted parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Index
from gda.layout.text import counted, format_bytes, format_numbers
from gda.show.subject import Subject


def format_devices(subject: Subject, positions: IntArray) -> str:
    """Return ``TPU 0-3``; ``device 0`` or ``devices 0-3`` if they have no names."""
    is_word = len(positions) > 1 and subject.device_ids is None
    kind = f"{subject.device_kind}s" if is_word else subject.device_kind
    return f"{kind} {format_numbers(subject.numbers(positions))}"


def processes_at(subject: Subject, positions: IntArray) -> IntArray:
    """Return the processes of some devices, ascending; none if the grid has no process numbers."""
    process_of = subject.grid.process_of
    if process_of is None:
        return np.zeros(0, np.int64)
    processes = process_of[positions]
    return processes if len(processes) == 1 else np.unique(processes)


def facts(subject: Subject) -> list[tuple[str, str]]:
    """Return the facts besides kind, shape and dtype, by key words."""
    found = [("mesh", _mesh(subject)), ("spec", subject.spec), ("blocks", _blocks(subject))]
    if subject.block_bytes is not None:
        found.append(("bytes", _bytes(subject, subject.block_bytes)))
    if subject.has_padding:
        total = math.prod(subject.grid.padded_shape)
        padding = total - math.prod(subject.shape)
        share = f"{100 * padding / total:.3g} %"
        found.append(("padding", f"{padding:,} of {total:,} elements, {share}"))
    if subject.memory_kind is not None:
        found.append(("memory", subject.memory_kind))
    return found


def padding_of(subject: Subject, index: Index, num_blocks: int = 1) -> tuple[int, int]:
    """Return the elements of padding, and all elements, of the blocks in a rectangle."""
    ends = (part.indices(size) for part, size in zip(index, subject.shape, strict=True))
    total = num_blocks * math.prod(subject.grid.shard_shape)
    return total - math.prod(stop - start for start, stop, _ in ends), total


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
    """Return the number of devices of each block, or of the only block, in words."""
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


# The middle of a long sequence is omitted.


@dataclass(frozen=True)
class Gap:
    """A placeholder for a number of omitted things."""

    count: int


def fold(count: int, room: int) -> Sequence[int | Gap]:
    """Return the numbers below ``count`` in at most ``room`` places (3 or more), with one gap."""
    if count <= room:
        return range(count)
    first = min(-(-2 * (room - 1) // 3), room - 2)
    last = room - 1 - first
    return [*range(first), Gap(count - first - last), *range(count - last, count)]

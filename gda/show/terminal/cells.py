"""The texts in the cells of a picture, for blocks and for gaps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gda.layout.numbering import IntArray
from gda.layout.spec import Index
from gda.layout.text import (
    format_index,
    format_more,
    format_numbers,
    format_processes,
    format_slice,
)
from gda.show.subject import Subject
from gda.show.terminal.frames import FAINT, PLAIN, PROCESS, Cell, Style
from gda.show.words import Gap, format_devices, padding_of, processes_at

_FEW_DEVICES = 1024

PADDING = "░"
"""Beside the index of a block: once if a part of it is padding, three times if all is."""


class Manner(Enum):
    """The ways to write a block."""

    INDEX = "its index, devices and processes"
    WORDS = "its devices and processes; the index stands beside the box"
    NUMBERS = "the numbers of these"


@dataclass(frozen=True, eq=False)
class _ShownBlock:
    index: Index
    positions: IntArray
    processes: IntArray


class Cells:
    """The cells of a subject's blocks, made on demand."""

    def __init__(self, subject: Subject) -> None:
        grid = subject.grid
        self.subject = subject
        self.parts = subject.grid.parts
        self._process_numbers = () if grid.processes is None else grid.processes.numbers
        self._blocks: dict[int, _ShownBlock] = {}

    def cell(self, part_of: Mapping[int, int], manner: Manner) -> Cell:
        """Return the cell of the block at these parts of the dimensions, by default 0."""
        block = self._block(part_of)
        # The lines above the box name a single process.
        has_processes = len(self._process_numbers) > 1
        if manner is Manner.NUMBERS:
            lines = [format_numbers(self.subject.numbers(block.positions))]
            lines += [f"p{format_numbers(block.processes)}"] if has_processes else []
        else:
            lines = [format_devices(self.subject, block.positions)]
            lines += [format_processes(block.processes)] if has_processes else []
        if manner is Manner.INDEX:
            lines.insert(0, format_index(block.index)[1:-1] + self._mark(block.index))
        return Cell(lines, self._style(block))

    def index(self, part_of: Mapping[int, int]) -> Index:
        return self._block(part_of).index

    def gap(self, gap: Gap) -> Cell:
        return Cell([format_more(gap.count)], FAINT, is_gap=True)

    def edge(self, dimension: int, part: int | Gap, *, is_narrow: bool) -> Cell:
        """Return the label beside a row or above a column; in two lines if it is narrow."""
        if isinstance(part, Gap):
            first, last = f"… {part.count:,}", "more"
            return Cell([first, last] if is_narrow else [f"{first} {last}"], FAINT)
        index = self.index({dimension: part})
        at = index[dimension]
        text = format_slice(at, at) + self._mark(index)
        start, _, stop = text.partition(":")
        return Cell([f"{start}:", stop] if is_narrow else [text], FAINT)

    def _mark(self, index: Index) -> str:
        padding, total = padding_of(self.subject, index)
        return f" {PADDING * (1 if padding < total else 3)}" if padding else ""

    @property
    def key_to_numbers(self) -> str:
        """The meaning of the numbers in cells of the manner ``NUMBERS``."""
        kind, has_ids = self.subject.device_kind, self.subject.device_ids is not None
        what = f"numbers of devices ({kind})" if has_ids else f"numbers of {kind}s"
        processes = ", p0 for process 0" if len(self._process_numbers) > 1 else ""
        return f"{what}{processes}"

    def _block(self, part_of: Mapping[int, int]) -> _ShownBlock:
        grid = self.subject.grid
        coordinates = [part_of.get(dimension, 0) for dimension in range(len(self.parts))]
        number = int(np.ravel_multi_index(coordinates, self.parts)) if coordinates else 0
        if number not in self._blocks:
            positions = self._holders(number, coordinates)
            processes = processes_at(self.subject, positions)
            self._blocks[number] = _ShownBlock(grid.block_index(number), positions, processes)
        return self._blocks[number]

    def _holders(self, number: int, coordinates: Sequence[int]) -> IntArray:
        grid = self.subject.grid
        first = [at * step for at, step in zip(coordinates, grid.shard_shape, strict=True)]
        has_elements = all(at < size for at, size in zip(first, grid.global_shape, strict=True))
        # For all blocks at once if they are few. A block without elements has none to locate.
        if grid.num_devices <= _FEW_DEVICES or not has_elements:
            return self.subject.holders[number]
        return grid.locate(first)

    def _style(self, block: _ShownBlock) -> Style:
        """Return the style of the process, counted from 0; plain for a block of several."""
        if len(block.processes) != 1:
            return PLAIN
        return f"{PROCESS} {bisect_left(self._process_numbers, block.processes[0])}"

"""Bytes from the host of one process to the hosts of others.

They travel by an all-gather among the processes that need them, through one device of each.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.buffers import aligned_empty
from gda.multihost.allgather import Bytes, all_gather
from gda.multihost.failure_watch import FailureWatch

MemoryOf = Callable[[int], np.ndarray[Any, Any] | None]

# The most bytes that a device receives at a time, and sends.
_RECEIVED_BYTES = 64 * 2**20
_SENT_BYTES = 8 * 2**20


class Sent(NamedTuple):
    """Bytes that one process has and others need."""

    sender: int
    processes: tuple[int, ...]  # the sender and those that need them, ascending
    nbytes: int

    @classmethod
    def to_holders(cls, sender: int, holders: Iterable[int], nbytes: int) -> Sent:
        return cls(sender, tuple(sorted({sender, *holders})), nbytes)


def exchange(
    parts: Sequence[Sent],
    memory_of: MemoryOf,
    watch: FailureWatch,
    max_bytes: int = _RECEIVED_BYTES,
) -> None:
    """Send the parts of this process, and fill the memory of those that it gets. Communicates.

    ``parts`` are the same in all processes that are in any of them. ``memory_of`` returns the
    memory of a part, or ``None`` where it is not wanted. A device receives at most ``max_bytes``.
    """
    among: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        if part.processes[1:]:
            among[part.processes].append(number)
    # In the same order in every process: some may be in several of these groups.
    for processes in sorted(among):
        if jax.process_index() in processes:
            _Sharers(processes, among[processes], parts, memory_of, max_bytes).exchange(watch)


class _Span(NamedTuple):
    """A range of the bytes of a part, and its place in what is sent in one round."""

    part: int
    start: int
    stop: int
    offset: int


class _Sharers:
    """Processes that send parts to each other, in rounds of one length."""

    def __init__(
        self,
        processes: tuple[int, ...],
        numbers: Sequence[int],
        parts: Sequence[Sent],
        memory_of: MemoryOf,
        max_bytes: int,
    ) -> None:
        self._processes, self._parts, self._memory_of = processes, parts, memory_of
        self._numbers: dict[int, list[int]] = {process: [] for process in processes}
        for number in numbers:
            self._numbers[parts[number].sender].append(number)
        most = max(sum(parts[n].nbytes for n in own) for own in self._numbers.values())
        # A power of two, because every length compiles a program; or what max_bytes allows.
        most_received = max(max_bytes // _power_of_two(len(processes)), 1)
        self._length = min(_power_of_two(most), _SENT_BYTES, most_received)
        self._count = -(-most // self._length)
        self._flat: dict[int, Bytes | None] = {}

    def exchange(self, watch: FailureWatch) -> None:
        spans = [self._rounds_of(self._numbers[process]) for process in self._processes]
        own = self._processes.index(jax.process_index())
        rounds = itertools.islice(zip(*spans, strict=True), self._count)
        works = (
            (each, partial(all_gather, self._packed(each[own]), self._processes)) for each in rounds
        )
        watch.in_turn(works, self._unpack)

    def _rounds_of(self, numbers: Sequence[int]) -> Iterator[list[_Span]]:
        """Yield the spans of each round; after the last ones, empty lists without end."""
        spans: list[_Span] = []
        offset = 0
        for number in numbers:
            start, nbytes = 0, self._parts[number].nbytes
            while start < nbytes:
                stop = min(nbytes, start + self._length - offset)
                spans.append(_Span(number, start, stop, offset))
                offset += stop - start
                start = stop
                if offset == self._length:
                    yield spans
                    spans, offset = [], 0
        yield spans
        yield from itertools.repeat([])

    def _packed(self, spans: list[_Span]) -> Bytes:
        data = aligned_empty(self._length, np.uint8)
        for span in spans:
            flat: Any = self._flat_of(span.part)
            data[span.offset : span.offset + span.stop - span.start] = flat[span.start : span.stop]
            self._drop(span)
        return data

    def _unpack(self, spans_of: Sequence[list[_Span]], received: Bytes) -> None:
        for process, spans, data in zip(self._processes, spans_of, received, strict=True):
            if process == jax.process_index():
                continue
            for span in spans:
                flat = self._flat_of(span.part)
                if flat is not None:
                    size = span.stop - span.start
                    flat[span.start : span.stop] = data[span.offset : span.offset + size]
                    memory: Any = self._memory_of(span.part)
                    if span.stop == len(flat) and not memory.flags.c_contiguous:
                        memory[...] = flat.view(memory.dtype).reshape(memory.shape)
                self._drop(span)

    def _flat_of(self, number: int) -> Bytes | None:
        """Return the contiguous bytes of a part: its memory, or a copy until all are exchanged."""
        if number not in self._flat:
            memory = self._memory_of(number)
            if memory is not None:
                memory = np.ascontiguousarray(memory).reshape(-1).view(np.uint8)
            self._flat[number] = memory
        return self._flat[number]

    def _drop(self, span: _Span) -> None:
        if span.stop == self._parts[span.part].nbytes:
            self._flat.pop(span.part, None)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length()

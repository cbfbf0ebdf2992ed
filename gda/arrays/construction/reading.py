"""The reads of many arrays in one run: by block from callbacks, and by box from sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from gda.arrays.construction.blocks import LARGE_BYTES
from gda.arrays.construction.filling import Filling
from gda.arrays.construction.pending import PendingArray
from gda.storage.options import Options, shown
from gda.storage.tasks import AsyncTask, Task, Transfer, run

Report = Callable[[int], object]  # called with the bytes of each read


class Reads(Protocol):
    """The reads of some arrays."""

    @property
    def builds(self) -> Sequence[PendingArray]:
        """The arrays that threads may read; small tensors take longer to place than to read."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        ...

    def tasks(self, report: Report, /) -> Iterable[Task | AsyncTask]: ...


class ReadsOfArray:
    """The reads of the blocks of one array, without the ``others``."""

    def __init__(self, pending: PendingArray, others: Collection[int] = ()) -> None:
        self.builds = (pending,)
        self._others = others

    @property
    def nbytes(self) -> int:
        return self.builds[0].nbytes

    def tasks(self, report: Report, /) -> Iterator[Task | AsyncTask]:
        (pending,) = self.builds
        numbers = [n for n in range(len(pending.plan.distinct)) if n not in self._others]
        source, options = pending.source, pending.options
        # Empty blocks are not read: some libraries refuse.
        if source is not None and options is not None and math.prod(pending.reader.shape):
            yield from Filling(pending, source, options, report).tasks(numbers)
            return
        for number in numbers:
            read = partial(pending.read_block, number)
            yield Task(pending.held_bytes(), read, partial(_keep, pending, number, report))


def _keep(pending: PendingArray, number: int, report: Report, block: Any) -> Transfer | None:
    report(pending.block_bytes)
    return pending.keep(number, block)


def read_all(reads: Sequence[Reads], options: Options, description: str) -> None:
    """Read the blocks of all arrays in one run, so that the reads of small arrays overlap too."""
    with shown(options.progress, description) as show:
        report = reporter(reads, show)
        run(chain.from_iterable(each.tasks(report) for each in reads), with_workers(options, reads))


def with_workers(options: Options, reads: Sequence[Reads]) -> Options:
    """Return the options, with the number of threads that suits all sources if none was given."""
    builds = [build for each in reads for build in each.builds]
    if options.max_workers is not None or not builds:
        return options
    workers = min(1 if each.source is None else each.source.workers for each in builds)
    # Several threads would mostly wait for Python's lock.
    is_small = sum(each.nbytes for each in builds) < len(builds) * LARGE_BYTES
    return options if is_small or workers == 1 else replace(options, max_workers=workers)


def reporter(reads: Sequence[Reads], show: Callable[[int, int], object]) -> Callable[[int], None]:
    done = total = 0

    def report(nbytes: int) -> None:
        nonlocal done, total
        # Only now: the size of a callback's blocks is known after the first read.
        total = total or sum(each.nbytes for each in reads)
        done += nbytes
        show(done, total)

    return report

"""The reads of many arrays in one run: by block from callbacks, by box from sources, or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from gda.arrays.construction.blocks import LARGE_BYTES
from gda.arrays.construction.filling import Filling
from gda.arrays.construction.pending import PendingArray
from gda.arrays.construction.reading_by_rows import TensorByRows, tasks_by_rows
from gda.storage.options import Options, counting
from gda.storage.tasks import AsyncTask, Task, run


def read_all(arrays: Sequence[PendingArray | TensorByRows], options: Options, name: str) -> None:
    """Read all blocks in one run, so that the reads of small arrays overlap too."""
    alone = [each for each in arrays if isinstance(each, PendingArray)]
    tensors = [each for each in arrays if isinstance(each, TensorByRows)]
    # Small tensors take longer to place than to read.
    large = [tensor.kind.build for tensor in tensors if tensor.kind.is_large]
    with counting(options.progress, name, lambda: nbytes_of(arrays)) as report:
        tasks = [tasks_of(each, report) for each in alone]
        if tensors:
            tasks.append(tasks_by_rows(tensors, options.max_bytes, report))
        run(chain.from_iterable(tasks), with_workers(options, [*alone, *large]))


def tasks_of(
    pending: PendingArray, report: Callable[[int], object], others: Collection[int] = ()
) -> Iterable[Task | AsyncTask]:
    """Return the tasks that read the blocks of an array, without the ``others``."""
    numbers = [n for n in range(len(pending.plan.distinct)) if n not in others]
    source, options = pending.source, pending.options
    # Empty blocks are not read: some libraries refuse.
    if source is not None and options is not None and math.prod(pending.reader.shape):
        return Filling(pending, source, options, report).tasks(numbers)
    return map(partial(pending.task, report), numbers)


def nbytes_of(arrays: Sequence[PendingArray | TensorByRows]) -> int:
    return sum(each.nbytes for each in arrays)


def with_workers(options: Options, arrays: Sequence[PendingArray]) -> Options:
    """Return the options, with the number of threads that suits all sources if none was given."""
    if options.max_workers is not None or not arrays:
        return options
    workers = min(1 if each.source is None else each.source.workers for each in arrays)
    # Several threads would mostly wait for Python's lock.
    is_small = nbytes_of(arrays) < len(arrays) * LARGE_BYTES
    return options if is_small or workers == 1 else replace(options, max_workers=workers)

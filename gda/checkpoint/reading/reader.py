"""The reads of a restore: each chunk that this process needs is read once, and checked.

The chunks are compared with the sizes of the files before they are read; where this process reads
alone, before memory is allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from gda.arrays.buffers import Buffers
from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.checkpoint.reading.blocks import Arrival, Use, buffered_bytes, read_chunk, uses_of
from gda.checkpoint.reading.files import Files
from gda.checkpoint.reading.manifest_at import check_not_replaced
from gda.checkpoint.reading.read_once import read_chunks_once
from gda.multihost.settings import own_settings
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.progress import counting
from gda.storage.stores.errors import CorruptionError
from gda.storage.stores.opening import Store, options_for
from gda.trees.records.restored_leaves import RestoredLeaf
from gda.trees.records.structure import noting_path

_FILES_IN_A_CHECK = 16
_SLOW_CHECK = 0.005  # seconds
_CHECKS_AT_A_TIME = 32
_MOST_BYTES_IN_A_TASK = 16 * 2**20


def read_arrays(
    store: Store,
    manifest: Manifest,
    leaves: Sequence[RestoredLeaf],
    options: Options,
    processes: tuple[int, ...],
) -> list[Any]:
    """Return the value of each leaf.

    Communicates if ``processes``, those that read together, are not empty.
    """
    options = options_for(store, options)
    arrivals = [Arrival(leaf) for leaf in leaves]
    try:
        _read(Files(store, manifest), arrivals, processes, options)
    except CorruptionError:
        check_not_replaced(store, manifest)
        raise
    return [arrival.value for arrival in arrivals]


def _read(
    files: Files, arrivals: Sequence[Arrival], processes: tuple[int, ...], options: Options
) -> None:
    """Read the chunks that this process needs, or those of all ``processes``, each in one."""
    arrays = files.manifest.arrays
    # The bytes that only pass through the host; memory that becomes an array needs no bound. The
    # groups of processes that read together are the same.
    sizes = [each.most_passing_nbytes if processes else each.passing_nbytes for each in arrivals]
    groups = [
        (group, uses_of(group, files.manifest))
        for group in tasks.groups_within(arrivals, sizes, options.max_bytes)
    ]
    chunks = [chunk for _, uses in groups for chunk in uses]
    missing: set[Chunk] = set()
    checked: set[int] = set()
    if not processes:
        _check(files, chunks, options, checked)
    total = sum(arrays[array].nbytes_per_chunk for array, _ in chunks)
    with counting(options.progress, "restore", total) as add:

        def arrived(chunk: Chunk) -> None:
            if chunk in missing:
                missing.remove(chunk)
                add(arrays[chunk[0]].nbytes_per_chunk)

        def check_and_read(uses: dict[Chunk, list[Use]]) -> None:
            _check(files, [*uses], options, checked)
            _read_chunks(files, uses, options, arrived)

        for group, uses in groups:
            missing.update(uses)
            buffers = Buffers(sum(len(arrival.boxes) for arrival in group))
            for arrival in group:
                with noting_path(arrival.leaf.saved.path):
                    arrival.allocate(buffers, () if processes else arrival.made_of_chunks)
            if processes:
                read_chunks_once(files, group, processes, check_and_read)
            else:
                _read_chunks(files, uses, options, arrived)
            for chunk in uses:  # also those that other processes have read
                arrived(chunk)
            _finish(group)


def _check(files: Files, chunks: Sequence[Chunk], options: Options, checked: set[int]) -> None:
    """Raise ``CorruptionError`` unless sizes and metadata of the files are right.

    ``checked`` has the arrays whose metadata was checked before; those of these chunks are added.
    """
    last_of = {array: chunk for array, chunk in chunks if array not in checked}
    checked.update(last_of)
    each = (chunks[i : i + _FILES_IN_A_CHECK] for i in range(0, len(chunks), _FILES_IN_A_CHECK))
    rest = (tasks.Task(2**20, partial(files.check, some, last_of)) for some in each)
    for task in rest:
        begun = time.monotonic()
        task.work()
        if time.monotonic() - begun > _SLOW_CHECK:
            break
    # A remote file system may take milliseconds for each file, in which no core is busy. The files
    # of a local one are checked in a third of the time by one thread.
    workers = _CHECKS_AT_A_TIME if options.are_for_threads else 1
    tasks.run(rest, replace(options, max_workers=workers))


def _read_chunks(
    files: Files,
    uses: dict[Chunk, list[Use]],
    options: Options,
    report: Callable[[Chunk], object],
) -> None:
    chunks = sorted(uses)
    sizes = [files.manifest.arrays[array].nbytes_per_chunk for array, _ in chunks]
    # A thread waits for Python between two tasks, so it reads several chunks in one. Requests to an
    # object store take long, and are to be as many at a time as they can be.
    most = min(_MOST_BYTES_IN_A_TASK, sum(sizes) // (8 * (options.max_workers or 1)))
    tasks.run(
        (
            tasks.Task(
                max([buffered_bytes(files, chunk, uses[chunk]) for chunk in group]),
                partial(_read_in_order, files, {chunk: uses[chunk] for chunk in group}),
                lambda _, group=group: [report(chunk) for chunk in group],
            )
            for group in tasks.groups_within(chunks, sizes, 0 if files.store.is_remote else most)
        ),
        options,
    )


def _read_in_order(files: Files, uses: dict[Chunk, list[Use]]) -> None:
    for chunk, of_chunk in uses.items():
        read_chunk(files, chunk, of_chunk)


def _finish(group: Iterable[Arrival]) -> None:
    with own_settings():
        for arrival in group:
            with noting_path(arrival.leaf.saved.path):
                arrival.finish()
    # The blocks on the host must live until they are transferred.
    jax.block_until_ready([arrival.value for arrival in group if not arrival.stays_on_host])

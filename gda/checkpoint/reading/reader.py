"""The reads of a restore: each chunk that this process needs is read once, and checked.

The chunks are compared with the sizes of the files before they are read; where this process reads
alone, before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax

from gda.arrays.buffers import Buffers
from gda.checkpoint.format.errors import CorruptionError
from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.checkpoint.format.structure import noting_path
from gda.checkpoint.reading.blocks import Arrival, Use, buffered_bytes, read_chunk, uses_of
from gda.checkpoint.reading.files import Files
from gda.checkpoint.reading.manifest_at import check_not_replaced
from gda.checkpoint.reading.read_once import read_chunks_once
from gda.checkpoint.reading.restored_leaves import RestoredLeaf
from gda.checkpoint.stores.opening import Store, options_for
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.progress import counting

_SIZES_IN_A_TASK = 64
_CHECKS_AT_A_TIME = 32


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
    # The groups of processes that read together are the same.
    sizes = [each.most_passing_nbytes if processes else each.passing_nbytes for each in arrivals]
    groups = [
        (group, uses_of(group, files.manifest))
        for group in _groups(arrivals, sizes, options.max_bytes)
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
                    arrival.allocate(buffers)
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
    arrays = {array for array, _ in chunks} - checked
    of_sizes = (
        tasks.Task(0, partial(files.check_sizes, chunks[first : first + _SIZES_IN_A_TASK]))
        for first in range(0, len(chunks), _SIZES_IN_A_TASK)
    )
    of_metadata = (
        tasks.Task(2**20, partial(files.check_metadata, each)) for each in sorted(arrays)
    )
    # A remote file system may take milliseconds for each, in which no core is busy.
    workers = _CHECKS_AT_A_TIME if options.are_for_threads else 1
    tasks.run(chain(of_sizes, of_metadata), replace(options, max_workers=workers))
    checked |= arrays


def _groups(
    arrivals: Sequence[Arrival], sizes: Sequence[int], max_bytes: int | None
) -> Iterator[list[Arrival]]:
    """Yield groups of arrays to read together: as many as ``max_bytes`` allows, at least one.

    ``sizes`` are the bytes that only pass through the host; memory that becomes an array needs no
    bound.
    """
    group: list[Arrival] = []
    held = 0
    for arrival, nbytes in zip(arrivals, sizes, strict=True):
        if group and max_bytes is not None and held + nbytes > max_bytes:
            yield group
            group, held = [], 0
        group.append(arrival)
        held += nbytes
    if group:
        yield group


def _read_chunks(
    files: Files,
    uses: dict[Chunk, list[Use]],
    options: Options,
    report: Callable[[Chunk], object],
) -> None:
    each = [
        tasks.Task(
            buffered_bytes(files, chunk, of_chunk),
            partial(read_chunk, files, chunk, of_chunk),
            lambda _, chunk=chunk: report(chunk),
        )
        for chunk, of_chunk in sorted(uses.items())
    ]
    tasks.run(each, options)


def _finish(group: Iterable[Arrival]) -> None:
    with jax.transfer_guard("allow"):  # whatever the user has set
        for arrival in group:
            with noting_path(arrival.leaf.saved.path):
                arrival.finish()
    # The blocks on the host must live until they are transferred.
    jax.block_until_ready([arrival.value for arrival in group if not arrival.stays_on_host])

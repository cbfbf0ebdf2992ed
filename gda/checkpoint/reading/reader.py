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

from gda.checkpoint.format.errors import CorruptionError
from gda.checkpoint.format.manifest import Manifest, StoredArray
from gda.checkpoint.format.structure import noting_path
from gda.checkpoint.reading.blocks import Arrival, Use, buffered_bytes, read_chunk, uses_of
from gda.checkpoint.reading.files import Chunk, Files
from gda.checkpoint.reading.manifest_at import check_not_replaced
from gda.checkpoint.reading.read_once import read_chunks_once
from gda.checkpoint.reading.restored_leaves import RestoredLeaf
from gda.checkpoint.stores.opening import options_for
from gda.checkpoint.stores.protocol import Store
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

    Args:
      processes: those that read together, if ``options.read_once`` asks for it; or none.

    Raises:
      CorruptionError: something is damaged or missing.
      RuntimeError: another checkpoint replaced it meanwhile.
      OSError: reading failed for another reason; the message names the file.
    """
    options = options_for(store, options)
    files = Files(store, manifest)
    arrivals = [Arrival(leaf) for leaf in leaves]
    try:
        if processes:
            _read_together(files, arrivals, processes, options)
        else:
            _read_alone(files, arrivals, options)
    except CorruptionError:
        check_not_replaced(store, manifest)
        raise
    return [arrival.value for arrival in arrivals]


def _read_alone(files: Files, arrivals: Sequence[Arrival], options: Options) -> None:
    """Read the chunks that this process needs."""
    arrays = files.manifest.arrays
    sizes = [0 if arrival.stays_on_host else arrival.nbytes for arrival in arrivals]
    groups = [
        (group, uses_of(group, arrays)) for group in _groups(arrivals, sizes, options.max_bytes)
    ]
    chunks = [chunk for _, uses in groups for chunk in uses]
    _check(files, chunks, options)
    with counting(options.progress, "restore", _nbytes(arrays, chunks)) as add:
        for group, uses in groups:
            _allocate(group)
            _read_chunks(files, uses, options, lambda chunk: add(arrays[chunk[0]].nbytes_per_chunk))
            _finish(group)


def _read_together(
    files: Files, arrivals: Sequence[Arrival], processes: tuple[int, ...], options: Options
) -> None:
    """Read the chunks that the processes need, each in one of them. Communicates."""
    arrays = files.manifest.arrays
    # The same groups in every process.
    sizes = [arrival.most_nbytes for arrival in arrivals]
    groups = [
        (group, [*uses_of(group, arrays)]) for group in _groups(arrivals, sizes, options.max_bytes)
    ]
    missing: set[Chunk] = set()
    checked: set[int] = set()
    total = _nbytes(arrays, [chunk for _, chunks in groups for chunk in chunks])
    with counting(options.progress, "restore", total) as add:

        def arrived(chunk: Chunk) -> None:
            if chunk in missing:
                missing.remove(chunk)
                add(arrays[chunk[0]].nbytes_per_chunk)

        def read(uses: dict[Chunk, list[Use]]) -> None:
            _check(files, [*uses], options, checked)
            _read_chunks(files, uses, options, arrived)

        for group, chunks in groups:
            missing.update(chunks)
            _allocate(group)
            read_chunks_once(files, group, processes, read)
            for chunk in chunks:  # also those that other processes have read
                arrived(chunk)
            _finish(group)


def _check(
    files: Files, chunks: Sequence[Chunk], options: Options, checked: set[int] | None = None
) -> None:
    """Raise ``CorruptionError`` unless sizes and metadata of the files are right.

    Args:
      checked: the arrays whose metadata was checked before; those of these chunks are added.
    """
    checked = set() if checked is None else checked
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


def _nbytes(arrays: Sequence[StoredArray], chunks: Iterable[Chunk]) -> int:
    return sum(arrays[array].nbytes_per_chunk for array, _ in chunks)


def _groups(
    arrivals: Sequence[Arrival], sizes: Sequence[int], max_bytes: int | None
) -> Iterator[list[Arrival]]:
    """Yield groups of arrays to read together: as many as ``max_bytes`` allows, at least one.

    Args:
      sizes: bytes of the blocks that only pass through the host. Memory that becomes the array
        needs no bound.
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


def _allocate(group: Iterable[Arrival]) -> None:
    for arrival in group:
        with noting_path(arrival.leaf.saved.path):
            arrival.allocate()


def _read_chunks(
    files: Files,
    uses: dict[Chunk, list[Use]],
    options: Options,
    report: Callable[[Chunk], object],
) -> None:
    each = [
        tasks.Task(
            buffered_bytes(files, chunk, uses[chunk]),
            lambda chunk=chunk: read_chunk(files, chunk, uses[chunk]),
            lambda _, chunk=chunk: report(chunk),
        )
        for chunk in sorted(uses)
    ]
    tasks.run(each, options)


def _finish(group: Iterable[Arrival]) -> None:
    with jax.transfer_guard("allow"):  # whatever the user has set
        for arrival in group:
            with noting_path(arrival.leaf.saved.path):
                arrival.finish()
    # The blocks on the host must live until they are transferred.
    jax.block_until_ready([arrival.value for arrival in group if not arrival.stays_on_host])

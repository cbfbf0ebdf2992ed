"""The writes of a save: the chunks of this process, and the records of all processes."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.fingerprints.fingerprint import sums_of_host
from gda.arrays.fingerprints.formula import LANES, Words, add, digest_of
from gda.arrays.fingerprints.sums import Sums
from gda.arrays.transport.to_host import HostBlock
from gda.checkpoint.format import zarr_format
from gda.checkpoint.format.chunks import Overlap, chunk_shape_of
from gda.checkpoint.format.manifest import StoredArray
from gda.checkpoint.writing.packing import Pack, fill, packs_of, sums_of
from gda.layout.spec import Shape
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.progress import counting
from gda.storage.stores import checksums
from gda.storage.stores.errors import SaveError
from gda.storage.stores.opening import Store
from gda.trees.records.arrivals import saved_type
from gda.trees.records.recorded_leaves import Leaf, Piece, ValueLeaf
from gda.trees.records.saved_leaves import (
    Keyed,
    SavedLeaf,
    is_on_accelerator,
    kept,
    to_host,
)

CHUNK_BYTES = 16 * 2**20
PACKED_BELOW = 2**20  # bytes of an array; the files of an unpacked array cost some ms


@dataclass(frozen=True)
class Share:
    """The part of this process in the save of a tree: every leaf, and sums that are begun."""

    leaves: Sequence[SavedLeaf | ValueLeaf]
    sums: Mapping[int, Sums] = field(default_factory=dict)  # over its blocks, by leaf

    @cached_property
    def small(self) -> list[SavedLeaf]:
        """The arrays that are packed."""
        return [each for each in self._arrays if each.record.nbytes < PACKED_BELOW]

    @cached_property
    def large(self) -> list[SavedLeaf]:
        """The arrays that are not packed: each is an array on disk."""
        return [each for each in self._arrays if each.record.nbytes >= PACKED_BELOW]

    @property
    def _arrays(self) -> list[SavedLeaf]:
        return [each for each in self.leaves if isinstance(each, SavedLeaf)]

    def kept(self, fingerprints: bool) -> Share:
        """Return the share with blocks that nothing can change any more.

        With ``fingerprints``, accelerators begin the sums of their blocks first: they are faster
        than this process.
        """
        on_accelerators = [
            leaf
            for leaf in self.large
            if any(is_on_accelerator(block.data) for block in leaf.blocks)
        ]
        sums = {leaf.number: leaf.begin_sums() for leaf in on_accelerators if fingerprints}
        return Share([kept(x) if isinstance(x, SavedLeaf) else x for x in self.leaves], sums)


class _Chunk(NamedTuple):
    """A chunk that this process writes."""

    array: StoredArray
    number: int
    made_bytes: int  # of memory that make takes
    # Returns the data, and sums over packed leaves or a source; any thread may call it.
    make: Callable[[], tuple[np.ndarray[Any, Any], dict[int, Words]]]
    release: Callable[[], object]  # called when the chunk is written


class _Written(NamedTuple):
    """A chunk in the store: its array, its number, checksum and size, and sums over leaves."""

    array: str
    number: int
    crc: int
    nbytes: int
    sums: dict[int, Words]


@dataclass(frozen=True)
class Writer:
    """A writer of shares into the directory ``data`` of a store."""

    store: Store
    data: str
    codec: str  # "bytes" or "zstd"
    fingerprints: bool  # True to record those of the arrays
    options: Options

    def write(self, share: Share) -> dict[str, Any]:
        """Write a share; return its part for ``records``, as JSON."""
        sums = dict(share.sums)
        arrays = {leaf.number: self._array_of(leaf) for leaf in share.large}
        packs = packs_of(share.small, self.codec)
        documents = [array for array, _ in packs]
        if jax.process_index() == 0:
            documents += arrays.values()
        chunks = itertools.chain(
            self._large_chunks(share.large, arrays, sums), self._pack_chunks(packs)
        )
        total = sum(leaf.written_bytes for leaf in share.large)
        total += sum(array.grid.num_chunks * array.nbytes_per_chunk for array, _ in packs)
        written = self._written(documents, chunks, total)
        of_array: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for each in written:
            of_array[each.array].append((each.number, each.crc, each.nbytes))
        return {
            "arrays": {number: of_array[array.name] for number, array in arrays.items()},
            "packs": [
                [each.name, each.shape, each.chunk_shape, each.dtype.name, of_array[each.name]]
                for each, _ in packs
            ],
            "pieces": [
                [placed.number, piece.array, piece.offset, piece.start, piece.shape]
                for _, pieces in packs
                for placed in pieces
                for piece in [placed.piece]
            ],
            "sums": _sums(sums, written),
        }

    def records(
        self, share: Share, parts: Sequence[dict[str, Any]]
    ) -> tuple[tuple[StoredArray, ...], tuple[Leaf, ...]]:
        """Return all arrays and leaves for the manifest, from the ``parts`` of all processes."""
        arrays: list[StoredArray] = []
        place: dict[int, int] = {}
        for leaf in share.large:
            place[leaf.number] = len(arrays)
            chunks = [part["arrays"][str(leaf.number)] for part in parts]
            arrays.append(_with_chunks(self._array_of(leaf), itertools.chain(*chunks)))
        pieces: dict[int, list[Piece]] = {}
        for part in parts:
            for number, pack, offset, start, shape in part["pieces"]:
                piece = Piece(len(arrays) + pack, offset, tuple(start), tuple(shape))
                pieces.setdefault(number, []).append(piece)
            for name, shape, chunk_shape, dtype, chunks in part["packs"]:
                shapes = tuple(shape), tuple(chunk_shape)
                pack = StoredArray.planned(name, *shapes, np.dtype(dtype), self.codec)
                arrays.append(_with_chunks(pack, chunks))
        leaves = [
            replace(
                leaf.record,
                fingerprint=self._digest(leaf, parts),
                array=place.get(leaf.number),
                pieces=tuple(pieces.get(leaf.number, ())),
            )
            if isinstance(leaf, SavedLeaf)
            else leaf
            for leaf in share.leaves
        ]
        return tuple(arrays), tuple(leaves)

    def _array_of(self, leaf: SavedLeaf) -> StoredArray:
        """Return the array on disk of a large leaf."""
        record = leaf.record
        words = re.sub(r"[^0-9A-Za-z_-]+", ".", ".".join(map(str, record.path))).strip(".")
        name = f"{leaf.number:05}.{words[:80]}".rstrip(".")
        chunk_shape = chunk_shape_of(leaf.block_shape, record.dtype.itemsize, CHUNK_BYTES)
        return StoredArray.planned(name, record.shape, chunk_shape, record.dtype, self.codec)

    # The chunks.

    def _large_chunks(
        self,
        leaves: Iterable[SavedLeaf],
        arrays: Mapping[int, StoredArray],
        sums: dict[int, Sums],
    ) -> Iterator[_Chunk]:
        """Yield every chunk; begin those of the ``sums`` of leaves that are missing."""
        blocks = ((leaf, block) for leaf in leaves for block in leaf.blocks)
        for host in to_host(blocks, self.options.max_bytes):
            leaf, block = host.key
            array = arrays[leaf.number]
            overlaps = list(array.grid.overlaps(block.start, block.data.shape))
            release = _after_last(host.release, len(overlaps))
            for overlap in overlaps:

                def make(host: Any = host, overlap: Any = overlap, array: Any = array) -> Any:
                    data = host.values()[overlap.in_block]
                    return _whole_chunk(data, array.chunk_shape), self._sums_of_read(host, overlap)

                made_bytes = 0 if overlap.is_whole else array.nbytes_per_chunk
                yield _Chunk(array, overlap.chunk, made_bytes, make, release)
            # While the disk has enough to do, and the processor would wait for it: a save of
            # 512 MiB on 2 cores takes an eighth less than with the sums first.
            is_half = block is leaf.blocks[len(leaf.blocks) // 2]
            if is_half and self.fingerprints and not leaf.is_source and leaf.number not in sums:
                sums[leaf.number] = leaf.begin_sums()

    def _sums_of_read(
        self, host: HostBlock[Keyed[SavedLeaf]], overlap: Overlap
    ) -> dict[int, Words]:
        """Return the share of a chunk in the fingerprint of a source, which is read only once."""
        leaf, block = host.key
        if not (self.fingerprints and leaf.is_source):
            return {}
        first = [each.start for each in overlap.in_block]
        start = tuple(map(operator.add, block.start, first))
        return {leaf.number: sums_of_host(host.values()[overlap.in_block], start)}

    def _pack_chunks(self, packs: Iterable[Pack]) -> Iterator[_Chunk]:
        for pack in packs:
            array = pack.array
            for number, blocks in pack.chunks(self.options):

                def make(array: StoredArray = array, blocks: Any = blocks) -> Any:
                    data = fill(array, blocks)
                    return data, sums_of(data, blocks) if self.fingerprints else {}

                def release(blocks: Any = blocks) -> None:
                    for block in blocks:
                        block.release()

                yield _Chunk(array, number, array.nbytes_per_chunk, make, release)

    def _written(
        self, documents: Iterable[StoredArray], chunks: Iterable[_Chunk], total: int
    ) -> list[_Written]:
        """Write the ``zarr.json`` of arrays, and chunks; return the chunks."""
        written: list[_Written] = []
        of_documents = (
            tasks.Task(array.metadata[0], functools.partial(self._write_document, array))
            for array in documents
        )
        with counting(self.options.progress, "save", total) as add:

            def finish(chunk: _Chunk, one: _Written) -> None:
                chunk.release()
                written.append(one)
                array = chunk.array
                add(math.prod(array.grid.shape_within(chunk.number)) * array.dtype.itemsize)

            of_chunks = (
                tasks.Task(
                    self._held_bytes(chunk),
                    functools.partial(self._write_chunk, chunk),
                    functools.partial(finish, chunk),
                )
                for chunk in chunks
            )
            tasks.run(itertools.chain(of_documents, of_chunks), self.options)
        self.store.flush()
        return written

    def _write_document(self, array: StoredArray) -> None:
        self.store.write(f"{self.data}/{array.name}/zarr.json", [array.document])

    def _held_bytes(self, chunk: _Chunk) -> int:
        """Return the memory that a chunk takes, compression included."""
        compressing = chunk.array.nbytes_per_chunk if self.codec == "zstd" else 0
        return max(chunk.array.nbytes_per_chunk, chunk.made_bytes + compressing)

    def _write_chunk(self, chunk: _Chunk) -> _Written:
        data, sums = chunk.make()
        payload = data.reshape(-1).view(np.uint8)
        if self.codec == "zstd":
            payload = zarr_format.compress(payload)
        crc = 0

        def parts() -> Iterator[checksums.Bytes | bytes]:
            nonlocal crc
            yield payload
            crc = checksums.crc32c(payload)  # the disk is at work meanwhile
            yield crc.to_bytes(zarr_format.CRC_BYTES, "little")

        name = f"{self.data}/{chunk.array.name}/{chunk.array.grid.key(chunk.number)}"
        self.store.write(name, parts())
        return _Written(chunk.array.name, chunk.number, crc, payload.nbytes, sums)

    # The fingerprints.

    def _digest(self, leaf: SavedLeaf, parts: Sequence[dict[str, Any]]) -> str | None:
        if not self.fingerprints:
            return None
        shares = [part["sums"].get(str(leaf.number), [0] * LANES) for part in parts]
        return digest_of(*saved_type(leaf.record), shares)


def _sums(large: Mapping[int, Sums], written: Iterable[_Written]) -> dict[int, list[int]]:
    """Return the share of this process in the fingerprint of each leaf."""
    small: dict[int, list[Words]] = {}
    for each in written:
        for number, words in each.sums.items():
            small.setdefault(number, []).append(words)
    return {number: sums.to_json() for number, sums in large.items()} | {
        number: add(words).tolist() for number, words in small.items()
    }


def _after_last(function: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that runs another one at the last of several calls."""
    left = iter(range(times - 1, -1, -1))

    def called() -> None:
        if not next(left):
            function()

    return called


def _whole_chunk(data: np.ndarray[Any, Any], chunk_shape: Shape) -> np.ndarray[Any, Any]:
    """Return the data of a chunk, contiguous, with zeros beyond the edge of the array."""
    if data.shape == chunk_shape:
        return np.asarray(data, order="C")
    chunk = np.zeros(chunk_shape, data.dtype)
    chunk[tuple(map(slice, data.shape))] = data
    return chunk


def _with_chunks(array: StoredArray, chunks: Iterable[tuple[int, int, int]]) -> StoredArray:
    """Return an array with number, checksum and size of all of its chunks."""
    by_number = {number: (crc, size) for number, crc, size in chunks}
    missing = array.grid.num_chunks - len(by_number)
    if missing:
        raise SaveError(f"no process wrote {missing} chunks of {array.name}; save again")
    crcs, sizes = zip(*[by_number[chunk] for chunk in range(len(by_number))], strict=True)
    return replace(array, crcs=crcs, sizes=sizes if array.codec == "zstd" else None)

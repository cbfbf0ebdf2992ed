"""The writes of a save: the chunks of this process, and the records of all processes.

A large leaf is an array on disk, whose chunks are parts of its blocks. Small leaves are packed, so
that a thousand cost as much as one of their total size: each process has an array for each dtype,
the *pack*, in which their pieces lie end to end, each piece within one chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from gda.arrays.fingerprints.formula import LANES, Words, add, digest_of, sums_of_each
from gda.arrays.fingerprints.on_devices import PendingSums
from gda.arrays.fingerprints.on_host import prepare, sums_on_host
from gda.arrays.transport.to_host import HostBlock, is_on_accelerator
from gda.checkpoint.format.manifest import Manifest, Overlap, StoredArray, chunk_shape_of, file_of
from gda.layout.indices import index_at, within
from gda.layout.spec import Index, Shape
from gda.storage import tasks
from gda.storage.options import Options, counting
from gda.storage.stores.checksums import size_and_crc
from gda.storage.stores.errors import SaveError
from gda.storage.stores.opening import Store
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    Piece,
    ValueLeaf,
    saved_type,
    without_collections,
)
from gda.trees.records.saved_leaves import (
    Block,
    Keyed,
    Saved,
    SavedLeaf,
    SavedPerProcess,
    kept,
    to_host,
)

AnyArray: TypeAlias = np.ndarray[Any, Any]

CHUNK_BYTES = 16 * 2**20
PACKED_BELOW = 2**20  # bytes of an array; the files of an unpacked array cost some ms
PACK_BYTES = 4 * 2**20  # of a chunk
_CHECKED = 64  # files at a time: to start a thread takes longer than to ask for the size of some


def is_packed(record: ArrayLeaf) -> bool:
    return record.nbytes < PACKED_BELOW


@dataclass(frozen=True)
class Share:
    """The part of this process in the save of a tree: every leaf, and sums that are begun."""

    leaves: Sequence[Saved]
    sums: Mapping[int, PendingSums] = field(default_factory=dict)  # over its blocks, by leaf
    linked: Sequence[Written] = ()  # of blocks that the leaves no longer have

    @cached_property
    def small(self) -> list[SavedLeaf]:
        return [each for each in self._arrays if is_packed(each.record)]

    @cached_property
    def large(self) -> list[SavedLeaf]:
        """The arrays that are not packed: each is an array on disk."""
        return [each for each in self._arrays if not is_packed(each.record)]

    @property
    def _arrays(self) -> list[SavedLeaf]:
        return [each for each in self.leaves if isinstance(each, SavedLeaf)]

    def kept(self) -> Share:
        """Return the share with blocks that nothing can change any more.

        Accelerators begin the sums of their blocks first: they are faster than this process.
        """
        on_accelerators = [
            leaf
            for leaf in self.large
            if any(is_on_accelerator(block.data) for block in leaf.blocks)
            and leaf.number not in self.sums
        ]
        sums = {leaf.number: leaf.begin_sums() for leaf in on_accelerators}
        leaves = [kept(x) if isinstance(x, SavedLeaf) else x for x in self.leaves]
        return replace(self, leaves=leaves, sums={**self.sums, **sums})


# The chunks that this process writes. Any thread may call data(), and then sums().


@dataclass(frozen=True, eq=False)
class _ChunkOfLeaf:
    array: StoredArray
    host: HostBlock[Keyed[SavedLeaf]]
    overlap: Overlap
    chunks_left: Iterator[int]  # of the block; counts down as chunks are written

    @property
    def number(self) -> int:
        return self.overlap.chunk

    @property
    def made_bytes(self) -> int:
        """Bytes of memory that ``data`` takes."""
        return 0 if self.overlap.is_whole else self.array.nbytes_per_chunk

    def data(self) -> AnyArray:
        """Return the chunk, contiguous, with zeros beyond the edge of the array."""
        part = self._part
        if part.shape == self.array.chunk_shape:
            return np.asarray(part, order="C")
        chunk = np.zeros(self.array.chunk_shape, part.dtype)
        chunk[tuple(map(slice, part.shape))] = part
        return chunk

    def sums(self, data: AnyArray) -> dict[int, Words]:
        """Return its share in the fingerprint of a source, which is read only once."""
        leaf, block = self.host.key
        if not leaf.is_source:
            return {}
        first = [each.start for each in self.overlap.in_block]
        start = tuple(map(operator.add, block.start, first))
        return {leaf.number: sums_on_host(self._part, start)}

    @property
    def _part(self) -> AnyArray:
        return self.host.values()[self.overlap.in_block]

    def release(self) -> None:
        """Release the block when its last chunk is written."""
        if not next(self.chunks_left):
            self.host.release()


@dataclass(frozen=True, eq=False)
class Placed:
    """A piece of a leaf in a pack, and the blocks that it consists of."""

    number: int  # of the leaf
    piece: Piece  # by the number of the pack among those of this process
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class _ChunkOfPack:
    """A chunk of a pack, its pieces, and their blocks that are ``coming`` to the host."""

    array: StoredArray
    number: int
    pieces: Sequence[Placed]
    coming: Sequence[HostBlock[Keyed[Placed]]]

    @property
    def made_bytes(self) -> int:
        return self.array.nbytes_per_chunk

    def data(self) -> AnyArray:
        out = np.zeros(self.array.chunk_shape, self.array.dtype)

        @functools.cache  # the same for all leaves of one layout
        def place_in(start: Shape, begin: Shape, shape: Shape) -> Index:
            return within(index_at(start, shape), begin)

        coming = iter(self.coming)
        for placed in self.pieces:
            part, begin = placed.piece.of_chunk(out), placed.piece.start
            for _, start, data, _ in placed.blocks:
                values = data if isinstance(data, np.ndarray) else next(coming).values()
                part[place_in(start, begin, values.shape)] = values
        return out

    def sums(self, data: AnyArray) -> dict[int, Words]:
        """Return its share in the fingerprint of each leaf with a piece there."""
        alike: dict[Any, list[Placed]] = {}
        for placed in self.pieces:
            alike.setdefault((placed.piece.start, placed.piece.shape), []).append(placed)
        sums: dict[int, Words] = {}
        for (start, _), pieces in alike.items():
            parts = [placed.piece.of_chunk(data) for placed in pieces]
            for placed, of_piece in zip(pieces, sums_of_each(parts, start), strict=True):
                number = placed.number
                sums[number] = sums[number] + of_piece if number in sums else of_piece
        return sums

    def release(self) -> None:
        for block in self.coming:
            block.release()


_Chunk: TypeAlias = _ChunkOfLeaf | _ChunkOfPack


class Written(NamedTuple):
    """A chunk in the store: its array, its number, checksum and size, and sums over leaves."""

    array: str
    number: int
    crc: int
    nbytes: int
    sums: dict[int, Words]


class Pack(NamedTuple):
    """The small arrays of one dtype that this process writes: in one array, in order of place."""

    array: StoredArray
    pieces: list[Placed]


@dataclass(frozen=True)
class Writer:
    """A writer of shares into the directory ``data`` of a store."""

    store: Store
    data: str
    options: Options
    writes_metadata: bool = True  # a ``zarr.json`` for each array

    def write(self, share: Share) -> dict[str, Any]:
        """Write a share; return its part for ``records``, as JSON."""
        sums = dict(share.sums)
        arrays = {leaf.number: self.array_of(leaf) for leaf in share.large}
        packs = self._packs_of(share.small)
        documents = [pack.array for pack in packs]
        if jax.process_index() == 0:
            documents += arrays.values()
        if not self.writes_metadata:
            documents = []
        chunks = itertools.chain(
            self._chunks_of_leaves(share.large, arrays, sums), self._chunks_of_packs(packs)
        )
        total = sum(leaf.written_bytes for leaf in share.large)
        total += sum(pack.array.grid.num_chunks * pack.array.nbytes_per_chunk for pack in packs)
        files = [
            self._write_file(number, leaf)
            for number, leaf in enumerate(share.leaves)
            if isinstance(leaf, SavedPerProcess)
        ]
        written = [*share.linked, *self._written(documents, chunks, total)]
        of_array: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for each in written:
            of_array[each.array].append((each.number, each.crc))
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
            "files": files,
        }

    # The arrays on disk.

    def array_of(self, leaf: SavedLeaf) -> StoredArray:
        record = leaf.record
        name = _name_of(leaf.number, record.path)
        chunk_shape = chunk_shape_of(leaf.block_shape, record.dtype.itemsize, CHUNK_BYTES)
        return StoredArray.planned(name, record.shape, chunk_shape, record.dtype)

    def name(self, array: StoredArray, chunk: int | None = None) -> str:
        return file_of(self.data, array, chunk)

    def name_of_value(self, number: int, leaf: SavedPerProcess) -> str:
        """Return the name of the file with the value of this process."""
        return f"{self.data}/{_name_of(number, leaf.record.path)}.{jax.process_index()}"

    @without_collections()
    def _packs_of(self, leaves: Iterable[SavedLeaf]) -> list[Pack]:
        """Return the packs of this process, with the blocks that it writes of small arrays."""
        by_dtype: dict[np.dtype[Any], list[SavedLeaf]] = {}
        for leaf in leaves:
            if leaf.blocks and leaf.record.nbytes:
                by_dtype.setdefault(leaf.record.dtype, []).append(leaf)
        return [self._pack(number, by_dtype[dtype]) for number, dtype in enumerate(by_dtype)]

    def _pack(self, number: int, leaves: Sequence[SavedLeaf]) -> Pack:
        """Lay leaves end to end; a piece that does not fit into a chunk begins the next."""
        dtype = leaves[0].record.dtype
        most = PACK_BYTES // dtype.itemsize
        pieces: list[Placed] = []
        end = 0
        for leaf in leaves:
            for start, shape, blocks in _boxes(leaf):
                size = math.prod(shape)
                if end % most + size > most:
                    end += -end % most
                piece = Piece(array=number, offset=end, start=start, shape=shape)
                pieces.append(Placed(leaf.number, piece, blocks))
                end += size
        chunk = min(end, most)
        name = f"packed.{dtype.name}.{jax.process_index()}"
        shape = (-(-end // chunk) * chunk,)
        return Pack(StoredArray.planned(name, shape, (chunk,), dtype), pieces)

    # The chunks.

    def _chunks_of_leaves(
        self,
        leaves: Iterable[SavedLeaf],
        arrays: Mapping[int, StoredArray],
        sums: dict[int, PendingSums],
    ) -> Iterator[_Chunk]:
        """Yield every chunk; begin those of the ``sums`` of leaves that are missing."""
        blocks = [(leaf, block) for leaf in leaves for block in leaf.blocks]
        for number, host in enumerate(to_host(blocks, self.options.max_bytes)):
            leaf, block = host.key
            array = arrays[leaf.number]
            overlaps = list(array.grid.overlaps(block.start, block.data.shape))
            chunks_left = iter(range(len(overlaps) - 1, -1, -1))
            for overlap in overlaps:
                yield _ChunkOfLeaf(array, host, overlap, chunks_left)
            if not number:
                # Now the disk has something to do: to compile takes Python's lock from all threads.
                prepare(
                    (leaf.record.dtype, block.data.size)
                    for leaf, block in blocks
                    if leaf.number not in sums and not is_on_accelerator(block.data)
                )
            # While the disk has enough to do, and the processor would wait for it: a save of
            # 512 MiB on 2 cores takes an eighth less than with the sums first.
            is_half = block is leaf.blocks[len(leaf.blocks) // 2]
            if is_half and not leaf.is_source and leaf.number not in sums:
                sums[leaf.number] = leaf.begin_sums(for_all_shapes=True)

    def _chunks_of_packs(self, packs: Iterable[Pack]) -> Iterator[_Chunk]:
        for array, pieces in packs:
            (size,) = array.chunk_shape
            # Blocks that are on the host already cost as much to follow as to copy.
            away = [
                (placed, block)
                for placed in pieces
                for block in placed.blocks
                if not isinstance(block.data, np.ndarray)
            ]
            coming = iter(to_host(away, self.options.max_bytes))
            for number, of_chunk in itertools.groupby(
                pieces, lambda placed, size=size: placed.piece.offset // size
            ):
                in_chunk = [*of_chunk]
                blocks = itertools.chain.from_iterable(placed.blocks for placed in in_chunk)
                count = sum(not isinstance(block.data, np.ndarray) for block in blocks)
                yield _ChunkOfPack(array, number, in_chunk, [*itertools.islice(coming, count)])

    def _written(
        self, documents: Iterable[StoredArray], chunks: Iterable[_Chunk], total: int
    ) -> list[Written]:
        """Write the ``zarr.json`` of arrays, and chunks; return the chunks."""
        written: list[Written] = []
        of_documents = (
            tasks.Task(array.metadata[0], functools.partial(self._write_document, array))
            for array in documents
        )
        with counting(self.options.progress, "save", total) as add:

            def finish(chunk: _Chunk, one: Written) -> None:
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

    def _write_file(self, number: int, leaf: SavedPerProcess) -> tuple[int, int]:
        """Write the value of this process; return size and checksum of its file."""
        self.store.write(self.name_of_value(number, leaf), leaf.data)
        return size_and_crc(leaf.data)

    def _write_document(self, array: StoredArray) -> None:
        self.store.write(self.name(array), array.document)

    def _held_bytes(self, chunk: _Chunk) -> int:
        # A file is written from the memory of the array, if that is on the host.
        is_view = isinstance(chunk, _ChunkOfLeaf) and not chunk.host.nbytes
        is_made = not is_view or self.store.is_remote
        return chunk.array.nbytes_per_chunk if is_made else chunk.made_bytes

    def _write_chunk(self, chunk: _Chunk) -> Written:
        data = chunk.data()
        sums = chunk.sums(data)
        payload = data.reshape(-1).view(np.uint8)
        array, number = chunk.array, chunk.number
        crc = self.store.write_sealed(self.name(array, number), payload)
        return Written(array.name, number, crc, payload.nbytes, sums)

    # All processes.

    @without_collections()
    def records(
        self, share: Share, parts: Sequence[dict[str, Any]]
    ) -> tuple[tuple[StoredArray, ...], tuple[Leaf, ...]]:
        """Return all arrays and leaves for the manifest, from the ``parts`` of all processes."""
        arrays: list[StoredArray] = []
        place: dict[int, int] = {}
        for leaf in share.large:
            place[leaf.number] = len(arrays)
            chunks = [part["arrays"][str(leaf.number)] for part in parts]
            arrays.append(_with_chunks(self.array_of(leaf), itertools.chain(*chunks)))
        pieces: dict[int, list[Piece]] = {}
        for part in parts:
            for number, pack, offset, start, shape in part["pieces"]:
                piece = Piece(len(arrays) + pack, offset, tuple(start), tuple(shape))
                pieces.setdefault(number, []).append(piece)
            for name, shape, chunk_shape, dtype, chunks in part["packs"]:
                shapes = tuple(shape), tuple(chunk_shape)
                pack = StoredArray.planned(name, *shapes, np.dtype(dtype))
                arrays.append(_with_chunks(pack, chunks))
        files = zip(*[part["files"] for part in parts], strict=True)
        totals = np.zeros((len(share.leaves), LANES), np.uint32)
        for sums in [part["sums"] for part in parts if part["sums"]]:
            totals[[*map(int, sums)]] += np.array([*sums.values()], np.uint32)

        def record_of(number: int, leaf: Saved) -> Leaf:
            if isinstance(leaf, ValueLeaf):
                return leaf
            if isinstance(leaf, SavedPerProcess):
                name = _name_of(number, leaf.record.path)
                return replace(leaf.record, name=name, files=tuple(map(tuple, next(files))))
            return replace(
                leaf.record,
                fingerprint=digest_of(*saved_type(leaf.record), totals[number]),
                array=place.get(number),
                pieces=tuple(pieces.get(number, ())),
            )

        return tuple(arrays), tuple(map(record_of, itertools.count(), share.leaves))

    def check_written(self, manifest: Manifest) -> None:
        """Raise ``OSError`` or ``SaveError`` unless every file of a local store has its size."""
        if self.store.is_remote:
            return
        files = [*manifest.files]
        some = (files[first : first + _CHECKED] for first in range(0, len(files), _CHECKED))
        checks = (functools.partial(self._check_files, each) for each in some)
        tasks.run((tasks.Task(0, check) for check in checks), self.options)

    def _check_files(self, files: Iterable[tuple[str, int]]) -> None:
        for name, nbytes in files:
            size = self.store.size(name)
            if size != nbytes:
                where = self.store.join(name)
                raise SaveError(
                    f"{where} was changed: it has {size} bytes, not {nbytes}; save again"
                )


def _name_of(number: int, path: Path) -> str:
    """Return the name of the files of a leaf; the number makes it unique."""
    words = re.sub(r"[^0-9A-Za-z_-]+", ".", ".".join(map(str, path))).strip(".")
    return f"{number:05}.{words[:80]}".rstrip(".")


def _boxes(leaf: SavedLeaf) -> Iterable[tuple[Shape, Shape, tuple[Block, ...]]]:
    """Return start, shape and blocks of each piece of an array."""
    if leaf.written_bytes == leaf.record.nbytes:
        return [((0,) * len(leaf.record.shape), leaf.record.shape, leaf.blocks)]
    return [(block.start, block.data.shape, (block,)) for block in leaf.blocks]


def _sums(large: Mapping[int, PendingSums], written: Iterable[Written]) -> dict[int, list[int]]:
    """Return the share of this process in the fingerprint of each leaf."""
    small: dict[int, list[Words]] = {}
    for each in written:
        for number, words in each.sums.items():
            small.setdefault(number, []).append(words)
    return {number: sums.result().tolist() for number, sums in large.items()} | {
        number: add(words).tolist() for number, words in small.items()
    }


def _with_chunks(array: StoredArray, chunks: Iterable[tuple[int, int]]) -> StoredArray:
    """Return an array with the checksums of its chunks."""
    by_number = dict(chunks)
    missing = array.grid.num_chunks - len(by_number)
    if missing:
        raise SaveError(f"no process wrote {missing} chunks of {array.name}; save again")
    return replace(array, crcs=tuple([by_number[chunk] for chunk in range(len(by_number))]))

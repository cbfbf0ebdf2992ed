"""Writing: the chunks that fall to this process, and the manifest over those of all."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from gda.arrays import fingerprint
from gda.arrays.fingerprint_formula import LANES, Words, add, digest_of, sums_of_numpy
from gda.arrays.to_host import MAX_BYTES, HostBlock, HostBlocks
from gda.checkpoint.files import group_of
from gda.checkpoint.format import manifest_json, zarr_format
from gda.checkpoint.format.chunks import ChunkGrid, chunk_shape_of
from gda.checkpoint.format.errors import SaveError
from gda.checkpoint.format.manifest import ArrayLeaf, Leaf, Manifest, Piece, StoredArray, ValueLeaf
from gda.checkpoint.leaves_to_save import Block, Source, on_host
from gda.checkpoint.packing import Pack, pack
from gda.checkpoint.stores.protocol import Store
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.progress import shown

CHUNK_BYTES = 16 * 2**20
PACKED_BELOW = 2**20  # bytes of a whole array; an array each costs some files, and these some ms


@dataclass
class Writer:
    """Writes what this process has to write of a tree into one directory of a store.

    Attributes:
      data: the directory.
      sources: every leaf of the tree.
      codec: ``"bytes"`` or ``"zstd"``.
      fingerprints: whether to record those of the arrays.
    """

    store: Store
    data: str
    sources: list[Source | ValueLeaf]
    codec: str
    fingerprints: bool
    options: Options

    def __post_init__(self) -> None:
        self._pending: dict[int, fingerprint.Pending] | None = None
        self._sort()

    def _sort(self) -> None:
        arrays = [source for source in self.sources if isinstance(source, Source)]
        self._own = {s.number: _Own(s) for s in arrays if s.nbytes >= PACKED_BELOW}
        self._small = [source for source in arrays if source.number not in self._own]

    def copy_to_host(self) -> None:
        """Copy what this process writes, so that nothing of the caller's is needed any more."""
        for own in self._own.values():
            for block in own.source.blocks:
                block.begin_transfer()
        copies = [
            source if isinstance(source, ValueLeaf) else self._on_host(source)
            for source in self.sources
        ]
        if jax.default_backend() != "cpu":
            self._begin_fingerprints()  # of what the copies on the host are no longer
        self.sources = copies
        self._sort()

    def _on_host(self, source: Source) -> Source:
        if source.number in self._own:
            return on_host(source, self.options, adopt=True)
        return on_host(source, Options(), adopt=False)

    def write(self) -> dict[str, Any]:
        """Write it; return what the manifest has to know of it, for JSON."""
        if self._pending is None:
            self._begin_fingerprints()
        packs = pack(self._small, self.codec, self.fingerprints)
        with shown(self.options.progress, "save") as show:
            report = self._report(packs, show)
            tasks.run(
                itertools.chain(
                    self._tasks(report), *[self._pack_tasks(each, report) for each in packs]
                ),
                self.options,
            )
        self.store.flush()
        return {
            "arrays": {number: own.written() for number, own in self._own.items() if own.chunks},
            "packs": [each.written() for each in packs],
            "sums": self._sums(packs) if self.fingerprints else {},
        }

    def _begin_fingerprints(self) -> None:
        """Begin to sum up what this process writes of large arrays, where it is on devices."""
        self._pending = {}
        for number, own in self._own.items():
            if self.fingerprints and own.source.grid is not None:
                blocks: dict[int, Any] = {block.number: block.data for block in own.source.blocks}
                self._pending[number] = fingerprint.begin_blocks(blocks, own.source.grid)

    def _sums(self, packs: Iterable[Pack]) -> dict[int, list[int]]:
        """Return the share of this process in the fingerprint of each leaf."""
        sums: dict[int, Words] = {}
        for number, own in self._own.items():
            if self._pending and number in self._pending:
                sums[number] = self._pending[number].result()
            elif own.source.blocks:
                (block,) = own.source.blocks
                sums[number] = sums_of_numpy(block.on_host())
        for piece in itertools.chain(*[each.pieces for each in packs]):
            assert piece.sums is not None
            sums[piece.number] = add([sums.get(piece.number, add([])), piece.sums])
        return {number: of_leaf.tolist() for number, of_leaf in sums.items()}

    def _report(
        self, packs: Sequence[Pack], show: Callable[[int, int], object]
    ) -> Callable[[int], None]:
        """Return the function that is told the bytes of every chunk that was written."""
        total = sum(own.written_bytes for own in self._own.values())
        total += sum(each.grid.num_chunks * each.chunk_bytes for each in packs)
        done = 0

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            show(done, total)

        return report

    def _tasks(self, report: Callable[[int], None]) -> Iterator[tasks.Task]:
        if jax.process_index() == 0:
            for own in self._own.values():
                yield self._document(f"{own.name}/zarr.json", own.metadata(self.codec))
        blocks = (
            ((own, block), block.data, block.data.nbytes)
            for own in self._own.values()
            for block in own.source.blocks
        )
        for block in HostBlocks(blocks, self.options.max_bytes or MAX_BYTES):
            yield from self._block_tasks(block, report)

    def _document(self, name: str, document: bytes) -> tasks.Task:
        file = f"{self.data}/{name}"
        return tasks.Task(len(document), lambda: self.store.write(file, [document]))

    def _block_tasks(
        self, block: HostBlock[tuple[_Own, Block]], report: Callable[[int], None]
    ) -> Iterator[tasks.Task]:
        own, where = block.key
        overlaps = list(own.grid.overlaps(where.start, own.source.block_shape))
        left = len(overlaps)

        def finish(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                block.release()
            report(own.chunk_bytes)

        for overlap in overlaps:

            def write(overlap: Any = overlap) -> None:
                data = np.asarray(block.values()[overlap.in_block], order="C")
                chunk = overlap.chunk
                own.chunks[chunk] = self._write_chunk(own.name, own.grid, chunk, data)

            held = max(own.chunk_bytes, self._compressing_bytes(own.chunk_bytes))
            yield tasks.Task(held, write, finish)

    def _pack_tasks(self, packed: Pack, report: Callable[[int], None]) -> Iterator[tasks.Task]:
        yield self._document(f"{packed.name}/zarr.json", packed.metadata)
        for chunk in range(packed.grid.num_chunks):

            def write(chunk: int = chunk) -> None:
                data = packed.fill(chunk)
                packed.chunks[chunk] = self._write_chunk(packed.name, packed.grid, chunk, data)

            held = packed.chunk_bytes + self._compressing_bytes(packed.chunk_bytes)
            yield tasks.Task(held, write, lambda _: report(packed.chunk_bytes))

    def _write_chunk(
        self, array: str, grid: ChunkGrid, chunk: int, data: np.ndarray[Any, Any]
    ) -> tuple[int, int]:
        """Write a chunk; return its checksum and size, without the checksum at its end."""
        if self.codec == "zstd":
            data = zarr_format.compress(data)
        payload = data.reshape(-1).view(np.uint8)
        crc = zarr_format.crc32c(payload)
        name = f"{self.data}/{array}/{grid.key(chunk)}"
        self.store.write(name, [payload, crc.to_bytes(zarr_format.CRC_BYTES, "little")])
        return crc, payload.nbytes

    def _compressing_bytes(self, chunk_bytes: int) -> int:
        """Return how much memory beside a chunk it takes to compress it."""
        return 2 * chunk_bytes if self.codec == "zstd" else 0

    def write_group(self, manifest: Manifest) -> Manifest:
        """Write what makes the arrays of all processes one group of zarr; return what knows it."""
        document = group_of(manifest.arrays)
        self.store.write(f"{self.data}/zarr.json", [document])
        self.store.flush()
        return replace(manifest, group=zarr_format.size_and_crc(document))

    def manifest(self, structure: Any, parts: Sequence[dict[str, Any]]) -> Manifest:
        """Return the manifest over what all processes have written.

        Args:
          structure: how the tree is put together.
          parts: what ``write`` returned in each process.
        """
        arrays: list[StoredArray] = []
        place: dict[int, int] = {}
        for number, own in self._own.items():
            place[number] = len(arrays)
            chunks = [part["arrays"].get(str(number), []) for part in parts]
            arrays.append(own.stored(itertools.chain(*chunks), self.codec))
        pieces: dict[int, list[Piece]] = {}
        for part in parts:
            for each in part["packs"]:
                for number, offset, start, shape in each["pieces"]:
                    piece = Piece(len(arrays), offset, tuple(start), tuple(shape))
                    pieces.setdefault(number, []).append(piece)
                arrays.append(_stored_pack(each, self.codec))
        leaves: list[Leaf] = []
        for number, source in enumerate(self.sources):
            if isinstance(source, Source):
                stored = (place.get(number), tuple(pieces.get(number, ())))
                leaves.append(_leaf(source, self._digest(source, parts), *stored))
            else:
                leaves.append(source)
        return Manifest(self.data, tuple(arrays), tuple(leaves), structure, _about())

    def _digest(self, source: Source, parts: Sequence[dict[str, Any]]) -> str | None:
        if not self.fingerprints:
            return None
        sums = [part["sums"].get(str(source.number), [0] * LANES) for part in parts]
        return digest_of(*source.saved_type, add(np.array(sums, np.uint32)))


def _leaf(
    source: Source, digest: str | None, array: int | None, pieces: tuple[Piece, ...]
) -> ArrayLeaf:
    return ArrayLeaf(
        source.path,
        source.kind,
        source.shape,
        source.dtype,
        source.key_impl,
        source.spec,
        source.mesh,
        digest,
        array,
        pieces,
    )


def _about() -> dict[str, Any]:
    try:
        gda_version = version("gda")
    except PackageNotFoundError:  # run from its sources, or these cannot be read any more
        gda_version = "unknown"
    return {
        "gda": gda_version,
        "jax": jax.__version__,
        "processes": jax.process_count(),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class _Own:
    """A leaf that is an array of its own on disk."""

    def __init__(self, source: Source) -> None:
        self.source = source
        chunk_shape = chunk_shape_of(source.block_shape, source.dtype.itemsize, CHUNK_BYTES)
        self.grid = ChunkGrid(source.shape, chunk_shape)
        self.chunk_bytes = math.prod(chunk_shape) * source.dtype.itemsize
        words = re.sub(r"[^0-9A-Za-z_-]+", ".", ".".join(map(str, source.path))).strip(".")
        self.name = f"{source.number:05}.{words[:80]}".rstrip(".")
        self.chunks: dict[int, tuple[int, int]] = {}

    @property
    def written_bytes(self) -> int:
        """Bytes that this process writes."""
        block_bytes = math.prod(self.source.block_shape) * self.source.dtype.itemsize
        return len(self.source.blocks) * block_bytes

    def metadata(self, codec: str) -> bytes:
        return zarr_format.metadata(
            self.source.shape, self.grid.chunk_shape, self.source.dtype, codec
        )

    def written(self) -> list[list[int]]:
        """Return number, checksum and size of the chunks that this process wrote."""
        return [[number, *each] for number, each in sorted(self.chunks.items())]

    def stored(self, written: Iterable[list[int]], codec: str) -> StoredArray:
        """Return what the manifest says of it, given what ``written`` returned everywhere."""
        crcs, sizes = [-1] * self.grid.num_chunks, [0] * self.grid.num_chunks
        for number, crc, size in written:
            crcs[number], sizes[number] = crc, size
        missing = crcs.count(-1)
        if missing:
            raise SaveError(f"{missing} chunks of {self.name} were written by no process")
        document = self.metadata(codec)
        return StoredArray(
            self.name,
            self.source.shape,
            self.grid.chunk_shape,
            self.source.dtype,
            codec,
            (len(document), zarr_format.crc32c(np.frombuffer(document, np.uint8))),
            crcs,
            sizes if codec == "zstd" else None,
        )


def _stored_pack(part: dict[str, Any], codec: str) -> StoredArray:
    return StoredArray(
        part["name"],
        tuple(part["shape"]),
        tuple(part["chunk_shape"]),
        np.dtype(manifest_json.dtype_of(part["dtype"])),
        codec,
        tuple(part["metadata"]),
        [crc for crc, _ in part["chunks"]],
        [size for _, size in part["chunks"]] if codec == "zstd" else None,
    )

"""Many small arrays laid end to end in one, so that a thousand cost what one of their size costs.

Every process has packs of its own, one for each dtype. A piece lies within one chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gda.arrays.fingerprint_formula import Words, sums_of_stack
from gda.checkpoint.format import zarr_format
from gda.checkpoint.format.chunks import ChunkGrid
from gda.checkpoint.leaves_to_save import Block, Source
from gda.layout.spec import Shape

PACK_BYTES = 4 * 2**20  # of a chunk


@dataclass
class _Placed:
    """A piece of a leaf: where it lies in the pack, and the blocks that it consists of."""

    number: int
    offset: int
    start: Shape
    shape: Shape
    blocks: tuple[Block, ...]
    sums: Words | None = None  # of its elements, for the fingerprint


@dataclass
class Pack:
    """The small arrays of one dtype that this process writes.

    Attributes:
      chunks: checksum and size of the chunks that were written.
    """

    name: str
    dtype: np.dtype[Any]
    codec: str
    fingerprints: bool
    pieces: list[_Placed] = field(default_factory=list)
    end: int = 0
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def _most(self) -> int:
        return PACK_BYTES // self.dtype.itemsize

    def add(self, source: Source) -> None:
        """Lay a source behind those that are there; what does not fit begins the next chunk."""
        if source.is_mine:
            self._place(source.number, (0,) * len(source.shape), source.shape, source.blocks)
        else:
            for block in source.blocks:
                self._place(source.number, block.start, source.block_shape, (block,))

    def _place(self, number: int, start: Shape, shape: Shape, blocks: tuple[Block, ...]) -> None:
        size = math.prod(shape)
        if self.end % self._most + size > self._most:
            self.end += -self.end % self._most
        self.pieces.append(_Placed(number, self.end, start, shape, blocks))
        self.end += size

    @property
    def grid(self) -> ChunkGrid:
        chunk = min(self.end, self._most)
        return ChunkGrid((-(-self.end // chunk) * chunk,), (chunk,))

    @property
    def chunk_bytes(self) -> int:
        return self.grid.chunk_shape[0] * self.dtype.itemsize

    @property
    def metadata(self) -> bytes:
        return zarr_format.metadata(self.grid.shape, self.grid.chunk_shape, self.dtype, self.codec)

    def fill(self, chunk: int) -> np.ndarray[Any, Any]:
        """Return the data of a chunk; sum up the pieces in it, if that is wanted."""
        (size,) = self.grid.chunk_shape
        out = np.zeros(size, self.dtype)
        first, last = (
            bisect_left(self.pieces, end, key=lambda piece: piece.offset)
            for end in (chunk * size, chunk * size + size)
        )
        alike: dict[Any, list[tuple[_Placed, np.ndarray[Any, Any]]]] = {}
        for piece in self.pieces[first:last]:
            begin = piece.offset % size
            whole = out[begin : begin + math.prod(piece.shape)].reshape(piece.shape)
            for block in piece.blocks:
                data = block.on_host()
                whole[_box(block.start, piece.start, data.shape)] = data
            alike.setdefault((piece.start, piece.shape), []).append((piece, whole))
        if self.fingerprints:
            for (start, _), pieces in alike.items():
                sums = sums_of_stack(np.stack([whole for _, whole in pieces]), start)
                for (piece, _), of_piece in zip(pieces, sums, strict=True):
                    piece.sums = of_piece
        return out

    def written(self) -> dict[str, Any]:
        """Return what the manifest needs to know of it, for JSON."""
        document = self.metadata
        return {
            "name": self.name,
            "shape": self.grid.shape,
            "chunk_shape": self.grid.chunk_shape,
            "dtype": self.dtype.name,
            "metadata": [len(document), zarr_format.crc32c(np.frombuffer(document, np.uint8))],
            "chunks": [self.chunks[chunk] for chunk in range(self.grid.num_chunks)],
            "pieces": [
                [piece.number, piece.offset, piece.start, piece.shape] for piece in self.pieces
            ],
        }


def pack(sources: Iterable[Source], codec: str, fingerprints: bool) -> list[Pack]:
    """Return the packs of this process, of all that it writes of some small arrays."""
    packs: dict[np.dtype[Any], Pack] = {}
    for source in sources:
        if not source.blocks or not source.nbytes:
            continue
        for block in source.blocks:
            block.begin_transfer()
        name = f"packed.{source.dtype.name}.{jax.process_index()}"
        packs.setdefault(source.dtype, Pack(name, source.dtype, codec, fingerprints)).add(source)
    return list(packs.values())


def _box(start: Shape, origin: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(
        slice(first - at, first - at + size)
        for first, at, size in zip(start, origin, shape, strict=True)
    )

"""The manifest: the records of a checkpoint, its leaves and the arrays that are stored for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gda.checkpoint.format import zarr_format
from gda.checkpoint.format.chunks import ChunkGrid
from gda.layout.boundary import set_module
from gda.layout.spec import Shape
from gda.storage.stores import checksums
from gda.trees.records.recorded_tree import Piece, RecordedTree


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class StoredArray:
    """A zarr array of a checkpoint; ``Contents.arrays`` has them.

    Attributes:
      name: its directory, below the directory of the data.
      shape, chunk_shape, dtype: those of the stored array. Chunks that reach beyond the shape hold
        zeros there.
      codec: ``"bytes"`` or ``"zstd"``.
      metadata: size and CRC-32C of its ``zarr.json``.
      crcs: the CRC-32C of every stored chunk, without its last four bytes, which repeat it. Empty
        before the array is written.
      sizes: the bytes of every stored chunk, without these four. ``None`` if the chunks are not
        compressed.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.zeros((512, 1024))})
    ...     (stored,) = gda.checkpoint.inspect(folder).arrays
    >>> stored.name, stored.shape, stored.grid.num_chunks
    ('00000.w', (512, 1024), 1)
    """

    name: str
    shape: Shape
    chunk_shape: Shape
    dtype: np.dtype[Any]
    codec: str
    metadata: tuple[int, int]
    crcs: Sequence[int] = field(default=(), hash=False)  # of a type that may have no hash
    sizes: Sequence[int] | None = None

    @classmethod
    def planned(
        cls, name: str, shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any], codec: str
    ) -> StoredArray:
        """Return the array before it is written."""
        document = zarr_format.metadata(shape, chunk_shape, dtype, codec)
        return cls(
            name=name,
            shape=shape,
            chunk_shape=chunk_shape,
            dtype=dtype,
            codec=codec,
            metadata=checksums.size_and_crc(document),
        )

    @cached_property
    def grid(self) -> ChunkGrid:
        """The shape of the array, divided into chunks."""
        return ChunkGrid(self.shape, self.chunk_shape)

    @property
    def nbytes_per_chunk(self) -> int:
        """Bytes of one chunk in memory."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def document(self) -> bytes:
        """The ``zarr.json`` that describes it."""
        return zarr_format.metadata(self.shape, self.chunk_shape, self.dtype, self.codec)

    def nbytes_of_file(self, chunk: int) -> int:
        """Return the size of the file of a chunk."""
        payload = self.nbytes_per_chunk if self.sizes is None else self.sizes[chunk]
        return payload + checksums.CRC_BYTES


Chunk = tuple[int, int]  # numbers of a stored array and of a chunk in it


@dataclass(frozen=True)
class Manifest(RecordedTree):
    """The contents of a checkpoint."""

    data: str  # the directory with its arrays
    arrays: tuple[StoredArray, ...]
    about: dict[str, Any]  # date and versions of the save, for people
    group: tuple[int, int]  # size and CRC-32C of the zarr.json of the group of all arrays

    def chunk_of(self, piece: Piece) -> Chunk:
        """Return the chunk that has a piece."""
        return piece.array, piece.offset // self.arrays[piece.array].chunk_shape[0]

    @property
    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file but that of the manifest."""
        yield f"{self.data}/zarr.json", self.group[0]
        for array in self.arrays:
            yield f"{self.data}/{array.name}/zarr.json", array.metadata[0]
            for chunk in range(array.grid.num_chunks):
                name = f"{self.data}/{array.name}/{array.grid.key(chunk)}"
                yield name, array.nbytes_of_file(chunk)


def group_of(arrays: Iterable[StoredArray]) -> bytes:
    """Return the ``zarr.json`` of the group of all arrays.

    It lists its arrays, so that zarr-python does not look for others: one array of a data type that
    it does not know, such as bfloat16, would be an error for the whole group.
    """
    return zarr_format.group(
        {
            array.name: array.document
            for array in arrays
            if zarr_format.opens_in_zarr_python(array.dtype)
        }
    )

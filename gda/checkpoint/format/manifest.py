"""The manifest: the records of a checkpoint, its leaves and the arrays that are stored for them.

An array is stored in zarr v3, in chunks with a CRC-32C at their end. Each chunk is a part of one
block of the saved array, contiguous in the memory of the block, so that it is written from there
and read into it without a copy.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gda.layout.boundary import set_module
from gda.layout.indices import Tiling, index_at, shape_at
from gda.layout.spec import Index, Shape
from gda.storage.stores import checksums
from gda.trees.records.recorded_tree import (
    PerProcessLeaf,
    Piece,
    RecordedTree,
)

# Types that TensorStore's zarr v3 driver refuses are stored as integers of the same size.
_AS_INTEGERS = {
    *("int1", "uint1", "uint2", "uint4"),
    *("float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"),
}


def chunk_shape_of(block_shape: Shape, itemsize: int, most_bytes: int) -> Shape:
    """Return the shape of equal parts of a block, contiguous in it, of about ``most_bytes``.

    Parts have at most ``most_bytes``, unless the sizes have no divisor near it.

    >>> chunk_shape_of((4096, 1024), 4, 2**22)
    (1024, 1024)
    >>> chunk_shape_of((7919, 16), 4, 2**18)  # a prime: one chunk of 500 KB rather than 7,919 rows
    (7919, 16)
    """
    if math.prod(block_shape) * itemsize <= most_bytes:
        return block_shape
    for dimension, size in enumerate(block_shape):
        row_bytes = math.prod(block_shape[dimension + 1 :]) * itemsize
        if row_bytes <= most_bytes:
            part = _nearest_divisor(size, most_bytes // row_bytes)
            return (1,) * dimension + (part, *block_shape[dimension + 1 :])
    return (1,) * len(block_shape)


def _nearest_divisor(size: int, most: int) -> int:
    """Return the largest divisor up to ``most``, or the next if that is nearer by ratio."""
    lower = next(part for part in range(min(most, size), 0, -1) if size % part == 0)
    if lower * 8 >= most:
        return lower
    upper = min(size // part for part in range(1, size // most + 1) if size % part == 0)
    return lower if most / lower <= upper / most else upper


class Overlap(NamedTuple):
    """The part that a chunk and a block have in common, as an index of each of them."""

    chunk: int
    in_chunk: Index
    in_block: Index
    is_whole: bool  # True if it is the whole chunk


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ChunkGrid:
    """A shape divided into equal chunks, numbered row-major; ``StoredArray.grid`` is one.

    As in zarr, the last chunks of a dimension that they do not divide reach beyond the shape.

    Attributes:
      shape: sizes of the whole.
      chunk_shape: sizes of a chunk.

    >>> import gda
    >>> grid = gda.checkpoint.ChunkGrid((4, 5), (2, 2))
    >>> grid.num_chunks, grid.key(4), grid.shape_within(5)
    (6, 'c.1.1', (2, 1))
    >>> [overlap.chunk for overlap in grid.overlaps((1, 2), (2, 2))]
    [1, 4]
    """

    shape: Shape
    chunk_shape: Shape

    @cached_property
    def _tiling(self) -> Tiling:
        return Tiling.of_blocks(self.shape, self.chunk_shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dimension."""
        return self._tiling.parts

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return math.prod(self.counts)

    def shape_within(self, chunk: int) -> Shape:
        """Return the sizes of the part of a chunk that is within the shape."""
        return shape_at(self._tiling.index(chunk), self.shape)

    def index(self, chunk: int) -> Index:
        """Return the place of a chunk, which may reach beyond the shape."""
        columns = self._tiling.columns(chunk)
        starts = [n * size for n, size in zip(columns, self.chunk_shape, strict=True)]
        return index_at(tuple(starts), self.chunk_shape)

    def key(self, chunk: int) -> str:
        """Return the name of a chunk within the array, as in zarr v3 with separator ``.``."""
        return ".".join(["c", *map(str, self._tiling.columns(chunk))])

    def overlaps(self, starts: Sequence[int], block_shape: Shape) -> Iterator[Overlap]:
        """Yield the overlap of each chunk with the block at ``starts``, in order of number."""
        along = []
        for start, size, part, count in zip(
            starts, block_shape, self.chunk_shape, self.counts, strict=True
        ):
            if size == 0:
                return
            parts = []
            for number in range(start // part, -(-(start + size) // part)):
                first, last = max(start, number * part), min(start + size, (number + 1) * part)
                in_chunk = slice(first - number * part, last - number * part)
                in_block = slice(first - start, last - start)
                parts.append((number, in_chunk, in_block, last - first == part))
            along.append((count, parts))
        for combination in itertools.product(*[parts for _, parts in along]):
            chunk = 0
            for (count, _), (number, *_) in zip(along, combination, strict=True):
                chunk = chunk * count + number
            yield Overlap(
                chunk,
                tuple([part[1] for part in combination]),
                tuple([part[2] for part in combination]),
                all(part[3] for part in combination),
            )


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class StoredArray:
    """A zarr array of a checkpoint; ``Contents.arrays`` has them.

    Attributes:
      name: its directory, below the directory of the data.
      shape, chunk_shape, dtype: those of the stored array. Chunks that reach beyond the shape hold
        zeros there.
      metadata: size and CRC-32C of its ``zarr.json``.
      crcs: the CRC-32C of every stored chunk, without its last four bytes, which repeat it. Empty
        before the array is written.

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
    metadata: tuple[int, int]
    crcs: Sequence[int] = field(default=(), hash=False)  # of a type that may have no hash

    @classmethod
    def planned(
        cls, name: str, shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any]
    ) -> StoredArray:
        """Return the array before it is written."""
        document = array_metadata(shape, chunk_shape, dtype)
        return cls(name, shape, chunk_shape, dtype, checksums.size_and_crc(document))

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
        return array_metadata(self.shape, self.chunk_shape, self.dtype)

    @property
    def nbytes_of_file(self) -> int:
        """The size of the file of a chunk."""
        return self.nbytes_per_chunk + checksums.CRC_BYTES


Chunk = tuple[int, int]  # numbers of a stored array and of a chunk in it


def file_of(data: str, array: StoredArray, chunk: int | None = None) -> str:
    """Return the name of the file of a chunk of an array in ``data``, by default its metadata."""
    return f"{data}/{array.name}/{'zarr.json' if chunk is None else array.grid.key(chunk)}"


@dataclass(frozen=True)
class Manifest(RecordedTree):
    """The contents of a checkpoint."""

    has_files: ClassVar[bool] = True
    data: str  # the directory with its arrays
    arrays: tuple[StoredArray, ...]
    about: dict[str, Any]  # date and versions of the save, for people

    def chunk_of(self, piece: Piece) -> Chunk:
        """Return the chunk that has a piece."""
        return piece.array, piece.offset // self.arrays[piece.array].chunk_shape[0]

    @property
    def per_process(self) -> list[PerProcessLeaf]:
        """The leaves that each process has by itself."""
        return [leaf for leaf in self.leaves if isinstance(leaf, PerProcessLeaf)]

    def file_of(self, leaf: PerProcessLeaf, process: int) -> str:
        """Return the name of the file of a process."""
        return f"{self.data}/{leaf.name}.{process}"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; leaves that are tied to one array count once."""
        places = {self.place_of(x) or x.path: x.nbytes for x in self.array_leaves}
        return sum(places.values())

    @property
    def nbytes_of_chunks(self) -> int:
        """Bytes of the files of all chunks."""
        return sum(array.nbytes_of_file * array.grid.num_chunks for array in self.arrays)

    @property
    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file but that of the manifest."""
        for array in self.arrays:
            yield file_of(self.data, array), array.metadata[0]
            for chunk in range(array.grid.num_chunks):
                yield file_of(self.data, array, chunk), array.nbytes_of_file
        for leaf in self.per_process:
            for process, (nbytes, _) in enumerate(leaf.files):
                yield self.file_of(leaf, process), nbytes


@lru_cache(maxsize=64)  # a tree has many arrays of few shapes
def array_metadata(shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any]) -> bytes:
    """Return the ``zarr.json`` of an array."""
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    stored = f"uint{8 * dtype.itemsize}" if dtype.name in _AS_INTEGERS else dtype.name
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": stored,
        "chunk_grid": {
            "name": "regular",
            # Sizes of 0 have no chunks, but zarr requires a chunk size.
            "configuration": {"chunk_shape": [max(size, 1) for size in chunk_shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _fill_value(stored),
        "codecs": [{"name": "bytes"} | order, {"name": "crc32c"}],
        "attributes": {} if stored == dtype.name else {"dtype": dtype.name},
    }
    return json.dumps(document, indent=1).encode()


def _fill_value(stored: str) -> Any:
    if stored == "bool":
        return False
    if stored.startswith("complex"):
        return [0.0, 0.0]
    return 0 if stored.startswith(("int", "uint")) else 0.0

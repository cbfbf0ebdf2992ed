"""The manifest: the records of a checkpoint, its leaves and the arrays that are stored for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gda.checkpoint.format import zarr_format
from gda.checkpoint.format.chunks import ChunkGrid
from gda.layout.boundary import set_module
from gda.layout.spec import Shape

Path = tuple[str | int, ...]


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
            metadata=zarr_format.size_and_crc(document),
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
        return payload + zarr_format.CRC_BYTES


@set_module("gda.checkpoint")
@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a small array within a chunk of a stored array that many small arrays share.

    Attributes:
      array: the number of the stored array in ``Contents.arrays``.
      offset: the first element of the block in the stored array.
      start, shape: first element and sizes of the block in the small array.

    >>> import gda, numpy as np
    >>> piece = gda.checkpoint.Piece(array=0, offset=4, start=(0, 0), shape=(1, 2))
    >>> piece.of_chunk(np.arange(8))
    array([[4, 5]])
    """

    array: int
    offset: int
    start: Shape
    shape: Shape

    def of_chunk(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the block out of its chunk, which has one dimension."""
        begin = self.offset % len(data)
        return data[begin : begin + math.prod(self.shape)].reshape(self.shape)


@set_module("gda.checkpoint")
@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array of the saved tree; ``Contents.leaves`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      kind: ``"GlobalArray"``, ``"PaddedArray"``, ``"jax.Array"``, ``"numpy"``, or ``"number"`` for
        a number of NumPy.
      shape, dtype: those of its data without padding; of PRNG keys, those of the numbers that they
        consist of.
      key_impl: the implementation of PRNG keys; ``None`` for other arrays.
      spec, mesh: its layout when it was saved, for people.
      fingerprint: its ``gda.fingerprint``; ``None`` if it was saved with ``fingerprint=False``.
      array: the number of its stored array in ``Contents.arrays``; ``None`` if ``pieces`` hold it.
      pieces: its blocks in stored arrays that many small arrays share.
      weak_type: True for a ``jax.Array`` of a weak type.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.zeros((2, 3))})
    ...     (leaf,) = gda.checkpoint.inspect(folder).leaves
    >>> leaf.path, leaf.kind, leaf.shape, leaf.nbytes
    (('w',), 'numpy', (2, 3), 48)
    """

    path: Path
    kind: str
    shape: Shape
    dtype: np.dtype[Any]
    key_impl: str | None = None
    spec: str | None = None
    mesh: dict[str, int] | None = field(default=None, hash=False)
    fingerprint: str | None = None
    array: int | None = None
    pieces: tuple[Piece, ...] = ()
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ValueLeaf:
    """A number, a string or bytes of Python in the saved tree; ``Contents.leaves`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      value: the value.

    >>> import gda, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'step': 7})
    ...     gda.checkpoint.inspect(folder).leaves
    (ValueLeaf(path=('step',), value=7),)
    """

    path: Path
    value: bool | int | float | complex | str | bytes


Leaf = ArrayLeaf | ValueLeaf


Chunk = tuple[int, int]  # numbers of a stored array and of a chunk in it


@dataclass(frozen=True)
class RecordedTree:
    """The records of a tree: in a checkpoint, or in the offer of another program."""

    leaves: tuple[Leaf, ...]  # in the order in which the structure counts them
    structure: Any  # of the tree: see gda.checkpoint.format.structure

    # For messages: the tree, and the arguments that cast its arrays to the dtypes of ``like``, and
    # that keep leaves which it does not have.
    what: ClassVar[str] = "the checkpoint"
    cast_argument: ClassVar[str] = "cast=True"
    missing_argument: ClassVar[str] = " (missing='keep' keeps those of like)"

    @property
    def array_leaves(self) -> list[ArrayLeaf]:
        """The leaves that are arrays."""
        return [leaf for leaf in self.leaves if isinstance(leaf, ArrayLeaf)]

    def leaves_at(self, at: Path) -> dict[Path, Leaf]:
        """Return the leaves of a subtree, by their paths in the whole tree."""
        return {leaf.path: leaf for leaf in self.leaves if leaf.path[: len(at)] == at}


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

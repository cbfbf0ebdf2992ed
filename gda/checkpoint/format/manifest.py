"""The manifest: the records of a checkpoint, its leaves and the arrays that are stored for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gda.checkpoint.format import zarr_format
from gda.checkpoint.format.chunks import ChunkGrid
from gda.layout.boundary import set_module
from gda.layout.spec import Shape

Path = tuple[str | int, ...]


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class StoredArray:
    """A zarr array of the checkpoint.

    Attributes:
      name: its directory, below that of the data.
      shape, chunk_shape, dtype: as it is stored, ``dtype`` being the real one.
      codec: ``"bytes"`` or ``"zstd"``.
      metadata: size and CRC-32C of its ``zarr.json``.
      crcs: the CRC-32C of every chunk as it is stored, without the four bytes that say so; empty
        before it is written.
      sizes: of every chunk in bytes, without these four; ``None`` where chunks are not compressed.
    """

    name: str
    shape: Shape
    chunk_shape: Shape
    dtype: np.dtype[Any]
    codec: str
    metadata: tuple[int, int]
    crcs: Sequence[int] = ()
    sizes: Sequence[int] | None = None

    @classmethod
    def planned(
        cls, name: str, shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any], codec: str
    ) -> StoredArray:
        """Return one that is to be written."""
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
        return ChunkGrid(self.shape, self.chunk_shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in memory."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def document(self) -> bytes:
        """The ``zarr.json`` that describes it."""
        return zarr_format.metadata(self.shape, self.chunk_shape, self.dtype, self.codec)

    def file_bytes(self, chunk: int) -> int:
        """Return the size of the file of a chunk."""
        payload = self.chunk_bytes if self.sizes is None else self.sizes[chunk]
        return payload + zarr_format.CRC_BYTES


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class Piece:
    """A box of a small array, laid into an array that many share, within one chunk of it.

    Attributes:
      array: the number of the stored array.
      offset: where it begins there, in elements.
      start, shape: which part of the small array it is.
    """

    array: int
    offset: int
    start: Shape
    shape: Shape

    def of_chunk(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the part of a chunk, which has one dimension, that the piece is."""
        begin = self.offset % len(data)
        return data[begin : begin + math.prod(self.shape)].reshape(self.shape)


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ArrayLeaf:
    """A leaf of the tree that is an array.

    Attributes:
      path: the keys and indices on the way to it.
      kind: ``"GlobalArray"``, ``"jax.Array"`` or ``"numpy"``.
      shape, dtype: of its data; of PRNG keys, of the numbers that they consist of.
      key_impl: of PRNG keys, which they are.
      spec, mesh: how it was cut when it was saved, for people.
      fingerprint: ``g.fingerprint()``; ``None`` if none was asked for.
      array: the number of the stored array that has it, or ``None`` where ``pieces`` do.
    """

    path: Path
    kind: str
    shape: Shape
    dtype: np.dtype[Any]
    key_impl: str | None = None
    spec: str | None = None
    mesh: dict[str, int] | None = None
    fingerprint: str | None = None
    array: int | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ValueLeaf:
    """A leaf that is a number, a string or bytes of Python."""

    path: Path
    value: bool | int | float | complex | str | bytes


Leaf = ArrayLeaf | ValueLeaf


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
      data: the directory with its arrays.
      arrays: the zarr arrays there.
      leaves: in the order in which ``structure`` counts them.
      structure: how the leaves were put together: see ``gda.checkpoint.format.structure``.
      about: when and by what it was written, for people.
      group: size and CRC-32C of the ``zarr.json`` of the group of all arrays; ``None`` in older
        checkpoints, where it lists nothing.
    """

    data: str
    arrays: tuple[StoredArray, ...]
    leaves: tuple[Leaf, ...]
    structure: Any
    about: dict[str, Any] = field(default_factory=dict)
    group: tuple[int, int] | None = None

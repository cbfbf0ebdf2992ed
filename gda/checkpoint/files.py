"""The files of a checkpoint, read with every check: size, checksum, and whose chunk it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gda.checkpoint import zarr_format
from gda.checkpoint.errors import CorruptionError
from gda.checkpoint.manifest import ArrayLeaf, Manifest, StoredArray
from gda.checkpoint.stores import Store
from gda.checkpoint.structure import format_path

Chunk = tuple[int, int]  # numbers of a stored array and of a chunk in it

_GONE = (FileNotFoundError, NotADirectoryError)


@dataclass
class Files:
    """What a manifest names, in the store where it is."""

    store: Store
    manifest: Manifest

    @cached_property
    def leaves_in(self) -> dict[Chunk, list[str]]:
        """The leaves of which something is in a chunk, for messages."""
        found: dict[Chunk, list[str]] = {}
        for leaf in self.manifest.leaves:
            if not isinstance(leaf, ArrayLeaf):
                continue
            if leaf.array is not None:
                found[leaf.array, -1] = [format_path(leaf.path)]
            for piece in leaf.pieces:
                size = math.prod(self.manifest.arrays[piece.array].chunk_shape)
                paths = found.setdefault((piece.array, piece.offset // size), [])
                paths.append(format_path(leaf.path))
        return found

    def leaves_of(self, number: int, chunk: int | None) -> str:
        """Return the leaves that a chunk belongs to, or a stored array, for messages."""
        if (alone := self.leaves_in.get((number, -1))) is not None:
            return f"array {alone[0]}"
        chunks = range(self.manifest.arrays[number].grid.num_chunks) if chunk is None else [chunk]
        packed = itertools.chain(*[self.leaves_in.get((number, each), []) for each in chunks])
        paths = list(dict.fromkeys(packed))
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return f"array{'s' * (len(paths) > 1)} {', '.join(paths[:3])}{more}"

    def name(self, array: StoredArray, file: str) -> str:
        return f"{self.manifest.data}/{array.name}/{file}"

    def check_size(self, where: Chunk) -> None:
        """Raise ``CorruptionError`` unless the file of a chunk has the size it should."""
        number, chunk = where
        array = self.manifest.arrays[number]
        with _About(self, number, chunk):
            size = self.store.size(self.name(array, array.grid.key(chunk)))
            if size is not None:
                _check_size(size, array.file_bytes(chunk))

    def check_metadata(self, number: int) -> None:
        """Raise ``CorruptionError`` unless the ``zarr.json`` of an array is what was saved."""
        array = self.manifest.arrays[number]
        nbytes, crc = array.metadata
        with _About(self, number, None):
            document, nothing = np.empty(nbytes, np.uint8), np.empty(0, np.uint8)
            found = self.store.read_into(self.name(array, "zarr.json"), document, nothing)
            _check_size(found, nbytes)
            computed = zarr_format.crc32c(document)
            if computed != crc:
                raise ValueError(f"is damaged: its CRC-32C is {computed:08x}, not {crc:08x}")

    def check_group(self) -> None:
        """Raise ``CorruptionError`` unless the directory says that it has zarr arrays."""
        name = f"{self.manifest.data}/zarr.json"
        try:
            expected = group_of(self.manifest.arrays)
            found = self.store.read(name, len(expected))
            what = None if found in (expected, zarr_format.PLAIN_GROUP) else "is damaged"
        except (*_GONE, ValueError) as error:
            what = "is missing" if isinstance(error, _GONE) else str(error)
        if what is not None:
            raise CorruptionError(f"the group of all arrays: {self.store.join(name)} {what}")

    def load(self, where: Chunk, payload: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Fill ``payload`` with a chunk as it is stored; return its elements, all checked.

        Args:
          payload: uint8, of the size of the file without the checksum at its end.

        Raises:
          CorruptionError: it is not what was saved.
        """
        number, chunk = where
        array = self.manifest.arrays[number]
        tail = np.empty(zarr_format.CRC_BYTES, np.uint8)
        with _About(self, number, chunk):
            name = self.name(array, array.grid.key(chunk))
            _check_size(self.store.read_into(name, payload, tail), array.file_bytes(chunk))
            said = int.from_bytes(tail.tobytes(), "little")
            _check_crc(zarr_format.crc32c(payload), said, array.crcs[chunk])
            if array.codec == "zstd":
                frame = payload.tobytes() + tail.tobytes()
                return zarr_format.decompress(frame, array.chunk_shape, array.dtype)
        return payload.view(array.dtype).reshape(array.chunk_shape)


def group_of(arrays: Iterable[StoredArray]) -> bytes:
    """Return the ``zarr.json`` of the group of all arrays.

    It lists its arrays, so that zarr-python does not look for others: one array of a data type that
    it does not know, such as bfloat16, would be an error for the whole group.
    """
    return zarr_format.group(
        {
            array.name: zarr_format.metadata(
                array.shape, array.chunk_shape, array.dtype, array.codec
            )
            for array in arrays
            if zarr_format.opens_in_zarr_python(array.dtype)
        }
    )


class _About:
    """Turns what goes wrong with a file into an error that names array, chunk and file."""

    def __init__(self, files: Files, number: int, chunk: int | None) -> None:
        self._files, self._number, self._chunk = files, number, chunk

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (*_GONE, ValueError)):
            return
        what = "is missing" if isinstance(error, _GONE) else str(error)
        files, array = self._files, self._files.manifest.arrays[self._number]
        key = "zarr.json" if self._chunk is None else array.grid.key(self._chunk)
        chunk = "its metadata" if self._chunk is None else f"chunk {key}"
        file = files.store.join(files.name(array, key))
        leaves = files.leaves_of(self._number, self._chunk)
        raise CorruptionError(f"{leaves}, {chunk}: {file} {what}") from None


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"has {found} bytes, not {expected}")


def _check_crc(computed: int, said: int, expected: int) -> None:
    if computed == expected == said:
        return
    if computed == said:
        raise ValueError(
            f"is whole, but is not what was saved: its CRC-32C is {computed:08x}, not "
            f"{expected:08x}. It comes from another save"
        )
    raise ValueError(f"is damaged: its CRC-32C is {computed:08x}, not {expected:08x}")

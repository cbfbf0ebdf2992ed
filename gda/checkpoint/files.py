"""The files of a checkpoint, read with every check: size, checksum, and whose chunk it is."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import numpy as np

from gda.checkpoint import zarr_format
from gda.checkpoint.errors import CorruptionError
from gda.checkpoint.manifest import ArrayLeaf, Manifest, StoredArray
from gda.checkpoint.stores import Store
from gda.checkpoint.structure import format_path

Chunk = tuple[int, int]  # numbers of a stored array and of a chunk in it


@dataclass
class Files:
    """What a manifest names, in the store where it is."""

    store: Store
    manifest: Manifest

    def name(self, array: StoredArray, file: str) -> str:
        return f"{self.manifest.data}/{array.name}/{file}"

    def check_size(self, where: Chunk) -> None:
        """Raise ``CorruptionError`` unless the file of a chunk has the size it should."""
        number, chunk = where
        array = self.manifest.arrays[number]
        with _About(self, array, chunk):
            size = self.store.size(self.name(array, array.grid.key(chunk)))
            if size is not None:
                _check_size(size, array.file_bytes(chunk))

    def check_metadata(self, number: int) -> None:
        """Raise ``CorruptionError`` unless the ``zarr.json`` of an array is what was saved."""
        array = self.manifest.arrays[number]
        nbytes, crc = array.metadata
        with _About(self, array, None):
            document = self.store.read(self.name(array, "zarr.json"), 2**20)
            _check_size(len(document), nbytes)
            computed = zarr_format.crc32c(np.frombuffer(document, np.uint8))
            if computed != crc:
                raise ValueError(f"is damaged: its CRC-32C is {computed:08x}, not {crc:08x}")

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
        with _About(self, array, chunk):
            name = self.name(array, array.grid.key(chunk))
            _check_size(self.store.read_into(name, payload, tail), array.file_bytes(chunk))
            said = int.from_bytes(tail.tobytes(), "little")
            _check_crc(zarr_format.crc32c(payload), said, array.crcs[chunk])
            if array.codec == "zstd":
                frame = payload.tobytes() + tail.tobytes()
                return zarr_format.decompress(frame, array.chunk_shape, array.dtype)
        return payload.view(array.dtype).reshape(array.chunk_shape)


class _About:
    """Turns what goes wrong with a file into an error that names array, chunk and file."""

    def __init__(self, files: Files, array: StoredArray, chunk: int | None) -> None:
        self._files, self._array, self._chunk = files, array, chunk

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        links = (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
        is_gone = isinstance(error, OSError) and error.errno in links
        if not is_gone and not isinstance(error, ValueError):
            return
        what = "is missing" if isinstance(error, FileNotFoundError) else str(error)
        array, files = self._array, self._files
        key = "zarr.json" if self._chunk is None else array.grid.key(self._chunk)
        chunk = "its metadata" if self._chunk is None else f"chunk {key}"
        file = files.store.join(files.name(array, key))
        raise CorruptionError(
            f"{_held_in(files.manifest, array)}, {chunk}: {file} {what}"
        ) from None


def _held_in(manifest: Manifest, array: StoredArray) -> str:
    """Return which leaf a stored array has, or which it is among."""
    number = manifest.arrays.index(array)
    paths = [
        format_path(leaf.path)
        for leaf in manifest.leaves
        if isinstance(leaf, ArrayLeaf)
        and (leaf.array == number or any(piece.array == number for piece in leaf.pieces))
    ]
    if len(paths) == 1:
        return f"array {paths[0]}"
    shown = ", ".join(paths[:3])
    return f"one of {len(paths)} small arrays ({shown}, ...)"


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

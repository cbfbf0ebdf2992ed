"""A checkpoint at a path: its manifest, and its files, compared with it as they are read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from gda.arrays.buffers import Buffers
from gda.checkpoint.format.files_at import no_checkpoint_at
from gda.checkpoint.format.manifest import Chunk, Manifest, StoredArray, file_of
from gda.checkpoint.format.manifest_json import load_manifest
from gda.layout.strict_json import pointer_in
from gda.multihost.shared_folders import advice_if_not_shared
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.stores import checksums
from gda.storage.stores.checksums import Bytes
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError, NewerFormatError
from gda.storage.stores.opening import Store
from gda.trees.per_process import from_bytes
from gda.trees.records.recorded_tree import PerProcessLeaf, format_path

T = TypeVar("T")

_FILES_IN_A_CHECK = 16
_SLOW_CHECK = 0.005  # seconds
_CHECKS_AT_A_TIME = 32
_GONE = (FileNotFoundError, NotADirectoryError)


def load_complete(store: Store) -> Manifest:
    """Return the manifest of a complete checkpoint; without one, the error says what is there."""
    try:
        return load_manifest(store)
    except _GONE:
        advice = "" if store.is_remote else advice_if_not_shared(store.url)
        raise CheckpointNotFoundError(f"{no_checkpoint_at(store)}{advice}") from None


class MissingFileError(CorruptionError):
    """A file of a checkpoint is missing; on a network file system it may only be late."""


def check_not_replaced(store: Store, manifest: Manifest) -> None:
    """Raise if a checkpoint was replaced or removed while it was read, which is no damage.

    Raises:
      RuntimeError: another one has replaced it.
      CheckpointNotFoundError: it was removed.
    """
    try:
        is_same = load_manifest(store).data == manifest.data
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(
            f"the checkpoint at {store.url} was removed while it was read"
        ) from None
    except (OSError, ValueError):
        return
    if not is_same:
        raise RuntimeError(
            f"the checkpoint at {store.url} was overwritten while it was being read; read it again"
        )


@dataclass
class Files:
    """The files that a manifest names, in their store."""

    store: Store
    manifest: Manifest
    _with_checked_metadata: set[int] = field(default_factory=set)  # arrays, of check_sizes

    @cached_property
    def leaves_in(self) -> dict[Chunk, list[str]]:
        """The paths of the leaves in each chunk, for messages."""
        found: dict[Chunk, list[str]] = {}
        for leaf in self.manifest.array_leaves:
            if leaf.array is not None:
                found[leaf.array, -1] = [format_path(leaf.path)]
            for piece in leaf.pieces:
                paths = found.setdefault(self.manifest.chunk_of(piece), [])
                paths.append(format_path(leaf.path))
        return found

    def leaves_of(self, number: int, chunk: int | None) -> str:
        """Return the leaves of a chunk or of a stored array, for messages."""
        if (alone := self.leaves_in.get((number, -1))) is not None:
            return f"array {alone[0]}"
        chunks = range(self.manifest.arrays[number].grid.num_chunks) if chunk is None else [chunk]
        packed = itertools.chain(*[self.leaves_in.get((number, each), []) for each in chunks])
        paths = list(dict.fromkeys(packed))
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return f"array{'s' * (len(paths) > 1)} {', '.join(paths[:3])}{more}"

    def name(self, array: StoredArray, chunk: int | None = None) -> str:
        return file_of(self.manifest.data, array, chunk)

    def check(self, chunks: Iterable[Chunk], last_of: Mapping[int, int]) -> None:
        """Check sizes of files, and after the last chunk of an array its metadata."""
        for number, chunk in chunks:
            array = self.manifest.arrays[number]
            with self._about(number, chunk):
                size = self.store.size(self.name(array, chunk))
                if size is not None:
                    _check_size(size, array.nbytes_of_file)
            if chunk == last_of.get(number):
                self.check_metadata(number)

    def check_sizes(self, chunks: Sequence[Chunk], options: Options) -> None:
        """Do as ``check``, for many chunks; check the metadata of each array once."""
        last_of = {n: chunk for n, chunk in chunks if n not in self._with_checked_metadata}
        self._with_checked_metadata.update(last_of)
        parts = iter(
            [chunks[i : i + _FILES_IN_A_CHECK] for i in range(0, len(chunks), _FILES_IN_A_CHECK)]
        )
        for part in parts:
            begun = time.monotonic()
            self.check(part, last_of)
            if time.monotonic() - begun > _SLOW_CHECK:
                break
        # A remote file system may take milliseconds for each file, in which no core is busy. The
        # files of a local one are checked in a third of the time by one thread.
        workers = _CHECKS_AT_A_TIME if options.are_for_threads else 1
        rest = [tasks.Task(2**20, partial(self.check, part, last_of)) for part in parts]
        tasks.run(rest, replace(options, max_workers=workers))

    def check_metadata(self, number: int) -> None:
        """Raise ``CorruptionError`` unless the ``zarr.json`` of an array is undamaged."""
        array = self.manifest.arrays[number]
        nbytes, crc = array.metadata
        with self._about(number):
            document, nothing = np.empty(nbytes, np.uint8), np.empty(0, np.uint8)
            size, found = self.store.read_into(self.name(array), document, nothing)
            _check_size(size, nbytes)
            if found != crc:
                raise ValueError(f"is damaged: its CRC-32C is {found:08x}, not {crc:08x}")

    def value_of(self, leaf: PerProcessLeaf, process: int) -> Any:
        """Return the value of a process; raise ``CorruptionError`` if its file is damaged."""
        name, expected = self.manifest.file_of(leaf, process), leaf.files[process]
        kind: type[ValueError] = CorruptionError
        try:
            data = self.store.read(name, expected[0])
            _check_size(len(data), expected[0])
            if checksums.size_and_crc(data) != expected:
                raise ValueError("is damaged")
            kind = NewerFormatError  # since the bytes are those that the save wrote
            return from_bytes(data)
        except _GONE:
            kind, problem = MissingFileError, "is missing"
        except ValueError as error:
            problem = str(error)
        what = f"value {format_path(leaf.path)} of process {process}"
        raise kind(f"{what}: {self.store.join(name)} {problem}")

    def load(self, where: Chunk, out: Bytes) -> None:
        """Read a chunk into contiguous memory; raise ``CorruptionError`` if it is damaged."""
        number, chunk = where
        array = self.manifest.arrays[number]
        tail = np.empty(checksums.CRC_BYTES, np.uint8)
        with self._about(number, chunk):
            size, crc = self.store.read_into(self.name(array, chunk), out, tail)
            _check_size(size, array.nbytes_of_file)
            in_file, expected = int.from_bytes(tail.tobytes(), "little"), array.crcs[chunk]
            if not crc == in_file == expected:
                what = "intact, but from another save" if crc == in_file else "damaged"
                raise ValueError(f"is {what}: its CRC-32C is {crc:08x}, not {expected:08x}")

    def loaded(self, where: Chunk) -> np.ndarray[Any, Any]:
        array = self.manifest.arrays[where[0]]
        data = Buffers(count=1).empty(array.chunk_shape, array.dtype)
        self.load(where, data.reshape(-1).view(np.uint8))
        return data

    def checked(self, where: Chunk) -> np.ndarray[Any, Any]:
        """Load a chunk; compare its size before memory is allocated."""
        self.check([where], {})
        return self.loaded(where)

    def loading_bytes(self, where: Chunk) -> int:
        """Return the memory that ``load`` takes beside ``out``, for the answer of a store."""
        return self.manifest.arrays[where[0]].nbytes_of_file * self.store.is_remote

    @contextmanager
    def _about(self, number: int, chunk: int | None = None) -> Iterator[None]:
        """Turn an error of a file into one that names array, chunk and file."""
        try:
            yield
        except (*_GONE, ValueError) as error:
            what = "is missing" if isinstance(error, _GONE) else str(error)
            array = self.manifest.arrays[number]
            part = "its metadata" if chunk is None else f"chunk {array.grid.key(chunk)}"
            name = self.name(array, chunk)
            with suppress(OSError, ValueError):
                what = pointer_in(self.store.head(name, 64)) or what
            leaves, links = self.leaves_of(number, chunk), self.store.num_links(name)
            if links > 1:
                what += f"; the file has {links} hard links, so verify what shares it too"
            kind = MissingFileError if isinstance(error, _GONE) else CorruptionError
            raise kind(f"{leaves}, {part}: {self.store.join(name)} {what}") from None


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"has {found} bytes, not {expected}")

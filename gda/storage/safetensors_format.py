"""The format of safetensors files, a length, a header of JSON and data: to read and to write.

A file that is laid out here is equal, byte for byte, to what the safetensors package writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gda.layout.spec import Shape
from gda.layout.strict_json import parse_json, pointer_in
from gda.storage.sources import SAFETENSORS_DTYPES

# A file of 100,000 tensors has a header of some 15 MB, and so has the index of a published model of
# 140,000. The 100 MB that the safetensors package accepts would take gigabytes to parse.
MOST_HEADER_BYTES = 32_000_000

METADATA = "__metadata__"


class Header(NamedTuple):
    """The header of a file, checked."""

    entries: list[Entry]
    data_start: int
    metadata: dict[str, str]
    version: tuple[int, ...]  # of the file, by version_of


class Entry(NamedTuple):
    """A tensor in the header: its first byte in the data, and that after its last."""

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int


# F4 has 2 elements in a byte; the F6 kinds are packed too.
_BITS = {name: dtype.itemsize * 8 for name, dtype in SAFETENSORS_DTYPES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


# Reading.


def version_of(file: int) -> tuple[int, ...]:
    """Return the inode, size and time of change of an open file: others if it was replaced."""
    status = os.fstat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_header(path: Path) -> Header:
    """Return the header of a file; ``ValueError`` says the fault in it."""
    with open(path, "rb") as file:
        version = version_of(file.fileno())
        size = version[1]
        begin = file.read(64)
        if pointer := pointer_in(begin):
            raise ValueError(f"{path} {pointer}")
        length = int.from_bytes(begin[:8], "little")
        file.seek(8)
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path} is truncated or not a safetensors file: it has {size} bytes, and its "
                f"length field gives the header {length}"
            )
        header = _read_object(path, file, length)
    metadata = header.pop(METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    ):
        raise ValueError(f"{path}: {METADATA} {str(metadata)[:50]} does not map texts to texts")
    entries = [_entry(path, name, fields) for name, fields in header.items()]
    data_start = 8 + length
    _check_places(path, entries, size - data_start)
    return Header(entries, data_start, metadata or {}, version)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ``ValueError`` if it is too large, or no object."""
    with open(path, "rb") as file:
        return _read_object(path, file, os.fstat(file.fileno()).st_size)


def _read_object(path: Path, file: BinaryIO, length: int) -> dict[str, Any]:
    if length > MOST_HEADER_BYTES:
        raise ValueError(
            f"{path} has a header of {length} bytes; expected are at most {MOST_HEADER_BYTES}"
        )
    try:
        parsed = parse_json(file.read(length).decode())
    except ValueError as error:
        raise ValueError(f"{path} has a broken header, which is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{path} has a broken header: {type(parsed).__name__} is not a JSON object"
        )
    return parsed


def check_header(text: bytes, name: str) -> None:
    """Raise ``ValueError`` if a header or an index would be larger than readers accept."""
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(
            f"{name} would have {len(text)} bytes of names; readers accept at most "
            f"{MOST_HEADER_BYTES}. Save a part of the tree in each folder"
        )


def _entry(path: Path, name: str, fields: Any) -> Entry:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        dtype, shape, (start, stop) = [fields[key] for key in ("dtype", "shape", "data_offsets")]
        are_sizes = len(shape) <= 64 and all(map(_is_size, (*shape, start, stop)))
        # NumPy multiplies the sizes also where one is 0.
        are_sizes = are_sizes and math.prod(size or 1 for size in shape) * _BITS[dtype] < 2**66
        if are_sizes and math.prod(shape) * _BITS[dtype] == (stop - start) * 8:
            return Entry(name, dtype, tuple(shape), start, stop)
    raise ValueError(
        f"tensor {name!r} of {path} has a broken entry in the header, {str(fields)[:200]}; "
        f"expected are a dtype of {', '.join(_BITS)}, a shape of at most 64 sizes "
        "that NumPy can have, and data_offsets with as many bytes"
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_places(path: Path, entries: list[Entry], data_bytes: int) -> None:
    """Raise unless the tensors fill the file end to end, as the format requires."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.stop > data_bytes:
            raise ValueError(
                f"tensor {entry.name!r} of {path} ends at byte {entry.stop} of the data, but the "
                f"file has {data_bytes}; it is truncated"
            )
        if entry.start != end:
            raise ValueError(
                f"tensor {entry.name!r} of {path} begins at byte {entry.start} of the data, and "
                f"those before it end at {end}"
            )
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"{path} has {data_bytes - end} bytes after its last tensor")


# Writing.

# The package sorts by dtype, the last of these first, then by name.
_RANKS = {name: rank for rank, name in enumerate(SAFETENSORS_DTYPES)}
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Tensor(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in the files; ``TypeError`` if they have none."""
    native = dtype.newbyteorder("=")
    if native not in _NAMES:
        known = ", ".join(str(each) for each in _NAMES)
        raise TypeError(
            f"safetensors files have no dtype {dtype}; convert the array to one of {known}"
        )
    return _NAMES[native]


@dataclass(frozen=True)
class FileLayout:
    """A file to write, with the tensors in the order of their data."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] | None

    @cached_property
    def header(self) -> bytes:
        """All bytes before the data."""
        content: dict[str, Any] = {}
        if self.metadata is not None:
            content[METADATA] = dict(sorted(self.metadata.items()))
        for name, dtype, shape, start, stop in self.entries:
            content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + (self.entries[-1].stop if self.entries else 0)


def file_of(name: str, tensors: Iterable[Tensor], metadata: Mapping[str, str] | None) -> FileLayout:
    """Return the layout of a file; ``ValueError`` if its header is longer than readers accept."""
    entries, end = [], 0
    for tensor in sorted(tensors, key=lambda tensor: (-_RANKS[tensor.dtype], tensor.name)):
        entries.append(Entry(*tensor, end, end + tensor.nbytes))
        end = entries[-1].stop
    file = FileLayout(name, tuple(entries), metadata)
    check_header(file.header[8:], name)
    return file

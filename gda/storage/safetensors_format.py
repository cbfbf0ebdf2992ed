"""The format of safetensors files, a length, a header of JSON and data: to read and to write.

A file that is laid out here is equal, byte for byte, to what the safetensors package writes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gda.layout.spec import Shape
from gda.layout.strict_json import parse_json
from gda.storage.sources import SAFETENSORS_DTYPES

# The header of a published model of 100,000 tensors has some 15 MB. The safetensors package has the
# same limit.
MOST_HEADER_BYTES = 100_000_000

METADATA = "__metadata__"


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


def read_header(path: Path) -> tuple[list[Entry], int]:
    """Return the tensors in the header of a file, and the first byte of the data.

    Raises:
      ValueError: the file is broken or truncated.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header, data_start = _read_header(path, file, size)
    header.pop(METADATA, None)
    entries = [_entry(path, name, given) for name, given in header.items()]
    _check_places(path, entries, size - data_start)
    return entries, data_start


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a file of ``size`` bytes, and the first byte of the data."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(
            f"{path} is truncated or not a safetensors file: it has {size} bytes, and its length "
            f"field gives the header {length}"
        )
    if length > MOST_HEADER_BYTES:
        raise ValueError(
            f"{path} has a header of {length} bytes; expected are at most {MOST_HEADER_BYTES}"
        )
    return parse_object(path, _read_exactly(file, length)), 8 + length


def _read_exactly(file: Any, count: int) -> bytes:
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Return a JSON object; ``ValueError`` names the file."""
    try:
        parsed = parse_json(text.decode())
    except ValueError as error:
        raise ValueError(f"{path} has a broken header, which is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{path} has a broken header: {type(parsed).__name__} is not a JSON object"
        )
    return parsed


def _entry(path: Path, name: str, given: Any) -> Entry:
    def broken(why: str) -> NoReturn:
        raise ValueError(f"tensor {name!r} of {path}: {why}")

    if not isinstance(given, dict) or not {"dtype", "shape", "data_offsets"} <= given.keys():
        broken("its entry in the header needs dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        broken(f"dtype {str(dtype)[:50]!r} is unknown; expected is one of {', '.join(_BITS)}")
    if not _are_sizes(shape) or len(shape) > 64:
        broken(f"shape {str(shape)[:100]} is not a list of at most 64 sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        broken(f"data_offsets {str(offsets)[:100]} are not begin and end in bytes")
    start, stop = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (stop - start) * 8:
        broken(
            f"shape {tuple(shape)} of {dtype} has {bits // 8} bytes, but data_offsets "
            f"{start} to {stop} have {stop - start}"
        )
    return Entry(name, dtype, tuple(shape), start, stop)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _check_places(path: Path, entries: list[Entry], data_bytes: int) -> None:
    """Raise unless the tensors fill the file end to end, as the format requires."""
    end, before = 0, ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.stop > data_bytes:
            raise ValueError(
                f"tensor {entry.name!r} of {path} ends at byte {entry.stop} of the data, but the "
                f"file has {data_bytes}; it is truncated"
            )
        if entry.start != end:
            word = "overlaps" if entry.start < end else "leaves a gap after"
            after = f"tensor {before!r}" if before else "the header"
            raise ValueError(f"tensor {entry.name!r} of {path} {word} {after}")
        end, before = entry.stop, entry.name
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
    """A file to write.

    Attributes:
      name: of the file.
      entries: the tensors in the order of their data.
      metadata: texts by name, or ``None``.
    """

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


def file_of(
    name: str, tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Return the layout of a file with these tensors.

    Raises:
      ValueError: its header would be longer than readers accept.

    >>> file = file_of('a.safetensors', [Tensor('b', 'U8', (3,)), Tensor('w', 'F32', (2,))])
    >>> [(entry.name, entry.start, entry.stop) for entry in file.entries]
    [('w', 0, 8), ('b', 8, 11)]
    >>> file.header[8:60]
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]'
    """
    entries, end = [], 0
    for tensor in sorted(tensors, key=lambda tensor: (-_RANKS[tensor.dtype], tensor.name)):
        entries.append(Entry(*tensor, end, end + tensor.nbytes))
        end = entries[-1].stop
    file = FileLayout(name, tuple(entries), metadata)
    if len(file.header) - 8 > MOST_HEADER_BYTES:
        raise ValueError(
            f"the header of {name} would have {len(file.header) - 8} bytes; readers accept at most "
            f"{MOST_HEADER_BYTES}. Save fewer tensors into a file, with a smaller max_file_bytes, "
            "or less metadata"
        )
    return file


def files_of_model(
    tensors: Sequence[Tensor], most_bytes: int, metadata: Mapping[str, str] | None = None
) -> tuple[list[FileLayout], bytes | None]:
    """Return the files of a model, named as published models have them, and their index.

    Files are filled in the order of the tensors. A tensor of more than ``most_bytes`` has a file of
    its own.

    Returns:
      the files, and the index; ``None`` for a single file.

    >>> tensors = [Tensor(name, 'F32', (2,)) for name in 'abc']
    >>> [file.name for file in files_of_model(tensors, 16)[0]]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups = _groups(tensors, most_bytes)
    if len(groups) == 1:
        return [file_of(MODEL, groups[0], metadata)], None
    files = [
        file_of(f"model-{number:05}-of-{len(groups):05}.safetensors", group, metadata)
        for number, group in enumerate(groups, 1)
    ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {entry.name: file.name for file in files for entry in file.entries},
    }
    return files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def files_named_by(index: Path) -> set[str]:
    """Return the files of an index that have names of ``files_of_model``; of no index, none."""
    try:
        files = parse_object(index, index.read_bytes()).get("weight_map")
    except (FileNotFoundError, ValueError):
        return set()
    named = files.values() if isinstance(files, dict) else ()
    return {file for file in named if isinstance(file, str) and _PART.fullmatch(file)}


def _groups(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    open_group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if tensor.nbytes > most_bytes:
            groups.append([tensor])
            continue
        if held + tensor.nbytes > most_bytes:
            groups.append(open_group)
            open_group, held = [], 0
        open_group.append(tensor)
        held += tensor.nbytes
    return [*groups, open_group] if open_group or not groups else groups

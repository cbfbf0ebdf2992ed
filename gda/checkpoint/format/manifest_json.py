"""The manifest as a file, written last: JSON, whose first line has size and SHA-256 of the rest.

Every value is checked before it is used: a manifest may be damaged, or hostile.
"""

from __future__ import annotations

import functools
import json
import math
import re
import reprlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from gda.checkpoint.format.manifest import Manifest, StoredArray
from gda.layout.dtype_names import recorded_dtype
from gda.layout.spec import Shape
from gda.layout.strict_json import check_memory, parse_json, pointer_in
from gda.storage.stores.errors import CorruptionError, NewerFormatError
from gda.storage.stores.opening import Store
from gda.trees.files.step_names import MANIFEST
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    PerProcessLeaf,
    Piece,
    ValueLeaf,
    check_structure,
    without_collections,
)

T = TypeVar("T")
R = TypeVar("R")

NAME = MANIFEST
_VERSION = 1
MOST_BYTES = 2**28  # of a manifest; 25 million chunks take about 230 MB
DATA_PATTERN = re.compile(r"data-[0-9a-f]{16}")
_NEW_DTYPE = re.compile(r"(u?int|b?float|complex)[1-9][0-9]{0,2}(_[a-z0-9]{1,20})?")
_LARGEST = 2**62  # of sizes, in elements and in bytes
_MOST_CHUNK_BYTES = 2**40
_MOST_DIMENSIONS = 64  # as many as NumPy has
MOST_HEADER_BYTES = 1000


@without_collections()
def dump(manifest: Manifest) -> bytes:
    """Return the file; raise ``ValueError`` if it would be larger than ``load`` accepts."""
    text = to_json(manifest)
    try:
        if len(text) + MOST_HEADER_BYTES > MOST_BYTES:
            raise ValueError(f"it would have {len(text)} bytes; expected are at most {MOST_BYTES}")
        check_memory(text)
    except ValueError as error:
        raise ValueError(
            f"the manifest cannot be written: {error}. Save fewer and larger arrays, or several "
            "checkpoints"
        ) from None
    body = text.encode()
    return _header(body) + body


def to_json(value: Any) -> str:
    return json.dumps(value, default=_for_json, separators=(",", ":"), allow_nan=False)


def _header(body: bytes | memoryview) -> bytes:
    seal = {"gda-checkpoint": _VERSION, "nbytes": len(body), "sha256": sha256(body).hexdigest()}
    return json.dumps(seal).encode() + b"\n"


def version_in(file: bytes) -> Any:
    """Return the version in the first line of a file; None if it does not begin like a manifest."""
    try:
        return json.loads(file[:MOST_HEADER_BYTES].partition(b"\n")[0])["gda-checkpoint"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def body_of(file: bytes, where: str) -> memoryview:
    """Return the JSON in a file.

    Raises:
      NewerFormatError: it has the version of a newer gda. A flipped bit of the version says so too,
        since of a newer file nothing else is known.
      CorruptionError: its first line does not match.
    """
    header = file[:MOST_HEADER_BYTES].partition(b"\n")[0]
    body = memoryview(file)[len(header) + 1 :]
    version = version_in(file)
    if version is None:
        pointer = pointer_in(file)
        raise CorruptionError(f"{where} {pointer or 'does not begin like a manifest of gda'}")
    if version != _VERSION:
        is_newer = type(version) is int and version > _VERSION
        raise (NewerFormatError if is_newer else CorruptionError)(
            f"{where} has version {version!r:.40}; this gda reads version {_VERSION}; update gda, "
            "unless its first line is damaged"
        )
    if header + b"\n" != _header(body):
        raise CorruptionError(
            f"{where} is damaged: its {len(body)} bytes do not match the checksum in its first line"
        )
    return body


def load_manifest(store: Store) -> Manifest:
    """Return the manifest of a checkpoint; raise if it is damaged, or not there."""
    file, where = _file_in(store)
    manifest = load(file, where)
    try:
        check_structure(manifest.structure, [leaf.path for leaf in manifest.leaves])
    except CorruptionError as error:
        raise CorruptionError(f"{where} is invalid: {error}") from None
    return manifest


def data_in(store: Store) -> str:
    """Return the directory that a manifest names; raise as ``load_manifest``, in less time."""
    file, where = _file_in(store)
    try:
        return _READERS["data"][1](parse_json(str(body_of(file, where), "utf-8"))["data"])
    except (TypeError, KeyError):
        raise CorruptionError(f"{where} names no directory of a checkpoint") from None


def _file_in(store: Store) -> tuple[bytes, str]:
    """Return the file, and its place for messages."""
    where = store.join(NAME)
    try:
        return store.read(NAME, MOST_BYTES), where
    except ValueError as error:
        raise CorruptionError(f"{where} {error}") from None


def load(file: bytes, where: str) -> Manifest:
    """Return the manifest in the file ``where``; raise ``CorruptionError`` if it is not valid."""
    body = body_of(file, where)
    return _checked(lambda: _manifest(parse_json(str(body, "utf-8"))), where)


def leaves_of_json(value: Any, where: str) -> tuple[Leaf, ...]:
    """Return the records of leaves in JSON; raise ``CorruptionError`` if they are not valid."""

    def read() -> tuple[Leaf, ...]:
        try:
            return _READERS["leaves"][1](value)
        except _Invalid as inner:
            raise type(inner)(f".leaves{inner}") from None

    return _checked(read, where)


def _checked(read: Callable[[], T], where: str) -> T:
    try:
        with without_collections():
            return read()
    except _Invalid as invalid:
        problem = str(invalid)
        problem = problem[1:] if problem[0] == "." else f"the manifest{problem}"
        if isinstance(invalid, _Unknown):
            raise NewerFormatError(f"{where} cannot be read here: {problem}") from None
        raise CorruptionError(f"{where} is invalid: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where} is not a manifest: {error}") from None


# To JSON. Floats that JSON does not have, and complex numbers, are written as strings.

_KEYS = {"crcs": "crc32c"}  # of fields with another name in the file
_PER_PROCESS = "PerProcess"  # the kind of a leaf


def _for_json(record: Any) -> Any:
    if isinstance(record, np.dtype):
        return _name_of(record)
    if isinstance(record, Piece):
        return [record.array, record.offset, record.start, record.shape]
    if isinstance(record, ValueLeaf):
        kind = type(record.value).__name__
        return {"path": record.path, "kind": kind, "value": _VALUES[kind][0](record.value)}
    entry = {
        key: value
        for name, key, default, *_ in _fields_of(type(record))
        if (value := getattr(record, name)) is not default
    }
    if isinstance(record, PerProcessLeaf):
        entry["kind"] = _PER_PROCESS
    if isinstance(record, StoredArray):
        entry["crc32c"] = np.asarray(record.crcs, ">u4").tobytes().hex()
    elif isinstance(record, ArrayLeaf) and record.array is None:
        entry["pieces"] = record.pieces
    return entry


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy makes it anew each time, in microseconds


_VALUES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bool": (bool, lambda value: _of(bool)(value)),
    # Python limits the decimal digits of an integer, but not the hexadecimal ones.
    "int": (
        lambda value: str(value) if value.bit_length() < 1000 else hex(value),
        lambda text: int(_text(text), 0),
    ),
    "float": (repr, lambda text: float(_text(text))),
    "complex": (repr, lambda text: complex(_text(text))),
    "str": (
        lambda text: text.encode("utf-8", "surrogatepass").hex() if _is_odd(text) else [text],
        lambda given: (
            bytes.fromhex(given).decode("utf-8", "surrogatepass")
            if isinstance(given, str)
            else _one_text(given)
        ),
    ),
    "bytes": (bytes.hex, lambda text: bytes.fromhex(_text(text))),
}


def _one_text(values: Any) -> str:
    (text,) = _list(values)
    return _text(text)


def _is_odd(text: str) -> bool:
    """Return True if a string has lone surrogates, which UTF-8 does not encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# From JSON, with every value checked.


class _Invalid(Exception):  # noqa: N818
    """A value is wrong; the readers around it put its place before the message."""


class _Unknown(_Invalid):
    """A value is right in a newer gda, or in one beside a newer ml_dtypes."""


def _manifest(body: Any) -> Manifest:
    manifest = _record(Manifest, body)
    if len({each.name for each in manifest.arrays}) != len(manifest.arrays):
        raise _Invalid(": two arrays have one name")
    if len({leaf.path for leaf in manifest.leaves}) != len(manifest.leaves):
        raise _Invalid(": two leaves have one path")
    for number, leaf in enumerate(manifest.leaves):
        if isinstance(leaf, ArrayLeaf):
            _check_stored(f".leaves[{number}]", leaf, manifest.arrays)
    nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in manifest.arrays)
    if manifest.nbytes > nbytes:
        raise _Invalid(": its leaves are larger than its arrays")
    if len({len(leaf.files) for leaf in manifest.per_process}) > 1:
        raise _Invalid(": two leaves have the files of different numbers of processes")
    return manifest


def _record(kind: type[R], value: Any) -> R:
    """Return a record of an object of JSON, which has the fields of its class."""
    if type(value) is not dict:
        raise _Invalid(" is not an object")
    found: dict[str, Any] = {}
    for name, key, default, expected, read in _fields_of(kind):
        given = value.get(key, default)
        if given is not default:
            try:
                given = read(given)
            except _Invalid as inner:
                raise type(inner)(f".{key}{inner}") from None
            except (ValueError, TypeError, OverflowError):
                raise _Invalid(f".{key} is {reprlib.repr(given)}; expected is {expected}") from None
        elif default is MISSING:
            raise _Invalid(f" has no {key!r}")
        found[name] = given
    return kind(**found)


@functools.cache
def _fields_of(kind: type) -> list[tuple[str, str, Any, str, Callable[[Any], Any]]]:
    """Return name, key in the file, default, values in words and reader of the fields."""
    return [
        (each.name, _KEYS.get(each.name, each.name), each.default, *_READERS[each.name])
        for each in fields(kind)
    ]


def _each(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:

    def read_all(values: Any) -> tuple[T, ...]:
        found: list[T] = []
        try:
            for value in _list(values):
                found.append(read(value))
        except _Invalid as inner:
            raise type(inner)(f"[{len(found)}]{inner}") from None
        return tuple(found)

    return read_all


def _array(value: Any) -> StoredArray:
    array = _record(StoredArray, value)
    shape, chunk_shape = array.shape, array.chunk_shape
    fits = len(shape) == len(chunk_shape)
    if not fits or not all(0 < c <= n for n, c in zip(shape, chunk_shape, strict=True)):
        raise _Invalid(f" has chunks of shape {chunk_shape}, which do not fit {shape}")
    if math.prod(shape) * array.dtype.itemsize > _LARGEST:
        raise _Invalid(f" of shape {shape} is larger than any machine can hold")
    if array.nbytes_per_chunk > _MOST_CHUNK_BYTES:
        raise _Invalid(f" has chunks of shape {chunk_shape}, which is too large")
    count = array.grid.num_chunks
    if len(array.crcs) != count:
        raise _Invalid(f".crc32c is not one checksum for each of {count} chunks")
    return array


def _leaf(value: Any) -> Leaf:
    kind = value.get("kind") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _VALUES:
        try:
            return _record(ValueLeaf, value | {"value": _VALUES[kind][1](value.get("value"))})
        except (ValueError, TypeError, OverflowError):
            raise _Invalid(f".value is not a {kind}") from None
    if kind == _PER_PROCESS:
        return _record(PerProcessLeaf, value)
    leaf = _record(ArrayLeaf, value)
    if (leaf.array is None) != ("pieces" in value):
        raise _Invalid(" has neither an array nor pieces, or both")
    if _size_without_zeros(leaf.shape) * leaf.dtype.itemsize > _LARGEST:
        raise _Invalid(f" of shape {leaf.shape} is larger than any machine can hold")
    return leaf


def _piece(value: Any) -> Piece:
    try:
        array, offset, start, shape = _list(value)
        return Piece(_number(array), _number(offset), _numbers(start), _shape(shape))
    except (ValueError, TypeError):
        expected = "an array, an offset, a start and a shape"
        raise _Invalid(f" is {reprlib.repr(value)}; expected is {expected}") from None


def _of(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no int
            raise TypeError
        return value

    return read


_list, _text = _of(list), _of(str)


def _matching(pattern: str) -> Callable[[Any], str]:
    compiled: Any = re.compile(pattern)
    return lambda text: compiled.fullmatch(text)[0]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise TypeError
    for value in values:  # without a call for each: there are millions
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise ValueError
    return tuple(values)


def _shape(values: Any) -> Shape:
    shape = _numbers(values)
    if len(shape) > _MOST_DIMENSIONS or _size_without_zeros(shape) > _LARGEST:
        raise ValueError
    return shape


def _size_without_zeros(shape: Shape) -> int:
    return math.prod([size for size in shape if size])


def _size_and_crc(values: Any, most_bytes: int) -> tuple[int, int]:
    nbytes, crc = _numbers(values)
    if nbytes > most_bytes or crc >= 2**32:
        raise ValueError
    return nbytes, crc


def _files(values: Any) -> tuple[tuple[int, int], ...]:
    if not _list(values):
        raise ValueError
    return tuple([_size_and_crc(each, _MOST_CHUNK_BYTES) for each in values])


def _mesh(value: Any) -> dict[str, int]:
    for size in _of(dict)(value).values():
        _number(size)
    return value


def _about(value: Any) -> dict[str, Any]:
    _path(list(_of(dict)(value).values()))
    return value


def _path(keys: Any) -> Path:
    if any(type(key) not in (str, int) for key in _list(keys)):
        raise TypeError
    return tuple(keys)


def _key_impl(name: Any) -> str:
    if not (_text(name).isprintable() and 0 < len(name) <= 80):
        raise ValueError
    return name


def _dtype(text: Any) -> np.dtype[Any]:
    try:
        return recorded_dtype(text)
    except TypeError:
        if _NEW_DTYPE.fullmatch(_text(text)):
            raise _Unknown(
                f" is {text}, which is not known here; update ml_dtypes and gda"
            ) from None
        raise


def _crcs(text: Any) -> array[int]:
    crcs = array("I", bytes.fromhex(text))  # also accepts blanks between the digits
    if sys.byteorder == "little":
        crcs.byteswap()
    return crcs


_SHAPE = "a list of sizes, whose product a machine can hold", _shape
# A field has one meaning in all records: its values in words, and their reader.
_READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "about": ("an object of strings and integers", _about),
    "array": ("the number of an array", _number),
    "arrays": ("a list of arrays", _each(_array)),
    "chunk_shape": _SHAPE,
    "crcs": ("eight hexadecimal digits for each chunk", _crcs),
    "data": ("the name of a directory of a checkpoint", _matching(DATA_PATTERN.pattern)),
    "dtype": ("the name of a dtype", _dtype),
    "files": ("a size and a CRC-32C for each process", _files),
    "fingerprint": ("16 hexadecimal digits", _matching("[0-9a-f]{16}")),
    "key_impl": ("a kind of PRNG keys", _key_impl),
    "weak_type": ("true or false", _of(bool)),
    "kind": ("a kind of leaf", _matching(r"GlobalArray|PaddedArray|jax\.Array|numpy|number")),
    "leaves": ("a list of leaves", _each(_leaf)),
    "mesh": ("an object of sizes", _mesh),
    "metadata": ("a size and a CRC-32C", lambda values: _size_and_crc(values, 2**20)),
    "name": ("a name of letters and digits", _matching(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,120}")),
    "path": ("a list of strings and integers", _path),
    "pieces": ("a list of pieces", _each(_piece)),
    "shape": _SHAPE,
    "spec": ("a string", _text),
    "structure": ("anything", lambda value: value),
    "value": ("anything", lambda value: value),
}


def _check_stored(name: str, leaf: ArrayLeaf, arrays: Sequence[StoredArray]) -> None:
    """Raise unless the stored arrays have each element of the leaf exactly once."""
    if leaf.fingerprint is None:
        raise _Invalid(f"{name} has no 'fingerprint'")
    used = [piece.array for piece in leaf.pieces] if leaf.array is None else [leaf.array]
    for number in used:
        if not 0 <= number < len(arrays):
            raise _Invalid(f"{name} is in array {number} of {len(arrays)}")
        if arrays[number].dtype != leaf.dtype:
            raise _Invalid(f"{name} has {leaf.dtype}, but is stored as {arrays[number].dtype}")
    if leaf.array is not None:
        if arrays[leaf.array].shape != leaf.shape:
            raise _Invalid(f"{name} has shape {leaf.shape}, not {arrays[leaf.array].shape}")
        return
    for piece in leaf.pieces:
        array = arrays[piece.array]
        size = math.prod(piece.shape)
        chunk_size = math.prod(array.chunk_shape)
        lies_in_one = len(array.shape) == 1 and piece.offset % chunk_size + size <= chunk_size
        if not size or not lies_in_one or piece.offset + size > array.shape[0]:
            raise _Invalid(f"{name} has a piece that is not in one chunk of array {piece.array}")
        if not len(piece.start) == len(piece.shape) == len(leaf.shape) or any(
            first + extent > whole
            for first, extent, whole in zip(piece.start, piece.shape, leaf.shape, strict=True)
        ):
            raise _Invalid(f"{name} has a piece outside of its shape {leaf.shape}")
    boxes = [(piece.start, piece.shape) for piece in leaf.pieces]
    if boxes == [((0,) * len(leaf.shape), leaf.shape)]:  # the usual case, in less time
        return
    count = sum(math.prod(shape) for _, shape in boxes)
    # Otherwise a read would leave elements unset: old memory of this process.
    if count != math.prod(leaf.shape) or not _are_tiles(boxes, leaf.shape):
        raise _Invalid(f"{name}.pieces do not have each element of its shape {leaf.shape} once")


def _are_tiles(boxes: list[tuple[Shape, Shape]], whole: Shape) -> bool:
    """Return True if boxes are different blocks of one regular grid, whose last may be shorter."""
    if len({start for start, _ in boxes}) < len(boxes):
        return False
    largest = [max(extents) for extents in zip(*[shape for _, shape in boxes], strict=True)]
    return all(
        first % step == 0 and extent == min(step, size - first)
        for start, shape in boxes
        for first, extent, step, size in zip(start, shape, largest, whole, strict=True)
    )

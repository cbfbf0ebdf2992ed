"""The manifest as a file: JSON, sealed by its first line, and checked when it is read.

The first line has the size and the SHA-256 of the rest. The file is written last; only the files
that it names belong to the checkpoint. Every value is checked before it is used: a manifest may be
damaged, or hostile.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np

from gda.checkpoint.format.chunks import ChunkGrid
from gda.checkpoint.format.errors import CorruptionError
from gda.checkpoint.format.manifest import (
    ArrayLeaf,
    Leaf,
    Manifest,
    Piece,
    StoredArray,
    ValueLeaf,
)
from gda.layout.spec import Shape
from gda.layout.strict_json import check_memory, parse_json

NAME = "manifest.json"
# A tree with a PaddedArray has version 2: the last chunks and pieces of it may be shorter, which
# a gda before PaddedArray would call damaged.
_VERSIONS = (1, 2)
MOST_BYTES = 2**28  # of a manifest; 25 million chunks take about 230 MB
DATA_PATTERN = re.compile(r"data-[0-9a-f]{16}")
_ARRAY_PATTERN = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,120}")
_LARGEST = 2**62  # of sizes, in elements and in bytes
_MOST_CHUNK_BYTES = 2**40
_MOST_DTYPE_LETTERS = 40
_MOST_DIMENSIONS = 64  # as many as NumPy has
_MOST_HEADER_BYTES = 1000
_FINGERPRINT_PATTERN = re.compile("[0-9a-f]{32}")


def dump(manifest: Manifest) -> bytes:
    """Return the file.

    Raises:
      ValueError: it would be larger than ``load`` accepts.
    """
    text = json.dumps(
        {
            "about": manifest.about,
            **({} if manifest.group is None else {"group": list(manifest.group)}),
            "data": manifest.data,
            "structure": manifest.structure,
            "leaves": [_dump_leaf(leaf) for leaf in manifest.leaves],
            "arrays": [dump_array(array) for array in manifest.arrays],
        },
        separators=(",", ":"),
        allow_nan=False,
    )
    try:
        if len(text) + _MOST_HEADER_BYTES > MOST_BYTES:
            raise ValueError(f"it would have {len(text)} bytes; expected are at most {MOST_BYTES}")
        check_memory(text)
    except ValueError as error:
        raise ValueError(
            f"the manifest cannot be written: {error}. Save fewer and larger arrays, or several "
            "checkpoints"
        ) from None
    kinds = {leaf.kind for leaf in manifest.leaves if isinstance(leaf, ArrayLeaf)}
    body = text.encode()
    return _header(body, _VERSIONS["PaddedArray" in kinds]) + body


def _header(body: bytes | memoryview, version: int) -> bytes:
    seal = {"gda-checkpoint": version, "nbytes": len(body), "sha256": sha256(body).hexdigest()}
    return json.dumps(seal).encode() + b"\n"


def load(file: bytes, where: str) -> Manifest:
    """Return the manifest in a file.

    Args:
      where: the name of the file, for the messages.

    Raises:
      CorruptionError: it is damaged, invalid, or of another version.
    """
    header = file[:_MOST_HEADER_BYTES].partition(b"\n")[0]
    body = memoryview(file)[len(header) + 1 :]
    try:
        seal = json.loads(header)
        version = seal["gda-checkpoint"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptionError(f"{where} does not begin like a manifest of gda") from None
    if version not in _VERSIONS:
        most = _VERSIONS[-1]
        raise CorruptionError(
            f"{where} has version {version!r:.40}; this gda reads versions up to {most}; update gda"
        )
    if header + b"\n" != _header(body, int(version)):
        raise CorruptionError(
            f"{where} is damaged: its {len(body)} bytes do not match the checksum in its first line"
        )
    try:
        with _without_collections():
            return _manifest(parse_json(str(body, "utf-8")))
    except _Invalid as invalid:
        raise CorruptionError(f"{where} is invalid: {invalid}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where} is not a manifest: {error}") from None


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch off garbage collection, half the time of a load; what is parsed has no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# To JSON. Floats that JSON does not have, and complex numbers, are written as strings.


def _dump_leaf(leaf: Leaf) -> dict[str, Any]:
    if isinstance(leaf, ValueLeaf):
        kind = type(leaf.value).__name__
        return {"path": list(leaf.path), "kind": kind, "value": _VALUES[kind][0](leaf.value)}
    entry: dict[str, Any] = {
        "path": list(leaf.path),
        "kind": leaf.kind,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
    }
    for name in ("key_impl", "spec", "mesh", "fingerprint", "array"):
        if (value := getattr(leaf, name)) is not None:
            entry[name] = value
    if leaf.array is None:
        entry["pieces"] = [dump_piece(piece) for piece in leaf.pieces]
    return entry


def dump_piece(piece: Piece) -> list[Any]:
    """Return a piece in JSON, for ``load_piece``."""
    return [piece.array, piece.offset, list(piece.start), list(piece.shape)]


def dump_array(array: StoredArray) -> dict[str, Any]:
    """Return an array in JSON, for ``load_array``."""
    return {
        "name": array.name,
        "shape": list(array.shape),
        "chunk_shape": list(array.chunk_shape),
        "dtype": array.dtype.name,
        "codec": array.codec,
        "metadata": list(array.metadata),
        "crc32c": np.asarray(array.crcs, ">u4").tobytes().hex(),
        **({} if array.sizes is None else {"sizes": list(array.sizes)}),
    }


_VALUES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bool": (bool, lambda text: _checked(text, bool)),
    # Python limits the decimal digits of an integer, but not the hexadecimal ones.
    "int": (
        lambda value: str(value) if value.bit_length() < 1000 else hex(value),
        lambda text: int(_text(text), 0),
    ),
    "float": (repr, lambda text: float(_text(text))),
    "complex": (repr, lambda text: complex(_text(text))),
    "str": (
        lambda text: text.encode("utf-8", "surrogatepass").hex() if _is_odd(text) else [text],
        lambda text: (
            bytes.fromhex(text).decode("utf-8", "surrogatepass")
            if isinstance(text, str)
            else _text(_one(text))
        ),
    ),
    "bytes": (bytes.hex, lambda text: bytes.fromhex(_text(text))),
}


def _is_odd(text: str) -> bool:
    """Return True if a string has lone surrogates, which UTF-8 does not encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# From JSON, with every value checked.


class _Invalid(Exception):  # noqa: N818
    pass


def _manifest(body: Any) -> Manifest:
    entry = _Entry("the manifest", body)
    data = entry.get("data", str)
    if not DATA_PATTERN.fullmatch(data):
        raise _Invalid(f"data is {data!r:.80}, which is not a directory of a checkpoint")
    arrays = tuple(
        load_array(each, f"arrays[{i}]") for i, each in enumerate(entry.get("arrays", list))
    )
    names = [array.name for array in arrays]
    if len(set(names)) != len(names):
        raise _Invalid("two arrays have one name")
    leaves = tuple(
        _leaf(_Entry(f"leaves[{i}]", each), arrays)
        for i, each in enumerate(entry.get("leaves", list))
    )
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise _Invalid("two leaves have one path")
    _check_shared_out(leaves, arrays)
    about = entry.get("about", dict)
    if any(type(value) not in (str, int) for value in about.values()):
        raise _Invalid("about has something other than integers and strings")
    group = None if entry.get("group", list, None) is None else _size_and_crc(entry, "group", 2**30)
    structure = entry.get("structure", object)
    return Manifest(
        data=data, arrays=arrays, leaves=leaves, structure=structure, about=about, group=group
    )


class _Entry:
    """An object of JSON, with its name for messages."""

    def __init__(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _Invalid(f"{name} is not an object")
        self.name = name
        self._value = value

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self._value.get(key, default)
        if type(value) is kind:
            return value
        if value is ...:
            raise _Invalid(f"{self.name} has no {key!r}")
        if value is not default and (not isinstance(value, kind) or _is_wrong_bool(value, kind)):
            raise _Invalid(f"{self.name}.{key} is a {type(value).__name__}")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        return _numbers(f"{self.name}.{key}", self.get(key, list))

    def shape(self, key: str) -> Shape:
        return _shape(f"{self.name}.{key}", self.get(key, list))

    def dtype(self) -> np.dtype[Any]:
        return _dtype(f"{self.name}.dtype", self.get("dtype", str))


def _is_wrong_bool(value: Any, kind: type) -> bool:
    return isinstance(value, bool) and kind is int


def _numbers(name: str, values: list[Any]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise _Invalid(f"{name} has {value!r:.40}, which is not a valid size")
    return tuple(values)


def _shape(name: str, values: list[Any]) -> Shape:
    shape = _numbers(name, values)
    if len(shape) > _MOST_DIMENSIONS or math.prod(size for size in shape if size) > _LARGEST:
        raise _Invalid(f"{name} is {values!r:.200}, which no machine can hold")
    return shape


def _dtype(name: str, text: str) -> np.dtype[Any]:
    dtype = _known_dtype(text) if len(text) <= _MOST_DTYPE_LETTERS else None
    if dtype is None:
        raise _Invalid(f"{name} is {text!r:.40}, which is not a known dtype")
    return dtype


@functools.lru_cache(maxsize=64)  # NumPy makes a name anew each time: a quarter of a load
def _known_dtype(text: str) -> np.dtype[Any] | None:
    import ml_dtypes  # registers the names of JAX's types in NumPy

    known = text if text in _NUMPY_DTYPES else getattr(ml_dtypes, text, None)
    is_known = known is text or isinstance(known, type)
    try:
        dtype = np.dtype(known) if is_known else None
    except TypeError:
        dtype = None
    return None if dtype is None or dtype.hasobject or dtype.name != text else dtype


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return True if a checkpoint can hold arrays of this dtype."""
    try:
        return _dtype("", dtype.name) == dtype
    except _Invalid:
        return False


_NUMPY_DTYPES = {
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


def load_array(value: Any, name: str) -> StoredArray:
    """Return the array that ``dump_array`` wrote; ``name`` is for messages."""
    entry = _Entry(name, value)
    name, codec = entry.get("name", str), entry.get("codec", str)
    if not _ARRAY_PATTERN.fullmatch(name):
        raise _Invalid(f"{entry.name}.name is {name!r:.140}, which is not a valid name")
    if codec not in ("bytes", "zstd"):
        raise _Invalid(f"{entry.name}.codec is {codec!r:.40}, which this gda does not know")
    shape, chunk_shape = entry.shape("shape"), entry.shape("chunk_shape")
    dtype = entry.dtype()
    fits = len(shape) == len(chunk_shape)
    if not fits or not all(0 < c <= n for n, c in zip(shape, chunk_shape, strict=True)):
        raise _Invalid(f"{entry.name} has chunks of shape {chunk_shape}, which do not fit {shape}")
    if math.prod(shape) * dtype.itemsize > _LARGEST:
        raise _Invalid(f"{entry.name} of shape {shape} is larger than any machine can hold")
    if math.prod(chunk_shape) * dtype.itemsize > _MOST_CHUNK_BYTES:
        raise _Invalid(f"{entry.name} has chunks of shape {chunk_shape}, which is too large")
    num_chunks = ChunkGrid(shape, chunk_shape).num_chunks
    crcs = _crcs(entry, num_chunks)
    sizes = None
    if codec == "zstd":
        sizes = entry.numbers("sizes")
        if len(sizes) != num_chunks or max(sizes) > _MOST_CHUNK_BYTES:
            raise _Invalid(f"{entry.name}.sizes are not those of {num_chunks} chunks")
    return StoredArray(
        name=name,
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        codec=codec,
        metadata=_size_and_crc(entry, "metadata", 2**20),
        crcs=crcs,
        sizes=sizes,
    )


def _size_and_crc(entry: _Entry, key: str, most_bytes: int) -> tuple[int, int]:
    numbers = entry.numbers(key)
    if len(numbers) != 2 or numbers[0] > most_bytes or numbers[1] >= 2**32:
        raise _Invalid(f"{entry.name}.{key} is not a size and a checksum")
    return numbers[0], numbers[1]


def _crcs(entry: _Entry, num_chunks: int) -> array[int]:
    text = entry.get("crc32c", str)
    try:
        data = bytes.fromhex(text)  # also accepts blanks between the digits
    except ValueError:
        raise _Invalid(f"{entry.name}.crc32c is not hexadecimal") from None
    if len(data) != 4 * num_chunks:
        raise _Invalid(f"{entry.name}.crc32c is not one checksum for each of {num_chunks} chunks")
    crcs = array("I", data)
    if sys.byteorder == "little":
        crcs.byteswap()
    return crcs


def _leaf(entry: _Entry, arrays: Sequence[StoredArray]) -> Leaf:
    path = tuple(entry.get("path", list))
    if any(type(key) not in (str, int) for key in path):
        raise _Invalid(f"{entry.name}.path is {path!r:.200}")
    kind = entry.get("kind", str)
    if kind in _VALUES:
        try:
            return ValueLeaf(path, _VALUES[kind][1](entry.get("value", object)))
        except (ValueError, TypeError, OverflowError):
            raise _Invalid(f"{entry.name}.value is not a {kind}") from None
    if kind not in ("GlobalArray", "PaddedArray", "jax.Array", "numpy"):
        raise _Invalid(f"{entry.name}.kind is {kind!r:.40}, which this gda does not know")
    number = entry.get("array", int, None)
    leaf = ArrayLeaf(
        path=path,
        kind=kind,
        shape=entry.shape("shape"),
        dtype=entry.dtype(),
        key_impl=_key_impl(entry),
        spec=entry.get("spec", str, None),
        mesh=_mesh(entry),
        fingerprint=_fingerprint(entry),
        array=number,
        pieces=() if number is not None else _pieces(entry),
    )
    if math.prod(size for size in leaf.shape if size) * leaf.dtype.itemsize > _LARGEST:
        raise _Invalid(f"{entry.name} of shape {leaf.shape} is larger than any machine can hold")
    _check_stored(entry.name, leaf, arrays)
    return leaf


def _key_impl(entry: _Entry) -> str | None:
    name = entry.get("key_impl", str, None)
    if name is not None and not (name.isprintable() and 0 < len(name) <= 80):
        raise _Invalid(f"{entry.name}.key_impl is {name!r:.80}, which is not a kind of keys")
    return name


def _mesh(entry: _Entry) -> dict[str, int] | None:
    mesh = entry.get("mesh", dict, None)
    if mesh is not None:
        _numbers(f"{entry.name}.mesh", list(mesh.values()))
    return mesh


def _fingerprint(entry: _Entry) -> str | None:
    text = entry.get("fingerprint", str, None)
    if text is not None and not _FINGERPRINT_PATTERN.fullmatch(text):
        raise _Invalid(f"{entry.name}.fingerprint is {text!r:.40}, which is not valid")
    return text


def _pieces(entry: _Entry) -> tuple[Piece, ...]:
    values = enumerate(entry.get("pieces", list))
    return tuple(load_piece(each, f"{entry.name}.pieces[{i}]") for i, each in values)


def load_piece(value: Any, name: str) -> Piece:
    """Return the piece that ``dump_piece`` wrote; ``name`` is for messages."""
    if not isinstance(value, list) or len(value) != 4:
        raise _Invalid(f"{name} is not an array, an offset, a start and a shape")
    array, offset = _numbers(name, value[:2])
    start = _numbers(name, _checked(value[2], list))
    return Piece(
        array=array, offset=offset, start=start, shape=_shape(name, _checked(value[3], list))
    )


def _check_stored(name: str, leaf: ArrayLeaf, arrays: Sequence[StoredArray]) -> None:
    """Raise unless the stored arrays have each element of the leaf exactly once."""
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
    boxes = []
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
        boxes.append((piece.start, piece.shape))
    size = sum(math.prod(shape) for _, shape in boxes)
    if size != math.prod(leaf.shape) or not _are_tiles(boxes, leaf.shape):
        raise _Invalid(f"the pieces of {name} are not its shape {leaf.shape}, each element once")


def _check_shared_out(leaves: Sequence[Leaf], arrays: Sequence[StoredArray]) -> None:
    """Raise unless a third of each array belongs to leaves, and no part of it to two.

    So a tree takes no more memory than its files, and a chunk hardly more than its leaves.
    """
    spans: list[list[tuple[int, int]]] = [[] for _ in arrays]
    for leaf in leaves:
        if not isinstance(leaf, ArrayLeaf):
            continue
        if leaf.array is not None:
            spans[leaf.array].append((0, math.prod(leaf.shape)))
        for piece in leaf.pieces:
            spans[piece.array].append((piece.offset, math.prod(piece.shape)))
    for number, of_array in enumerate(spans):
        if not of_array:
            raise _Invalid(f"arrays[{number}] belongs to no leaf")
        of_array.sort()
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(of_array)):
            raise _Invalid(f"two leaves have one part of arrays[{number}]")
        # The pieces in two chunks of a pack one after the other are larger than a chunk.
        used = sum(size for _, size in of_array)
        if used * 3 < math.prod(arrays[number].shape):
            raise _Invalid(f"{used} elements of arrays[{number}] belong to leaves, and most do not")


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


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Invalid(f"it has a {type(value).__name__}; expected is a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _checked(value, str)


def _one(value: Any) -> Any:
    (only,) = _checked(value, list)
    return only

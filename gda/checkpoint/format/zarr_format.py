"""Arrays in zarr v3: metadata, and chunks as bytes with a CRC-32C at the end.

A chunk without compression is the memory of the block and four bytes after it, so it is written and
read in place. TensorStore compresses.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gda.layout.spec import Shape
from gda.layout.strict_json import parse_json

CRC_BYTES = 4

# Types that TensorStore's zarr v3 driver refuses are stored as integers of the same size.
_AS_INTEGERS = {
    *("int1", "uint1", "uint2", "uint4"),
    *("float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"),
}


def zarr_dtype(dtype: np.dtype[Any]) -> str:
    """Return the name of the zarr data type in which elements of ``dtype`` are stored."""
    return f"uint{8 * dtype.itemsize}" if dtype.name in _AS_INTEGERS else dtype.name


def metadata(shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any], codec: str) -> bytes:
    """Return the ``zarr.json`` of an array.

    Args:
      codec: ``"bytes"`` or ``"zstd"``.
    """
    stored = zarr_dtype(dtype)
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
        "codecs": codecs(dtype, codec),
        "attributes": {} if stored == dtype.name else {"dtype": dtype.name},
    }
    return json.dumps(document, indent=1).encode()


def check_metadata(document: bytes, expected: bytes) -> None:
    """Raise ``ValueError`` unless a ``zarr.json`` describes the same array as another."""
    found = parse_json(document.decode())
    for name, value in json.loads(expected).items():
        if not isinstance(found, dict) or found.get(name) != value:
            said = found.get(name) if isinstance(found, dict) else found
            raise ValueError(
                f"contradicts the manifest: its {name} is {said!r:.80}, not {value!r:.80}"
            )


def opens_in_zarr_python(dtype: np.dtype[Any]) -> bool:
    """Return True if zarr-python has the data type in which elements of ``dtype`` are stored."""
    return dtype.isbuiltin == 1 or dtype.name in _AS_INTEGERS


def group(documents: Mapping[str, bytes]) -> bytes:
    """Return the ``zarr.json`` of a group that lists its arrays.

    Args:
      documents: the ``zarr.json`` of each array, by name.
    """
    # As text: a hostile manifest may name very many, and parsed they take more memory.
    listed = [f'"{name}": '.encode() + document for name, document in documents.items()]
    return _LISTING.replace(b"{}}}", b"{" + b",\n".join(listed) + b"}}}")


_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_LISTING = json.dumps(
    _GROUP | {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {}}}
).encode()
PLAIN_GROUP = json.dumps(_GROUP).encode()  # in older checkpoints


def codecs(dtype: np.dtype[Any], codec: str) -> list[dict[str, Any]]:
    """Return the codecs of a chunk, as in ``zarr.json``."""
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    as_bytes = {"name": "bytes"} | order
    compressed = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    return [as_bytes, *(compressed if codec == "zstd" else []), {"name": "crc32c"}]


def _fill_value(stored: str) -> Any:
    if stored == "bool":
        return False
    if stored.startswith("complex"):
        return [0.0, 0.0]
    return 0 if stored.startswith(("int", "uint")) else 0.0


def crc32c(data: np.ndarray[Any, Any], before: int = 0) -> int:
    """Return the CRC-32C of contiguous memory, without a copy.

    Args:
      before: that of what precedes it.
    """
    google_crc32c = require_crc32c()
    view = data.reshape(-1).view(np.uint8)  # a new view, which becomes read-only
    view.flags.writeable = False  # as the function requires
    return google_crc32c.extend(before, view)


def size_and_crc(document: bytes) -> tuple[int, int]:
    """Return the record of a ``zarr.json`` in the manifest."""
    return len(document), crc32c(np.frombuffer(document, np.uint8))


def require_crc32c() -> Any:
    """Return the package for checksums; ``ImportError`` says what to install."""
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(
            "checkpoints need google-crc32c: pip install 'gda[checkpoint]'", name=error.name
        ) from error
    return google_crc32c


def require_tensorstore(purpose: str) -> Any:
    """Return TensorStore; ``ImportError`` names the purpose and the package to install."""
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs TensorStore: pip install 'gda[checkpoint]'", name=error.name
        ) from error
    return tensorstore


def compress(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the zstd frame of contiguous memory, without a checksum.

    Takes memory of twice the size of the frame.
    """
    store = _in_memory(data.nbytes)
    raw = data.reshape(-1).view(np.uint8)
    store.write(raw, can_reference_source_data_indefinitely=True).result()

    def read(start: int, stop: int | None) -> bytes:
        return store.kvstore.read(_KEY, byte_range=slice(start, stop)).result().value

    # In parts, because TensorStore copies each result twice.
    frame = np.empty(data.nbytes + data.nbytes // 256 + 64, np.uint8)  # the bound of zstd
    for start in itertools.count(0, _PART_BYTES):
        try:
            part = read(start, start + _PART_BYTES)
        except ValueError:  # the last part is shorter
            part = read(start, None)
            frame[start : start + len(part)] = np.frombuffer(part, np.uint8)
            return frame[: start + len(part)]
        frame[start : start + _PART_BYTES] = np.frombuffer(part, np.uint8)
    raise AssertionError


def decompress(frame: bytes, nbytes: int, out: np.ndarray[Any, Any] | None) -> None:
    """Read a zstd frame of ``nbytes`` into ``out``, contiguous uint8; with ``None`` only check it.

    Takes ``decompressing_bytes`` beside ``out``, if no variable of the caller holds the frame.

    Raises:
      ValueError: the frame is damaged, or has another size; that of its header is compared first.
    """
    tensorstore = require_tensorstore("zstd compression")
    if (said := _size_in_header(frame)) != nbytes:
        raise ValueError(f"holds a zstd frame of {said or 'unknown'} bytes, not {nbytes}")
    store = _in_memory(nbytes)
    store.kvstore.write(_KEY, frame).result()
    del frame
    if out is None:
        store[:1].read().result()  # decompresses all of it
    else:
        tensorstore.array(out, context=tensorstore.Context()).write(store).result()


def decompressing_bytes(frame_bytes: int, nbytes: int) -> int:
    """Return the memory that ``decompress`` takes, including the frame."""
    return max(3 * frame_bytes, frame_bytes + nbytes)


def _size_in_header(frame: bytes) -> int | None:
    """Return the size of the content that a zstd frame declares, as each of ``compress`` does.

    None if it declares none: then it may ask for a window of 2 GiB, however short it is.
    """
    if frame[:4] != b"\x28\xb5\x2f\xfd" or len(frame) < 5:
        return None
    flags = frame[4]
    has_no_window = flags >> 5 & 1
    width = (has_no_window, 2, 4, 8)[flags >> 6]
    start = 5 + (not has_no_window) + (0, 1, 2, 4)[flags & 3]  # after the window and a dictionary
    field = frame[start : start + width]
    if not width or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


_KEY = "c.0"
_PART_BYTES = 2**20


def _in_memory(nbytes: int) -> Any:
    """Return an array of bytes, in memory of TensorStore, that is one zstd frame."""
    tensorstore = require_tensorstore("zstd compression")
    document = json.loads(metadata((nbytes,), (nbytes,), np.dtype(np.uint8), "zstd"))
    document["codecs"].pop()  # the checksum
    return tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": "memory://",
            "metadata": document,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        context=tensorstore.Context(),
    ).result()

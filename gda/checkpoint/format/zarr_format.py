"""Arrays in zarr v3: metadata, and chunks as bytes with a CRC-32C at the end.

A chunk without compression is the memory of the block and four bytes after it, so it is written and
read in place.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from gda.layout.distribution import of_extra
from gda.layout.spec import Shape
from gda.storage.stores.checksums import Bytes

_LEVEL = 1  # of zstd

# Types that TensorStore's zarr v3 driver refuses are stored as integers of the same size.
_AS_INTEGERS = {
    *("int1", "uint1", "uint2", "uint4"),
    *("float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"),
}


@lru_cache(maxsize=64)  # a tree has many arrays of few shapes
def metadata(shape: Shape, chunk_shape: Shape, dtype: np.dtype[Any], codec: str) -> bytes:
    """Return the ``zarr.json`` of an array; the codec is ``"bytes"`` or ``"zstd"``."""
    stored = f"uint{8 * dtype.itemsize}" if dtype.name in _AS_INTEGERS else dtype.name
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
        "codecs": _codecs(dtype, codec),
        "attributes": {} if stored == dtype.name else {"dtype": dtype.name},
    }
    return json.dumps(document, indent=1).encode()


def opens_in_zarr_python(dtype: np.dtype[Any]) -> bool:
    """Return True if zarr-python has the data type in which elements of ``dtype`` are stored."""
    return dtype.isbuiltin == 1 or dtype.name in _AS_INTEGERS


def group(documents: Mapping[str, bytes]) -> bytes:
    """Return the ``zarr.json`` of a group from those of its arrays, by name."""
    # Joined as text: a hostile manifest may name millions, which take more memory when parsed.
    listed = [f'"{name}": '.encode() + document for name, document in documents.items()]
    return _LISTING.replace(b"{}}}", b"{" + b",\n".join(listed) + b"}}}")


_LISTING = json.dumps(
    {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {}},
    }
).encode()


def _codecs(dtype: np.dtype[Any], codec: str) -> list[dict[str, Any]]:
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    zstd = {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}
    return [{"name": "bytes"} | order, *[zstd] * (codec == "zstd"), {"name": "crc32c"}]


def _fill_value(stored: str) -> Any:
    if stored == "bool":
        return False
    if stored.startswith("complex"):
        return [0.0, 0.0]
    return 0 if stored.startswith(("int", "uint")) else 0.0


def require_zstd() -> Any:
    """Return the package for compression."""
    with of_extra("zstd compression needs zstandard"):
        import zstandard
    return zstandard


def compress(data: Bytes) -> Bytes:
    """Return the zstd frame of contiguous memory; takes memory of the size of ``data``."""
    compressor = require_zstd().ZstdCompressor(level=_LEVEL, write_checksum=False)
    return np.frombuffer(compressor.compress(data), np.uint8)


def decompress(frame: Bytes, out: Bytes) -> None:
    """Read a zstd frame into contiguous memory of its size; takes no other memory."""
    zstandard = require_zstd()
    size = -1
    with contextlib.suppress(zstandard.ZstdError):
        size = zstandard.frame_content_size(frame)
    # A frame that declares no size may ask for a window of 2 GiB, however short it is.
    if size != out.nbytes:
        raise ValueError(
            f"holds a zstd frame of {size if size >= 0 else 'unknown'} bytes, not {out.nbytes}"
        )
    try:
        # With all of the frame and room for its content, zstd needs no window and no buffer.
        read = zstandard.ZstdDecompressor().stream_reader(frame).readinto(out)
    except zstandard.ZstdError as error:
        raise ValueError(f"holds a damaged zstd frame: {error}") from None
    if read != out.nbytes:
        raise ValueError(f"holds a zstd frame that ends after {read} of {out.nbytes} bytes")

"""CRC-32C of memory, as stores and files record it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gda.layout.distribution import of_extra

CRC_BYTES = 4  # at the end of a chunk

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def crc32c(data: np.ndarray[Any, Any], before: int = 0) -> int:
    """Return the CRC-32C of contiguous memory, which follows data of checksum ``before``."""
    google_crc32c = require_crc32c()
    view = data.reshape(-1).view(np.uint8)  # a new view, which becomes read-only
    view.flags.writeable = False  # as the function requires
    return google_crc32c.extend(before, view)


def size_and_crc(document: bytes) -> tuple[int, int]:
    """Return the record of a ``zarr.json`` in the manifest."""
    return len(document), crc32c(np.frombuffer(document, np.uint8))


@cache
def require_crc32c() -> Any:
    """Return the package for checksums."""
    with of_extra("checkpoints need google-crc32c"):
        import google_crc32c
    return google_crc32c

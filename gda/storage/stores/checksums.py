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
    return require_crc32c().iscsi(data.reshape(-1).view(np.uint8), before)


def size_and_crc(document: bytes) -> tuple[int, int]:
    """Return size and checksum of a ``zarr.json``, as the manifest records them."""
    return len(document), crc32c(np.frombuffer(document, np.uint8))


# Of the fast packages, fastcrc is imported in 4 ms, awscrt in 77. Both let other threads run, which
# google-crc32c does not. With AVX-512, both are three times as fast as google-crc32c. Without it,
# fastcrc is as fast, and awscrt takes twice the time of memory that is not in the cache.
@cache
def require_crc32c() -> Any:
    """Return the package for checksums."""
    with of_extra("checkpoints, offers and pulls need fastcrc"):
        from fastcrc import crc32
    return crc32

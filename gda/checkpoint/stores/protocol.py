"""The store of the files of a checkpoint: a directory, or an object store through TensorStore.

Names are relative, their parts separated by ``/``. A file that was written is durable after the
next ``flush``. Errors say which file, and keep their class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LOCK = ".lock"  # at the top level of a directory; held while a save runs


class Store(Protocol):
    """Files by name."""

    url: str
    """The name that the user knows."""
    is_remote: bool
    """True if a request takes long, and its answer comes in memory of its own."""

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """Write a file that consists of some buffers; it must not be there yet."""
        ...

    def flush(self) -> None:
        """Make everything durable that was written through this object."""
        ...

    def version(self, name: str) -> bytes:
        """Return what tells this content of a file from others."""
        ...

    def replace(
        self, name: str, data: bytes, version: bytes | None, check: Callable[[], None]
    ) -> None:
        """Write a file of the top level, or replace it: durable, and at no time a part of it.

        Calls ``check`` immediately before; nothing is written if it raises.

        Raises ``SaveError`` if the file is no longer of ``version``: nothing was written, and
        nothing will be. After another error it may be written yet.
        """
        ...

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a file; raise ``ValueError`` if it is larger than ``most_bytes``.

        Here and below ``ValueError`` says what is wrong with the file, which the caller names.
        """
        ...

    def read_into(
        self, name: str, payload: Bytes, tail: Bytes, note: Callable[[Bytes], object]
    ) -> int:
        """Read a file that fills both buffers; return its real size, whatever that is.

        Calls ``note`` with each part of the payload, in order, when it has been read.
        """
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a file, or ``None`` where asking is as dear as reading."""
        ...

    def entries(self) -> list[str]:
        """Return what is at the top level."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or all below a directory; nothing to remove is no error."""
        ...

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Keep other saves out; gives whether that is possible here."""
        ...

    def join(self, name: str) -> str:
        """Return the name as a user would write it."""
        ...

"""The store of the files of a checkpoint: a directory, or an object store through TensorStore.

Names are relative, their parts separated by ``/``. A written file is durable after the next
``flush``. Errors name the file, and keep their class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gda.checkpoint.format.zarr_format import Bytes

LOCK = ".lock"  # at the top level of a directory; held while a save runs


class Store(Protocol):
    """Files by name."""

    url: str
    """The name that the user knows."""
    is_remote: bool
    """True if requests are slow, and their answers are in new memory."""

    def write(self, name: str, parts: Sequence[Any]) -> None:
        """Write a new file from some buffers."""
        ...

    def flush(self) -> None:
        """Make everything durable that was written through this object."""
        ...

    def version(self, name: str) -> bytes:
        """Return a version that changes with the content of a file."""
        ...

    def replace(
        self, name: str, data: bytes, version: bytes | None, check: Callable[[], None]
    ) -> None:
        """Write or replace a file of the top level: durable and atomic.

        Calls ``check`` immediately before. Nothing is written if it raises.

        Raises ``SaveError`` if the file no longer has ``version``: nothing was or will be written.
        After another error it may still be written.
        """
        ...

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a file; raise ``ValueError`` if it is larger than ``most_bytes``.

        Here and below the message of ``ValueError`` omits the name, which the caller adds.
        """
        ...

    def head(self, name: str, nbytes: int) -> bytes:
        """Return so many first bytes of a file, or all if it has less."""
        ...

    def read_into(
        self, name: str, payload: Bytes, tail: Bytes, note: Callable[[Bytes], object]
    ) -> int:
        """Read a file that fills both buffers; return its size, also if it differs.

        Calls ``note`` with each part of the payload, in order, when it has been read.
        """
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a file, or ``None`` if that costs as much as reading it."""
        ...

    def entries(self, directory: str = "") -> list[str]:
        """Return the names in a directory, by default at the top level."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all files; no error if there is none."""
        ...

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Keep other saves out; gives True if the store has locks."""
        ...

    def join(self, name: str) -> str:
        """Return the path or URL of a file, for the user."""
        ...

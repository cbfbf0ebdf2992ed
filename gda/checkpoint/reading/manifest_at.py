"""The contents of a path: a checkpoint, an unfinished one, or something else."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.manifest import Manifest
from gda.checkpoint.format.manifest_json import file_and_name, load_manifest
from gda.layout.text import join_some, printable
from gda.storage.stores.directory import LOCK, FileStore
from gda.storage.stores.errors import CheckpointNotFoundError, CorruptionError
from gda.storage.stores.opening import Store

T = TypeVar("T")

MOST_ATTEMPTS = 10  # if another save commits during each of them, the read fails


def is_whole(store: Store) -> bool:
    """Return True if a path has a manifest that matches its checksum; it is not parsed."""
    try:
        manifest_json.body_of(*file_and_name(store))
    except (FileNotFoundError, NotADirectoryError, CorruptionError):
        return False
    return True


def load_complete(store: Store) -> Manifest:
    """Return the manifest of the checkpoint that must be there; an error says what is there."""
    try:
        return load_manifest(store)
    except FileNotFoundError:
        raise CheckpointNotFoundError(_what_is_there(store)) from None
    except NotADirectoryError:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {store.url}: it is a file, or below one"
        ) from None


class ReplacedError(RuntimeError):
    """Another checkpoint replaced the one that was being read."""


def read_complete(
    stores: Sequence[Store], read: Callable[..., T], is_alone: Callable[[], bool] = lambda: True
) -> T:
    """Return the result of ``read`` for checkpoints; call it again if one is replaced.

    ``is_alone`` returns True if no other process must read the same checkpoints.
    """
    attempts = MOST_ATTEMPTS
    while True:
        try:
            return read(*map(load_complete, stores))
        except ReplacedError:
            attempts -= 1
            if not attempts or not is_alone():
                raise


def check_not_replaced(store: Store, manifest: Manifest) -> None:
    """Raise ``RuntimeError`` if another checkpoint has replaced this one."""
    try:
        is_same = load_manifest(store).data == manifest.data
    except (OSError, ValueError):
        return
    if not is_same:
        raise ReplacedError(
            f"the checkpoint at {store.url} was overwritten while it was being read; read it again"
        )


def _what_is_there(store: Store) -> str:
    try:
        entries = store.entries()
    except FileNotFoundError:
        return f"there is no checkpoint at {store.url}: no such directory"
    except io.UnsupportedOperation:  # of a web server
        return f"there is no checkpoint at {store.url}: it has no {manifest_json.NAME}"
    unfinished = [name for name in entries if manifest_json.DATA_PATTERN.fullmatch(name)]
    if unfinished:
        return (
            f"there is no complete checkpoint at {store.url}: a save was begun there "
            f"({', '.join(unfinished)}) and never committed; the next save removes it"
        )
    if below := [name for name in sorted(entries, key=len) if _has_manifest(store, name)][::-1]:
        return (
            f"there is no checkpoint at {store.url} itself; it has the checkpoints "
            f"{join_some(list(map(printable, below)))}. Pass one of them"
        )
    shown = [name for name in entries if name != LOCK]
    if not shown:
        return f"there is no checkpoint at {store.url}: it is empty"
    has = printable(", ".join(shown[:8])) + ("..." if len(shown) > 8 else "")
    return f"there is no checkpoint at {store.url}: it has no {manifest_json.NAME}, but {has}"


def _has_manifest(store: Store, name: str) -> bool:
    """Return True if an entry of a directory is a checkpoint; an object store is not asked."""
    return isinstance(store, FileStore) and os.path.isfile(
        os.path.join(store.url, name, manifest_json.NAME)
    )

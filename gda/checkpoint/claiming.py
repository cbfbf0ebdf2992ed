"""Claiming a path for a save, which keeps other saves out and finds what may be removed."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from gda.checkpoint.format import manifest_json
from gda.checkpoint.format.errors import CorruptionError, SaveError
from gda.checkpoint.found import load_manifest
from gda.checkpoint.stores.protocol import LOCK, Store
from gda.layout.text import join_some

NEW = f"{manifest_json.NAME}.new"  # of a save that is committing, in a directory


@dataclass(frozen=True)
class Claim:
    """The directory of a save, and what will no longer count once it is committed.

    Attributes:
      data: a directory that is not there yet.
      replaced: what to remove then, from the top level.
      version: of the manifest that was there, for the store to see whether it still is.
    """

    data: str
    replaced: tuple[str, ...]
    version: bytes | None = None


@contextlib.contextmanager
def claimed(store: Store, overwrite: bool) -> Iterator[Claim]:
    """Keep other saves out of the path, where that is possible, and give the claim.

    Raises:
      FileExistsError: something is there that must not be lost.
      SaveError: another save is at work.
    """
    if not store.is_remote:
        # Before there is so much as a lock in a directory of another program.
        try:
            _check_may_be_saved_into(store, store.entries(), overwrite)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{store.url} is a file, or in one; a checkpoint is a directory, so give the path "
                "of one, or one that is not there yet"
            ) from None
    with store.lock() as is_locked:
        version = store.version(manifest_json.NAME)  # first: whatever comes later is noticed
        entries = store.entries()
        _check_may_be_saved_into(store, entries, overwrite)
        if NEW in entries and not store.is_remote:
            if not is_locked:
                raise SaveError(
                    f"another save into {store.url} is committing, or died when it was: "
                    f"{store.join(NEW)} is there, and this file system has no locks that tell. "
                    "If none is running, remove that file"
                )
            remove(store, NEW)
        committed = None
        before = [name for name in entries if manifest_json.DATA_PATTERN.fullmatch(name)]
        is_readable = True
        if manifest_json.NAME in entries:
            try:
                committed = load_manifest(store).data
            except CorruptionError:
                is_readable = False  # and it is not known what of the rest is of use
        if is_locked and is_readable:
            # Of saves that died. Without a lock they might be of one that goes on.
            for name in before:
                if name != committed:
                    remove(store, name)
            before = [committed] if committed in before else []
        yield Claim(f"data-{uuid.uuid4().hex[:16]}", tuple(before), version)


def remove(store: Store, name: str) -> None:
    """Remove what no longer counts; where that fails, it is no reason not to save."""
    try:
        store.remove(name)
    except OSError as error:
        logging.getLogger("gda").warning(
            "%s is of no use any more, and was not removed: %s", store.join(name), error
        )


def _check_may_be_saved_into(store: Store, entries: list[str], overwrite: bool) -> None:
    foreign = [name for name in entries if not _is_ours(name)]
    # Beside a checkpoint, or the beginnings of one, they are left alone.
    if foreign and len(foreign) + (LOCK in entries) == len(entries):
        raise FileExistsError(
            f"{store.url} is not empty and not a checkpoint: it has {join_some(foreign)}. "
            "Save into a directory of its own"
        )
    if manifest_json.NAME in entries:
        try:
            store.size(manifest_json.NAME)
        except ValueError as error:
            raise FileExistsError(f"{store.join(manifest_json.NAME)} {error}; remove it") from None
    if manifest_json.NAME in entries and not overwrite:
        raise FileExistsError(
            f"there is a checkpoint at {store.url}; pass overwrite=True to replace it"
        )


def _is_ours(name: str) -> bool:
    known = (manifest_json.NAME, NEW, LOCK)
    return name in known or manifest_json.DATA_PATTERN.fullmatch(name) is not None

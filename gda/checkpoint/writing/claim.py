"""The claim of a save on its path: it keeps other saves out and finds data to remove."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from gda.checkpoint.format import manifest_json
from gda.checkpoint.reading.manifest_at import load_manifest
from gda.layout.text import join_some
from gda.storage.stores.directory import LOCK
from gda.storage.stores.errors import CorruptionError, SaveError
from gda.storage.stores.opening import Store

# The array of a large leaf, one of packed leaves, and the document of their group.
_OF_DATA = re.compile(r"\d{5,}(\..+)?|packed\..+|zarr\.json", re.DOTALL)
NEW = f"{manifest_json.NAME}.new"  # of a save that is committing, in a directory


def left_by_killed_saves(names: Collection[str]) -> set[str]:
    """Return the files that killed saves left in a directory without a checkpoint."""
    if manifest_json.NAME in names:
        return set()
    return {name for name in names if name == NEW or manifest_json.DATA_PATTERN.fullmatch(name)}


@dataclass(frozen=True)
class Claim:
    """The directory of a save, and the data to remove after the commit."""

    data: str  # a new directory
    replaced: tuple[str, ...]  # names at the top level
    version: bytes | None = None  # of the present manifest, for the store to detect a change


@contextlib.contextmanager
def claimed(store: Store, overwrite: bool) -> Iterator[Claim]:
    """Keep other saves out of the path, if the store has locks, and give the claim."""
    if not store.is_remote:
        # Before the lock file is made, which must not go into a directory of another program.
        try:
            _check_may_be_saved_into(store, store.entries(), overwrite)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{store.url} is a file, or below one; expected is a directory, or a path that "
                "does not exist. Choose another path"
            ) from None
    with store.lock() as is_locked:
        version = store.version(manifest_json.NAME)  # first, to detect later changes
        committed: str | None = None
        with contextlib.suppress(CorruptionError):  # then the data in use is unknown
            committed = _committed(store)
        entries = store.entries(known=committed or "")
        _check_may_be_saved_into(store, entries, overwrite)
        if NEW in entries and not store.is_remote:
            if not is_locked:
                raise SaveError(
                    f"another save into {store.url} is committing, or died while committing: "
                    f"{store.join(NEW)} exists, and this file system has no locks. If no save is "
                    "running, remove that file"
                )
            remove(store, NEW)
        before = [
            name
            for name in entries
            if manifest_json.DATA_PATTERN.fullmatch(name) and _holds_data_alone(store, name)
        ]
        # Left by saves that died. Without a lock one of them may still be running.
        if is_locked and committed is not None:
            for name in before:
                if name != committed:
                    remove(store, name)
            before = [committed] if committed in before else []
        yield Claim(f"data-{uuid.uuid4().hex[:16]}", tuple(before), version)


def _committed(store: Store) -> str:
    """Return the directory of the data of the checkpoint; empty if there is none."""
    try:
        return load_manifest(store).data
    except FileNotFoundError:
        return ""


def _holds_data_alone(store: Store, name: str) -> bool:
    """Return True if a directory has nothing but what a save writes into its own."""
    try:
        return all(map(_OF_DATA.fullmatch, store.entries(name)))
    except NotADirectoryError:
        return False


def remove(store: Store, name: str) -> None:
    """Remove data that is no longer used; a failure is only logged."""
    try:
        store.remove(name)
    except OSError as error:
        logging.getLogger("gda").warning(
            "%s is no longer used and could not be removed: %s; remove it", store.join(name), error
        )


def _check_may_be_saved_into(store: Store, entries: list[str], overwrite: bool) -> None:
    is_data = manifest_json.DATA_PATTERN.fullmatch
    others = [name for name in entries if not is_data(name)]
    foreign = [name for name in others if name not in (manifest_json.NAME, NEW, LOCK)]
    # Beside a checkpoint, complete or not, other files are ignored.
    if foreign and len(foreign) + (LOCK in entries) == len(entries):
        raise FileExistsError(
            f"{store.url} is not empty and not a checkpoint: it has {join_some(foreign)}. "
            "Save into a directory of its own"
        )
    if manifest_json.NAME not in entries:
        return
    where = store.join(manifest_json.NAME)
    try:
        begin = store.head(manifest_json.NAME, manifest_json.MOST_HEADER_BYTES)
    except ValueError as error:
        raise FileExistsError(f"{where} {error}; remove it") from None
    # Beside data of a save, it is a damaged manifest of gda.
    if others == entries and manifest_json.version_in(begin) is None:
        raise FileExistsError(
            f"{where} is of another program: it does not begin like a manifest of gda. Save into a "
            "directory of its own"
        )
    if not overwrite:
        raise FileExistsError(
            f"there is a checkpoint at {store.url}; pass overwrite=True to replace it"
        )

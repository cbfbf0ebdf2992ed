"""The kind of the files at a path, by their names, and the reason why they are no checkpoint."""

from __future__ import annotations

import io
import os
from enum import Enum

from gda.checkpoint.format import manifest_json
from gda.layout.text import join_some, printable
from gda.storage.orbax_runs.run_folder import MARKS
from gda.storage.stores.directory import LOCK
from gda.storage.stores.opening import Store, has

_OF_SAFETENSORS = (".safetensors", ".safetensors.index.json")


class FileKind(Enum):
    """A kind of files that hold a tree; its value is for people."""

    CHECKPOINT = "a checkpoint of gda"
    SAFETENSORS = "safetensors files"
    ORBAX = "an Orbax run"


def names_at(store: Store) -> list[str] | None:
    """Return the names in a folder without its lock; ``None`` for a file, or below one."""
    try:
        return [name for name in store.entries() if name != LOCK]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        return None


def has_manifest(store: Store) -> bool:
    """Return True for a manifest of gda, even damaged; ``ValueError`` if it is no regular file."""
    try:
        begin = store.head(manifest_json.NAME, manifest_json.MOST_HEADER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return manifest_json.version_in(begin) is not None


def kind_at(store: Store) -> FileKind:
    """Return the kind of files at a path, by their names; a checkpoint if it is unknown."""
    kinds = _kinds_at(store)
    if len(kinds) > 1:
        raise ValueError(
            f"{store.url} has {' and '.join(kind.value for kind in kinds)} side by side; move each "
            "into a folder of its own, or pass the path of a file"
        )
    return kinds[0] if kinds else FileKind.CHECKPOINT


def _kinds_at(store: Store) -> list[FileKind]:
    try:
        kinds = [FileKind.CHECKPOINT] if has_manifest(store) else []
    except ValueError:
        kinds = []
    if store.is_remote:  # ask for some keys, because a list has all of them
        return kinds or [FileKind.ORBAX] * any(has(store, mark) for mark in MARKS)
    if (names := names_at(store)) is None:
        is_tensors = os.path.isfile(store.url) and store.url.endswith(_OF_SAFETENSORS)
        return [FileKind.SAFETENSORS] if is_tensors else []
    if any(name.endswith(_OF_SAFETENSORS) for name in names):
        kinds.append(FileKind.SAFETENSORS)
    # Older releases have no mark beside the folder of the tree, and a folder of runs has none.
    items = [os.path.join(store.url, name, mark) for name in names for mark in MARKS]
    if not {*MARKS}.isdisjoint(names) or (not kinds and any(map(os.path.lexists, items))):
        kinds.append(FileKind.ORBAX)
    return kinds


def no_checkpoint_at(store: Store) -> str:
    """Return the reason why there is no complete checkpoint, and the names that are there."""
    problem = f"there is no checkpoint at {store.url}"
    try:
        names = names_at(store)
    except io.UnsupportedOperation:  # of a web server
        return f"{problem}: it has no {manifest_json.NAME}"
    if names is None:
        return f"{problem}: it is a file, or below one"
    if unfinished := [*filter(manifest_json.DATA_PATTERN.fullmatch, names)]:
        return (
            f"there is no complete checkpoint at {store.url}: a save was begun there "
            f"({', '.join(unfinished)}) and never committed; the next save removes it"
        )
    places = {name: os.path.join(store.url, name, manifest_json.NAME) for name in names}
    below = [name for name in sorted(names, key=len) if os.path.isfile(places[name])][::-1]
    if below and not store.is_remote:
        found = join_some([*map(printable, below)])
        return f"{problem} itself; it has the checkpoints {found}. Pass one of them"
    if names:
        return f"{problem}: it has {join_some([*map(printable, names)])}"
    is_empty = store.is_remote or os.path.isdir(store.url)
    return f"{problem}: {'it is empty' if is_empty else 'no such directory'}"

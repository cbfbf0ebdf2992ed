"""The folder of the tree in an Orbax run, in a directory or an object store.

A run is a folder with ``_METADATA``, or with a folder for each item, which has it. Orbax saves into
a folder with ``.orbax-checkpoint-tmp`` in its name, and renames it; object stores cannot rename, so
there a run is finished when it has ``commit_success.txt``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from gda.layout.text import join_some
from gda.storage.stores.object_store import RETRIES, require_tensorstore
from gda.storage.stores.opening import Store, open_store

_MOST_BYTES = 2**28  # of a file of metadata; that of 100,000 leaves has some 30 MB

METADATA = "_METADATA"
MARKS = (METADATA, "_CHECKPOINT_METADATA", "orbax.checkpoint")  # files of a run, or of an item
OCDBT = "manifest.ocdbt"
COMMITTED, PARTIAL = "commit_success.txt", ".orbax-checkpoint-tmp"
_OF_RUN = ("_CHECKPOINT_METADATA", "orbax.checkpoint", COMMITTED)  # also of a run with items
# Of JsonSave and of v1, of the metrics of CheckpointManager, and of a grain iterator in a process.
OF_PROCESS = "process_"
_JSON = re.compile(r"metadata|data\.json|metrics|process_\d+-of-\d+\.json")
STEP = re.compile(r"(.*[_-])?(\d+)")  # the name of the run of a step

_TIMEOUT = 600.0  # seconds for each answer of an object store
_OCDBT_CACHE_BYTES = 2**24  # of the nodes of an OCDBT database

# Statuses of TensorStore that a damaged run has; others are of the store.
_DAMAGED = re.compile(
    "NOT_FOUND|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE|DATA_LOSS|UNIMPLEMENTED"
)


_MSGPACK = "a file of msgpack is read by flax.serialization.msgpack_restore"


def folder_of_item(path: Any) -> tuple[OrbaxFolder, list[str]]:
    """Return the folder of an item or of the only tree, and the files of an item of JSON."""
    folder = OrbaxFolder(open_store(path, _TIMEOUT))
    folder.check_finished()
    if folder.has_tree():
        return folder, []
    names = folder.entries()
    if files := _json_files(folder, names):
        return folder, files
    return folder.within(_item(folder, names)), []


def _json_files(folder: OrbaxFolder, names: Iterable[str]) -> list[str]:
    # An item may be a folder of such a name.
    files = [name for name in names if _JSON.fullmatch(name) and folder.has(name)]
    of_processes = [f"{OF_PROCESS}{each}-of-{len(files)}.json" for each in range(len(files))]
    if {*files} == {*of_processes}:
        return of_processes
    if len(files) > 1 or any(name.startswith(OF_PROCESS) for name in files):
        raise ValueError(
            f"{folder.url} is damaged: it has {join_some(files)}; expected is one file of JSON, or "
            "one for each process; copy the run again"
        )
    return files


def items_of(folder: OrbaxFolder, names: Iterable[str]) -> list[str]:
    """Return the names that are folders of trees, and not steps."""
    of_run = not {*_OF_RUN}.isdisjoint(names := [*names])
    return [
        name
        for name in names
        if (of_run or not STEP.fullmatch(name)) and PARTIAL not in name and folder.has_tree(name)
    ]


def _item(folder: OrbaxFolder, names: Sequence[str]) -> str:
    """Return the only tree of a run; ``ValueError`` says which there are, or what is there."""
    items = items_of(folder, names)
    if len(items) == 1:
        return items[0]
    if items:
        raise ValueError(
            f"{folder.url} has {len(items)} items: {join_some([repr(name) for name in items])}; "
            f"pass the path of the folder of one, such as {folder.url}{items[-1]}"
        )
    found = join_some([repr(name) for name in names]) or "no files"
    raise ValueError(
        f"{folder.url} is not an Orbax run, which has {METADATA}: it has {found}. Pass the folder "
        "of one step. If it is of a release of Orbax without this file, restore it with Orbax, and "
        f"save it again; {_MSGPACK}"
    )


class OrbaxFolder:
    """A folder of a run.

    Attributes:
      url: the path or URL for messages, with a slash at its end.
    """

    def __init__(self, store: Store, within: str = "") -> None:
        self._store, self._within = store, within  # "", or with a slash at its end
        self.url: str = store.join(within)

    def within(self, name: str) -> OrbaxFolder:
        """Return a folder in this one."""
        return OrbaxFolder(self._store, f"{self._within}{name}/")

    def read(self, name: str) -> bytes | None:
        """Return a file, or ``None`` if it is missing; ``ValueError`` if it is too large."""
        try:
            return self._store.read(self._within + name, _MOST_BYTES)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.url}{name} {error}") from None

    def has(self, name: str) -> bool:
        """Return True if there is a file of this name."""
        try:
            self._store.head(self._within + name, 0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return False
        return True

    def has_tree(self, within: str = "") -> bool:
        """Return True if there are metadata of a tree, here or in a folder within."""
        return self.has(f"{within}/{METADATA}" if within else METADATA)

    def entries(self) -> list[str]:
        """Return the names in this folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._store.entries(self._within.removesuffix("/"))
        return []

    def check_finished(self) -> None:
        """Raise if the run does not exist, or its save has not finished."""
        if PARTIAL in os.path.basename(self.url.rstrip("/")):
            raise ValueError(
                f"{self.url} is an unfinished save: {PARTIAL} is in its name; open a run that is "
                "complete"
            )
        if not self._store.is_remote:
            try:
                self._store.entries()  # FileNotFoundError, NotADirectoryError
            except NotADirectoryError:
                raise NotADirectoryError(
                    f"{self.url.rstrip('/')} is a file, and an Orbax run is a folder; {_MSGPACK}"
                ) from None
            return
        if self.has(COMMITTED):
            return
        if self.has_tree() or any(map(self.has, _OF_RUN)):
            raise ValueError(
                f"{self.url} is an unfinished save: it has no {COMMITTED}; open a run that is "
                f"complete. If it was copied from a disk and is whole, add an empty {COMMITTED}"
            )
        if not self.entries():
            raise FileNotFoundError(f"there is nothing at {self.url}")

    def begin_to_open(
        self, spec: dict[str, Any], names: Iterable[str], in_ocdbt: bool
    ) -> list[Any]:
        """Return futures of the TensorStores of some arrays."""
        tensorstore = require_tensorstore("an Orbax run")
        cache = {"cache_pool#ocdbt": {"total_bytes_limit": _OCDBT_CACHE_BYTES}}
        context = tensorstore.Context(RETRIES | cache)
        base = self._store.spec()
        base["path"] = base.get("path", "") + self._within
        if in_ocdbt:
            base = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
        kv = tensorstore.KvStore.open(base, context=context).result()
        options: Any = {"open": True, "read": True, "context": context}
        return [
            tensorstore.open(spec, kvstore=kv / f"{name}/" if name else kv, **options)
            for name in names
        ]

    def results(self, futures: Iterable[Any], names: Iterable[str], fault: str) -> list[Any]:
        """Return the results of futures of some arrays; errors name the array."""
        results = []
        for future, name in zip(futures, names, strict=True):
            try:
                results.append(future.result())
            except Exception as error:
                text = f"the array {name!r:.200} of {self.url} {fault}: {str(error)[:1000]}"
                if not _DAMAGED.match(str(error)):
                    raise OSError(text) from None
                raise ValueError(f"{text}; the run is damaged: copy it again") from None
        return results

"""The folder of the tree in an Orbax run, on a disk or in an object store.

A run is a folder with ``_METADATA``, or with a folder for each item, which has it. Orbax saves into
a folder with ``.orbax-checkpoint-tmp`` in its name, and renames it; object stores cannot rename, so
there a run is finished when it has ``commit_success.txt``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from gda.layout.text import join_some
from gda.storage import tasks
from gda.storage.options import Options
from gda.storage.orbax_runs.metadata import parse_items
from gda.storage.paths import directory_named, require_tensorstore, url_named

MOST_FILES = 32  # read at a time
MOST_BYTES = 2**28  # of a file of metadata; that of 100,000 leaves has some 30 MB

METADATA = "_METADATA"
MARKS = (METADATA, "_CHECKPOINT_METADATA", "orbax.checkpoint")  # files of a run, or of an item
AGGREGATE = "checkpoint"  # values of older releases
OCDBT = "manifest.ocdbt"
_COMMITTED, _PARTIAL = "commit_success.txt", ".orbax-checkpoint-tmp"
_OF_RUN = ("_CHECKPOINT_METADATA", "orbax.checkpoint", _COMMITTED)  # also of a run with items
_STEP = re.compile(r"(.*[_-])?\d+")  # the name of the run of a step

_SOME_RETRIES = {"max_retries": 5, "initial_delay": "1s", "max_delay": "8s"}
_RETRIES = [f"{driver}_request_retries" for driver in ("http", "s3", "gcs")]
_OCDBT_CACHE_BYTES = 2**24  # of the nodes of an OCDBT database

# Statuses of TensorStore that a damaged run has; others are of the store.
_DAMAGED = re.compile(
    "NOT_FOUND|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE|DATA_LOSS|UNIMPLEMENTED"
)


def folder_of_tree(path: Any, item: str | None, *, has_like: bool) -> OrbaxFolder:
    """Return the folder of the tree in a run or in its item; errors as ``open_orbax``.

    With ``has_like``, a folder needs no metadata.
    """
    folder = _folder_at(path)
    folder.check_finished()
    if has_like:
        return folder if item is None else folder.within(item)
    if item is None and folder.has_tree():
        return folder
    return folder.within(_item(folder, item))


def _folder_at(path: Any) -> OrbaxFolder:
    if isinstance(path, dict):
        return _StoredFolder(path)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "path must be that of an Orbax run: a folder, a URL such as 'gs://bucket/run/100', or "
            f"the spec of a TensorStore key-value store, not a {type(path).__name__}"
        )
    text = os.fspath(path)
    directory = directory_named(text)
    return _StoredFolder(url_named(text)) if directory is None else _Directory(directory)


def _item(folder: OrbaxFolder, item: str | None) -> str:
    """Return the item to open; ``ValueError`` says which there are, or which other files."""
    if item and _PARTIAL not in item and folder.has_tree(item):
        return item
    named = folder.named_items()
    names = named or folder.entries()
    of_run = bool(named) or not {*_OF_RUN}.isdisjoint(names)
    items = [
        name
        for name in names
        if (of_run or not _STEP.fullmatch(name)) and _PARTIAL not in name and folder.has_tree(name)
    ]
    if item is None and len(items) == 1:
        return items[0]
    there = join_some([repr(name) for name in items])
    if item is not None and items:
        raise ValueError(f"{folder.url} has no item {item!r} with arrays; it has {there}")
    if items:
        raise ValueError(
            f"{folder.url} has {len(items)} items: {there}; pass one of them, such as "
            f"item={items[-1]!r}, or the path of its folder"
        )
    if item is not None and folder.has_tree():
        raise ValueError(f"{folder.url} has one tree and no items; omit item={item!r}")
    raise ValueError(
        f"{folder.url} is not an Orbax run, which has {METADATA}: {_found(folder, names)}"
    )


def _found(folder: OrbaxFolder, names: Sequence[str]) -> str:
    """Return in words what a folder holds instead of a run, and what to do."""
    marks = (METADATA, *_OF_RUN)
    runs = [
        name
        for name in names
        if _STEP.fullmatch(name)
        and (
            any(folder.has(f"{name}/{mark}") for mark in marks)
            or any(folder.has(f"{name}/{each}/{METADATA}") for each in folder.entries(name))
        )
    ]
    if runs:
        runs.sort(key=lambda name: (len(name), name))
        text = join_some([repr(name) for name in runs])
        return f"it holds runs, {text}; open one of them, such as {folder.url}{runs[-1]}"
    if OCDBT in names or any(folder.has(f"{name}/.zarray") for name in names):
        return "it has arrays, but no structure; pass like=, a tree of the structure that was saved"
    if any(_PARTIAL in name for name in names):
        return "it has only unfinished saves; pass a run that is complete"
    if "manifest.json" in names:
        return "it has a manifest.json; restore a checkpoint of gda with gda.checkpoint.restore"
    if any(name.endswith(".safetensors") for name in names):
        return "it has safetensors files; open them with gda.storage.open_safetensors"
    return f"it has {join_some([repr(name) for name in names]) or 'no files'}"


class OrbaxFolder:
    """A folder of a run.

    Attributes:
      url: the path or URL for messages, with a slash at its end.
    """

    def __init__(self, spec: Any, url: str | None = None) -> None:
        self._tensorstore = require_tensorstore("an Orbax run")
        self._spec: dict[str, Any] = self._tensorstore.KvStore.Spec(spec).to_json()
        path = self._spec.get("path", "")
        self._spec["path"] = path if path.endswith("/") or not path else f"{path}/"
        self._context = self._tensorstore.Context(
            {
                **dict.fromkeys(_RETRIES, _SOME_RETRIES),
                "cache_pool#ocdbt": {"total_bytes_limit": _OCDBT_CACHE_BYTES},
            }
        )
        self._kv = self._opened(self._spec)
        self.url: str = url or f"{self._spec['driver']}:{self._spec['path']}"

    def within(self, name: str) -> OrbaxFolder:
        """Return a folder in this one."""
        raise NotImplementedError

    def read(self, name: str, most_bytes: int = MOST_BYTES) -> bytes | None:
        """Return a file, or ``None`` if it is missing; ``ValueError`` if it is too large."""
        raise NotImplementedError

    def has(self, name: str) -> bool:
        """Return True if there is a file of this name."""
        raise NotImplementedError

    def has_tree(self, within: str = "") -> bool:
        """Return True if there are metadata or values of a tree, here or in a folder within."""
        prefix = f"{within}/" if within else ""
        return self.has(prefix + METADATA) or self.has(prefix + AGGREGATE)

    def entries(self, within: str = "") -> list[str]:
        """Return the names in this folder, or in one within."""
        raise NotImplementedError

    def named_items(self) -> list[str]:
        """Return the names of the items by the metadata, if that costs less than ``entries``."""
        return []

    def read_each(self, names: Sequence[str]) -> list[bytes | None]:
        """Return several files, read at the same time, as ``read`` does."""
        found: list[bytes | None] = [None] * len(names)
        each = (
            tasks.Task(0, partial(self.read, name), partial(found.__setitem__, number))
            for number, name in enumerate(names)
        )
        tasks.run(each, Options(max_workers=MOST_FILES))
        return found

    def check_finished(self) -> None:
        """Raise if the run does not exist, or its save has not finished."""
        if _PARTIAL in os.path.basename(self.url.rstrip("/")):
            raise ValueError(
                f"{self.url} is an unfinished save: {_PARTIAL} is in its name; open a run that is "
                "complete"
            )

    def begin_to_open(
        self, spec: dict[str, Any], names: Iterable[str], in_ocdbt: bool
    ) -> list[Any]:
        """Return futures of the TensorStores of some arrays."""
        store = self._kv
        if in_ocdbt:
            cache = {"cache_pool": "cache_pool#ocdbt"}
            store = self._opened({"driver": "ocdbt", "base": self._spec} | cache)
        options: Any = {"open": True, "read": True, "context": self._context}
        return [
            self._tensorstore.open(spec, kvstore=store / f"{name}/" if name else store, **options)
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

    def _opened(self, spec: dict[str, Any]) -> Any:
        return self._tensorstore.KvStore.open(spec, context=self._context).result()


class _Directory(OrbaxFolder):
    """A folder on a disk."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        super().__init__({"driver": "file", "path": f"{self._path}/"}, os.path.join(path, ""))

    def within(self, name: str) -> OrbaxFolder:
        return _Directory(os.path.join(self._path, name))

    def read(self, name: str, most_bytes: int = MOST_BYTES) -> bytes | None:
        if not self.has(name):
            return None
        with open(os.path.join(self._path, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise _too_large(self.url + name, size)
            return file.read(size)

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self._path, name))

    def entries(self, within: str = "") -> list[str]:
        path = os.path.join(self._path, within)
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def check_finished(self) -> None:
        super().check_finished()
        os.scandir(self._path).close()  # FileNotFoundError, NotADirectoryError


class _StoredFolder(OrbaxFolder):
    """A folder in an object store."""

    def within(self, name: str) -> OrbaxFolder:
        return _StoredFolder(self._spec | {"path": f"{self._spec['path']}{name}/"})

    def read(self, name: str, most_bytes: int = MOST_BYTES) -> bytes | None:
        try:
            # Read the byte after the last allowed one: a file that is too large is not transferred.
            found = self._read(name, slice(most_bytes, most_bytes + 1))
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            found = self._read(name, None)
            return found.value
        if found.state == "missing":
            return None
        raise _too_large(self.url + name, most_bytes + 1)

    def has(self, name: str) -> bool:
        return self._read(name, slice(0, 0)).state == "value"

    def entries(self, within: str = "") -> list[str]:
        # TensorStore cannot list one level.
        prefix = f"{within}/" if within else ""
        below = self._tensorstore.KvStore.KeyRange(prefix, f"{within}0" if within else "")
        keys = self._kv.list(below, strip_prefix_length=len(prefix.encode())).result()
        return sorted({key.decode(errors="backslashreplace").partition("/")[0] for key in keys})

    def named_items(self) -> list[str]:
        with contextlib.suppress(ValueError):
            return parse_items(self.read("_CHECKPOINT_METADATA") or b"{}")
        return []

    def check_finished(self) -> None:
        super().check_finished()
        if self.has(_COMMITTED):
            return
        if self.has_tree() or any(map(self.has, _OF_RUN)):
            raise ValueError(
                f"{self.url} is an unfinished save: it has no {_COMMITTED}; open a run that is "
                f"complete. If it was copied from a disk and is whole, add an empty {_COMMITTED}"
            )
        if not self.entries():
            raise FileNotFoundError(f"there is nothing at {self.url}")

    def _read(self, name: str, byte_range: slice | None) -> Any:
        try:
            return self._kv.read(name, byte_range=byte_range).result()
        except Exception as error:
            if "OUT_OF_RANGE" in str(error):
                raise
            raise OSError(f"{self.url}{name}: {str(error)[:1000]}") from error


def _too_large(where: str, nbytes: int) -> ValueError:
    return ValueError(f"{where} has {nbytes} bytes; expected are at most {MOST_BYTES}")

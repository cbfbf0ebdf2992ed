"""The store behind a path, a URL or a spec."""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
from dataclasses import replace
from typing import Any

from gda.storage.options import Options
from gda.storage.stores.directory import FileStore
from gda.storage.stores.object_store import KvStore

Store = FileStore | KvStore

# A single letter before the colon is not a scheme in use, but may be part of a name.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{1,2})")


def open_store(path: Any, timeout: float) -> Store:
    """Return the store of a path, a URL, a TensorStore key-value store or the spec of one."""
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if isinstance(path, str):
        return _of_text(path, timeout)
    if (directory := _directory_of(path)) is not None:
        return FileStore(directory)
    if names_store(path):
        return KvStore(path, timeout)
    raise TypeError(
        "the first argument must be the path of a checkpoint: a directory, a URL such as "
        "'s3://bucket/run', or a TensorStore key-value store or the spec of one, not a "
        f"{type(path).__name__}"
    )


def _directory_of(path: Any) -> str | None:
    """Return the directory of TensorStore's file driver, which cannot remove directories."""
    spec = path
    if not isinstance(path, dict):
        tensorstore = sys.modules.get("tensorstore")  # imported, if an object of it exists
        if tensorstore is None:
            return None
        if isinstance(path, tensorstore.KvStore) and path.transaction is None:
            path = path.spec()
        if not isinstance(path, tensorstore.KvStore.Spec):
            return None
        spec = path.to_json()
    if spec.get("driver") != "file":
        return None
    where = spec.get("path", "")
    return where if len(where) < 2 else where.rstrip("/")


def names_store(path: Any) -> bool:
    """Return True if something is the place of a checkpoint, for ``open_store``, and not a tree."""
    if isinstance(path, dict):
        return isinstance(path.get("driver"), str)
    tensorstore = sys.modules.get("tensorstore")  # imported, if an object of it exists
    kinds = () if tensorstore is None else (tensorstore.KvStore, tensorstore.KvStore.Spec)
    return isinstance(path, (str, os.PathLike, *kinds))


def _of_text(path: str, timeout: float) -> Store:
    """Return the store of a path or a URL; ``ValueError`` for one slash, or a file elsewhere."""
    match = _URL.match(path)
    if match is None:
        return FileStore(os.path.expanduser(path))
    scheme = match[1].lower()
    if scheme == "file":
        url = urllib.parse.urlsplit(path)
        if url.netloc not in ("", "localhost"):
            raise ValueError(f"{path!r} is a file of the host {url.netloc!r}; write file:///path")
        return FileStore(urllib.parse.unquote(url.path))
    if match[2] != "//":
        raise ValueError(f"{path!r} looks like a URL with one slash; write {scheme}://...")
    return KvStore(f"{scheme}://{path[match.end() :].removesuffix('/')}/", timeout)


def has(store: Store, name: str) -> bool:
    """Return True if there is a file of this name."""
    try:
        store.head(name, 1)  # not 0, for which a web server gets a request that it may not know
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def options_for(store: Store, options: Options, least: int = 2) -> Options:
    """Return the options, with the number of workers for this store if the user gave none."""
    workers = 32 if store.is_remote else min(max(os.cpu_count() or 1, least), 32)
    return replace(options, max_workers=options.max_workers or workers)

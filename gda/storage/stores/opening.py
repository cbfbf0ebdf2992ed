"""The store behind a path, a URL or a spec."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from gda.storage.options import Options
from gda.storage.paths import directory_named, url_named
from gda.storage.stores.directory import FileStore
from gda.storage.stores.object_store import KvStore

Store = FileStore | KvStore


def open_store(path: Any, timeout: float) -> Store:
    """Return the store of a path, a URL, a TensorStore key-value store or the spec of one.

    A key-value store of the driver ``file`` is a directory, which has locks and is synchronized.
    """
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if isinstance(path, str):
        return _of_text(path, timeout)
    if names_store(path):
        store = KvStore(path, timeout)
        directory = store.directory
        return store if directory is None else FileStore(directory)
    raise TypeError(
        "the first argument must be the path of a checkpoint: a directory, a URL such as "
        "'s3://bucket/run', or a TensorStore key-value store or the spec of one, not a "
        f"{type(path).__name__}"
    )


def names_store(path: Any) -> bool:
    """Return True if something is the place of a checkpoint, for ``open_store``, and not a tree."""
    if isinstance(path, dict):
        return isinstance(path.get("driver"), str)
    tensorstore = sys.modules.get("tensorstore")  # imported, if an object of it exists
    kinds = () if tensorstore is None else (tensorstore.KvStore, tensorstore.KvStore.Spec)
    return isinstance(path, (str, os.PathLike, *kinds))


def _of_text(path: str, timeout: float) -> Store:
    directory = directory_named(path)
    return KvStore(url_named(path), timeout) if directory is None else FileStore(directory)


def options_for(store: Store, options: Options, least: int = 2) -> Options:
    """Return the options, with the number of workers for this store if the user gave none."""
    workers = 32 if store.is_remote else min(max(os.cpu_count() or 1, least), 32)
    return replace(options, max_workers=options.max_workers or workers)

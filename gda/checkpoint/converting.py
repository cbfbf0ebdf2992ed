"""The conversion of the tree at a path into other files, block by block, without a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats
from gda.checkpoint.saving import save
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import FileKind, open_tree
from gda.layout.text import join_some
from gda.storage.options import Options, ProgressLike
from gda.storage.stores.directory import LOCK
from gda.storage.stores.opening import Store, open_store, options_for
from gda.storage.views.lazy import lazy
from gda.trees.files.save_safetensors import save_safetensors
from gda.trees.leaves import are_keys, as_dicts, held_by, is_array, is_container, is_source

# PyTorch's transformers wants it; no other reader looks.
_METADATA = {"format": "pt"}
MAX_FILE_BYTES = 5 * 2**30


class Converted(NamedTuple):
    """The tree that a conversion has written."""

    kind: FileKind
    num_leaves: int
    nbytes: int  # of its arrays


def convert(
    source: str,
    target: str,
    *,
    kind: FileKind | None = None,
    change: Callable[[Any], Any] | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> Converted:
    """Write the tree at a path into other files: all of it, or nothing.

    At the target is nothing, or an empty folder. ``kind`` is by default that of the target's name.
    ``change`` takes the tree at the source, with a ``LazyArray`` for each array, and returns the
    tree to write; ``dtype`` is that of its floats. The rest is as for ``checkpoint.save`` and
    ``save_safetensors``, also the errors.
    """
    kind = _kind_of_target(target, kind)
    store = open_store(target, timeout)
    _check_is_new(store)
    opened = open_tree(path_of(source, timeout), timeout)
    tree = opened.tree if change is None else change(opened.tree)
    if not any(map(_is_array, jax.tree.leaves(as_dicts(tree), is_leaf=is_container))):
        given = opened.url if change is None else f"the {type(tree).__name__} of the map"
        raise ValueError(
            f"there is no array to write in {given}; expected is a tree of arrays and sources, in "
            "dicts and lists"
        )
    if dtype is not None:
        wanted = dtype_of_floats(dtype)
        tree = jax.tree.map(partial(_cast, wanted), as_dicts(tree), is_leaf=is_container)
    if kind is FileKind.SAFETENSORS:
        tree = jax.tree.map(_number_as_array, tree, is_leaf=is_container)
    leaves = jax.tree.leaves(as_dicts(tree), is_leaf=is_container)
    # All sources of an opened tree are read by any thread.
    workers = options_for(store, Options(), least=4).max_workers
    options: dict[str, Any] = {"max_workers": workers, "progress": progress}
    if kind is FileKind.CHECKPOINT:
        save(target, tree, timeout=timeout, **options)
    else:
        options |= {"max_file_bytes": max_file_bytes, "metadata": {**_METADATA, **opened.metadata}}
        save_safetensors(target, tree, **options)
    return Converted(kind, len(leaves), sum(map(_nbytes, leaves)))


def _kind_of_target(target: str, kind: FileKind | None) -> FileKind:
    is_file = target.endswith(".safetensors")
    if is_file and kind is FileKind.CHECKPOINT:
        raise ValueError(
            f"{target} has the name of a safetensors file, and a checkpoint is a folder; choose "
            "another name"
        )
    return kind or (FileKind.SAFETENSORS if is_file else FileKind.CHECKPOINT)


def _check_is_new(store: Store) -> None:
    try:
        names = store.entries()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise FileExistsError(
            f"{store.url} is a file, or below one; remove it, or choose another target"
        ) from None
    if names := sorted({*names} - {LOCK}):
        raise FileExistsError(
            f"{store.url} is not empty: it has {join_some(names)}. Remove it, or choose another "
            "target"
        )


def _is_array(leaf: Any) -> bool:
    return is_source(leaf) or is_array(leaf) or isinstance(leaf, np.ndarray)


def _cast(dtype: np.dtype[Any], leaf: Any) -> Any:
    """Return an array in the dtype that it has where floats are cast to one dtype."""
    if not _is_array(leaf) or are_keys(leaf):
        return leaf
    wanted = dtype_in_tree(leaf.dtype, dtype)
    return leaf if wanted == leaf.dtype else lazy(held_by(leaf)).astype(wanted)


def _number_as_array(leaf: Any) -> Any:
    """Return a number as an array without dimensions, which safetensors files can hold."""
    return np.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf


def _nbytes(leaf: Any) -> int:
    if not _is_array(leaf):
        return 0
    if are_keys(leaf):
        leaf = jax.random.key_data(held_by(leaf))
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize

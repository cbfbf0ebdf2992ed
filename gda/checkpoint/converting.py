"""The conversion of the tree at a path into other files, block by block, without a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats
from gda.checkpoint.format.files_at import FileKind, names_at
from gda.checkpoint.reading.saved_arrays import OfOtherProcesses
from gda.checkpoint.saving import save
from gda.checkpoint.step_folders.folder import path_of
from gda.checkpoint.tree_at import open_tree
from gda.layout.text import join_some
from gda.storage.options import Options, ProgressLike
from gda.storage.stores.opening import Store, open_store, options_for
from gda.storage.views.lazy import lazy
from gda.trees.files.save_safetensors import check_leaf, save_safetensors
from gda.trees.leaves import (
    are_keys,
    as_dicts,
    held_by,
    is_array,
    is_container,
    is_source,
    names_of,
)
from gda.trees.per_process import PerProcess, merged
from gda.trees.records.recorded_tree import flatten, path_in, unflatten
from gda.trees.records.saved_leaves import given_leaves

# PyTorch's transformers wants it; no other reader looks.
_METADATA = {"format": "pt"}
MAX_FILE_BYTES = 5 * 2**30


class Converted(NamedTuple):
    """The tree that a conversion has written."""

    kind: FileKind
    num_leaves: int
    nbytes: int  # of its arrays
    skipped: Sequence[str]  # the paths of leaves that the files cannot hold


def convert(
    source: str,
    target: str,
    *,
    kind: FileKind | None = None,
    at: str = "",
    merge: Callable[[list[Any], int], Sequence[Any]] | None = None,
    skip: bool = False,
    change: Callable[[Any], Any] | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = 600,
    progress: ProgressLike = False,
) -> Converted:
    """Write the tree at a path into other files: all of it, or nothing.

    The target is new, or an empty folder. ``kind`` is by default that of the target's name.
    ``at`` is the path of a subtree at the source, with slashes. ``merge`` is as for ``restore``;
    then ``change`` takes the tree, with a ``LazyArray`` for each array, and returns the tree to
    write. ``skip`` omits leaves that the files cannot hold, which are an error otherwise. ``dtype``
    is that of the floats. The other arguments and errors are those of ``checkpoint.save`` and
    ``save_safetensors``.
    """
    kind = _kind_of_target(target, kind)
    store = open_store(target, timeout)
    _check_is_new(store)
    opened = open_tree(path_of(source, timeout), timeout, all_items=bool(at))
    tree = _subtree(opened.tree, at) if at else opened.tree
    if merge is not None:
        tree = jax.tree.map(partial(_merged, merge), tree)
    tree = as_dicts(tree if change is None else change(tree))
    if kind is FileKind.SAFETENSORS:
        tree = jax.tree.map(_number_as_array, tree, is_leaf=is_container)
    tree, skipped = _that_fit(tree, kind, skip)
    if not any(map(_is_array, jax.tree.leaves(tree, is_leaf=is_container))):
        given = opened.url if change is None else f"the {type(tree).__name__} of the map"
        raise ValueError(
            f"there is no array to write in {given}; expected is a tree of arrays and sources, in "
            "dicts and lists"
        )
    if dtype is not None:
        wanted = dtype_of_floats(dtype)
        tree = jax.tree.map(partial(_cast, wanted), tree, is_leaf=is_container)
    leaves = jax.tree.leaves(tree, is_leaf=is_container)
    # Any thread may read the sources of an opened tree.
    workers = options_for(store, Options(), least=4).max_workers
    options: dict[str, Any] = {"max_workers": workers, "progress": progress}
    if kind is FileKind.CHECKPOINT:
        save(target, tree, timeout=timeout, **options)
    else:
        options |= {"max_file_bytes": max_file_bytes, "metadata": {**_METADATA, **opened.metadata}}
        save_safetensors(target, tree, **options)
    return Converted(kind, len(leaves), sum(map(_nbytes, leaves)), skipped)


def _subtree(tree: Any, at: str) -> Any:
    structure, leaves = flatten(tree)
    try:
        path = path_in(structure, tuple(at.split("/")))
    except KeyError as error:
        raise ValueError(f"--at {at}: {error.args[0]}") from None
    return unflatten(structure, [leaf for _, leaf in leaves], path)


def _merged(merge: Callable[[list[Any], int], Sequence[Any]], leaf: Any) -> Any:
    if not isinstance(leaf, OfOtherProcesses):
        return leaf
    return PerProcess(merged(merge, [read() for read in leaf.reads], 1)[0])


def _that_fit(tree: Any, kind: FileKind, skips: bool) -> tuple[Any, list[str]]:
    """Return a tree without leaves that files of a kind cannot hold, and their paths, or raise."""
    keyed, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    reasons = [_misfit(kind, leaf) for _, leaf in keyed]
    named = zip(("/".join(names_of(keys)) for keys, _ in keyed), reasons, strict=True)
    unfit = {name: why for name, why in named if why}
    if unfit and not skips:
        each = join_some([f"{name} ({why})" for name, why in unfit.items()])
        more = "--skip omits such leaves, and a function of --map may change them"
        raise ValueError(f"{kind.value} cannot hold {each}; {more}")
    fitting = [None if why else leaf for (_, leaf), why in zip(keyed, reasons, strict=True)]
    return jax.tree.unflatten(definition, fitting), [*unfit]


def _misfit(kind: FileKind, leaf: Any) -> str | None:
    """Return the reason why files of a kind cannot hold a leaf; ``None`` if they can."""
    if isinstance(leaf, OfOtherProcesses):
        return f"it has the values of {len(leaf.reads)} processes; --merge makes one of them"
    try:
        if kind is FileKind.SAFETENSORS:
            check_leaf(leaf)
        else:
            given_leaves([((), leaf)], Options())
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _kind_of_target(target: str, kind: FileKind | None) -> FileKind:
    is_file = target.endswith(".safetensors")
    if is_file and kind is FileKind.CHECKPOINT:
        raise ValueError(
            f"{target} has the name of a safetensors file, and a checkpoint is a folder; choose "
            "another name"
        )
    return kind or (FileKind.SAFETENSORS if is_file else FileKind.CHECKPOINT)


def _check_is_new(store: Store) -> None:
    names = names_at(store)
    if names is None:
        raise FileExistsError(
            f"{store.url} is a file, or below one; remove it, or choose another target"
        )
    if names:
        raise FileExistsError(
            f"{store.url} is not empty: it has {join_some(names)}. Remove it, or choose another "
            "target"
        )


def _is_array(leaf: Any) -> bool:
    return is_source(leaf) or is_array(leaf) or isinstance(leaf, np.ndarray)


def _cast(dtype: np.dtype[Any], leaf: Any) -> Any:
    """Return an array in the dtype that it has when floats are cast to ``dtype``."""
    if not _is_array(leaf) or are_keys(leaf):
        return leaf
    wanted = dtype_in_tree(leaf.dtype, dtype)
    return leaf if wanted == leaf.dtype else lazy(held_by(leaf)).astype(wanted)


def _number_as_array(leaf: Any) -> Any:
    """Return a number as an array without dimensions, for safetensors files."""
    return np.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf


def _nbytes(leaf: Any) -> int:
    if not _is_array(leaf):
        return 0
    if are_keys(leaf):
        leaf = jax.random.key_data(held_by(leaf))
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize

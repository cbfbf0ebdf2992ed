"""The conversion of the tree at a path into other files, block by block, without a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.dtypes import dtype_in_tree, dtype_of_floats
from gda.checkpoint.saving import MAX_BYTES, left_by_killed_saves, save
from gda.checkpoint.tree_at import FileKind, OpenedTree, open_tree
from gda.layout.text import join_some, typed_shape
from gda.storage import safetensors_model
from gda.storage.options import Options, ProgressLike
from gda.storage.stores.directory import LOCK
from gda.storage.stores.errors import repr_of
from gda.storage.stores.opening import Store, open_store, options_for
from gda.storage.views.lazy import lazy
from gda.trees.files.save_safetensors import planned_save, save_safetensors
from gda.trees.leaves import (
    are_keys,
    as_dicts,
    held_by,
    is_array,
    is_container,
    is_source,
    is_value,
)
from gda.trees.records.recorded_tree import flatten, format_path
from gda.trees.records.saved_leaves import saved_leaves

# PyTorch's transformers wants it; no other reader looks.
_METADATA = {"format": "pt"}
MAX_FILE_BYTES = 5 * 2**30


class ConvertedLeaf(NamedTuple):
    name: str
    type: str
    nbytes: int


@dataclass(frozen=True)
class Conversion:
    """A tree to be written, and its place. Nothing of its arrays was read or written yet."""

    source: OpenedTree
    target: str
    kind: FileKind
    leaves: tuple[ConvertedLeaf, ...]
    num_files: int  # of safetensors files; otherwise 0
    save: Callable[..., None]  # with all of its arguments but progress

    def write(self, progress: ProgressLike) -> None:
        """Write the target: all of it, or nothing. Errors as those of the two savers."""
        self.save(progress=progress)


def plan_conversion(
    source: str,
    target: str,
    *,
    kind: FileKind | None = None,
    change: Callable[[Any], Any] | None = None,
    dtype: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = 600,
) -> Conversion:
    """Return what a conversion will write; nothing of it is done, and all is checked.

    At the target is nothing, or only the files of a killed conversion to the same ``kind``, which
    is by default that of the target's name. ``change`` takes the tree at the source, with a
    ``LazyArray`` for each array, and returns the tree to write; ``dtype`` is that of its floats.
    The rest is as for ``checkpoint.save`` and ``save_safetensors``.
    """
    kind = _kind_of_target(target, kind)
    _check_is_new(open_store(target, timeout), kind)
    opened = open_tree(source, timeout)
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
    metadata = {**_METADATA, **opened.metadata}
    names, num_files = _checked(
        target, kind, tree, Options(max_bytes=max_bytes), max_file_bytes, metadata
    )
    # All sources of an opened tree are read by any thread.
    workers = options_for(open_store(target, timeout), Options(), least=4).max_workers
    arguments = {"max_workers": workers, "max_bytes": max_bytes}
    if kind is FileKind.CHECKPOINT:
        saver = partial(save, target, tree, timeout=timeout, **arguments)
    else:
        files = {"max_file_bytes": max_file_bytes, "metadata": metadata}
        saver = partial(save_safetensors, target, tree, **files, **arguments)
    return Conversion(
        source=opened,
        target=target,
        kind=kind,
        leaves=tuple(map(_converted, names, [leaf for _, leaf in flatten(tree)[1]])),
        num_files=num_files,
        save=saver,
    )


def _kind_of_target(target: str, kind: FileKind | None) -> FileKind:
    is_file = target.endswith(".safetensors")
    if is_file and kind is FileKind.CHECKPOINT:
        raise ValueError(
            f"{target} has the name of a safetensors file, and a checkpoint is a folder; choose "
            "another name"
        )
    return kind or (FileKind.SAFETENSORS if is_file else FileKind.CHECKPOINT)


def _check_is_new(store: Store, kind: FileKind) -> None:
    try:
        names = store.entries()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise FileExistsError(
            f"{store.url} is a file, or below one; remove it, or choose another target"
        ) from None
    is_checkpoint = kind is FileKind.CHECKPOINT
    left_by = left_by_killed_saves if is_checkpoint else safetensors_model.left_by_killed_saves
    if names := sorted({*names} - {LOCK} - left_by(names)):
        raise FileExistsError(
            f"{store.url} is not empty: it has {join_some(names)}. Remove it, or choose another "
            "target"
        )


def _checked(
    target: str,
    kind: FileKind,
    tree: Any,
    options: Options,
    max_file_bytes: int,
    metadata: Mapping[str, str],
) -> tuple[Sequence[str], int]:
    """Return the names of leaves and the number of files; raise if the tree cannot be written."""
    if kind is FileKind.SAFETENSORS:
        for path, leaf in flatten(tree)[1]:
            if are_keys(leaf):
                raise TypeError(
                    f"{format_path(path)} is an array of PRNG keys, and safetensors files have no "
                    "keys; write jax.random.key_data(keys) in the function of the map or omit it, "
                    "or write a checkpoint"
                )
            if is_value(leaf) and not isinstance(leaf, np.generic):
                raise TypeError(
                    f"{format_path(path)} is {repr_of(leaf):.60}, and safetensors files have "
                    "arrays only; omit it in the function of the map, or write a checkpoint"
                )
        plan = planned_save(target, tree, max_file_bytes, metadata, options)
        return plan.names, len(plan.files)
    leaves = flatten(tree)[1]
    saved_leaves(leaves, options)
    return [format_path(path) for path, _ in leaves], 0


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


def _converted(name: str, leaf: Any) -> ConvertedLeaf:
    if not _is_array(leaf):
        return ConvertedLeaf(name, type(leaf).__name__, 0)
    if are_keys(leaf):
        leaf = jax.random.key_data(held_by(leaf))
    nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    return ConvertedLeaf(name, typed_shape(leaf.dtype, leaf.shape), nbytes)

"""The leaves of a tree of arrays, and their paths for error messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from gda.arrays.container import Container
from gda.arrays.dtypes import is_extended
from gda.arrays.liveness import live
from gda.arrays.padded_array import PaddedArray
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index
from gda.layout.text import format_index
from gda.mesh import grid_of_array
from gda.multihost.descriptions import leaf_path, note_path
from gda.storage.sources import is_mapping, settled, slices
from gda.trees.per_process import PerProcess

Tree = Any  # a pytree: of arrays, containers or sources, or of an argument for each leaf

Keys = tuple[Any, ...]  # of JAX: the path of a leaf

T = TypeVar("T")

# Tuples: joining classes with | takes longer than the check, which is made for every leaf.
_ARRAYS = (Container, jax.Array)
_VALUES = (int, float, complex, str, bytes, np.generic, PerProcess)


def is_container(node: object) -> bool:
    """Return True for a container of an array; one of anything else is a node, as a list is."""
    return isinstance(node, Container) and not node._is_inert


def opened(tree: Any, kind: type[Container] = Container) -> Any:
    """Replace each container that holds no array, but a spec for instance, by its content."""

    def is_kind(node: object) -> bool:
        return isinstance(node, kind)

    def content(node: Any) -> Any:
        return opened(node.array, kind) if is_kind(node) and node._is_inert else node

    nodes = jax.tree.leaves(tree, is_leaf=is_kind)
    if not any(is_kind(node) and node._is_inert for node in nodes):
        return tree  # the object that it is, as a static argument must stay
    return jax.tree.map(content, tree, is_leaf=is_kind)


def is_array(leaf: object) -> bool:
    return isinstance(leaf, _ARRAYS)


def is_value(leaf: object) -> bool:
    """Return True for a leaf that functions of trees leave as it is, without a spec."""
    return leaf is None or isinstance(leaf, _VALUES)


def is_source(leaf: Any) -> bool:
    """Return True if a leaf is read by slices, such as a memory map, and is no array in memory."""
    if isinstance(leaf, np.ndarray):
        # The name of its file. Arrays computed from a memory map are of its class, without it.
        return getattr(leaf, "filename", None) is not None
    return not (is_array(leaf) or is_value(leaf)) and slices(leaf)


def are_keys(leaf: object) -> bool:
    """Return True if a leaf is an array of typed PRNG keys, which NumPy cannot hold."""
    return is_array(leaf) and is_extended(getattr(held_by(leaf), "dtype", None))


def are_bare_keys(leaf: object) -> bool:
    """Return True for a ``jax.Array`` of keys, which gets no container: jax.random takes none."""
    return are_keys(leaf) and not is_container(leaf)


def as_dicts(tree: Any) -> Any:
    """Return the tree with dicts for mappings that JAX does not know, as ``h5py.Group``.

    A ``jax.Ref`` becomes its present array.
    """

    def as_dict(node: Any, keys: tuple[Any, ...] = ()) -> Any:
        if is_array(node) or is_value(node):
            return node
        if not is_mapping(node):
            return settled(node) if is_leaf(node) else as_dicts(node)
        return {name: as_dict(_member(node, name, keys), (*keys, name)) for name in node}

    return jax.tree.map(as_dict, tree, is_leaf=is_container)


def _member(mapping: Any, name: Any, keys: tuple[Any, ...]) -> Any:
    try:
        return mapping[name]
    except Exception as error:  # such as of a link in an HDF5 file to what is not there
        path = "/".join(map(str, (*keys, name)))
        error.add_note(f"gda: at {path} of a {type(mapping).__name__}")
        raise


def is_leaf(node: object) -> bool:
    """Return True if a node of a tree is an array, a container or another leaf."""
    return is_container(node) or jax.tree_util.all_leaves([node])


def held_by(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, Container) else leaf


def array_of(leaf: Any, otherwise: str = "") -> jax.Array:
    """Return the array of a leaf with its data and padding; arguments and errors as ``live``."""
    return leaf._live() if isinstance(leaf, Container) else live(leaf, otherwise)


def grid_of_leaf(leaf: Any) -> ShardGrid:
    """Return the grid of the elements of an array or container, with processes, without padding."""
    return leaf.grid if isinstance(leaf, Container) else grid_of_array(leaf)


def without_data(leaf: Any) -> Any:
    """Return the layout of an array as a tree without data, equal in all processes that agree."""
    array = held_by(leaf)
    layout = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    return PaddedArray(layout, leaf.shape) if isinstance(leaf, PaddedArray) else layout


def path_of(tree: Any, number: int) -> str:
    """Return the path of a leaf, such as ``a/0``: for messages only, because it is slow."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)[0]
    return leaf_path(paths[number][0])


def names_of(keys: Keys) -> list[str]:
    """Return the names on the way to a leaf as texts."""
    return [str(name_of(key)) for key in keys]


def name_of(key: Any) -> Any:
    """Return the name of a child, without the kind of its node."""
    return _NAME_OF.get(type(key), str)(key)


_NAME_OF: dict[type, Callable[[Any], Any]] = {
    DictKey: attrgetter("key"),
    FlattenedIndexKey: attrgetter("key"),
    SequenceKey: attrgetter("idx"),
    GetAttrKey: attrgetter("name"),
}


def note_writing(error: Exception, tree: Any, number: int, index: Index) -> None:
    """Add a note to an error: the leaf, and the index of the block, that were being written."""
    if any(note.startswith("gda: while reading") for note in getattr(error, "__notes__", ())):
        return  # of a source, with the same index
    path = path_of(tree, number)
    of_leaf = f" of {path}" if path else ""
    error.add_note(f"gda: while writing index {format_index(index)}{of_leaf}")


def with_paths(tree: Any, function: Callable[..., T], *values: Sequence[Any]) -> list[T]:
    """Return the result of ``function`` for each leaf; its error gets the leaf's path."""
    results: list[T] = []
    for of_leaf in zip(*values, strict=True):
        try:
            results.append(function(*of_leaf))
        except Exception as error:
            note_path(error, path_of(tree, len(results)))
            raise
    return results

"""The tree at a path of any kind: a checkpoint, safetensors files or an Orbax run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from gda.checkpoint.format.files_at import FileKind, kind_at
from gda.checkpoint.reading.checked_files import load_complete
from gda.checkpoint.reading.saved_arrays import tree_of_sources
from gda.checkpoint.step_folders.folder import below
from gda.layout.strict_json import parse_json
from gda.storage.options import Options
from gda.storage.orbax_runs.open_orbax import JsonItem, open_item, open_orbax
from gda.storage.orbax_runs.run_folder import METADATA, OrbaxFolder, items_of
from gda.storage.safetensors import open_safetensors
from gda.storage.sources import Unreadable
from gda.storage.stores.opening import Store, has, open_store
from gda.storage.views.lazy import LazyArray, lazy
from gda.trees.leaves import is_source, name_of
from gda.trees.per_process import PerProcess
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    PerProcessLeaf,
    RecordedTree,
    ValueLeaf,
    flatten,
)
from gda.trees.records.saved_leaves import given_leaves


class OpenedTree(NamedTuple):
    """The tree at a path, with a ``LazyArray`` or an ``Unreadable`` for each array."""

    kind: FileKind
    url: str
    tree: Any
    metadata: Mapping[str, str]  # of safetensors files


def open_tree(path: Any, timeout: float, like: Any = None, all_items: bool = False) -> OpenedTree:
    """Return the tree at a path; only PRNG keys and numbers are read now.

    ``path`` and ``timeout`` are as for ``checkpoint.save``. If ``like`` has a child for some items
    of an Orbax run, the tree is the dict of these items; with ``all_items``, of all if there are
    several. Errors are those of ``kind_at``, ``inspect``, ``open_safetensors`` and ``open_orbax``.
    """
    store = open_store(path, timeout)
    kind = kind_at(store)
    metadata: Mapping[str, str] = {}
    if kind is FileKind.SAFETENSORS:
        files = open_safetensors(store.url)
        tree: Any = dict(files)
        metadata = files.metadata
    elif kind is FileKind.ORBAX:
        if all_items:
            like = dict.fromkeys(items_of(OrbaxFolder(store), store.entries()), 0)
        items = _items_like(like, store)
        tree = {each: _item(below(path, each), items[each]) for each in items} or open_orbax(path)
    else:
        tree = tree_of_sources(store, load_complete(store))
    return OpenedTree(kind, store.url, jax.tree.map(_lazy, tree), metadata)


def recorded(opened: OpenedTree) -> tuple[RecordedTree, dict[Path, Any]]:
    """Return the records that an opened tree would have in a checkpoint, and its leaves by path."""
    structure, leaves = flatten(opened.tree)
    records: list[Leaf] = []
    for path, leaf in leaves:
        if isinstance(leaf, LazyArray):
            records.append(ArrayLeaf(path, "source", leaf.shape, leaf.dtype))
        elif isinstance(leaf, Unreadable):
            records.append(ValueLeaf(path, repr(leaf)))
        elif isinstance(leaf, ValuesOfProcesses):
            records.append(PerProcessLeaf(path, "", ((0, 0),) * len(leaf.item.names)))
        else:
            (given,) = given_leaves([(path, leaf)], Options())
            records.append(given if isinstance(given, ValueLeaf) else given.record)
    return RecordedTree(tuple(records), structure), dict(leaves)


@dataclass(frozen=True)
class ValuesOfProcesses:
    """The values of an item of JSON, one for each process, each read when it is asked for."""

    item: JsonItem
    like: Any  # a value of the wanted class: bytes and str get the text

    def __call__(self, process: int) -> Any:
        text = self.item.text(process)
        if isinstance(self.like, bytes):
            return text.encode()
        return text if isinstance(self.like, str) else parse_json(text)


def _items_like(like: Any, store: Store) -> dict[str, Any]:
    """Return the children of ``like`` by name, if there are several and all are items of a run."""
    if has(store, METADATA):  # with folders of arrays
        return {}
    children = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda node: node is not like)[0]
    named = {str(name_of(*keys)): child for keys, child in children if keys}
    return named if len(named) > 1 and {*named} <= {*store.entries()} else {}


def _item(path: Any, like: Any) -> Any:
    if isinstance(like, PerProcess) and isinstance(item := open_item(path), JsonItem):
        return ValuesOfProcesses(item, like.value)
    return open_orbax(path)


def _lazy(leaf: Any) -> Any:
    try:
        return lazy(leaf) if not isinstance(leaf, Unreadable) and is_source(leaf) else leaf
    except (TypeError, ValueError) as error:
        return Unreadable(str(error))

"""The tree of an Orbax run, as sources: ``gda.storage.open_orbax``. Orbax is not imported.

An array of a run is a Zarr array that TensorStore reads, in a folder of its own or in an OCDBT
database of all arrays. ``_METADATA`` beside them has the structure of the tree, but no dtypes, so
each array is opened; all at the same time, because each waits for its own file.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from gda.layout.boundary import public, set_module
from gda.layout.strict_json import parse_json
from gda.mesh import own_settings
from gda.storage.orbax_runs.metadata import (
    ARRAYS,
    EMPTY,
    OrbaxLeaf,
    OrbaxTree,
    parse_key_kinds,
    parse_strings,
    parse_tree,
    tree_of,
)
from gda.storage.orbax_runs.run_folder import (
    METADATA,
    OCDBT,
    OF_PROCESS,
    OrbaxFolder,
    folder_of_item,
)
from gda.storage.sources import TensorStoreFacts, Unreadable

T = TypeVar("T")

# The numbers of Python by the dtype in which they are saved.
_OF_PYTHON = ("bool", "int64", "float64", "complex128")
_MOST_BYTES = 2**28  # of a leaf that is read when its run is opened


@set_module("gda.storage")
@public
def open_orbax(path: str | os.PathLike[str] | dict[str, Any]) -> Any:
    """Return the tree of an Orbax run, with sources that are read when they are sliced.

    Orbax is not imported. The metadata is read, and numbers, strings and PRNG keys; no other data.
    The devices and processes that saved the run need not exist: each process may open it and read
    the blocks that it needs. Runs of versions 0 and 1 are read, with OCDBT or without, as Zarr 2 or
    3.

    Args:
      path: a run: the folder that ``StandardCheckpointer``, ``Checkpointer`` or ``save_pytree`` was
        given, or the one of a step, such as ``run/100``, that ``CheckpointManager`` has made; if
        the run has several trees, the folder of one, such as ``run/100/params``; or the folder of
        an item of JSON. Also a URL such as ``gs://bucket/run/100``, or the spec of a TensorStore
        key-value store.

    Returns:
      the tree as it was saved: dicts and lists; lists in place of tuples, and dicts in place of
        named tuples and dataclasses, as Orbax has them in its metadata. Arrays are TensorStores,
        which ``load_tree`` reads. Numbers and strings are values, and ``None`` and empty containers
        are themselves. Typed PRNG keys are a ``jax.Array`` of keys on one device. A leaf without
        data raises ``ValueError`` with the reason when it is used. Keys of dicts are strings, also
        those that were numbers. Of an item of JSON it is the value; of one with a file for each
        process, such as that of a grain iterator, the list of their values.

    Raises:
      FileNotFoundError, NotADirectoryError: the folder or the run is missing.
      ValueError: the folder is no Orbax run, or one that is unfinished or damaged, or with names
        that lead out of it; it has several items; or it holds several runs. The message has the
        files that were found.
      OSError: a store cannot be reached.
      ImportError: TensorStore is not installed.

    >>> import gda, jax, numpy as np, os, tempfile
    >>> import orbax.checkpoint as ocp
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, 'run')
    ...     with ocp.StandardCheckpointer() as checkpointer:
    ...         checkpointer.save(path, {'w': np.ones((8, 2), np.float32), 'step': 100})
    ...     tree = gda.storage.open_orbax(path)
    ...     print(tree['step'], tree['w'].shape, tree['w'].dtype.name)
    ...     print(gda.load_tree(tree, mesh, jax.sharding.PartitionSpec('x', 'y'))['w'])
    100 (8, 2) float32
    float32[8,2] P('x', 'y')
    """
    item = open_item(path)
    if not isinstance(item, JsonItem):
        return item
    values = [parse_json(item.text(number)) for number in range(len(item.names))]
    return values if item.is_of_processes else values[0]


@dataclass(frozen=True)
class JsonItem:
    """An item of JSON: one file, or one for each process, such as of a grain iterator."""

    folder: OrbaxFolder
    names: Sequence[str]

    @property
    def is_of_processes(self) -> bool:
        return self.names[0].startswith(OF_PROCESS)

    def text(self, number: int) -> str:
        """Return the text of a file; ``ValueError`` if it is not JSON."""
        text: Any = _parsed(self.folder, self.names[number], bytes.decode)
        with _damage_named(self.folder, self.names[number]):
            parse_json(text)
        return text


def open_item(path: Any) -> Any:
    """Return the tree of ``open_orbax``, or an item of JSON without its values."""
    folder, files = folder_of_item(path)
    if files:
        return JsonItem(folder, files)
    tree: Any = _parsed(folder, METADATA, parse_tree)
    values = _values_of(folder, tree)
    with _damage_named(folder, METADATA):
        return tree_of(tree.leaves, lambda leaf: values[leaf])


def _values_of(folder: OrbaxFolder, tree: OrbaxTree) -> dict[OrbaxLeaf, Any]:
    """Return the value or the source of each leaf."""
    written = [leaf for leaf in tree.leaves if leaf.is_written]
    values: dict[OrbaxLeaf, Any] = {leaf: _without_data(folder, leaf) for leaf in tree.leaves}
    if strings := [leaf for leaf in written if leaf.kind == "string"]:
        values |= _strings(folder, strings)
    arrays = [leaf for leaf in written if leaf.kind in (*ARRAYS, "scalar")]
    stores = dict(zip(arrays, _opened(folder, tree, arrays), strict=True))
    kinds = _key_kinds(folder, stores)
    small = [leaf for leaf in arrays if leaf.kind == "scalar" or kinds.get(leaf.name)]
    return values | stores | _read(folder, {leaf: stores[leaf] for leaf in small}, kinds)


def _without_data(folder: OrbaxFolder, leaf: OrbaxLeaf) -> Any:
    """Return the value of a leaf without files of its own."""
    if leaf.kind in EMPTY:
        return EMPTY[leaf.kind]()
    return Unreadable(
        f"leaf {leaf.name!r:.200} of {folder.url}, of type {leaf.kind!r:.80}, was not written, or "
        "in a way that gda does not read; load the other leaves, or restore it with Orbax"
    )


def _strings(folder: OrbaxFolder, leaves: Sequence[OrbaxLeaf]) -> dict[OrbaxLeaf, str]:
    texts = _parsed(folder, "_strings.json", parse_strings) or {}
    if lost := [leaf.name for leaf in leaves if leaf.name not in texts]:
        raise ValueError(
            f"{folder.url} is damaged: the string {lost[0]!r:.200} is not in _strings.json; "
            "copy the run again"
        )
    return {leaf: texts[leaf.name] for leaf in leaves}


def _opened(folder: OrbaxFolder, tree: OrbaxTree, leaves: Sequence[OrbaxLeaf]) -> list[Any]:
    """Return the open TensorStores of some leaves."""
    names, in_ocdbt = [leaf.name for leaf in leaves], tree.uses_ocdbt
    if in_ocdbt is None:
        in_ocdbt = folder.has(OCDBT)
    spec = {
        "driver": "zarr3" if tree.uses_zarr3 else "zarr",
        # Older releases omit blocks of zeros where the format has a fill value: only Zarr 3.
        "fill_missing_data_reads": tree.uses_zarr3 and not tree.has_zeros,
    }
    return folder.results(folder.begin_to_open(spec, names, in_ocdbt), names, "cannot be opened")


def _key_kinds(folder: OrbaxFolder, stores: dict[OrbaxLeaf, Any]) -> dict[str, str | None]:
    """Return the implementations of typed keys by name; only arrays of uint32 may be keys."""
    names = {
        leaf.name
        for leaf, store in stores.items()
        if leaf.kind == "jax.Array" and store.dtype.name == "uint32"
    }
    kinds: dict[str, str | None] = {}
    # Each process lists the arrays of which it wrote a part: mostly the first lists all.
    process = 0
    while names - kinds.keys():
        found = _parsed(folder, f"array_metadatas/process_{process}", parse_key_kinds)
        if found is None:
            break
        kinds |= found
        process += 1
    return kinds


def _read(
    folder: OrbaxFolder, stores: dict[OrbaxLeaf, Any], kinds: dict[str, str | None]
) -> dict[OrbaxLeaf, Any]:
    """Return the values of numbers and PRNG keys."""
    for leaf, store in stores.items():
        # Or TensorStore would end the process where memory does not suffice.
        facts = TensorStoreFacts.of(store)
        nbytes = max(store.size, math.prod(facts.read_chunks or ())) * facts.dtype.itemsize
        if nbytes > _MOST_BYTES:
            raise ValueError(
                f"{folder.url} is damaged: the number or PRNG key {leaf.name!r:.200} has {nbytes} "
                f"bytes; expected are at most {_MOST_BYTES}; copy the run again"
            )
    futures = [store.read() for store in stores.values()]
    data = folder.results(futures, [leaf.name for leaf in stores], "cannot be read")
    pairs = zip(stores, data, strict=True)
    return {leaf: _value_of(leaf, each, kinds.get(leaf.name)) for leaf, each in pairs}


def _value_of(leaf: OrbaxLeaf, data: np.ndarray[Any, Any], kind: str | None) -> Any:
    if leaf.kind == "scalar":
        is_python = data.dtype.name in _OF_PYTHON and not data.ndim
        return data.item() if is_python else data[()]
    try:
        with own_settings():
            return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=kind)
    except (TypeError, ValueError) as error:
        return Unreadable(f"leaf {leaf.name!r:.200} is of PRNG keys {kind!r:.80}: {error}")


def _parsed(folder: OrbaxFolder, name: str, parse: Callable[[bytes], T]) -> T | None:
    """Return the content of a file; ``None`` if it is missing."""
    text = folder.read(name)
    with _damage_named(folder, name):
        return None if text is None else parse(text)


@contextlib.contextmanager
def _damage_named(folder: OrbaxFolder, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder.url}{name} is damaged: {error}; copy the run again") from None

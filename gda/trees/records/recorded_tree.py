"""The records of a tree, in a checkpoint or in the offer of another program: leaves and structure.

The structure is JSON: of a leaf its number; of ``None`` it is ``null``; of a node ``{"dict": [[key,
node], ...]}``, or with ``"list"``, ``"tuple"`` or ``"node"``, the last with ``"class"`` beside it.
A node of a class comes back as a dict, because a file must not make Python load a class.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np
from jax.tree_util import DictKey

from gda.layout.boundary import set_module
from gda.layout.spec import Shape
from gda.layout.text import join_some, near_name, path_text
from gda.multihost.descriptions import leaf_path, note_path
from gda.storage.stores.errors import CorruptionError
from gda.trees.leaves import Keys, as_dicts, is_container, name_of

Path = tuple[str | int, ...]


@set_module("gda.checkpoint")
@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a small array within a chunk of a stored array that many small arrays share.

    Attributes:
      array: the number of the stored array in ``Contents.arrays``.
      offset: the first element of the block in the stored array.
      start, shape: first element and sizes of the block in the small array.

    >>> import gda, numpy as np
    >>> piece = gda.checkpoint.Piece(array=0, offset=4, start=(0, 0), shape=(1, 2))
    >>> piece.of_chunk(np.arange(8))
    array([[4, 5]])
    """

    array: int
    offset: int
    start: Shape
    shape: Shape

    def of_chunk(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the block out of its chunk, which has one dimension."""
        begin = self.offset % len(data)
        return data[begin : begin + math.prod(self.shape)].reshape(self.shape)


@set_module("gda.checkpoint")
@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array of the saved tree; ``Contents.leaves`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      kind: ``"GlobalArray"``, ``"PaddedArray"``, ``"jax.Array"``, ``"numpy"``, or ``"number"`` for
        a number of NumPy.
      shape, dtype: those of its data without padding; of PRNG keys, those of the numbers that they
        consist of.
      key_impl: the implementation of PRNG keys; ``None`` for other arrays.
      spec, mesh: its layout when it was saved, for people.
      fingerprint: its ``gda.fingerprint``; ``None`` in the offer of another program.
      array: the number of its stored array in ``Contents.arrays``; ``None`` if ``pieces`` hold it.
      pieces: its blocks in stored arrays that many small arrays share.
      weak_type: True for a ``jax.Array`` of a weak type.

    >>> import gda, numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'w': np.zeros((2, 3))})
    ...     (leaf,) = gda.checkpoint.inspect(folder).leaves
    >>> leaf.path, leaf.kind, leaf.shape, leaf.nbytes
    (('w',), 'numpy', (2, 3), 48)
    """

    path: Path
    kind: str
    shape: Shape
    dtype: np.dtype[Any]
    key_impl: str | None = None
    spec: str | None = None
    mesh: dict[str, int] | None = field(default=None, hash=False)
    fingerprint: str | None = None
    array: int | None = None
    pieces: tuple[Piece, ...] = ()
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


@set_module("gda.checkpoint")
@dataclass(frozen=True)
class ValueLeaf:
    """A number, a string or bytes of Python in the saved tree; ``Contents.leaves`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      value: the value.

    >>> import gda, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'step': 7})
    ...     gda.checkpoint.inspect(folder).leaves
    (ValueLeaf(path=('step',), value=7),)
    """

    path: Path
    value: bool | int | float | complex | str | bytes


@set_module("gda.checkpoint")
@dataclass(frozen=True, slots=True)
class PerProcessLeaf:
    """A ``PerProcess`` of the saved tree; ``Contents.leaves`` has them.

    Attributes:
      path: the keys and indices that lead to it.
      name: the name of its files below the directory of the data, without ``.`` and the process.
      files: size and CRC-32C of the file of each process.

    >>> import gda, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gda.checkpoint.save(folder, {'data': gda.checkpoint.PerProcess([5])})
    ...     gda.checkpoint.inspect(folder).leaves
    (PerProcessLeaf(path=('data',), name='00000.data', files=((4, 1605819030),)),)
    """

    path: Path
    name: str
    files: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for nbytes, _ in self.files)


Leaf = ArrayLeaf | ValueLeaf | PerProcessLeaf


@dataclass(frozen=True)
class RecordedTree:
    """The records of a tree: in a checkpoint, or in the offer of another program."""

    leaves: tuple[Leaf, ...]  # in the order in which the structure counts them
    structure: Any  # of the tree, as JSON

    has_files: ClassVar[bool] = False
    # For messages: the tree, and the arguments that cast its arrays to the dtypes of ``like``, and
    # that keep leaves which it does not have.
    what: ClassVar[str] = "the checkpoint"
    cast_argument: ClassVar[str] = "cast=True"
    missing_argument: ClassVar[str] = " (missing='keep' keeps those of like)"

    @property
    def array_leaves(self) -> list[ArrayLeaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArrayLeaf)]

    def place_of(self, leaf: Leaf) -> Any:
        """Return the place of an array in the files, which tied leaves share.

        ``None`` of leaves that are never tied: values, numbers, keys and arrays without elements.
        """
        if self.has_files and isinstance(leaf, ArrayLeaf) and leaf.nbytes and may_be_tied(leaf):
            return leaf.array, leaf.pieces
        return None


def may_be_tied(record: ArrayLeaf) -> bool:
    """Return False for keys and numbers, which a reader makes anew for each leaf."""
    return record.key_impl is None and record.kind != "number"


# PRNG keys.


def saved_type(record: ArrayLeaf) -> tuple[Shape, Any]:
    """Return shape and dtype of the recorded array; for keys not those of their data."""
    if record.key_impl is None:
        return record.shape, record.dtype
    return record.shape[: -key_ndim(record.key_impl)], key_dtype(record.key_impl)


def check_keys(record: ArrayLeaf) -> None:
    """Raise ``ValueError`` if JAX does not have this kind of PRNG keys, or their data differs."""
    if record.key_impl is None:
        return
    key = _key_data(record.key_impl)
    if record.dtype != key.dtype or record.shape[len(record.shape) - key.ndim :] != key.shape:
        raise ValueError(
            f"it has keys of {record.key_impl!r}, which are {key.dtype}{list(key.shape)} each, but "
            f"their data is {record.dtype}{list(record.shape)}"
        )


def key_ndim(impl: str | None) -> int:
    """Return the number of last dimensions that belong to one key."""
    return 0 if impl is None else _key_data(impl).ndim


def key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _key_data(impl: str) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


_DEEPEST = 200


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch off garbage collection while the records of a tree are made, which have no cycles.

    Every few hundred records it would look through all objects of the program: half of the time in
    which a manifest is read, and a quarter of that in which 1,000 small arrays are saved.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def flatten(tree: Any) -> tuple[Any, list[tuple[Path, Any]]]:
    """Return the structure as JSON, and path and value of every leaf."""
    tree = as_dicts(tree)
    leaves, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    found = [(path_of_keys(keys), leaf) for keys, leaf in leaves]
    if len(dict(found)) != len(found):
        seen: set[Path] = set()
        twice = next(path for path, _ in found if path in seen or seen.add(path))
        raise ValueError(f"two leaves have the path {format_path(twice)}; rename one of them")
    return _json_of(tree, definition, itertools.count(), 0), found


def unflatten(structure: Any, values: Sequence[Any], at: Path = ()) -> Any:
    """Return the tree of a structure that was checked, or its subtree at a path of ``path_in``."""
    for key in at:
        structure = dict(_children(structure))[key]
    return _read(structure, values)


def path_in(structure: Any, at: Path) -> Path:
    """Return a path with the keys of the structure; raise ``KeyError`` if there is nothing.

    The text of a key is enough: Orbax writes the key ``0`` of a dict as ``"0"``.
    """
    path: Path = ()
    for i, key in enumerate(at):
        children = dict(_children(structure))
        alike = [each for each in children if str(each) == str(key)]
        if not alike:
            there = join_some([repr(each) for each in children]) or "nothing"
            raise KeyError(
                f"{format_path(at[: i + 1])} is not in the tree; {format_path(at[:i])} has {there}"
                f"{near_name(key, children)}"
            )
        found = key if key in alike else alike[0]
        path, structure = (*path, found), children[found]
    return path


def check_structure(structure: Any, paths: Sequence[Path]) -> None:
    """Raise ``CorruptionError`` unless a structure has every leaf once, at its path."""
    count = 0
    path: list[str | int] = []  # shared by all nodes, which may be far more than the leaves

    def check(node: Any) -> None:
        nonlocal count
        if node is None:
            return
        if type(node) is int:
            # The keys of a node differ, so each path, and each leaf, comes once.
            if not 0 <= node < len(paths) or paths[node] != tuple(path):
                raise CorruptionError("the structure of the tree has a leaf in a wrong place")
            count += 1
            return
        if not isinstance(node, dict) or len(path) >= _DEEPEST:
            raise CorruptionError("the structure of the tree is invalid, or too deep")
        for key, below in _children(node):
            path.append(key)
            check(below)
            path.pop()

    check(structure)
    if count != len(paths):
        raise CorruptionError("the structure of the tree does not have every leaf once")


def format_path(path: Path) -> str:
    """Return a path as text, such as ``params/0``."""
    return path_text(path) or "the tree itself"


def checked_path(at: Any) -> Path:
    """Return the path that a user gave, if it is a list of strings and integers."""
    path = None if isinstance(at, str | bytes) else tuple(at)
    if path is None or any(type(key) not in (str, int) for key in path):
        raise TypeError(f"at must be a list of keys and indices, such as ['params', 0], not {at!r}")
    return path


@contextmanager
def noting_path(path: Path) -> Iterator[None]:
    """Add the path of a leaf to an exception of the block."""
    try:
        yield
    except Exception as error:
        note_path(error, path_text(path))
        raise


def path_of_keys(keys: Keys) -> Path:
    """Return the path of JAX's keys; an attribute is the same as a key of a dict."""
    path = tuple(map(name_of, keys))
    for part in path:
        if type(part) not in (str, int):
            raise TypeError(
                f"the key {part!r} in {leaf_path(keys)} is a {type(part).__name__}; use only "
                "strings and integers as keys in a tree that is saved"
            )
    return path


def _json_of(node: Any, definition: Any, numbers: Iterator[int], depth: int) -> Any:
    """Return the JSON of a node; its leaves take the next numbers."""
    if (data := definition.node_data()) is None:
        return next(numbers)
    kind, aux = data
    if kind is type(None):
        return None
    if depth >= _DEEPEST:
        raise ValueError(f"the tree is nested deeper than {_DEEPEST} levels; flatten it")
    keys, nodes = _keys_and_children(kind, aux, node)
    children = [
        [key, _json_of(child, below, numbers, depth + 1)]
        for key, child, below in zip(keys, nodes, definition.children(), strict=True)
    ]
    if kind is dict:
        return {"dict": children}
    if kind is list or kind is tuple:
        return {kind.__name__: [below for _, below in children]}
    return {"node": children, "class": f"{kind.__module__}.{kind.__qualname__}"}


def _keys_and_children(kind: Any, aux: Any, node: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if kind is dict:
        return [path_of_keys((DictKey(key),))[0] for key in aux], [node[key] for key in aux]
    if kind is list or kind is tuple:
        return range(len(node)), node
    # JAX gives keys of leaves only, so here all children are leaves.
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda below: below is not node)[0]
    return [path_of_keys(keys)[0] for keys, _ in pairs], [child for _, child in pairs]


def _children(structure: Any) -> Iterable[Any]:
    """Return key and node of each child of a node, without a copy of them."""
    if not isinstance(structure, dict):
        return ()
    for name in ("dict", "node"):
        if name in structure:
            return _pairs(structure[name])
    for name in ("list", "tuple"):
        if name in structure:
            return enumerate(_list(structure[name]))
    raise CorruptionError("the structure of the tree has a node of an unknown kind")


def _read(structure: Any, values: Sequence[Any]) -> Any:
    if structure is None:
        return None
    if type(structure) is int:
        return values[structure]
    children = _children(structure)
    if "dict" in structure or "node" in structure:
        items = {key: _read(below, values) for key, below in children}
        # JAX sorts the keys of a dict, and cannot compare strings with integers. It does not sort
        # those of an OrderedDict.
        return items if len({*map(type, items)}) < 2 else OrderedDict(items)
    items = [_read(below, values) for _, below in children]
    return items if "list" in structure else tuple(items)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptionError("the structure of the tree is invalid")
    return value


def _pairs(value: Any) -> list[Any]:
    pairs = _list(value)
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise CorruptionError("the structure of the tree has an invalid key")
    if len({key for key, _ in pairs}) != len(pairs):
        raise CorruptionError("the structure of the tree has a key twice")
    return pairs

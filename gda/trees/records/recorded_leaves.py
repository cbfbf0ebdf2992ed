"""The records of a tree and its leaves, in a checkpoint or in the offer of another program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from gda.layout.boundary import set_module
from gda.layout.spec import Shape

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
      fingerprint: its ``gda.fingerprint``; ``None`` if it was saved with ``fingerprint=False``.
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


Leaf = ArrayLeaf | ValueLeaf


@dataclass(frozen=True)
class RecordedTree:
    """The records of a tree: in a checkpoint, or in the offer of another program."""

    leaves: tuple[Leaf, ...]  # in the order in which the structure counts them
    structure: Any  # of the tree: see gda.trees.records.structure

    # For messages: the tree, and the arguments that cast its arrays to the dtypes of ``like``, and
    # that keep leaves which it does not have.
    what: ClassVar[str] = "the checkpoint"
    cast_argument: ClassVar[str] = "cast=True"
    missing_argument: ClassVar[str] = " (missing='keep' keeps those of like)"

    @property
    def array_leaves(self) -> list[ArrayLeaf]:
        """The leaves that are arrays."""
        return [leaf for leaf in self.leaves if isinstance(leaf, ArrayLeaf)]

    def leaves_at(self, at: Path) -> dict[Path, Leaf]:
        """Return the leaves of a subtree, by their paths in the whole tree."""
        return {leaf.path: leaf for leaf in self.leaves if leaf.path[: len(at)] == at}


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
    """Return the dtype of keys of an implementation."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _key_data(impl: str) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the data of one key."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))

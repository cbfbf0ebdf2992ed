"""Lazy views of sources: ``gda.storage.lazy``, ``stack`` and ``concatenate``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import as_dtype, is_raw, native
from gda.layout.spec import Shape, integers
from gda.layout.text import counted
from gda.storage.sources import HasReader, Source, source_of, typed
from gda.storage.views.mapping import Item, ViewMap, identity
from gda.storage.views.reads import Joined, Mapped, SourceNode, source_of_node


@set_module("gda.storage")
class LazyArray(HasReader):
    """A view of sources, read when an array is made of it, from ``gda.storage.lazy``.

    It is a source of ``gda.load_tree`` and ``GlobalArray.from_source``, which read the blocks that
    they need. ``np.asarray(view)`` and other functions of NumPy, such as ``np.stack``, read all;
    ``gda.storage.stack`` gives a view. Every operation returns another view and reads nothing. A
    view never changes.

    Each block is read in as few slices of the sources as cost no more than several: slices that
    overlap, lie side by side, share a chunk, or have fewer than 32 KiB between them are read
    together, in pieces of 4 MiB if not straight into the block. So a block of a dimension that was
    split, merged or sliced with a step may also read what lies between two slices: less than
    32 KiB, or the rest of a chunk. Other blocks read their own elements.

    Attributes:
      shape: its sizes.
      dtype: its NumPy dtype, in the byte order of this machine.

    >>> import gda, numpy as np
    >>> view = gda.storage.lazy(np.arange(6).reshape(2, 3)).T[1:]
    >>> view
    LazyArray(shape=(2, 2), dtype=int64)
    >>> np.asarray(view)
    array([[1, 4],
           [2, 5]])
    """

    def __init__(self, node: Mapped) -> None:
        self._node = node
        self.shape: Shape = node.shape
        self.dtype: np.dtype[Any] = node.dtype

    @property
    def _reader(self) -> Source:
        return source_of_node(self._node)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        """Size of the first dimension; ``TypeError`` for a view of no dimensions."""
        if not self.shape:
            raise TypeError("a view of no dimensions has no len(); use view.size, which is 1")
        return self.shape[0]

    @property
    def T(self) -> LazyArray:
        """The view with its dimensions in reverse order."""
        return self._then(self._node.map.transposed(reversed(range(self.ndim))))

    @public
    def transpose(self, *axes: int | Sequence[int]) -> LazyArray:
        """Return the view with its dimensions in another order, as ``numpy.transpose``.

        Args:
          axes: the old number of each new dimension, as integers or one sequence; reversed if none.

        Raises:
          ValueError: the axes are not those of the view, each once.

        >>> import gda, numpy as np
        >>> gda.storage.lazy(np.zeros((2, 3, 4))).transpose(2, 0, 1).shape
        (4, 2, 3)
        """
        given = _integers(axes) if axes else tuple(reversed(range(self.ndim)))
        order = normalize_axis_tuple(given, self.ndim, "axes")
        if len(order) < self.ndim:
            raise ValueError(f"axes {given} for a view of shape {self.shape}; give each one once")
        return self._then(self._node.map.transposed(order))

    @public
    def reshape(self, *shape: int | Sequence[int]) -> LazyArray:
        """Return the view in another shape: dimensions split, and neighbours merged.

        Args:
          shape: the sizes, as integers or one sequence. One may be -1, which stands for the rest.

        Raises:
          ValueError: the number of elements differs; or the rows of both shapes do not line up, so
            that a block would need pieces of almost every row of the source.

        >>> import gda, numpy as np
        >>> view = gda.storage.lazy(np.zeros((6, 4)))
        >>> view.reshape(2, 3, 4).shape, view.reshape(-1).shape, view.reshape(3, 8).shape
        ((2, 3, 4), (24,), (3, 8))
        """
        sizes = self._sizes(_integers(shape))
        if (view_map := self._node.map.reshaped(sizes)) is None:
            raise ValueError(
                f"a view of shape {self.shape} cannot be reshaped to {sizes}: its rows and those "
                "of the result begin at different elements, so that a block would need pieces of "
                "almost all of them. A reshape may split a dimension and merge neighbours; read "
                "the array and reshape that, numpy.asarray(view).reshape(...)"
            )
        return self._then(view_map)

    @public
    def astype(self, dtype: npt.DTypeLike) -> LazyArray:
        """Return the view cast to a dtype.

        Args:
          dtype: as ``dtype=`` of ``gda.load_tree``. For elements without a NumPy type, as
            ``numpy.load`` gives for bfloat16, it names the type that they have.

        Raises:
          TypeError: that is no dtype, or of another size than elements without a type.

        A read raises ``DoesNotFitError`` for a value that the dtype cannot hold, as ``load_tree``
        does.

        >>> import gda, numpy as np
        >>> np.asarray(gda.storage.lazy(np.arange(3)).astype('bf16'))
        array([0, 1, 2], dtype=bfloat16)
        """
        node, wanted = self._node, native(as_dtype(dtype))
        if wanted == self.dtype:
            return self
        if is_raw(self.dtype):
            leaf, view_map = node.node, node.map
            if not isinstance(leaf, SourceNode):
                leaf, view_map = SourceNode(self, self._reader), identity(self.shape)
            leaf = SourceNode(leaf.value, typed(leaf.source, wanted))
            return LazyArray(Mapped(leaf, view_map, wanted))
        is_cast = node.dtype != node.node.dtype
        below, view_map = (node, identity(self.shape)) if is_cast else (node.node, node.map)
        return LazyArray(Mapped(below, view_map, wanted))

    @public
    def __getitem__(self, index: Any) -> LazyArray:
        """Return a part: integers, slices with any step, ``...`` and ``None``, as in NumPy.

        Raises:
          IndexError: an integer is outside its dimension, there are too many, or the index has an
            array, a list or a boolean.
        """
        items = _items(index, self.shape)
        node = self._node
        if (view_map := node.map.indexed(items)) is None:
            node = Mapped(node, identity(self.shape), node.dtype)
            view_map = node.map.indexed(items)
            assert view_map is not None
        return LazyArray(Mapped(node.node, view_map, node.dtype))

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Read the whole view, for ``np.asarray``, ``jnp.asarray`` and the like.

        Raises:
          ValueError: ``copy=False`` was given, but a read always makes a new array.
        """
        if copy is False:
            raise ValueError(
                f"{self!r} is read into a new array, which copy=False forbids; use "
                "numpy.asarray(view)"
            )
        whole = tuple([slice(0, size) for size in self.shape])
        block = self._reader.read(whole, lambda dtype: np.empty(self.shape, dtype))
        return np.asarray(block, dtype)

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={self.dtype})"

    def _then(self, view_map: ViewMap) -> LazyArray:
        return LazyArray(Mapped(self._node.node, view_map, self._node.dtype))

    def _sizes(self, given: Shape) -> Shape:
        """Return a shape that has all elements, with the size that -1 stands for."""
        known = math.prod([size for size in given if size != -1])
        if given.count(-1) == 1 and known and self.size % known == 0:
            given = tuple([self.size // known if size == -1 else size for size in given])
        if min(given, default=0) < 0 or math.prod(given) != self.size:
            raise ValueError(
                f"a view of shape {self.shape}, of {counted(self.size, 'element')}, cannot be "
                f"reshaped to {given}; give sizes of that product, of which one may be -1"
            )
        return given


@set_module("gda.storage")
@public
def lazy(source: Any) -> LazyArray:
    """Return a view of a source that can be transposed, sliced, reshaped and cast without a read.

    Args:
      source: anything with ``shape``, ``dtype`` and NumPy's slicing, as for
        ``GlobalArray.from_source``. A view is returned as it is.

    Raises:
      TypeError, ValueError: it is not a source, as in ``GlobalArray.from_source``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> weight = gda.storage.lazy(np.ones((4, 16), np.float32))  # [out, in]
    >>> gda.load_tree({'w': weight.T}, mesh, jax.sharding.PartitionSpec('x'))['w']
    GlobalArray(shape=(16, 4), dtype=float32, mesh={'x': 8}, spec=P('x'))
    """
    if isinstance(source, LazyArray):
        return source
    leaf = SourceNode(source, source_of(source))
    return LazyArray(Mapped(leaf, identity(leaf.shape), leaf.dtype))


@set_module("gda.storage")
@public
def stack(views: Iterable[Any], axis: int = 0) -> LazyArray:
    """Return a view of several, side by side along a new dimension, as ``numpy.stack``.

    Args:
      views: views or sources of one shape and dtype.
      axis: the place of the new dimension in the result.

    Raises:
      ValueError: there are none, their shapes differ, or there is no such axis.
      TypeError: their dtypes differ, or one is not a source.

    >>> import gda, numpy as np
    >>> layers = [np.zeros((4, 8), np.float32) for _ in range(3)]
    >>> gda.storage.stack([gda.storage.lazy(layer).T for layer in layers], axis=1)
    LazyArray(shape=(8, 3, 4), dtype=float32)
    """
    parts = _parts(views, "stack")
    axis = normalize_axis_index(axis, parts[0].ndim + 1)
    new = (slice(None),) * axis + (None,)
    return _joined("stack", parts, [part[new] for part in parts], axis)


@set_module("gda.storage")
@public
def concatenate(views: Iterable[Any], axis: int = 0) -> LazyArray:
    """Return a view of several, side by side along a dimension, as ``numpy.concatenate``.

    Args:
      views: views or sources of one dtype, of shapes that differ along ``axis`` only.
      axis: the dimension.

    Raises:
      ValueError: there are none, their shapes differ, or there is no such axis.
      TypeError: their dtypes differ, or one is not a source.

    >>> import gda, numpy as np
    >>> gda.storage.concatenate([np.zeros((2, 8)), np.zeros((3, 8))]).shape
    (5, 8)
    """
    parts = _parts(views, "concatenate")
    axis = normalize_axis_index(axis, parts[0].ndim)
    return _joined("concatenate", parts, parts, axis)


def _parts(views: Iterable[Any], name: str) -> list[LazyArray]:
    parts = [lazy(view) for view in views]
    if not parts:
        raise ValueError(f"{name} needs at least one view or source; none were given")
    return parts


def _joined(name: str, given: list[LazyArray], parts: list[LazyArray], axis: int) -> LazyArray:
    first = parts[0]
    for number, part in enumerate(parts):
        others = (part.shape[:axis], part.shape[axis + 1 :])
        if part.ndim != first.ndim or others != (first.shape[:axis], first.shape[axis + 1 :]):
            along = "" if name == "stack" else f", which may differ along axis {axis} only"
            raise ValueError(
                f"view {number} of {name} has shape {given[number].shape}, the first "
                f"{given[0].shape}; give views of one shape{along}"
            )
        if part.dtype != first.dtype:
            raise TypeError(
                f"view {number} of {name} has dtype {part.dtype}, the first {first.dtype}; cast "
                f"one of them, such as view.astype('{first.dtype}')"
            )
    node = Joined([part._node for part in parts], axis)
    return LazyArray(Mapped(node, identity(node.shape), node.dtype))


# The arguments of methods.


def _integers(given: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    values: Any = given[0] if len(given) == 1 and np.ndim(given[0]) else given  # pyright: ignore
    return integers(values)


def _items(index: Any, shape: Shape) -> list[Item]:
    """Return the checked items of an index, one for every dimension and for every None."""
    given = list(index) if isinstance(index, tuple) else [index]
    for item in given:
        is_basic = item is None or item is Ellipsis or isinstance(item, slice)
        is_array = isinstance(item, bool | np.bool_ | np.ndarray | jax.Array)
        if not is_basic and (is_array or not hasattr(item, "__index__")):
            raise IndexError(
                f"a {type(item).__name__} in the index of a view or tensor; it takes integers, "
                "slices, ... and None. The elements that a list, an array or a boolean picks are "
                "not blocks of the source: stack the parts, gda.storage.stack([view[i] for i in "
                "numbers]), or read the array and index that, numpy.asarray(view)[index]"
            )
    np.broadcast_to(np.int8(0), shape)[index]  # needs no memory; NumPy's errors for a wrong one
    count = len(given) - given.count(None)
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(shape) - count + 1)
    else:
        given += [slice(None)] * (len(shape) - count)
    sizes = iter(shape)
    return [None if item is None else range(next(sizes))[item] for item in given]

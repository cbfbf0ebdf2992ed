"""Lazy views of sources: ``gda.storage.lazy``, ``stack`` and ``concatenate``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import as_dtype, is_raw, native
from gda.layout.spec import Shape, integers
from gda.layout.text import counted
from gda.storage.sources import HasReader, Source, source_of
from gda.storage.views.mapping import Item, ViewMap, identity
from gda.storage.views.reads import Joined, Mapped, SourceNode, bits_of, source_of_node


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
    LazyArray(shape=(2, 2), dtype=int64, made_of=ndarray[2,3].T[1:])
    >>> np.asarray(view)
    array([[1, 4],
           [2, 5]])
    """

    def __init__(self, node: Mapped, origin: Any, steps: tuple[str, ...] = ()) -> None:
        self._node, self._origin, self._steps = node, origin, steps
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
        return self._then(".T", self._node.map.transposed(reversed(range(self.ndim))))

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
        order = [axis + self.ndim if axis < 0 else axis for axis in given]
        if sorted(order) != [*range(self.ndim)]:
            raise ValueError(
                f"axes {given} for a view of shape {self.shape}; give each number from 0 to "
                f"{self.ndim - 1} once"
            )
        return self._then(f".transpose{given}", self._node.map.transposed(order))

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
        return self._then(f".reshape{sizes}", view_map)

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
        if is_raw(self.dtype) and wanted.itemsize != self.dtype.itemsize:
            raise TypeError(
                f"the source has elements of {self.dtype.itemsize} bytes without a NumPy type "
                f"({self.dtype}); they cannot be {wanted}, of {wanted.itemsize} bytes. Pass the "
                "dtype that was saved"
            )
        is_cast = node.dtype != node.node.dtype
        below, view_map = (node, identity(self.shape)) if is_cast else (node.node, node.map)
        steps = (*self._steps, f".astype({wanted})")
        return LazyArray(Mapped(below, view_map, wanted), self._origin, steps)

    @public
    def view(self, dtype: npt.DTypeLike) -> LazyArray:
        """Return the bits of the view as numbers of another dtype, as ``numpy.ndarray.view``.

        Args:
          dtype: one of the same size, written as for ``astype``.

        Raises:
          TypeError: that is no dtype, or of another size.

        >>> import gda, numpy as np
        >>> np.asarray(gda.storage.lazy(np.array([16256], np.uint16)).view('bf16'))
        array([1], dtype=bfloat16)
        """
        wanted = native(as_dtype(dtype))
        if wanted.itemsize != self.dtype.itemsize:
            raise TypeError(
                f"a view of {self.dtype}, of {self.dtype.itemsize} bytes, has no elements of "
                f"{wanted}, of {wanted.itemsize} bytes; give a dtype of that size, or read the "
                "array and view that, numpy.asarray(view).view(dtype)"
            )
        leaf = SourceNode(self, bits_of(self._reader, wanted))
        steps = (*self._steps, f".view({wanted})")
        return LazyArray(Mapped(leaf, identity(self.shape), wanted), self._origin, steps)

    @public
    def __getitem__(self, index: Any) -> LazyArray:
        """Return a part: integers, slices with any step, ``...`` and ``None``, as in NumPy.

        Raises:
          IndexError: an integer is outside its dimension, there are too many, or the index has an
            array, a list or a boolean.
        """
        items = _items(index, self.shape)
        node, text = self._node, f"[{_text_of(index)}]"
        if (view_map := node.map.indexed(items)) is None:
            node = Mapped(node, identity(self.shape), node.dtype)
            view_map = node.map.indexed(items)
            assert view_map is not None
        return LazyArray(
            Mapped(node.node, view_map, node.dtype), self._origin, (*self._steps, text)
        )

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
        return f"LazyArray(shape={self.shape}, dtype={self.dtype}, made_of={_made_of(self)})"

    def _then(self, step: str, view_map: ViewMap) -> LazyArray:
        node = Mapped(self._node.node, view_map, self._node.dtype)
        return LazyArray(node, self._origin, (*self._steps, step))

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


class _Join(NamedTuple):
    """The arguments of ``stack`` or ``concatenate``."""

    name: str
    views: list[LazyArray]
    axis: int


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
    return LazyArray(Mapped(leaf, identity(leaf.shape), leaf.dtype), source)


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
    LazyArray(shape=(8, 3, 4), dtype=float32,
        made_of=stack([ndarray[4,8].T, ..., ndarray[4,8].T], axis=1) of 3)
    """
    parts = _parts(views, "stack")
    axis = _axis(axis, parts[0].ndim + 1)
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
    axis = _axis(axis, parts[0].ndim)
    return _joined("concatenate", parts, parts, axis)


def bytes_to_read(view: LazyArray) -> int:
    """Return the bytes of its sources that all of a view is made of."""
    return view._node.source_bytes


def _parts(views: Iterable[Any], name: str) -> list[LazyArray]:
    parts = [lazy(view) for view in views]
    if not parts:
        raise ValueError(f"{name} needs at least one view or source; none were given")
    return parts


def _axis(axis: int, ndim: int) -> int:
    number = operator.index(axis)
    if not -ndim <= number < ndim:
        raise ValueError(
            f"axis={axis} of {counted(ndim, 'dimension')}; give a number from {-ndim} to {ndim - 1}"
            if ndim
            else "views of no dimensions; use stack"
        )
    return number % ndim


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
    mapped = Mapped(node, identity(node.shape), node.dtype)
    return LazyArray(mapped, _Join(name, given, axis))


# The arguments of methods.


def _integers(given: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    values: Any = given[0] if len(given) == 1 and np.ndim(given[0]) else given  # pyright: ignore
    return integers(values)


def _items(index: Any, shape: Shape) -> list[Item]:
    """Return the checked items of an index, one for every dimension and for every None."""
    given = list(index) if isinstance(index, tuple) else [index]
    for item in given:
        _check_basic(item)
    count = sum(item is not None and item is not Ellipsis for item in given)
    dots = sum(item is Ellipsis for item in given)
    if count > len(shape) or dots > 1:
        raise IndexError(
            f"an index of {counted(count, 'dimension')} and {counted(dots, 'ellipsis', 'ellipses')}"
            f" for a view of shape {shape}; give at most {len(shape)}, and one ellipsis"
        )
    at = [item is Ellipsis for item in given].index(True) if dots else len(given)
    given[at : at + dots] = [slice(None)] * (len(shape) - count)
    sizes = iter(enumerate(shape))
    return [None if item is None else _item(item, *next(sizes)) for item in given]


def _check_basic(item: Any) -> None:
    is_basic = item is None or item is Ellipsis or isinstance(item, slice)
    is_array = isinstance(item, bool | np.bool_ | np.ndarray | jax.Array)
    if is_basic or (hasattr(item, "__index__") and not is_array):
        return
    raise IndexError(
        f"a {type(item).__name__} in the index of a view or tensor; it takes integers, slices, ... "
        "and None. The elements that a list, an array or a boolean picks are not blocks of the "
        "source: stack the parts, gda.storage.stack([view[i] for i in numbers]), or read the array "
        "and index that, numpy.asarray(view)[index]"
    )


def _item(item: Any, dimension: int, size: int) -> int | range:
    if isinstance(item, slice):
        return range(*item.indices(size))
    place = operator.index(item)
    if not -size <= place < size:
        raise IndexError(
            f"index {place} is outside dimension {dimension}, of size {size}; give a number from "
            f"{-size} to {size - 1}"
        )
    return place % size


# The text of a view: its sources and steps.


def _made_of(view: LazyArray, levels: int = 3) -> str:
    """Return the text of a view, with so many levels of joined views."""
    origin = view._origin
    if isinstance(origin, _Join):
        name, parts, axis = origin
        shown = ["..."]
        if levels:
            some = parts if len(parts) < 3 else [parts[0], parts[-1]]
            shown = [_made_of(part, levels - 1) for part in some]
            shown[1:1] = ["..."] * (len(parts) > 2)
        count = "" if len(parts) < 3 else f" of {len(parts)}"
        text = f"{name}([{', '.join(shown)}], axis={axis}){count}"
    elif isinstance(origin, np.ndarray | jax.Array):  # whose repr reads them
        text = f"{type(origin).__name__}[{','.join(map(str, origin.shape))}]"
    else:
        text = " ".join(repr(origin).split())
        text = text if len(text) <= 200 else f"{text[:200]}..."
    return text + "".join(view._steps)


def _text_of(index: Any) -> str:
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join(map(_text_of_item, items)) or "()"


def _text_of_item(item: Any) -> str:
    if not isinstance(item, slice):
        return "..." if item is Ellipsis else str(item)
    start, stop = ("" if end is None else str(end) for end in (item.start, item.stop))
    return f"{start}:{stop}" + ("" if item.step is None else f":{item.step}")

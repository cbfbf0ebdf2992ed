"""Operators, methods and properties of ``jax.Array`` for a container of one.

All compute on the array inside. Operators are written out, because Python looks for them in the
class and each has a reflected form. Methods and properties are made in a loop over what JAX's
arrays have, so that they are those of the installed version.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import jax
import numpy as np

_LEAVES = (int, float, complex, np.ndarray, np.generic, jax.Array)


def unwrapped(tree: Any) -> Any:
    """Return the tree with the array of each container in its place."""
    # Flattening takes longer than these checks, which the usual operands pass.
    if isinstance(tree, ArrayOperators):
        return tree.__jax_array__()
    if isinstance(tree, _LEAVES):
        return tree

    def has_operators(leaf: object) -> bool:
        return isinstance(leaf, ArrayOperators)

    if not any(map(has_operators, jax.tree.leaves(tree, is_leaf=has_operators))):
        return tree  # perhaps a static argument, which must stay the object that it is
    return jax.tree.map(
        lambda leaf: leaf.__jax_array__() if has_operators(leaf) else leaf,
        tree,
        is_leaf=has_operators,
    )


_T = TypeVar("_T")

_Binary = Callable[["ArrayOperators", Any], jax.Array]


def _unary(function: Callable[[Any], _T]) -> Callable[[ArrayOperators], _T]:
    def method(self: ArrayOperators) -> _T:
        return function(self.__jax_array__())

    return method


def _forward(function: Callable[[Any, Any], Any]) -> _Binary:
    def method(self: ArrayOperators, other: Any) -> jax.Array:
        return function(self.__jax_array__(), unwrapped(other))

    return method


def _both_ways(function: Callable[[Any, Any], Any]) -> tuple[_Binary, _Binary]:
    def reflected(self: ArrayOperators, other: Any) -> jax.Array:
        return function(unwrapped(other), self.__jax_array__())

    return _forward(function), reflected


class _At:
    """``jax.Array.at``, which takes arrays as indices and no containers."""

    __slots__ = ("_at",)

    def __init__(self, at: Any) -> None:
        self._at = at

    def __getitem__(self, key: Any) -> Any:
        return self._at[unwrapped(key)]


class ArrayOperators:
    """Everything that ``jax.Array`` does, done by the array of ``__jax_array__``.

    Results are ordinary ``jax.Array``s.
    """

    __slots__ = ()

    # NumPy asks this before its own operators, so that `numpy_array + g` stays on the devices.
    __array_priority__ = 200

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def _held(self) -> jax.Array:
        """Return the array for questions about it, which a data callback may ask too."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._held())

    __reversed__: Callable[[ArrayOperators], Iterator[jax.Array]] = _unary(reversed)
    __iter__: Callable[[ArrayOperators], Iterator[jax.Array]] = _unary(iter)
    __getitem__ = _forward(operator.getitem)
    __bool__ = _unary(bool)
    __int__ = _unary(int)
    __float__ = _unary(float)
    __complex__ = _unary(complex)
    __index__ = _unary(operator.index)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError("a GlobalArray is immutable; write g.at[index].set(value), a new jax.Array")

    def __round__(self, ndigits: int | None = None) -> jax.Array:
        return round(self.__jax_array__(), ndigits)

    def __eq__(self, other: object) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compare elementwise, like any array.

        The ancestor refused ``==`` because two containers could not be compared without moving
        data. This one computes where the data is, and ``jnp.sin(g) == g`` would anyway.
        """
        return self.__jax_array__() == unwrapped(other)

    __ne__ = _forward(operator.ne)  # pyright: ignore[reportAssignmentType]
    __lt__ = _forward(operator.lt)
    __le__ = _forward(operator.le)
    __gt__ = _forward(operator.gt)
    __ge__ = _forward(operator.ge)
    __add__, __radd__ = _both_ways(operator.add)
    __sub__, __rsub__ = _both_ways(operator.sub)
    __mul__, __rmul__ = _both_ways(operator.mul)
    __matmul__, __rmatmul__ = _both_ways(operator.matmul)
    __truediv__, __rtruediv__ = _both_ways(operator.truediv)
    __floordiv__, __rfloordiv__ = _both_ways(operator.floordiv)
    __mod__, __rmod__ = _both_ways(operator.mod)
    __divmod__, __rdivmod__ = _both_ways(divmod)
    __pow__, __rpow__ = _both_ways(operator.pow)
    __and__, __rand__ = _both_ways(operator.and_)
    __or__, __ror__ = _both_ways(operator.or_)
    __xor__, __rxor__ = _both_ways(operator.xor)
    __lshift__, __rlshift__ = _both_ways(operator.lshift)
    __rshift__, __rrshift__ = _both_ways(operator.rshift)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)

    # The results of the loop below, for type checkers and editors.
    if TYPE_CHECKING:
        T = jax.Array.T
        all = jax.Array.all
        any = jax.Array.any
        argmax = jax.Array.argmax
        argmin = jax.Array.argmin
        argpartition = jax.Array.argpartition
        argsort = jax.Array.argsort
        astype = jax.Array.astype
        at = jax.Array.at
        aval = jax.Array.aval
        byteswap = jax.Array.byteswap
        choose = jax.Array.choose
        clip = jax.Array.clip
        committed = jax.Array.committed
        compress = jax.Array.compress
        conj = jax.Array.conj
        conjugate = jax.Array.conjugate
        copy = jax.Array.copy
        cumprod = jax.Array.cumprod
        cumsum = jax.Array.cumsum
        device = jax.Array.device
        devices = jax.Array.devices
        diagonal = jax.Array.diagonal
        dot = jax.Array.dot
        flatten = jax.Array.flatten
        imag = jax.Array.imag
        item = jax.Array.item
        itemsize = jax.Array.itemsize
        mT = jax.Array.mT
        max = jax.Array.max
        mean = jax.Array.mean
        min = jax.Array.min
        nonzero = jax.Array.nonzero
        on_device_size_in_bytes = jax.Array.on_device_size_in_bytes
        platform = jax.Array.platform
        prod = jax.Array.prod
        ptp = jax.Array.ptp
        ravel = jax.Array.ravel
        real = jax.Array.real
        repeat = jax.Array.repeat
        reshape = jax.Array.reshape
        round = jax.Array.round
        searchsorted = jax.Array.searchsorted
        sort = jax.Array.sort
        squeeze = jax.Array.squeeze
        std = jax.Array.std
        sum = jax.Array.sum
        swapaxes = jax.Array.swapaxes
        take = jax.Array.take
        to_device = jax.Array.to_device
        tobytes = jax.Array.tobytes
        tolist = jax.Array.tolist
        trace = jax.Array.trace
        traceback = jax.Array.traceback
        transpose = jax.Array.transpose
        unsafe_buffer_pointer = jax.Array.unsafe_buffer_pointer
        var = jax.Array.var
        view = jax.Array.view
        weak_type = jax.Array.weak_type

        # Of the class of arrays alone, which has no types.
        def clone(self) -> jax.Array: ...
        def is_ready(self) -> bool: ...
        @property
        def format(self) -> Any: ...
    else:

        @property
        def at(self) -> _At:
            """Indexed updates: ``g.at[index].set(value)`` gives a new ``jax.Array``."""
            return _At(self.__jax_array__().at)


# Of the class that JAX's arrays are of, and not for a container: to free the memory is the array's
# part, and NumPy would prefer a buffer to `__array__`, which knows what this process can give.
_NOT_FOR_CONTAINERS = {"__del__", "__buffer__", "__release_buffer__"}

# They compute nothing.
_QUESTIONS = {
    *("aval", "committed", "device", "devices", "format", "is_ready", "itemsize"),
    *("on_device_size_in_bytes", "platform", "traceback", "weak_type"),
}


def _attributes_of_arrays() -> dict[str, Any]:
    """Return the public methods and properties of arrays by name, those of any object aside."""
    # JAX does not export the class that its arrays are of, which has a few names more than
    # `jax.Array`. Nothing else is ready or not: tracers and PRNG keys are not.
    concrete = [c for c in jax.Array.__subclasses__() if hasattr(c, "is_ready")]
    attributes = {name: getattr(cls, name) for cls in (*concrete, jax.Array) for name in dir(cls)}
    return {
        name: theirs
        for name, theirs in attributes.items()
        if (not name.startswith("_") or name.startswith("__"))
        and not hasattr(object, name)
        and (callable(theirs) or isinstance(theirs, property))
    }


def _delegating(name: str, theirs: Any) -> Any:
    """Return a property or a method that asks the array inside, which is an array or a tracer."""
    about = (theirs.__doc__ or "").partition("\n\n")[0].strip()
    doc = f"``{name}`` of the ``jax.Array`` inside.\n\n{about}".strip()
    ask = operator.methodcaller("_held" if name in _QUESTIONS else "__jax_array__")
    if isinstance(theirs, property):
        return property(lambda self: getattr(ask(self), name), doc=doc)

    def method(self: ArrayOperators, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unwrapped((args, kwargs))
        return getattr(ask(self), name)(*args, **kwargs)

    if isinstance(theirs, FunctionType):  # else JAX's own has no signature to show
        functools.update_wrapper(method, theirs)
    method.__name__, method.__qualname__, method.__doc__ = name, f"ArrayOperators.{name}", doc
    return method


for _name, _theirs in _attributes_of_arrays().items():
    if _name not in _NOT_FOR_CONTAINERS and _name not in vars(ArrayOperators):
        setattr(ArrayOperators, _name, _delegating(_name, _theirs))

"""Python's operators for a container of a ``jax.Array``: they compute on the array inside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax


def _unwrapped(value: Any) -> Any:
    return value.__jax_array__() if isinstance(value, ArrayOperators) else value


_Unary = Callable[["ArrayOperators"], jax.Array]
_Binary = Callable[["ArrayOperators", Any], jax.Array]


def _unary(function: Callable[[Any], Any]) -> _Unary:
    def method(self: ArrayOperators) -> jax.Array:
        return function(self.__jax_array__())

    return method


def _forward(function: Callable[[Any, Any], Any]) -> _Binary:
    def method(self: ArrayOperators, other: Any) -> jax.Array:
        return function(self.__jax_array__(), _unwrapped(other))

    return method


def _both_ways(function: Callable[[Any, Any], Any]) -> tuple[_Binary, _Binary]:
    def reflected(self: ArrayOperators, other: Any) -> jax.Array:
        return function(_unwrapped(other), self.__jax_array__())

    return _forward(function), reflected


class ArrayOperators:
    """What arrays do with operators, indexing and conversions, through ``__jax_array__``.

    Results are ordinary ``jax.Array``s.
    """

    __slots__ = ()

    # NumPy asks this before its own operators, so that `numpy_array + g` stays on the devices.
    __array_priority__ = 200

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __reversed__(self) -> Iterator[jax.Array]:
        return reversed(self.__jax_array__())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __getitem__(self, key: Any) -> jax.Array:
        key = tuple(map(_unwrapped, key)) if isinstance(key, tuple) else _unwrapped(key)
        return self.__jax_array__()[key]

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError("a GlobalArray is immutable; write g.at[index].set(value), a new jax.Array")

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())

    def __complex__(self) -> complex:
        return complex(self.__jax_array__())

    def __index__(self) -> int:
        return operator.index(self.__jax_array__())

    def __round__(self, ndigits: int | None = None) -> jax.Array:
        return round(self.__jax_array__(), ndigits)

    def __eq__(self, other: object) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compare elementwise, like any array.

        The ancestor refused ``==`` because two containers could not be compared without moving
        data. This one computes where the data is, and ``jnp.sin(g) == g`` would anyway.
        """
        return self.__jax_array__() == _unwrapped(other)

    def __ne__(self, other: object) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__jax_array__() != _unwrapped(other)

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

    def __divmod__(self, other: Any) -> tuple[jax.Array, jax.Array]:
        return divmod(self.__jax_array__(), _unwrapped(other))

    def __rdivmod__(self, other: Any) -> tuple[jax.Array, jax.Array]:
        return divmod(_unwrapped(other), self.__jax_array__())

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

    @property
    def T(self) -> jax.Array:
        """The transpose."""
        return self.__jax_array__().T

    @property
    def mT(self) -> jax.Array:
        """The transpose of the last two dimensions."""
        return self.__jax_array__().mT

    @property
    def at(self) -> Any:
        """JAX's indexed updates: ``g.at[index].set(value)`` gives a new ``jax.Array``."""
        return self.__jax_array__().at

    def astype(self, dtype: Any) -> jax.Array:
        """Return a ``jax.Array`` of another dtype."""
        return self.__jax_array__().astype(dtype)

"""``GlobalArray``: the container with the operators of an array.

It holds one ``jax.Array`` and nothing else. ``gda.arrays.constructors`` has its constructors,
``gda.arrays.operators`` its operators and the methods of ``jax.Array``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import jax
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.arrays import libraries
from gda.arrays.construction import from_callbacks
from gda.arrays.construction.blocks import check_in_callback, data_callbacks
from gda.arrays.constructors import ArrayConstructors
from gda.arrays.container import Container
from gda.arrays.liveness import deleted_error
from gda.arrays.operators import ArrayOperators
from gda.layout.boundary import hide_own_frames, set_module
from gda.layout.spec import Shape, SpecLike, format_spec
from gda.layout.text import typed_shape
from gda.mesh import (
    LayoutUnknownError,
    after_spec,
    is_tracer,
    not_an_array_error,
)
from gda.multihost.agreement import communicates, if_checked

_SUCCESSORS = {
    "numpy": "gda.to_numpy(g) or numpy.asarray(g)",
    "shards": "g.local_shards or g.global_shards",
}
_new = object.__new__
_set_array = Container.array.__set__  # pyright: ignore[reportAttributeAccessIssue]


class _NoArray:
    """The class of the default of ``array``, which no container ever holds."""


_NO_ARRAY = _NoArray()


@set_module("gda")
class GlobalArray(Container, ArrayConstructors, ArrayOperators):
    """A global array sharded over a mesh, held by the devices of one or many processes.

    It is a thin, immutable container over one committed ``jax.Array`` with a ``NamedSharding``,
    in ``.array``. Operators, indexing, ``jnp`` functions and all methods and properties of
    ``jax.Array`` work on it and return ordinary ``jax.Array``s. Functions of ``jax.lax`` need
    ``g.array``; their error is "Triggering __jax_array__() during abstractification", and
    docs/works.md lists them. It is a pytree whose only leaf is that array, so ``jax.jit``,
    ``jax.grad``, ``jax.tree.map``, ``jax.device_put`` and optimisers take and return it.

    A tree function puts its results into containers, so that the tree keeps its structure:
    ``jax.device_get(tree)`` returns a ``GlobalArray`` around a NumPy array, for which there is
    ``gda.to_numpy(tree)``. Around something that is no array, a container has no layout. With
    ``is_leaf=lambda x: isinstance(x, gda.GlobalArray)``, the function gets the container, and the
    tree has its results as they are.

    Args:
      global_shape: sizes of the whole array.
      mesh: ``jax.sharding.Mesh``, with Auto or Explicit axes. Here and in all constructors, a
        ``NamedSharding`` or a ``SingleDeviceSharding`` may replace mesh and spec. Omit the spec
        then; the array is in the memory kind of the sharding.
      spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
      device_buffers: single-device ``jax.Array``s of the shard shape, one dtype and one memory
        kind, one per device of ``mesh.local_devices``, in that order. They become the shards
        without a copy: deleting or donating one deletes the shard. On CPU, an array that
        ``jax.device_put`` made without ``may_alias=False`` may share memory with a NumPy array.
      dtype: that of the buffers. Needed in a process without a device of the mesh, which passes no
        buffers.

    Raises:
      TypeError: a buffer is not a ``jax.Array``, or dtypes differ.
      ValueError: the spec does not fit, or a buffer is missing, on another device, in another
        memory kind or of another shape.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> data = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    >>> buffers = [jax.device_put(data[index], device, may_alias=False)
    ...            for device, index in gda.get_shard_indices((8, 2), mesh, P('x', 'y')).items()]
    >>> g = gda.GlobalArray((8, 2), mesh, P('x', 'y'), buffers)
    >>> g
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
    >>> float((g @ g.T)[0, 0])
    1.0
    >>> gda.GlobalArray((8, 2), NamedSharding(mesh, P('x', 'y')), buffers).spec == g.spec
    True
    """

    __slots__ = ()

    array: jax.Array
    """The array itself, for everything that a container does not do."""

    @overload
    def __new__(
        cls,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        device_buffers: Iterable[jax.Array],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Self: ...
    @overload
    def __new__(
        cls,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        device_buffers: Iterable[jax.Array],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Self: ...
    @overload
    def __new__(cls, *, array: Any) -> Self: ...
    def __new__(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Any = None,
        mesh: Any = None,
        spec: Any = None,
        device_buffers: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        array: Any = _NO_ARRAY,
    ) -> Self:
        # `array=` is the way in for JAX's tree functions, in every jitted call. They pass tracers,
        # None, ShapeDtypeStruct or object(), so it checks nothing; users have `from_array`.
        if array is _NO_ARRAY:
            try:
                array = _of_buffers(global_shape, mesh, spec, device_buffers, dtype)
            except Exception as error:
                hide_own_frames(error)
                raise
        self = _new(cls)
        _set_array(self, array)
        return self

    @classmethod
    def _around(cls, array: Any, shape: Shape | None) -> Self:
        return cls(array=array)

    @property
    def shape(self) -> Shape:
        """Sizes of the whole array."""
        return self.array.shape

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device holds the whole array."""
        return self.sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices belong to this process."""
        return self.array.is_fully_addressable

    def addressable_data(self, i: int) -> jax.Array:
        """Return the data of ``addressable_shards[i]``.

        Raises:
          IndexError: there is no such shard.
          RuntimeError: this process has no shard at all, or the array was deleted or donated.
        """
        shards = self.addressable_shards
        if not shards:
            raise RuntimeError(
                f"no device of the mesh {dict(self.mesh.shape)} belongs to process "
                f"{jax.process_index()}, so it has no shard; call this in a process that has one"
            )
        return shards[i].data

    def copy_to_host_async(self) -> None:
        """Start copying the data of this process to the host, for a later ``numpy.asarray``."""
        self._live().copy_to_host_async()

    # As an array.

    def __jax_array__(self) -> jax.Array:
        """Return the array to compute with, also one that is being traced; raise if it is gone."""
        array = self._held()
        if data_callbacks.depth:
            check_in_callback(array)
        return array

    def _held(self) -> jax.Array:
        array = self.array
        # Asking a tracer would raise. An array of NumPy has nothing to ask.
        if is_tracer(array):
            return array
        if hasattr(array, "is_deleted"):
            if array.is_deleted():
                raise deleted_error(array)
        elif not hasattr(array, "dtype"):
            raise not_an_array_error(array)
        return array

    def __eq__(self, other: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # jax.tree.map(lambda x: x.sharding, tree) puts shardings into containers, Orbax puts None
        # into them, and such trees are compared.
        if self._is_inert:
            return isinstance(other, GlobalArray) and self.array == other.array
        return super().__eq__(other)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"GlobalArray has no attribute {name!r}"
            if name in _SUCCESSORS:
                problem += f"; write {_SUCCESSORS[name]}"
            theirs = getattr(type(self), name, None)
            if isinstance(theirs, property):  # its AttributeError has lost its message
                try:
                    theirs.__get__(self)
                except LayoutUnknownError:
                    raise
                except AttributeError as error:
                    is_array = hasattr(self.array, "dtype")
                    problem += f" here: {error if is_array else not_an_array_error(self.array)}"
            raise AttributeError(problem)

    # As a Python object.

    def __str__(self) -> str:
        """Return dtype, shape and spec; of a scalar the value, as of a loss that is printed."""
        array = self.array
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            return repr(self)
        if isinstance(array, jax.Array) and not array.shape and not is_tracer(array):
            return repr(self) if array.is_deleted() else str(array)
        try:
            spec = f" {format_spec(self.spec)}"
        except TypeError:
            spec = ""
        return typed_shape(array.dtype, array.shape) + spec

    def __format__(self, format_spec: str) -> str:
        return format(self.__jax_array__(), format_spec) if format_spec else str(self)

    # The names of GlobalDeviceArray.

    @property
    def mesh_axes(self) -> PartitionSpec:
        """``spec`` by its name in GlobalDeviceArray."""
        return self.spec

    def local_data(self, i: int) -> jax.Array:
        """Return ``addressable_data(i)``, by its name in GlobalDeviceArray."""
        return self.addressable_data(i)


@communicates("GlobalArray", if_checked())
def _of_buffers(
    global_shape: Any, mesh: Any, spec: Any, device_buffers: Any, dtype: npt.DTypeLike | None
) -> jax.Array:
    """Return the array whose shards are the buffers; arguments and errors of ``GlobalArray``."""
    spec, device_buffers = after_spec(mesh, spec, device_buffers)
    if device_buffers is None:
        raise TypeError(
            "GlobalArray takes global_shape, mesh, spec and device_buffers; for an array on the "
            "host write GlobalArray.from_source(array, mesh, spec), for a jax.Array that has its "
            "sharding GlobalArray.from_array(array)"
        )
    return from_callbacks.array_from_device_buffers(global_shape, mesh, spec, device_buffers, dtype)


# As a dataclass, which JAX flattens without a function of Python. JAX makes containers by calling
# `GlobalArray(array=leaf)`, and the name of the field is the leaf's key in all checkpoints.
jax.tree_util.register_dataclass(GlobalArray, data_fields=["array"], meta_fields=[])
jax.export.register_pytree_node_serialization(
    GlobalArray,
    serialized_name="gda.GlobalArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
    from_children=lambda aux_data, children: GlobalArray(array=children[0]),
)
libraries.register(GlobalArray)

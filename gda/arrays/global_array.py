"""``GlobalArray``: one ``jax.Array``, with the operators and methods of the installed JAX's arrays.

All compute on the array inside, and give ordinary ``jax.Array``s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
import numpy.typing as npt

from gda.arrays.container import BlockLike, Container, set_array
from gda.arrays.liveness import data_callbacks, short_text, usable
from gda.layout.boundary import hide_own_frames, public, set_module
from gda.layout.spec import Index, Shape, SpecLike
from gda.mesh import Device, MeshLike, is_tracer, sharding_of, skip_spec_if_sharding
from gda.multihost.agreement import communicates, if_checked

BatchedCallback = Callable[[list[Index]], Iterable[BlockLike]]
PlacingCallback = Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]]

_LEAVES = (int, float, complex, np.ndarray, np.generic, jax.Array)


class _NoLeaf:
    """The default of the argument ``array``, for which ``None`` is a value."""


def unwrapped(tree: Any) -> Any:
    """Return the tree with the array of each container in its place."""
    # Flattening takes longer than these checks, which the usual operands pass.
    if isinstance(tree, GlobalArray):
        return tree.__jax_array__()
    if isinstance(tree, _LEAVES):
        return tree
    leaves, structure = jax.tree.flatten(tree, lambda node: isinstance(node, GlobalArray))
    if not any(isinstance(leaf, GlobalArray) for leaf in leaves):
        return tree  # perhaps a static argument, which must stay the same object
    return structure.unflatten(map(unwrapped, leaves))


class _At:
    """``jax.Array.at``, which takes arrays as indices and no containers."""

    def __init__(self, at: Any) -> None:
        self._at = at

    def __getitem__(self, key: Any) -> Any:
        return self._at[unwrapped(key)]


# Type checkers take a container for an array, as functions of ``jnp`` do, so they know the members
# that the loop below adds.
if TYPE_CHECKING:
    from jax import Array as _LikeArray
else:
    _LikeArray = object


@set_module("gda")
class GlobalArray(Container, _LikeArray):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A global array sharded over a mesh, held by the devices of one or many processes.

    It is a thin, immutable container over one ``jax.Array`` with a ``NamedSharding``, in
    ``.array``. That is committed to its devices, unless ``from_array`` got one that is not.
    Operators, indexing, ``jnp`` functions and all methods and properties of ``jax.Array`` work on
    it and return ordinary ``jax.Array``s. Functions of ``jax.lax`` need ``g.array``; their error is
    "Triggering __jax_array__() during abstractification", and docs/limits.md has others. It is a
    pytree whose only leaf is that array, so ``jax.jit``, ``jax.grad``, ``jax.device_put`` and
    optimisers take and return it.

    A tree function puts its results into containers, which have no layout around something that is
    no array: ``jax.device_get(tree)`` has NumPy arrays in containers, ``gda.to_numpy(tree)`` has
    none. With ``is_leaf=lambda x: isinstance(x, gda.GlobalArray)``, it gets the container itself.

    Args:
      global_shape, mesh, spec: as in ``from_callback``.
      device_buffers: single-device ``jax.Array``s of the shard shape and one dtype, in the memory
        kind of the sharding, one per device of ``mesh.local_devices``, in that order. They become
        the shards without a copy: deleting or donating one deletes the shard. Those of a weak type
        are copied. On CPU, an array that ``jax.device_put`` made without ``may_alias=False`` may
        share memory with a NumPy array.
      dtype: that of the buffers. Needed where no device of the mesh is, and no buffers.

    Raises:
      TypeError: a buffer is not a ``jax.Array``, or dtypes differ.
      ValueError: the spec does not fit, or a buffer is missing, on another device, in another
        memory kind or of another shape.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> data = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x', 'y'], lambda index: data[index])
    >>> g
    GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
    >>> g.local_shards[2].index, g.local_shards[2].data.tolist(), float((g @ g.T)[0, 0])
    ((slice(2, 4, None), slice(0, 1, None)), [[4.0], [6.0]], 1.0)
    """

    __slots__ = ()

    array: jax.Array
    """The array itself, for everything that a container does not do."""

    def __init__(
        self,
        global_shape: Iterable[int] | None = None,
        mesh: MeshLike | None = None,
        spec: SpecLike | Iterable[jax.Array] | None = None,
        device_buffers: Iterable[jax.Array] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        array: Any = _NoLeaf,
    ) -> None:
        # JAX's tree functions, in every jitted call, pass `array=` alone, and as it anything, also
        # None: see `_from_leaf`. A `__new__` in place of this would take a quarter longer.
        if array is _NoLeaf or not (
            global_shape is mesh is spec is device_buffers is dtype is None
        ):
            from gda.arrays.construction import from_callbacks

            if array is not _NoLeaf:
                raise TypeError(
                    "GlobalArray got array= and other arguments; wrap an array that has its "
                    "sharding with GlobalArray.from_array(array)"
                )
            try:
                array = from_callbacks.array_from_device_buffers(
                    global_shape, mesh, *skip_spec_if_sharding(mesh, spec, device_buffers), dtype
                )
            except Exception as error:
                hide_own_frames(error)
                raise
        set_array(self, array)

    @classmethod
    @public
    def from_array(cls, array: jax.Array | jax.ShapeDtypeStruct | Self) -> Self:
        """Wrap a ``jax.Array`` that already has its sharding; nothing is copied or moved.

        One on a single device, which has no mesh, gets a mesh of that device and the spec ``P()``.
        A ``jax.ShapeDtypeStruct`` stands for an array that is not here.

        Raises:
          TypeError: it is not a ``jax.Array``, or its sharding is neither a ``NamedSharding`` nor
            on a single device.
        """
        if isinstance(array, cls):
            return array
        if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(
                f"from_array takes a jax.Array that has its sharding, not {type(array).__name__}; "
                "for an array on the host write GlobalArray.from_source(array, mesh, spec)"
            )
        if isinstance(array, jax.Array) and not is_tracer(array):
            sharding_of(array)
        return cls._from_leaf(array)

    @classmethod
    @communicates("GlobalArray.from_batched_callback", if_checked())
    def from_batched_callback(
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: SpecLike | BatchedCallback | None = None,
        data_callback: BatchedCallback | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> Self:
        """Build an array by one call that returns all blocks of this process.

        Arguments, communication and errors are those of ``from_callback``, except:

        Args:
          data_callback: ``data_callback(indices)`` gets one index for each device of this process,
            in the order of ``mesh.local_devices``, and returns the blocks in that order. If several
            devices have the same index, all get the block of the first.

        Raises:
          ValueError: also if the number of blocks is not the number of indices.
        """
        from gda.arrays.construction import from_callbacks

        arguments = (
            global_shape,
            mesh,
            *skip_spec_if_sharding(mesh, spec, data_callback),
            dtype,
            copy,
        )
        return cls._from_leaf(from_callbacks.array_from_batched_callback(*arguments))

    @classmethod
    @communicates("GlobalArray.from_batched_callback_with_devices", if_checked())
    def from_batched_callback_with_devices(
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: SpecLike | PlacingCallback | None = None,
        data_callback: PlacingCallback | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Self:
        """Build an array by one call that returns arrays on the devices of this process.

        Arguments and communication are those of ``from_callback``, errors those of ``GlobalArray``.

        Args:
          data_callback: gets a list with one ``(index, (device, ...))`` for each distinct index,
            and returns a flat list of single-device ``jax.Array``s, one for each device, in the
            same order, which become the shards as ``device_buffers`` do.
          dtype: cast to it, on the devices.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> def place(request):
        ...     return [jax.device_put(data[index], device, may_alias=False)
        ...             for index, devices in request for device in devices]
        >>> gda.GlobalArray.from_batched_callback_with_devices((8, 2), mesh, ['x'], place)
        GlobalArray(shape=(8, 2), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x'))
        """
        from gda.arrays.construction import from_callbacks

        arguments = (global_shape, mesh, *skip_spec_if_sharding(mesh, spec, data_callback), dtype)
        array = from_callbacks.array_from_batched_callback_with_devices(*arguments)
        return cls._from_leaf(array)

    @classmethod
    @communicates("GlobalArray.from_process_local", if_checked())
    def from_process_local(
        cls,
        local_data: BlockLike,
        mesh: MeshLike,
        spec: SpecLike | Iterable[int | None] | None = None,
        global_shape: Iterable[int | None] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> Self:
        """Build an array from the part that each process has, such as its rows of a batch.

        The data of a process is its distinct blocks side by side, in the order of their
        coordinates, of the shape ``ShardGrid.view(process).local_shape``. They must form a regular
        grid. Replicated blocks must be equal in all processes, which ``gda.check_replicas_agree``
        checks. Communicates as ``from_callback`` does.

        Args:
          local_data: a ``jax.Array`` of this process, or anything that ``numpy.asarray`` takes. If
            the shards of a ``jax.Array`` on accelerators are the blocks, on the right devices, they
            are used, and deleted or donated together. Any other is copied.
          mesh, spec, dtype: as in ``from_callback``.
          global_shape: sizes of the whole array, by default inferred, or ``None`` for those to
            infer. If the local data has the whole of a dimension, gda takes the blocks from it. A
            process without a device of the mesh must pass ``global_shape`` and ``dtype``; its local
            data is ignored.
          copy: as in ``from_callback``. NumPy data is copied once, and with ``False`` not at all.

        Raises:
          TypeError: the local data has a dtype that JAX does not have, or is being traced.
          ValueError: the spec or ``global_shape`` does not fit the data, or the blocks of this
            process do not form a regular grid. The message shows the blocks.
          DoesNotFitError: as in ``from_callback``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> gda.GlobalArray.from_process_local(np.zeros((16, 3), np.float32), mesh, [('x', 'y')])
        GlobalArray(shape=(16, 3), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(('x', 'y')))
        """
        from gda.arrays.construction.from_process_local import array_from_process_local

        array = array_from_process_local(local_data, mesh, spec, global_shape, dtype, copy)
        return cls._from_leaf(array)

    # Its layout.

    @property
    def shape(self) -> Shape:
        """Sizes of the whole array."""
        return self.array.shape

    mesh_axes = Container.spec  # by its name in GlobalDeviceArray

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device holds the whole array."""
        return self.sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices belong to this process."""
        return self.array.is_fully_addressable

    def local_data(self, i: int) -> jax.Array:
        """Return the data of ``local_shards[i]``, and raise the same errors."""
        return self.local_shards[i].data

    addressable_data = local_data  # pyright: ignore[reportAssignmentType]  # as in jax.Array

    def copy_to_host_async(self) -> None:
        """Start copying the data of this process to the host, for a later ``numpy.asarray``."""
        self._live().copy_to_host_async()

    def __jax_array__(self) -> jax.Array:
        """Return the array to compute with, also one that is being traced; raise if it is gone."""
        array = usable(self.array)
        if data_callbacks.depth:
            from gda.arrays.construction.blocks import check_in_callback

            check_in_callback(array)
        return array

    def __eq__(self, other: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compare elementwise, like any array, where the data is: ``jnp.sin(g) == g`` would too."""
        # jax.tree.map(lambda x: x.sharding, tree) puts shardings into containers, Orbax puts None
        # into them, and such trees are compared.
        if self._is_inert:
            return isinstance(other, GlobalArray) and self.array == other.array
        return self.__jax_array__() == unwrapped(other)

    __array_priority__ = 200  # so that NumPy leaves `numpy_array + g` to the devices

    if not TYPE_CHECKING:  # for which it is that of ``jax.Array``

        @property
        def at(self) -> _At:
            """Indexed updates: ``g.at[index].set(value)`` gives a new ``jax.Array``."""
            return _At(self.__jax_array__().at)

    def __str__(self) -> str:
        """Return dtype, shape and spec; of a scalar the value, as of a loss that is printed."""
        return repr(self) if self._is_inert else short_text(self.array)

    def __format__(self, format_spec: str) -> str:
        return format(self.__jax_array__(), format_spec) if format_spec else str(self)


# Members of JAX's arrays that a container must not have: the array frees the memory, and NumPy
# would prefer a buffer to `__array__`, which knows what this process can give.
_NOT_FOR_CONTAINERS = {"__del__", "__buffer__", "__release_buffer__", *dir(GlobalArray)} - {
    *("__ne__", "__lt__", "__le__", "__gt__", "__ge__")  # comparisons, which every object has
}

# These compute nothing, so a data callback may use them too.
_QUESTIONS = {
    *("__len__", "aval", "committed", "device", "devices", "format", "is_ready", "itemsize"),
    *("on_device_size_in_bytes", "platform", "traceback", "weak_type"),
}


def _attributes_of_arrays() -> dict[str, Any]:
    """Return the operators, public methods and properties of arrays by name."""
    # JAX does not export the class of its arrays; tracers and PRNG keys have no `is_ready`.
    concrete = [c for c in jax.Array.__subclasses__() if hasattr(c, "is_ready")]
    attributes = {name: getattr(cls, name) for cls in (*concrete, jax.Array) for name in dir(cls)}
    return {
        name: attribute
        for name, attribute in attributes.items()
        if (not name.startswith("_") or name.startswith("__"))
        and (callable(attribute) or isinstance(attribute, property))
    }


def _delegating(name: str, of_jax: Any) -> Any:
    """Return a property or a method that delegates to the array, which may be a tracer."""
    about = (of_jax.__doc__ or "").partition("\n\n")[0].strip()
    doc = f"``{name}`` of the ``jax.Array`` inside.\n\n{about}".strip()
    is_question = name in _QUESTIONS

    def array_of(container: GlobalArray) -> jax.Array:
        return usable(container.array) if is_question else container.__jax_array__()

    if isinstance(of_jax, property):
        return property(lambda self: getattr(array_of(self), name), doc=doc)

    def method(self: GlobalArray, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {key: unwrapped(value) for key, value in kwargs.items()}
        return getattr(array_of(self), name)(*map(unwrapped, args), **kwargs)

    if isinstance(of_jax, FunctionType):  # else JAX's own has no signature to show
        functools.update_wrapper(method, of_jax)
    method.__name__, method.__qualname__, method.__doc__ = name, f"GlobalArray.{name}", doc
    return method


for _name, _of_jax in _attributes_of_arrays().items():
    if _name not in _NOT_FOR_CONTAINERS:
        setattr(GlobalArray, _name, _delegating(_name, _of_jax))


# A dataclass, which JAX flattens without a function of Python: with one, a call with 100 containers
# takes 1.4 times as long as with raw arrays, as a dataclass 1.2 times. JAX makes containers by
# calling `GlobalArray(array=leaf)`, and the name of the field is the leaf's key in all checkpoints.
jax.tree_util.register_dataclass(GlobalArray, data_fields=["array"], meta_fields=[])
jax.export.register_pytree_node_serialization(
    GlobalArray,
    serialized_name="gda.GlobalArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
    from_children=lambda aux_data, children: GlobalArray._from_leaf(*children),
)

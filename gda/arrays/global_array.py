"""The container: ``GlobalArray``.

It holds one ``jax.Array`` and nothing else. Mesh, spec and shards are derived from that array on
first use, and kept. ``gda.arrays.constructors`` has its constructors, ``gda.arrays.operators`` its
operators and the methods of ``jax.Array``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn, overload

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.arrays import libraries, pickling
from gda.arrays.construction import from_callbacks
from gda.arrays.constructors import ArrayConstructors
from gda.arrays.fingerprints import fingerprint
from gda.arrays.liveness import deleted_error, describe, live, real
from gda.arrays.operators import ArrayOperators
from gda.arrays.process_local import is_all_here
from gda.arrays.shard import DataByDevice, LocalShards, Shard
from gda.arrays.transport import moving
from gda.layout.boundary import hide_own_frames, public, set_module, unexpected_keyword
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, SpecLike, format_spec
from gda.mesh import (
    LayoutUnknownError,
    after_spec,
    devices_of,
    is_tracer,
    local_positions,
    mesh_grid,
    not_an_array_error,
    sharding_of,
)

AnyNDArray = np.ndarray[Any, Any]

_NOTHING = object()
_get = object.__getattribute__
_set = object.__setattr__


@set_module("gda")
class GlobalArray(ArrayConstructors, ArrayOperators):
    """A global array sharded over a mesh, held by the devices of one or many processes.

    It is a thin, immutable container over one committed ``jax.Array`` with a ``NamedSharding``,
    in ``.array``. Operators, indexing, ``jnp`` functions and all methods and properties of
    ``jax.Array`` work on it and return ordinary ``jax.Array``s. Functions of ``jax.lax`` need
    ``g.array``; their error is "Triggering __jax_array__() during abstractification", and
    docs/works.md lists them. It is a pytree whose only leaf is that array, so ``jax.jit``,
    ``jax.grad``, ``jax.tree.map``, ``jax.device_put`` and optimisers take and return it.

    A tree function puts its results back into the container, also results that are not arrays:
    ``jax.device_get(tree)`` and ``jax.tree.map(np.asarray, tree)`` return a ``GlobalArray`` around
    a NumPy array, and ``jax.tree.map(lambda x: x.shape, tree)`` returns one around a tuple. For
    NumPy arrays use ``gda.to_numpy(tree)``. For other results pass ``is_leaf=lambda x:
    isinstance(x, gda.GlobalArray)``. Then the function gets the container, and the tree has its
    results.

    Args:
      global_shape: sizes of the whole array.
      mesh: ``jax.sharding.Mesh``, with Auto or Explicit axes. Here and in all constructors, a
        ``NamedSharding`` or a ``SingleDeviceSharding`` may replace mesh and spec. Omit the spec
        then; the array is in the memory kind of the sharding.
      spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
      device_buffers: single-device ``jax.Array``s of the shard shape, one dtype and one memory
        kind, one per device of ``mesh.local_devices``, in that order. They become the shards
        without a copy: deleting or donating one deletes the shard.
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

    # Unset slots are caches that are not filled yet.
    __slots__ = ("__weakref__", "_data_by_device", "_global_shards", "_local_shards", "array")

    array: jax.Array
    """The array itself, for everything that a container does not do."""

    _local_shards: tuple[Shard[Any], ...]
    _global_shards: tuple[Shard[Any], ...]
    _data_by_device: DataByDevice

    @overload
    def __init__(
        self,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        device_buffers: Iterable[jax.Array],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        device_buffers: Iterable[jax.Array],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None: ...
    @overload
    def __init__(self, *, array: Any) -> None: ...
    def __init__(  # pyright: ignore[reportInconsistentOverload]
        self,
        global_shape: Any = None,
        mesh: Any = None,
        spec: Any = None,
        device_buffers: Any = None,
        global_mesh: Any = None,
        mesh_axes: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        array: Any = _NOTHING,
    ) -> None:
        # `array=` is the way in for JAX's tree functions. They pass tracers, None, ShapeDtypeStruct
        # or object(), so it checks nothing; users have `from_array`.
        if array is _NOTHING:
            # Of 2022, and positional: catching any keyword would cost a tenth of each unflattening.
            for name, value in (("global_mesh", global_mesh), ("mesh_axes", mesh_axes)):
                if value is not None:
                    raise unexpected_keyword("GlobalArray", name)
            spec, device_buffers = after_spec(mesh, spec, device_buffers)
            if device_buffers is None:
                raise TypeError(
                    "GlobalArray takes global_shape, mesh, spec and device_buffers; for an array "
                    "on the host write GlobalArray.from_source(array, mesh, spec), for a jax.Array "
                    "that has its sharding GlobalArray.from_array(array)"
                )
            try:
                array = from_callbacks.array_from_device_buffers(
                    global_shape, mesh, spec, device_buffers, dtype
                )
            except Exception as error:
                hide_own_frames(error)
                raise
        _set(self, "array", array)

    # Its layout and its values.

    @property
    def shape(self) -> Shape:
        """Sizes of the whole array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, a NumPy dtype, or the key type of PRNG keys."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.array.ndim

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, replicas not counted."""
        return self.array.nbytes

    @property
    def sharding(self) -> NamedSharding:
        """Mesh and spec as JAX's ``NamedSharding``.

        Raises:
          TypeError: there is none, because the array is being traced over Auto axes or the
            container holds something else.
        """
        return sharding_of(self.array)

    @property
    def mesh(self) -> Mesh:
        """The mesh. While tracing over Explicit axes it is an ``AbstractMesh``, without devices."""
        return self.sharding.mesh  # pyright: ignore[reportReturnType]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec, as JAX holds it.

        Over Explicit axes, JAX adds ``None`` up to the number of dimensions; ``grid.spec`` is the
        short form.
        """
        return self.sharding.spec

    @property
    def grid(self) -> ShardGrid:
        """The index math of this array."""
        sharding = self.sharding
        return _cached_grid(self.array.shape, sharding.mesh, sharding.spec)  # pyright: ignore

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device holds the whole array."""
        return self.sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """True if all devices belong to this process."""
        return self.array.is_fully_addressable

    # Shards.

    @property
    def addressable_shards(self) -> Sequence[Shard[jax.Array]]:
        """The shards on devices of this process, in device order.

        While tracing over Explicit axes no device is known: there is a shard for every position of
        the mesh, with device ``None``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> [shard.replica_id for shard in g.addressable_shards]
        [0, 1, 0, 1, 0, 1, 0, 1]
        """

        def make() -> LocalShards:
            shards = LocalShards(self._shards(only_local=True))
            shards.num_global = self.grid.num_devices
            return shards

        return self._cached("_local_shards", make)

    @property
    def global_shards(self) -> Sequence[Shard[jax.Array | None]]:
        """The shards on all devices of the mesh, in device order.

        ``data`` is ``None`` on devices of other processes; nothing is communicated. Costs O(mesh).
        """
        return self._cached("_global_shards", lambda: self._shards(only_local=False))

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

    def _shards(self, only_local: bool) -> tuple[Shard[Any], ...]:
        mesh, grid = self.mesh, self.grid
        data_by_device = self._cached("_data_by_device", lambda: DataByDevice(self.array))
        if not isinstance(mesh, Mesh):
            devices = repeat(None, grid.num_devices)
        elif only_local and len(local_positions(mesh)) < grid.num_devices:
            local = local_positions(mesh)
            shards = zip(local, grid.shards_at(local.values()), strict=True)
            return tuple([Shard(device, *which, data_by_device) for device, which in shards])
        else:
            devices = devices_of(mesh)
        return tuple(
            map(Shard, devices, grid.indices(), grid.replica_ids.tolist(), repeat(data_by_device))
        )

    def _cached(self, slot: str, make: Callable[[], Any]) -> Any:
        try:
            return _get(self, slot)
        except AttributeError:
            pass  # not in the handler: an error of `make` has another cause
        value = make()
        _set(self, slot, value)
        return value

    # Its life on the devices.

    def block_until_ready(self) -> GlobalArray:
        """Wait until the data is there, and return the container."""
        try:
            self.array.block_until_ready()
        except (AttributeError, RuntimeError):
            self._on_devices()  # raises with the layout if that is the reason
            raise
        return self

    def copy_to_host_async(self) -> None:
        """Start copying the data of this process to the host, for a later ``numpy.asarray``."""
        live(self).copy_to_host_async()

    def delete(self) -> None:
        """Free the device memory now. Every later access to data raises ``RuntimeError``.

        Jitted functions, also those of ``jnp``, see the array and raise JAX's own message.
        """
        real(self).delete()

    def is_deleted(self) -> bool:
        """Return True if the data was deleted or donated."""
        return real(self).is_deleted()

    def _live(self) -> jax.Array:
        """Return the array, or say that it is gone."""
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

    def _on_devices(self) -> jax.Array:
        """Return the live array, or say that what is held is not on devices."""
        array = self._live()
        if not isinstance(array, jax.Array):
            raise not_an_array_error(array)
        return array

    # Moving it, and comparing it without that. These three communicate.

    @overload
    def reshard(
        self, spec: SpecLike, /, *, max_bytes: int | None = None, donate: bool = False
    ) -> GlobalArray: ...
    @overload
    def reshard(
        self,
        sharding: NamedSharding | SingleDeviceSharding,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> GlobalArray: ...
    @overload
    def reshard(
        self,
        mesh: Mesh,
        spec: SpecLike,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> GlobalArray: ...
    @public
    def reshard(
        self,
        mesh_or_spec: Any,
        spec: Any = None,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> GlobalArray:
        """Move the data to another layout; communicates between processes.

        ``g.reshard(spec)`` shards it by another spec over its own mesh, ``g.reshard(mesh, spec)``
        over another mesh, both in the same memory kind. ``g.reshard(sharding)`` moves it to the
        memory kind of the sharding too. The devices of both meshes may be any of the program:
        more, fewer, others, in other processes. Each process with a device in either mesh must call
        it; others need not. A process without the data calls it on
        ``GlobalArray(array=jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))`` with the
        sharding that the array has now; a process without devices in the new mesh gets an array
        without local shards. ``ReshardPlan`` tells what is sent. Inside ``jit`` use
        ``gda.constrain``.

        Args:
          max_bytes: the most bytes that a device holds of pieces on their way, by default 256 MiB,
            and at least an element or two.
          donate: delete this array when its data has left. Blocks that stay are copied, so the
            new array shares no memory with this one.

        Returns:
          a new ``GlobalArray``. Without ``donate`` both may share the blocks that stay on their
          devices, and are then deleted or donated together.

        Raises:
          ValueError: the spec does not fit, ``max_bytes`` is below 1, or the processes have devices
            of several platforms.
          TypeError: the array is being traced.
          DisagreementError, LateProcessError: the processes ask for different moves, or a process
            failed, died or did not come; in each process, after at most the time limit of
            ``gda.checking_agreement`` once the failure shows. Before the move, a process waits for
            the others for up to half an hour, or for that limit where checks are on.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> g.reshard([None, 'y'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
        >>> g.reshard(jax.sharding.Mesh(mesh.devices[:2, 0], ('z',)), ['z'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'z': 2}, spec=P('z'))
        """
        array: Any = self.array
        if not isinstance(array, jax.ShapeDtypeStruct):
            array = live(self, "inside jit use gda.constrain")
        return GlobalArray(
            array=moving.reshard(array, mesh_or_spec, spec, max_bytes=max_bytes, donate=donate)
        )

    @overload
    def gather(self, process: None = None, *, max_bytes: int | None = None) -> AnyNDArray: ...
    @overload
    def gather(self, process: int, *, max_bytes: int | None = None) -> AnyNDArray | None: ...
    @public
    def gather(
        self, process: int | None = None, *, max_bytes: int | None = None
    ) -> AnyNDArray | None:
        """Return the whole value as NumPy on every process; communicates between processes.

        All processes of the program must call it, also those without devices of the mesh. The
        blocks go through one device of each process, a few at a time, so no device has to hold the
        whole array. If every process has all blocks already, no data is sent. An array of this
        process alone is only copied, and the other processes need not call it.

        Args:
          process: the process that needs the value. The others get ``None`` and need no memory for
            it. The network traffic is the same.
          max_bytes: the most bytes that a device may hold at a time, by default 256 MiB, and at
            least one byte of each process.

        Returns:
          a new array that the caller may write to.

        Raises:
          ValueError: there is no such process, ``max_bytes`` is below 1, or only one other process
            holds the array.
          TypeError: the array has PRNG keys, which NumPy does not have, or is being traced.
          RuntimeError: the array was deleted or donated.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
        >>> g.gather()
        array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
        """
        return moving.gather(live(self), process, max_bytes)

    @public
    def fingerprint(self) -> str:
        """Return a digest of shape, dtype and content; communicates where others hold a part.

        128 bits as 32 hex digits, to compare arrays of two processes or runs without moving them.
        It does not depend on mesh, spec, order of devices, number of processes or version of JAX.
        It compares bits: 0.0 and -0.0 differ, and so do NaNs with other bits. It is not secure: one
        can construct an array with the same digest. ``gda.fingerprint`` takes NumPy arrays too.

        Every device sums up the blocks that it holds, each block once, and processes exchange 16
        bytes. All processes of the program must call it, also those without devices of the mesh.
        For an array of this process alone the other processes need not call it.

        Raises:
          TypeError: the array is being traced, or has no mesh and spec.
          ValueError: only one other process holds the array.
          RuntimeError: the array was deleted or donated.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
        >>> g.fingerprint()
        '34e9cdb4d1cce9f64ce5f5ee4bbb7244'
        >>> g.reshard([('y', 'x')]).fingerprint() == g.fingerprint()
        True
        """
        return fingerprint.fingerprint(live(self))

    # As an array.

    def __jax_array__(self) -> jax.Array:
        return self._live()

    def __eq__(self, other: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # jax.tree.map(lambda x: x.sharding, tree) puts shardings into containers, and such trees
        # are compared.
        if not hasattr(self.array, "dtype"):
            return isinstance(other, GlobalArray) and self.array == other.array
        return super().__eq__(other)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole array on the host.

        Raises:
          RuntimeError: this process does not hold every block of it, or it was deleted.
          TypeError: it is being traced, or holds no data, as what ``jax.eval_shape`` gives.
        """
        array = self._live()
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            # NumPy would make an array of Python objects of it.
            raise not_an_array_error(array)
        if isinstance(array, jax.Array) and not is_tracer(array) and not is_all_here(array):
            raise RuntimeError(
                f"this process does not hold every block of {self!r}; g.gather() gives the whole "
                "value to every process, and gda.global_to_host_array(g) to each its own rows"
            )
        return np.asarray(array, dtype=dtype, copy=copy)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"GlobalArray has no attribute {name!r}"
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

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a GlobalArray is immutable; {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a GlobalArray is immutable; {name} cannot be deleted")

    def __repr__(self) -> str:
        return describe(self.array)

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook; None if there is none, so that it shows the text.

        Neither reads nor moves data, and raises nothing.
        """
        from gda.show.page import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return libraries.treescope_repr(self, path, subtree_renderer)

    def __treescope_ndarray_adapter__(self) -> Any:
        return libraries.treescope_adapter(self)

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
        return f"{array.dtype}[{','.join(map(str, array.shape))}]{spec}"

    def __format__(self, format_spec: str) -> str:
        return format(self._live(), format_spec) if format_spec else str(self)

    def __copy__(self) -> GlobalArray:
        return GlobalArray(array=self.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalArray:
        array = self._on_devices()
        if is_tracer(array):
            return GlobalArray(array=array)  # in a trace nothing can be written to
        # `array.copy()` is jitted, and that loses the layout of arrays without elements.
        return GlobalArray(array=jax.device_put(array, array.sharding, may_alias=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the whole data with the layout of mesh and spec.

        Raises:
          TypeError: it is being traced, or this process does not hold every block of it.
        """
        return self._unpickled, (tuple(pickling.dump(live(self), self.sharding)),)

    @classmethod
    def _unpickled(cls, state: tuple[Any, ...]) -> GlobalArray:
        return cls(array=pickling.load(pickling.State(*state)))

    # The names of GlobalDeviceArray.

    @property
    def mesh_axes(self) -> PartitionSpec:
        """``spec`` by its name in GlobalDeviceArray."""
        return self.spec

    @property
    def local_shards(self) -> Sequence[Shard[jax.Array]]:
        """``addressable_shards`` by their name in GlobalDeviceArray."""
        return self.addressable_shards

    def local_data(self, i: int) -> jax.Array:
        """Return ``addressable_data(i)``, by its name in GlobalDeviceArray."""
        return self.addressable_data(i)


@lru_cache(maxsize=1024)
def _cached_grid(shape: Shape, mesh: Mesh, spec: PartitionSpec) -> ShardGrid:
    return mesh_grid(shape, mesh, spec)


# The quickest registration there is: design.md has the figures. JAX makes containers by calling
# `GlobalArray(array=leaf)`, and the name of the field is the leaf's key in all checkpoints.
jax.tree_util.register_dataclass(GlobalArray, data_fields=["array"], meta_fields=[])
jax.export.register_pytree_node_serialization(
    GlobalArray,
    serialized_name="gda.GlobalArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
libraries.register(GlobalArray)

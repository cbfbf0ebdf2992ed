"""The container: ``GlobalArray`` and its ``Shard`` records.

A ``GlobalArray`` holds one ``jax.Array`` and nothing else; all it says of mesh, spec and shards is
derived from that array when asked for, and kept. What its methods do is written below it: grids in
``gda.layout.grid``, construction in ``gda.arrays.from_callbacks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    cast,
    overload,
)

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gda.arrays import (
    fingerprint,
    from_callbacks,
    from_process_local,
    libraries,
    moving,
    pickling,
)
from gda.arrays.operators import ArrayOperators
from gda.arrays.process_local import is_all_here
from gda.layout.boundary import hide_own_frames, public, set_module, unexpected_keyword
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index, Shape, SpecLike, format_spec
from gda.layout.text import counted
from gda.mesh import (
    Device,
    LayoutUnknownError,
    MeshLike,
    after_spec,
    devices_of,
    is_tracer,
    local_positions,
    mesh_grid,
    not_an_array_error,
    sharding_of,
)
from gda.storage.options import Options, ProgressLike, Retry

AnyNDArray = np.ndarray[Any, Any]
DataT = TypeVar("DataT", jax.Array, jax.Array | None)

_NOTHING = object()
_get = object.__getattribute__
_set = object.__setattr__


class _Pieces:
    """The single-device arrays of an array, split off when first asked for.

    Shards refer to this and not to the container: it keeps its shards, and device memory should be
    freed with the last reference, not when the garbage collector finds a cycle.
    """

    __slots__ = ("_array", "_by_device")

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self._by_device: dict[Device | None, jax.Array] | None = None

    def on(self, device: Device | None) -> jax.Array | None:
        """Return the piece on a device; ``None`` for a device of another process."""
        array = self._array
        if is_tracer(array):
            raise TypeError(
                f"the shards of {GlobalArray(array=array)!r} have no data while it is being "
                "traced; compute on .array, or see each block with jax.shard_map"
            )
        if not isinstance(array, jax.Array):
            raise TypeError(f"a {type(array).__name__} has no data, and so its shards have none")
        if array.is_deleted():
            raise _deleted_error(array)
        if self._by_device is None:
            # `array.addressable_data(i)` would be wrong here: of a fully replicated array it gives
            # the first device's shard for every i.
            self._by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return self._by_device.get(device)


@set_module("gda")
class Shard(Generic[DataT]):
    """What one device holds of a ``GlobalArray``: device, index, replica id and data, read-only."""

    __slots__ = ("_device", "_index", "_pieces", "_replica_id")

    def __init__(
        self, device: Device | None, index: Index, replica_id: int, pieces: _Pieces
    ) -> None:
        self._device = device
        self._index = index
        self._replica_id = replica_id
        self._pieces = pieces

    @property
    def device(self) -> Device | None:
        """The device; ``None`` while tracing, where a mesh has no devices."""
        return self._device

    @property
    def index(self) -> Index:
        """The global elements it holds: one slice per dimension."""
        return self._index

    @property
    def replica_id(self) -> int:
        """How many devices before it, in device order, hold the same index.

        Writing the shards with replica id 0 writes every element once.
        """
        return self._replica_id

    @property
    def data(self) -> DataT:
        """A single-device ``jax.Array`` of the shard shape; ``None`` for another process's device.

        Fetched when first asked for: splitting the array costs some microseconds a device.

        Raises:
          RuntimeError: the array was deleted or donated.
          TypeError: the array is being traced, or is not one that has data.
        """
        return cast("DataT", self._pieces.on(self._device))

    def __repr__(self) -> str:
        return f"Shard(device={self.device}, index={self.index}, replica_id={self.replica_id})"


class _LocalShards(tuple[Shard[Any], ...]):
    """The shards of this process; an index beyond them is answered with their number.

    Attributes:
      num_global: number of shards in all processes.
    """

    num_global: int

    def __getitem__(self, i: Any) -> Any:
        try:
            return super().__getitem__(i)
        except IndexError:
            raise IndexError(
                f"there is no local shard {i}: process {jax.process_index()} has {len(self)} of "
                f"the {counted(self.num_global, 'shard')}; global_shards lists all"
            ) from None


# As a tuple is one.
jax.tree_util.register_pytree_node(
    _LocalShards,
    lambda shards: (tuple(shards), None),
    lambda _, shards: tuple(shards),  # pyright: ignore[reportArgumentType]
)


@set_module("gda")
class GlobalArray(ArrayOperators):
    """A global array cut over a mesh, held by the devices of one or many processes.

    A thin, immutable container over one committed ``jax.Array`` with a ``NamedSharding``, in
    ``.array``. Computing on it gives ordinary ``jax.Array``s: operators, indexing, ``jnp``
    functions and all methods and properties of ``jax.Array`` work on ``.array``. Functions of
    ``jax.lax`` need ``.array`` written out; JAX says "Triggering __jax_array__() during
    abstractification" of them, and docs/works.md names the functions concerned. It is a pytree
    whose only leaf is that array, so ``jax.jit``, ``jax.grad``, ``jax.tree.map``,
    ``jax.device_put`` and optimisers take it and give it back.

    A tree function puts its results back into the container, also those that are no arrays:
    ``jax.device_get(tree)`` and ``jax.tree.map(np.asarray, tree)`` give a ``GlobalArray`` around a
    NumPy array, and ``jax.tree.map(lambda x: x.shape, tree)`` one around a tuple. For NumPy arrays
    use ``gda.to_numpy(tree)``; for other results pass ``is_leaf=lambda x: isinstance(x,
    gda.GlobalArray)``, and the function gets the container and its results stay as they are.

    Args:
      global_shape: sizes of the whole array.
      mesh: ``jax.sharding.Mesh``, with Auto or Explicit axes. Here and in all constructors a
        ``NamedSharding``, or a ``SingleDeviceSharding``, may stand in place of mesh and spec; the
        spec is then omitted, and the array is in the memory kind of the sharding.
      spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
      device_buffers: single-device ``jax.Array``s of the shard shape, one dtype and one memory
        kind, one per device of ``mesh.local_devices``, in that order. They become the shards
        without a copy: deleting or donating one deletes the shard.

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

    # Slots that are not set are caches that were not asked for yet.
    __slots__ = ("__weakref__", "_global_shards", "_local_shards", "_pieces", "array")

    array: jax.Array
    """The array itself, for everything that a container does not do."""

    _local_shards: tuple[Shard[Any], ...]
    _global_shards: tuple[Shard[Any], ...]
    _pieces: _Pieces

    @overload
    def __init__(
        self,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        device_buffers: Iterable[jax.Array],
    ) -> None: ...
    @overload
    def __init__(
        self,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        device_buffers: Iterable[jax.Array],
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
                    global_shape, mesh, spec, device_buffers
                )
            except Exception as error:
                hide_own_frames(error)
                raise
        _set(self, "array", array)

    @classmethod
    @public
    def from_array(cls, array: jax.Array | GlobalArray) -> GlobalArray:
        """Wrap a ``jax.Array`` that already has its sharding; nothing is copied or moved.

        An array on a single device, which has no mesh, gets a mesh of that one device and the spec
        ``P()``.

        Raises:
          TypeError: it is not a ``jax.Array``, or its sharding is neither a ``NamedSharding`` nor
            on a single device.

        >>> import gda, jax.numpy as jnp
        >>> gda.GlobalArray.from_array(jnp.zeros((2, 3)))
        GlobalArray(shape=(2, 3), dtype=float32, mesh={'device': 1}, spec=P())
        """
        if isinstance(array, GlobalArray):
            return array
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"from_array takes a jax.Array that has its sharding, not {type(array).__name__}; "
                "for an array on the host write GlobalArray.from_source(array, mesh, spec)"
            )
        if not is_tracer(array):
            sharding_of(array)
        return cls(array=array)

    @overload
    @classmethod
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        data_callback: Callable[[Index], Any],
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
        into: Literal[False] = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> GlobalArray: ...
    @overload
    @classmethod
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        data_callback: Callable[[Index, np.ndarray[Any, Any]], object],
        *,
        dtype: npt.DTypeLike,
        copy: None = None,
        into: Literal[True],
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> GlobalArray: ...
    @overload
    @classmethod
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        data_callback: Callable[..., Any],
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
        into: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> GlobalArray: ...
    @classmethod
    @public
    def from_callback(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
        into: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> GlobalArray:
        """Build an array block by block: one call per distinct index of this process.

        Replicas of a block are read once. Communicates between processes only to check that they
        agree, and only where ``gda.checking_agreement`` is on.

        Args:
          global_shape: sizes of the whole array.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: ``data_callback(index)`` returns the block at ``index``, of the shard
            shape: a NumPy array, a ``jax.Array`` on any device, a list, for a scalar a number, or
            anything else that ``numpy.asarray`` takes. With ``into=True``,
            ``data_callback(index, out)`` fills ``out``; what it leaves is left uninitialised.
          dtype: cast every block to it, as its own ``astype`` does. Needed with ``into=True`` and
            where this process has no device of the mesh.
          copy: what happens to blocks. ``None``: a block that somebody else can reach, such
            as a view, a memory map or a buffer used again, is copied at once; a fresh one is
            adopted. After the call nothing that is done to the caller's memory changes the array.
            ``True`` copies all. ``False`` copies none: the caller promises to leave them alone for
            as long as the array lives. So with a ``jax.Array``, which the caller could delete or
            donate: one that the callback still holds is copied on its device. An array of JAX's
            that shares memory with another, as ``jax.device_put`` to the device where that is makes
            it, or of an aligned NumPy array on CPU, needs ``copy=True`` to be protected.
          into: hand out 64-byte-aligned buffers of the shard shape and ``dtype`` to be filled;
            reading a file straight into them spares a copy.
          max_workers: how many blocks are read at a time. With more than one the callback is called
            in threads and must be safe there; contexts of JAX's such as ``jax.enable_x64`` do not
            reach it. By default one, in the caller's thread.
          max_bytes: bounds what blocks hold on the host beside the arrays: on CPU, where a block
            becomes the array, while it is read; on an accelerator until it was sent there. One
            block that is larger is read alone. What the callback itself allocates beside its
            result is not counted. By default there is no bound.
          progress: ``True`` shows bytes and rate on stderr, which needs rich; a function is called
            with ``(bytes_done, bytes_total)`` of this process after each block.
          retry: a ``gda.Retry`` with the errors after which a block is read again.

        On accelerators blocks are sent to their devices while others are read; on CPU the array is
        made when all are there. An error in one read, or Ctrl-C, stops the rest: those that run
        are waited for, and no thread is left.

        Without ``jax_enable_x64`` JAX narrows 64-bit types to 32 bits. Floats are rounded.

        Raises:
          TypeError: blocks of differing dtypes, or of one that JAX does not have.
          ValueError: the spec does not fit the shape and the mesh; a block of another shape.
          DoesNotFitError: narrowing changes an integer or makes a finite number infinite. It is a
            ``ValueError`` and an ``OverflowError``.
          ImportError: ``progress=True`` without rich.
          Exception: what the callback raises, with a note of the index.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda index: data[index])
        >>> g.local_shards[2].data.tolist(), g.local_shards[3].replica_id
        ([[4, 5], [6, 7]], 1)

        With a sharding in place of mesh and spec:

        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> sharding = NamedSharding(mesh, P('x'), memory_kind='pinned_host')
        >>> g = gda.GlobalArray.from_callback((8, 2), sharding, lambda index: data[index])
        >>> g.sharding == sharding
        True
        """
        spec, data_callback = after_spec(mesh, spec, data_callback)
        options = None
        if (max_workers, max_bytes, retry) != (None, None, None) or progress is not False:
            options = Options(max_workers, max_bytes, progress, retry)
        return cls(
            array=from_callbacks.array_from_callback(
                global_shape,
                mesh,
                spec,
                data_callback,
                dtype=dtype,
                copy=copy,
                into=into,
                options=options,
            )
        )

    @classmethod
    @public
    def from_source(
        cls,
        source: Any,
        mesh: MeshLike,
        spec: SpecLike | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> GlobalArray:
        """Build an array of anything that can be sliced, reading the blocks of this process only.

        Each distinct block is read once, by one slice with start and stop for every dimension, and
        copied at once where the source keeps it. Datasets of h5py and TensorStores read straight
        into memory that JAX on CPU takes as it is. A TensorStore reads asynchronously, in threads
        of its own: ``max_workers``, by default 32, is then how many reads are under way.
        Communicates as ``from_callback`` does. ``gda.load_tree`` reads many at once.

        Args:
          source: has ``shape``, ``dtype`` and NumPy-style slicing: a memory map, ``zarr.Array``,
            ``h5py.Dataset``, TensorStore, netCDF variable, a value of
            ``gda.storage.open_safetensors`` or what ``get_slice`` of safetensors gives.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          dtype: cast to it. Bytes that NumPy has no type for, such as what ``numpy.load`` makes of
            bfloat16, are taken as it.
          max_workers, max_bytes, progress, retry: as in ``from_callback``. More than one worker
            needs a library that several threads may use.

        Raises:
          TypeError: ``source`` is not a source, or has a dtype that JAX does not have.
          ValueError: the spec does not fit; a block of another shape than was asked for.
          DoesNotFitError, ImportError: as in ``from_callback``.
          Exception: what the source raises, with a note of the index.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> gda.GlobalArray.from_source(np.arange(16).reshape(8, 2), mesh, ['x', 'y'])
        GlobalArray(shape=(8, 2), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
        """
        options = Options(max_workers, max_bytes, progress, retry)
        return cls(array=from_callbacks.array_from_source(source, mesh, spec, dtype, options))

    @overload
    @classmethod
    def from_batched_callback(
        cls,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        data_callback: Callable[[list[Index]], Iterable[Any]],
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray: ...
    @overload
    @classmethod
    def from_batched_callback(
        cls,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        data_callback: Callable[[list[Index]], Iterable[Any]],
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray: ...
    @classmethod
    @public
    def from_batched_callback(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray:
        """Build an array by one call that returns all blocks of this process.

        Args:
          global_shape: sizes of the whole array.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: ``data_callback(indices)`` gets one index per device of this process, in
            device order, repeats included, and returns the blocks in that order. Of devices that
            hold the same index the first one's block is taken for all.
          dtype: as in ``from_callback``.
          copy: as in ``from_callback``.

        Communicates as ``from_callback`` does. Raises what that raises, and
        ``ValueError`` where the number of blocks is not the number of indices.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> gda.GlobalArray.from_batched_callback(
        ...     (8, 2), mesh, ['x', 'y'], lambda indices: [data[index] for index in indices])
        GlobalArray(shape=(8, 2), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
        """
        spec, data_callback = after_spec(mesh, spec, data_callback)
        return cls(
            array=from_callbacks.array_from_batched_callback(
                global_shape, mesh, spec, data_callback, dtype=dtype, copy=copy
            )
        )

    @overload
    @classmethod
    def from_batched_callback_with_devices(
        cls,
        global_shape: Iterable[int],
        mesh: Mesh,
        spec: SpecLike,
        data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> GlobalArray: ...
    @overload
    @classmethod
    def from_batched_callback_with_devices(
        cls,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> GlobalArray: ...
    @classmethod
    @public
    def from_batched_callback_with_devices(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> GlobalArray:
        """Build an array by one call that places all blocks of this process itself.

        Args:
          global_shape: sizes of the whole array.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: gets one ``(index, (device, ...))`` per distinct index and returns
            single-device ``jax.Array``s, one per device, flat, in the order given. They become
            the shards without a copy: deleting or donating one deletes the shard.
          dtype: cast to it, on the devices.

        Communicates as ``from_callback`` does.

        Raises:
          TypeError: something returned is not a ``jax.Array``, or dtypes differ.
          ValueError: the spec does not fit, or an array is missing, on another device or of
            another shape.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> def place(request):
        ...     return [jax.device_put(data[index], device, may_alias=False)
        ...             for index, devices in request for device in devices]
        >>> gda.GlobalArray.from_batched_callback_with_devices((8, 2), mesh, ['x'], place)
        GlobalArray(shape=(8, 2), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x'))
        """
        spec, data_callback = after_spec(mesh, spec, data_callback)
        return cls(
            array=from_callbacks.array_from_batched_callback_with_devices(
                global_shape, mesh, spec, data_callback, dtype=dtype
            )
        )

    @overload
    @classmethod
    def from_process_local(
        cls,
        local_data: Any,
        mesh: Mesh,
        spec: SpecLike,
        global_shape: Iterable[int] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray: ...
    @overload
    @classmethod
    def from_process_local(
        cls,
        local_data: Any,
        mesh: NamedSharding | SingleDeviceSharding,
        global_shape: Iterable[int] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray: ...
    @classmethod
    @public
    def from_process_local(  # pyright: ignore[reportInconsistentOverload]
        cls,
        local_data: Any,
        mesh: MeshLike,
        spec: Any = None,
        global_shape: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> GlobalArray:
        """Build an array of what each process has of it, such as its rows of a batch.

        The data of a process is its distinct blocks side by side, in the order of their coordinates
        and gaps left out: ``ShardGrid.view(process).local_shape`` is its shape. That needs blocks
        that form a regular grid; the devices may be in any order in the mesh. Blocks that several
        processes hold must be equal in all of them (``host_local_array_to_global_array`` can check
        that). Communicates as ``from_callback`` does.

        Args:
          local_data: a NumPy array, a ``jax.Array`` of this process, PRNG keys, or anything else
            that ``numpy.asarray`` takes. A ``jax.Array`` whose shards are the blocks, on their
            devices, is used without a copy, so deleting or donating it deletes them; another is
            copied there.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          global_shape: sizes of the whole array, by default inferred. In a dimension in which the
            local data has the whole global size, the blocks of this process are cut out of it.
            Needed, with ``dtype``, in a process without a device of the mesh, which ignores the
            local data.
          dtype: as in ``from_callback``.
          copy: as in ``from_callback``: NumPy data is copied once, unless it is ``False``, which
            promises to leave the data alone for as long as the array lives.

        Raises:
          TypeError: a dtype that JAX does not have, or local data that is being traced.
          ValueError: the spec or ``global_shape`` does not fit the data, or the blocks of this
            process do not form a regular grid; it shows them.
          DoesNotFitError: as in ``from_callback``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> gda.GlobalArray.from_process_local(np.zeros((16, 3), np.float32), mesh, [('x', 'y')])
        GlobalArray(shape=(16, 3), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(('x', 'y')))
        """
        spec, global_shape = after_spec(mesh, spec, global_shape)
        return cls(
            array=from_process_local.array_from_process_local(
                local_data, mesh, spec, global_shape, dtype=dtype, copy=copy
            )
        )

    # What it is.

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
          TypeError: the array has none: it is being traced over Auto axes, or is not an array.
        """
        return sharding_of(self.array)

    @property
    def mesh(self) -> Mesh:
        """The mesh. While tracing over Explicit axes it is an ``AbstractMesh``, without devices."""
        return self.sharding.mesh  # pyright: ignore[reportReturnType]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec, as JAX holds it.

        Over Explicit axes JAX fills it up with ``None`` to the rank; ``grid.spec`` is the short
        form.
        """
        return self.sharding.spec

    @property
    def mesh_axes(self) -> PartitionSpec:
        """The partition spec, by the name that GlobalDeviceArray had for it."""
        return self.spec

    @property
    def grid(self) -> ShardGrid:
        """The index math of this array."""
        sharding = self.sharding
        return _cached_grid(self.array.shape, sharding.mesh, sharding.spec)  # pyright: ignore

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array."""
        return self.sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all devices belong to this process."""
        return self.array.is_fully_addressable

    # Shards.

    @property
    def local_shards(self) -> Sequence[Shard[jax.Array]]:
        """The shards on devices of this process, in device order.

        While tracing over Explicit axes no device is known: there is a shard for every position of
        the mesh, with device ``None``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> [shard.replica_id for shard in g.local_shards]
        [0, 1, 0, 1, 0, 1, 0, 1]
        """

        def make() -> _LocalShards:
            shards = _LocalShards(self._shards(only_local=True))
            shards.num_global = self.grid.num_devices
            return shards

        return self._cached("_local_shards", make)

    @property
    def addressable_shards(self) -> Sequence[Shard[jax.Array]]:
        """``local_shards`` by JAX's name."""
        return self.local_shards

    @property
    def global_shards(self) -> Sequence[Shard[jax.Array | None]]:
        """The shards on all devices of the mesh, in device order.

        ``data`` is ``None`` on devices of other processes; nothing is communicated. Costs O(mesh).
        """
        return self._cached("_global_shards", lambda: self._shards(only_local=False))

    def local_data(self, i: int) -> jax.Array:
        """Return the data of ``local_shards[i]``.

        Raises:
          IndexError: there is no such shard.
          RuntimeError: the array was deleted or donated.
        """
        return self.local_shards[i].data

    def addressable_data(self, i: int) -> jax.Array:
        """``local_data`` by JAX's name."""
        return self.local_data(i)

    def _shards(self, only_local: bool) -> tuple[Shard[Any], ...]:
        mesh, grid = self.mesh, self.grid
        pieces = self._cached("_pieces", lambda: _Pieces(self.array))
        if not isinstance(mesh, Mesh):
            devices = repeat(None, grid.num_devices)
        elif only_local and len(local_positions(mesh)) < grid.num_devices:
            local = local_positions(mesh)
            shards = zip(local, grid.shards_at(local.values()), strict=True)
            return tuple([Shard(device, *which, pieces) for device, which in shards])
        else:
            devices = devices_of(mesh)
        return tuple(map(Shard, devices, grid.indices(), grid.replica_ids.tolist(), repeat(pieces)))

    def _cached(self, slot: str, make: Callable[[], Any]) -> Any:
        try:
            return _get(self, slot)
        except AttributeError:
            pass  # not in the handler: what `make` raises has nothing to do with this
        value = make()
        _set(self, slot, value)
        return value

    # Its life on the devices.

    def block_until_ready(self) -> GlobalArray:
        """Wait until the data is there, and return the container."""
        try:
            self.array.block_until_ready()
        except (AttributeError, RuntimeError):
            self._on_devices()  # if that was why, says it with the layout
            raise
        return self

    def copy_to_host_async(self) -> None:
        """Start copying the data of this process to the host, for a later ``numpy.asarray``."""
        self._on_devices().copy_to_host_async()

    def delete(self) -> None:
        """Free the device memory now. Every later access to data raises ``RuntimeError``.

        Of jitted functions, those of ``jnp`` included, the message is JAX's: they see the array.
        """
        self.array.delete()

    def is_deleted(self) -> bool:
        """Whether the data was deleted or donated."""
        return self.array.is_deleted()

    def _live(self) -> jax.Array:
        """Return the array, or say that it is gone."""
        array = self.array
        # Asking a tracer would raise. An array of NumPy has nothing to ask.
        if is_tracer(array):
            return array
        if hasattr(array, "is_deleted"):
            if array.is_deleted():
                raise _deleted_error(array)
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
    def reshard(self, spec: SpecLike, /) -> GlobalArray: ...
    @overload
    def reshard(self, sharding: NamedSharding | SingleDeviceSharding, /) -> GlobalArray: ...
    @overload
    def reshard(self, mesh: Mesh, spec: SpecLike, /) -> GlobalArray: ...
    @public
    def reshard(self, mesh_or_spec: Any, spec: Any = None, /) -> GlobalArray:
        """Move the data to another layout; communicates between processes where they hold parts.

        ``g.reshard(spec)`` cuts it by another spec over its own mesh, ``g.reshard(mesh, spec)``
        over another mesh, both in the same memory kind; ``g.reshard(sharding)`` moves it to the
        memory kind of the sharding too. Within one process any mesh will do. Between processes JAX
        moves data within one set of devices, in any order of them and over any axes; all processes
        with devices of the mesh must call it. Inside ``jit`` use ``gda.constrain``.

        Returns:
          a new ``GlobalArray``; it may share memory with this one where nothing has to move.

        Raises:
          ValueError: the spec does not fit, or the devices are others and belong to several
            processes.
          TypeError: the array is being traced.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> g.reshard([None, 'y'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
        >>> g.reshard(jax.sharding.Mesh(mesh.devices[:2, 0], ('z',)), ['z'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'z': 2}, spec=P('z'))
        """
        if is_tracer(self.array):
            raise TypeError("reshard moves data, and there is none in a trace; use gda.constrain")
        array = self._on_devices()
        if isinstance(mesh_or_spec, Sharding):
            return GlobalArray(array=moving.reshard(array, mesh_or_spec, spec))  # pyright: ignore
        is_mesh = isinstance(mesh_or_spec, Mesh)
        if is_mesh != (spec is not None):
            raise TypeError("write g.reshard(spec), g.reshard(mesh, spec) or g.reshard(sharding)")
        mesh = mesh_or_spec if is_mesh else self.mesh
        return GlobalArray(array=moving.reshard(array, mesh, spec if is_mesh else mesh_or_spec))

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
        blocks go round a few at a time through one device of each process, so no device has to
        hold the whole array. Where every process has all blocks already, no data is sent. An array
        of this process alone is just copied, and the others need not call it.

        Args:
          process: the one that needs it; the others get ``None`` and need no memory for it. The
            network carries as much either way.
          max_bytes: how much of it a device may hold at a time, by default 256 MiB; at least one
            row of a block for each process.

        Returns:
          a new array that the caller may write to.

        Raises:
          ValueError: there is no such process, ``max_bytes`` is below 1, or the array lies on
            devices of one other process alone, for which it is a local array.
          TypeError: PRNG keys, of which NumPy knows nothing, or the array is being traced.
          RuntimeError: the array was deleted or donated.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
        >>> g.gather()
        array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
        """
        if is_tracer(self.array):
            raise TypeError("gather needs the value, and there is none in a trace")
        return moving.gather(self._on_devices(), process, max_bytes)

    @public
    def fingerprint(self) -> str:
        """Return a digest of shape, dtype and content; communicates where others hold a part.

        128 bits as 32 hex digits, for two processes or runs to compare arrays without moving them.
        It does not depend on mesh, spec, order of devices or number of processes, and is the same
        from one version of JAX to the next. It sees bits: 0.0 and -0.0 differ, and so do NaNs of
        other bits. Against somebody who makes another array of the same digest on purpose it is no
        protection.

        Every device sums up the blocks that it holds, each block once, and between processes go 16
        bytes. All processes of the program must call it, also those without devices of the mesh.
        The fingerprint of an array of this process alone the others need not ask for.

        Raises:
          TypeError: the array is being traced, or has no mesh and spec.
          ValueError: the array lies on devices of one other process alone.
          RuntimeError: the array was deleted or donated.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
        >>> g.fingerprint()
        '34e9cdb4d1cce9f64ce5f5ee4bbb7244'
        >>> g.reshard([('y', 'x')]).fingerprint() == g.fingerprint()
        True
        """
        return fingerprint.fingerprint(self._on_devices())

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
            raise TypeError(f"a {type(array).__name__} has no data, and so it gives no NumPy array")
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
            if isinstance(theirs, property):  # it raised AttributeError, and Python forgets why
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
        array = self.array
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            return f"GlobalArray(array={array!r})"
        return f"GlobalArray(shape={array.shape}, dtype={array.dtype}, {self._layout_text()})"

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows; None where there is none, so it shows the text.

        Neither reads nor moves data, and raises nothing.
        """
        from gda.show.page import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return libraries.treescope_repr(self, path, subtree_renderer)

    def __treescope_ndarray_adapter__(self) -> Any:
        return libraries.treescope_adapter(self)

    def _layout_text(self) -> str:
        try:
            sharding = self.sharding
        except TypeError:
            return "traced" if is_tracer(self.array) else "no sharding"
        return f"mesh={dict(sharding.mesh.shape)}, spec={format_spec(sharding.spec)}"

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
        return self._unpickled, (tuple(pickling.dump(self._on_devices(), self.sharding)),)

    @classmethod
    def _unpickled(cls, state: tuple[Any, ...]) -> GlobalArray:
        return cls(array=pickling.load(pickling.State(*state)))


def _deleted_error(array: jax.Array) -> RuntimeError:
    return RuntimeError(
        f"{GlobalArray(array=array)!r} was deleted, by delete() or by donating it to a jitted "
        "function"
    )


@lru_cache(maxsize=1024)
def _cached_grid(shape: Shape, mesh: Mesh, spec: PartitionSpec) -> ShardGrid:
    return mesh_grid(shape, mesh, spec)


# The quickest registration there is: design.md has the figures. JAX makes containers by calling
# `GlobalArray(array=leaf)`, and the name of the field is the leaf's key in everybody's checkpoints.
jax.tree_util.register_dataclass(GlobalArray, data_fields=["array"], meta_fields=[])
jax.export.register_pytree_node_serialization(
    GlobalArray,
    serialized_name="gda.GlobalArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
libraries.register(GlobalArray)

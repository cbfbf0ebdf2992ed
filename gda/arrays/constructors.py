"""The constructors of ``GlobalArray``: what each takes, and whose memory it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gda.arrays.construction import from_callbacks, from_process_local
from gda.layout.boundary import public
from gda.layout.spec import Index, SpecLike
from gda.mesh import Device, MeshLike, after_spec, is_tracer, sharding_of
from gda.multihost.agreement import communicates, if_checked
from gda.storage.options import Options, ProgressLike, Retry


class ArrayConstructors:
    """The constructors of a container that is made of one array."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __init__(self, *, array: Any) -> None: ...

    @classmethod
    @public
    def from_array(cls, array: jax.Array | Self) -> Self:
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
        if isinstance(array, ArrayConstructors):
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
    ) -> Self: ...
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
    ) -> Self: ...
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
    ) -> Self: ...
    @classmethod
    @public
    @communicates("GlobalArray.from_callback", if_checked())
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
    ) -> Self:
        """Build an array block by block: one call for each distinct block of this process.

        Does not communicate, except inside ``with gda.check_processes_agree()``.

        Args:
          global_shape: sizes of the whole array.
          mesh: ``jax.sharding.Mesh``.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: ``data_callback(index)`` returns the block at ``index``, of the shard
            shape: a NumPy array, a ``jax.Array`` on any device, a list, for a scalar a number, or
            anything else that ``numpy.asarray`` takes. With ``into=True``,
            ``data_callback(index, out)`` fills ``out``. Elements that it does not write are
            uninitialised.
          dtype: cast every block to it. Required with ``into=True``, and in a process without a
            device of the mesh.
          copy: with ``None``, copy a block at once if other code refers to its memory, such as a
            view, a memory map or a buffer that the callback uses again. After the call, no change
            of the caller's memory changes the array. ``True``: copy all blocks. ``False``: copy
            none; do not change the blocks while the array exists. With ``None``, a ``jax.Array``
            on CPU is copied, because it may be in the memory of a NumPy array, as the result of
            ``jax.device_put`` is. On an accelerator it is copied if the callback still refers to
            it, because the caller could delete or donate it. Pass ``copy=True`` if it shares its
            buffer with another one, as the result of ``jax.device_put`` on the same device does.
          into: pass 64-byte-aligned buffers of the shard shape and ``dtype`` to the callback,
            which fills them. Reading a file straight into them saves a copy.
          max_workers: number of blocks read at a time, by default one in the caller's thread. With
            more than one, threads call the callback, which must be thread-safe. Contexts of JAX
            other than ``jax.enable_x64`` do not apply in these threads.
          max_bytes: limit of the host memory for blocks that are not yet part of an array: on CPU
            while a block is read, and on an accelerator until it is sent there. A block that is
            larger is read alone. Other memory that the callback allocates does not count. By
            default there is no limit.
          progress: ``True`` shows bytes and rate on stderr, which needs rich. A function is called
            with ``(nbytes_done, nbytes_total)`` of this process after each block.
          retry: a ``gda.Retry`` with the errors after which a block is read again.

        On accelerators, gda sends blocks to their devices while it reads others. On CPU, it makes
        the array after the last read. After an error in one read, or Ctrl-C, no new read starts,
        and gda waits until the current reads and all threads end.

        Without ``jax_enable_x64``, JAX narrows 64-bit types to 32 bits and rounds floats.

        Raises:
          TypeError: blocks have different dtypes, or one that JAX does not have.
          ValueError: the spec does not fit the shape and the mesh, or a block has another shape or
            is held by several processes, as ``g[index]`` of such an array is.
          DoesNotFitError: narrowing, or a cast, changes an integer, makes a finite number infinite
            or loses an imaginary part. It is a ``ValueError`` and an ``OverflowError``.
          ImportError: ``progress=True`` without rich.
          Exception: any error of the callback, with a note of the index.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda index: data[index])
        >>> g.addressable_shards[2].data.tolist(), g.addressable_shards[3].replica_id
        ([[4, 5], [6, 7]], 1)

        With a sharding instead of mesh and spec:

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
    @communicates("GlobalArray.from_source", if_checked(option="read_once"))
    def from_source(
        cls,
        source: Any,
        mesh: MeshLike,
        spec: SpecLike | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        read_once: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> Self:
        """Build an array from anything that can be sliced; read the blocks of this process only.

        Each distinct block is read once, by one slice with start and stop for every dimension, and
        copied at once if the source keeps it. Blocks of this process that share chunks of the
        source, or its rows of fewer than 32 KiB, such as columns, are read together: some rows or
        chunks at a time, each once, which are split in memory. On CPU, datasets of h5py and
        TensorStores are read straight into the memory of the array. A TensorStore reads in its own
        threads: for it, ``max_workers`` is the number of reads at a time, by default 32.
        Communicates as ``from_callback`` does. ``gda.load_tree`` reads many sources at once.

        Args:
          source: has ``shape``, ``dtype`` and NumPy-style slicing: a memory map, ``zarr.Array``,
            ``h5py.Dataset``, TensorStore, netCDF variable, a value of
            ``gda.storage.open_safetensors``, or the result of ``get_slice`` of safetensors.
          mesh, spec: as in ``from_callback``.
          dtype: cast to it. If the source has bytes without a type, as ``numpy.load`` returns for
            bfloat16, this is the type of these bytes.
          read_once: ``True`` reads what several processes need, a block or rows of several, in one
            of them only, and large blocks in parts by all of them, and sends the bytes to the
            others. Communicates: all processes with devices of the mesh must call this, with the
            same ``max_bytes``. Until all is exchanged, the host holds these blocks, and at most
            ``max_bytes``, by default 256 MiB, that only others need.
          max_workers, max_bytes, progress, retry: as in ``from_callback``. More than one worker
            needs a thread-safe library. ``max_bytes`` also limits the memory to split what is
            read; one chunk is always allowed, and 32 KiB. On accelerators, if the blocks that are
            read together are larger than ``max_bytes``, a few are read at a time, and the rows and
            chunks that they share again each time.

        Raises:
          TypeError: ``source`` is not a source, or has a dtype that JAX does not have.
          ValueError: the spec does not fit, a block has another shape than requested, or other
            processes hold parts of the source: ``gda.reshard_tree`` moves such an array.
          DoesNotFitError, ImportError: as in ``from_callback``.
          DisagreementError, LateProcessError: with ``read_once``, another process failed, asked for
            something else, or did not arrive.
          Exception: any error of the source, with a note of the index.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> gda.GlobalArray.from_source(np.arange(16).reshape(8, 2), mesh, ['x', 'y'])
        GlobalArray(shape=(8, 2), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
        """
        options = Options(max_workers, max_bytes, progress, retry, read_once)
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
    ) -> Self: ...
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
    ) -> Self: ...
    @classmethod
    @public
    @communicates("GlobalArray.from_batched_callback", if_checked())
    def from_batched_callback(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> Self:
        """Build an array by one call that returns all blocks of this process.

        Args:
          global_shape, mesh, spec: as in ``from_callback``.
          data_callback: ``data_callback(indices)`` gets one index for each device of this process,
            in the order of ``mesh.local_devices``, and returns the blocks in that order. If several
            devices have the same index, all get the block of the first.
          dtype, copy: as in ``from_callback``.

        Communicates as ``from_callback`` does, and raises the same errors. Raises ``ValueError``
        if the number of blocks is not the number of indices.

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
    ) -> Self: ...
    @overload
    @classmethod
    def from_batched_callback_with_devices(
        cls,
        global_shape: Iterable[int],
        mesh: NamedSharding | SingleDeviceSharding,
        data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Self: ...
    @classmethod
    @public
    @communicates("GlobalArray.from_batched_callback_with_devices", if_checked())
    def from_batched_callback_with_devices(  # pyright: ignore[reportInconsistentOverload]
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> Self:
        """Build an array by one call that returns arrays on the devices of this process.

        Args:
          global_shape, mesh, spec: as in ``from_callback``.
          data_callback: gets a list with one ``(index, (device, ...))`` for each distinct index,
            and returns a flat list of single-device ``jax.Array``s, one for each device, in the
            same order. They become the shards without a copy: deleting or donating one deletes
            the shard. On CPU, an array that ``jax.device_put`` made without ``may_alias=False`` may
            share memory with a NumPy array.
          dtype: cast to it, on the devices.

        Communicates as ``from_callback`` does.

        Raises:
          TypeError: a returned value is not a ``jax.Array``, or dtypes differ.
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
    ) -> Self: ...
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
    ) -> Self: ...
    @classmethod
    @public
    @communicates("GlobalArray.from_process_local", if_checked())
    def from_process_local(  # pyright: ignore[reportInconsistentOverload]
        cls,
        local_data: Any,
        mesh: MeshLike,
        spec: Any = None,
        global_shape: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> Self:
        """Build an array from the part that each process has, such as its rows of a batch.

        The data of a process is its distinct blocks side by side, in the order of their
        coordinates, without gaps: ``ShardGrid.view(process).local_shape`` is its shape. The blocks
        must form a regular grid; the devices may be in any order in the mesh. Replicated blocks
        must be equal in all processes (``host_local_array_to_global_array`` can check that).
        Communicates as ``from_callback`` does.

        Args:
          local_data: a NumPy array, a ``jax.Array`` of this process, PRNG keys, or anything else
            that ``numpy.asarray`` takes. If the shards of a ``jax.Array`` are the blocks, on the
            right devices, it is used without a copy on accelerators, and with ``copy=False`` on
            CPU, and deleting or donating it deletes them. Any other ``jax.Array`` is copied.
          mesh, spec: as in ``from_callback``.
          global_shape: sizes of the whole array, by default inferred. If the local data has the
            whole global size in a dimension, gda takes the blocks of this process from it. A
            process without a device of the mesh must pass ``global_shape`` and ``dtype``; its
            local data is ignored.
          dtype: as in ``from_callback``.
          copy: as in ``from_callback``. NumPy data is copied once. With ``False`` it is not copied:
            do not change it while the array exists.

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
        spec, global_shape = after_spec(mesh, spec, global_shape)
        return cls(
            array=from_process_local.array_from_process_local(
                local_data, mesh, spec, global_shape, dtype=dtype, copy=copy
            )
        )


# Python's errors about arguments have this name, and users know of no other class. The functions
# around these, of ``public``, keep theirs, by which typing.get_overloads finds the overloads.
for _name, _method in vars(ArrayConstructors).items():
    if isinstance(_method, classmethod):
        inspect.unwrap(_method.__func__).__qualname__ = f"GlobalArray.{_name}"

"""The base of both containers: one ``jax.Array`` with its layout, shards, life, moves and copies.

Mesh, spec and shards are derived from the array on first use, and kept. ``GlobalArray`` adds
operators, ``PaddedArray`` padding, and both constructors of their own. Methods import what builds,
moves and digests arrays, so that ``import gda`` and a jitted call load none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, overload

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.liveness import OUTSIDE, deleted_error, describe, traced_error
from gda.arrays.shard import DataByDevice, LocalShards, Shard
from gda.layout.boundary import public
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, SpecLike, check_shape
from gda.mesh import (
    LayoutUnknownError,
    MeshLike,
    after_spec,
    devices_of,
    grid_of,
    is_tracer,
    local_positions,
    not_an_array_error,
    sharding_of,
)
from gda.multihost.agreement import communicates, if_checked
from gda.storage.options import Options, ProgressLike, Retry

AnyNDArray = np.ndarray[Any, Any]

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)

_SUCCESSORS = {
    "numpy": "gda.to_numpy(g) or numpy.asarray(g)",
    "shards": "g.local_shards or g.global_shards",
}

_get = object.__getattribute__
_set = object.__setattr__


def _if_shared(given: dict[str, Any]) -> Any:
    """Return ``among`` of a method: all processes, if several processes have parts of the array."""
    devices = given["self"].array.sharding.device_set
    return () if len({device.process_index for device in devices}) > 1 else None


class Container:
    """A ``jax.Array`` with a mesh and spec; immutable, and a pytree with that array as its leaf."""

    # Unset slots are caches that are not filled yet.
    __slots__ = ("__weakref__", "_data_by_device", "_global_shards", "_local_shards", "array")

    array: jax.Array

    _in_jit: ClassVar[str] = OUTSIDE
    """The words for an array that is being traced: the way to do it inside ``jit``."""

    _shape_if_padded: Shape | None = None
    """The shape without padding, where the array may have padding."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> Shape: ...

    @classmethod
    def _wrap(cls, array: Any, shape: Shape | None) -> Self:
        """Return a container of this class; ``shape`` is that without padding, if it has any."""
        raise NotImplementedError

    def _with_array(self, array: Any) -> Self:
        """Return a container of the same kind and shape around another array."""
        return self._wrap(array, self._shape_if_padded)

    @property
    def _is_inert(self) -> bool:
        """True around something that is no array, which a function of trees put here."""
        return not isinstance(self.array, _ARRAYS)

    # From data; the constructors of one class alone are there.

    @classmethod
    def _padding(cls, fill: object) -> dict[str, Any]:
        """Return the options of the functions that build an array, for its padding."""
        if fill is not None:
            raise TypeError(f"a {cls.__name__} has no padding; omit fill=, or use gda.PaddedArray")
        return {}

    @classmethod
    @public
    @communicates("{cls.__name__}.from_callback", if_checked())
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: SpecLike | Callable[..., Any] | None = None,
        data_callback: Callable[..., Any] | None = None,
        *,
        fill: object = None,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
        into: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> Self:
        """Build an array block by block: one call for each distinct block of this process.

        Does not communicate, unless inside ``gda.check_processes_agree()``. Indices and blocks of a
        ``PaddedArray`` are without padding. A device that holds padding alone gets no call.

        Args:
          global_shape: sizes of the whole array, without padding.
          mesh: ``jax.sharding.Mesh``, with Auto or Explicit axes. In all constructors, a
            ``NamedSharding`` or a ``SingleDeviceSharding`` may replace mesh and spec, and the
            array is then in its memory kind; the callback follows it.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: ``data_callback(index)`` returns the block at ``index``, of the shard
            shape: a ``jax.Array`` on any device, or anything that ``numpy.asarray`` takes.
          fill: value of the padding of a ``PaddedArray``, by default 0.
          dtype: cast every block to it. Required with ``into=True``, and in a process that has no
            device of the mesh, or padding alone.
          copy: with ``None``, copy a block at once if other code refers to its memory, such as a
            view, a memory map or a buffer that the callback uses again, and a ``jax.Array`` on CPU,
            which may be in such memory: no later change there changes the array. ``True``: copy
            all blocks, as is needed for a ``jax.Array`` that shares its buffer with another one.
            ``False``: copy none; do not change the blocks while the array exists.
          into: call ``data_callback(index, out)``, which fills ``out``, an uninitialised buffer
            that is aligned to 64 bytes. Reading a file straight into it saves a copy.
          max_workers: number of blocks read at a time, by default one in the caller's thread. With
            more than one, threads call the callback, which must be thread-safe. Contexts of JAX
            other than ``jax.enable_x64`` do not apply in these threads.
          max_bytes: limit of the host memory for blocks that are not yet part of an array: on CPU
            while a block is read, and on an accelerator until it is sent there. A larger block is
            read alone. Memory that the callback allocates does not count. By default no limit.
          progress: ``True`` shows bytes and rate on stderr, which needs rich. A function is called
            with ``(nbytes_done, nbytes_total)`` of this process after each block.
          retry: a ``gda.Retry`` with the errors after which a block is read again.

        On accelerators, gda sends blocks to their devices while it reads others. After an error in
        one read, or Ctrl-C, no new read starts, and gda waits until the current reads and all
        threads end. Without ``jax_enable_x64``, JAX narrows 64-bit types to 32 bits and rounds
        floats.

        Raises:
          TypeError: blocks have different dtypes, or one that JAX does not have; ``fill`` is not
            a number, or is given for a ``GlobalArray``.
          ValueError: the spec does not fit the shape and the mesh; a block has another shape or
            is held by several processes, as ``g[index]`` of such an array is; ``fill`` is not a
            value of the dtype.
          DoesNotFitError: narrowing, or a cast, changes an integer, makes a finite number infinite
            or loses an imaginary part. It is a ``ValueError`` and an ``OverflowError``.
          ImportError: ``progress=True`` without rich.
          Exception: any error of the callback, with a note of the index.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(16).reshape(8, 2)
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda index: data[index])
        >>> g.local_shards[2].data.tolist(), g.local_shards[3].replica_id
        ([[4, 5], [6, 7]], 1)
        >>> data = np.arange(15).reshape(5, 3)
        >>> p = gda.PaddedArray.from_callback((5, 3), mesh, ['x', 'y'], lambda index: data[index])
        >>> p.local_shards[5].index, p.local_shards[5].data.tolist()
        ((slice(4, 5, None), slice(2, 3, None)), [[14]])
        """
        from gda.arrays.construction import from_callbacks

        shape, options = check_shape(global_shape), None
        if (max_workers, max_bytes, retry) != (None, None, None) or progress is not False:
            options = Options(max_workers, max_bytes, progress, retry)
        array = from_callbacks.array_from_callback(
            shape,
            mesh,
            *after_spec(mesh, spec, data_callback),
            dtype=dtype,
            copy=copy,
            into=into,
            options=options,
            **cls._padding(fill),
        )
        return cls._wrap(array, shape)

    @classmethod
    @public
    @communicates("{cls.__name__}.from_source", if_checked(option="read_once"))
    def from_source(
        cls,
        source: Any,
        mesh: MeshLike,
        spec: SpecLike | None = None,
        *,
        fill: object = None,
        dtype: npt.DTypeLike | None = None,
        read_once: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> Self:
        """Build an array from anything that can be sliced; read the blocks of this process only.

        Each distinct block is read once, by one slice with start and stop for every dimension, and
        copied at once if the source keeps it. Blocks that share chunks of the source, or rows of
        fewer than 32 KiB, are read together, each chunk or row once, and split in memory. On CPU,
        datasets of h5py and TensorStores are read straight into the memory of the array. A
        TensorStore has its own threads: ``max_workers`` is its number of reads at a time, by
        default 32. Communicates as ``from_callback`` does. ``gda.load_tree`` reads many sources.

        Args:
          source: has ``shape``, ``dtype`` and NumPy-style slicing: a memory map, ``zarr.Array``,
            ``h5py.Dataset``, TensorStore, netCDF variable, a value of
            ``gda.storage.open_safetensors``, or the result of ``get_slice`` of safetensors.
          mesh, spec, fill: as in ``from_callback``.
          dtype: cast to it. If the source has bytes without a type, as ``numpy.load`` returns for
            bfloat16, this is the type of these bytes.
          read_once: ``True`` reads what several processes need, a block or rows of several, in one
            of them only, and large blocks in parts by all of them, and sends the bytes to the
            others. Communicates: all processes with devices of the mesh must call this, with the
            same ``max_bytes``. Until all is exchanged, the host holds these blocks, and at most
            ``max_bytes``, by default 256 MiB, that only others need.
          max_workers, max_bytes, progress, retry: as in ``from_callback``, but memory maps and
            tensors of ``open_safetensors`` are read by as many threads as there are cores, at most
            32, or by one if they are small. ``max_bytes`` also limits the memory to split what is
            read; one chunk is always allowed, and 32 KiB. On accelerators, if the blocks that are
            read together are larger, a few are read at a time, and the rows and chunks that they
            share again each time.

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
        >>> gda.PaddedArray.from_source(np.arange(10), mesh, [('x', 'y')]).padded_shape
        (16,)
        """
        from gda.arrays.construction import from_callbacks
        from gda.storage.sources import source_of

        options = Options(max_workers, max_bytes, progress, retry, read_once)
        array = from_callbacks.array_from_source(
            source, mesh, spec, dtype, options, **cls._padding(fill)
        )
        return cls._wrap(array, source_of(source).shape)

    # Its layout.

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements, a NumPy dtype, or the key type of PRNG keys."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array, without padding: the divisor of a mean."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, without padding and replicas."""
        return self.size * self.dtype.itemsize

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
        """The index math of this array, with the processes of its devices."""
        sharding: Any = self.sharding
        return grid_of(self.array.shape, sharding.mesh, sharding.spec)

    # Shards.

    @property
    def local_shards(self) -> tuple[Shard[jax.Array], ...]:
        """The shards on devices of this process, in device order, without padding.

        The data of a device that holds padding alone has a size of 0, and replica ids are those of
        the padded array. While tracing over Explicit axes no device is known: there is a shard for
        every position of the mesh, with device ``None``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> [shard.replica_id for shard in g.local_shards]
        [0, 1, 0, 1, 0, 1, 0, 1]
        """

        def make() -> LocalShards:
            shards = LocalShards(self._shards(only_local=True))
            shards.num_global = self.grid.num_devices
            return shards

        return self._cached("_local_shards", make)

    addressable_shards = local_shards  # by the name that they have in ``jax.Array``

    @property
    def global_shards(self) -> tuple[Shard[jax.Array | None], ...]:
        """The shards on all devices of the mesh, in device order.

        ``data`` is ``None`` on devices of other processes; nothing is communicated. Costs O(mesh).
        """
        return self._cached("_global_shards", lambda: self._shards(only_local=False))

    def _shards(self, only_local: bool) -> tuple[Shard[Any], ...]:
        mesh, grid = self.mesh, self.grid
        block_shape = None if self._shape_if_padded is None else grid.shard_shape
        data = self._cached(
            "_data_by_device", lambda: DataByDevice(self.array, type(self).__name__, block_shape)
        )
        if not isinstance(mesh, Mesh):
            devices: Iterable[Any] = repeat(None, grid.num_devices)
        elif only_local and len(local_positions(mesh)) < grid.num_devices:
            local = local_positions(mesh)
            shards = zip(local, grid.shards_at(local.values()), strict=True)
            return tuple([Shard(device, *which, data) for device, which in shards])
        else:
            devices = devices_of(mesh)
        return tuple(map(Shard, devices, grid.indices(), grid.replica_ids.tolist(), repeat(data)))

    def _cached(self, slot: str, make: Callable[[], Any]) -> Any:
        try:
            return _get(self, slot)
        except AttributeError:
            pass  # not in the handler: an error of `make` has another cause
        value = make()
        _set(self, slot, value)
        return value

    # Its life on the devices.

    def block_until_ready(self) -> Self:
        """Wait until the data is there, and return the container."""
        self._live().block_until_ready()
        return self

    def delete(self) -> None:
        """Free the device memory now. Every later access to data raises ``RuntimeError``.

        Jitted functions, also those of ``jnp``, see the array and raise JAX's own message.
        """
        self._real().delete()

    def is_deleted(self) -> bool:
        """Return True if the data was deleted or donated."""
        return self._real().is_deleted()

    def _live(self, in_jit: str | None = None) -> jax.Array:
        """Return the array with its data, and of a ``PaddedArray`` with its padding."""
        array = self._real(in_jit)
        if array.is_deleted():
            raise deleted_error(array, type(self).__name__, self._shape_if_padded)
        return array

    def _real(self, in_jit: str | None = None) -> jax.Array:
        """Return the array as ``_live`` does, also one that was deleted.

        ``in_jit`` are the words for an array that is being traced, by default those of the class.
        """
        if is_tracer(self.array):
            raise traced_error("the array", in_jit or self._in_jit)
        if not isinstance(self.array, jax.Array):
            raise not_an_array_error(self.array)
        return self.array

    # Moving it, and comparing it without that. These three communicate.

    @public
    @communicates("reshard", lambda given: [given["self"], given["mesh_or_spec"]])
    def reshard(
        self,
        mesh_or_spec: MeshLike | SpecLike,
        spec: SpecLike | None = None,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> Self:
        """Move the data to another layout; communicates between processes.

        ``g.reshard(spec)`` shards it by another spec over its own mesh, ``g.reshard(mesh, spec)``
        over another mesh, both in the same memory kind. ``g.reshard(sharding)`` moves it to the
        memory kind of the sharding too. The devices of both meshes may be any of the program, in
        any processes. Each process with a device in either mesh must call it. One without the data
        calls it on ``GlobalArray(array=jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))``
        with the sharding that the array has now; one without devices in the new mesh gets an array
        without local shards. ``ReshardPlan`` tells what is sent. Inside ``jit`` use
        ``gda.constrain``.

        A ``PaddedArray`` is padded anew with 0; no padding is sent. A ``GlobalArray`` whose shape
        the new mesh does not divide goes there as ``PaddedArray(g.array, g.shape)``.

        Args:
          max_bytes: the most bytes that a device holds of pieces on their way, by default 256 MiB,
            and at least an element or two.
          donate: delete this array when its data has left. Blocks that stay are copied, so the
            new array shares no memory with this one.

        Returns:
          a new container. Without ``donate`` both may share the blocks that stay on their
          devices, and are then deleted or donated together.

        Raises:
          ValueError: the spec does not fit, ``max_bytes`` is below 1, or the processes have devices
            of several platforms.
          TypeError: the array is being traced.
          DisagreementError, LateProcessError: the processes ask for different moves, or a process
            failed, died or did not come; in each process. Before the move, a process waits for the
            others for up to half an hour, or as ``gda.check_processes_agree`` where checks are on.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8, 2), mesh, ['x'], lambda i: np.zeros((2, 2)))
        >>> g.reshard([None, 'y'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P(None, 'y'))
        >>> fewer = jax.sharding.Mesh(mesh.devices[:2, 0], ('z',))
        >>> g.reshard(fewer, ['z'])
        GlobalArray(shape=(8, 2), dtype=float32, mesh={'z': 2}, spec=P('z'))
        >>> p = gda.PaddedArray.from_array(np.arange(5), mesh, ['x'])
        >>> p.padded_shape, p.reshard(fewer, ['z']).padded_shape
        ((8,), (6,))
        """
        from gda.arrays.transport import moving

        array: Any = self.array
        if not isinstance(array, jax.ShapeDtypeStruct):
            array = self._live("inside jit use gda.constrain")
        moved = moving.reshard(
            array,
            mesh_or_spec,
            spec,
            shape=self._shape_if_padded,
            max_bytes=max_bytes,
            donate=donate,
        )
        return self._with_array(moved)

    @overload
    def gather(self, process: None = None, *, max_bytes: int | None = None) -> AnyNDArray: ...
    @overload
    def gather(self, process: int, *, max_bytes: int | None = None) -> AnyNDArray | None: ...
    @public
    @communicates("{self.__class__.__name__}.gather", _if_shared)
    def gather(
        self, process: int | None = None, *, max_bytes: int | None = None
    ) -> AnyNDArray | None:
        """Return the whole value as NumPy on every process; communicates between processes.

        All processes of the program must call it, also those without devices of the mesh; for an
        array of this process alone, the others need not. The blocks go through one device of each
        process, a few at a time, so no device has to hold the whole array. If every process has
        all blocks already, no data is sent.

        Args:
          process: the process that needs the value. The others get ``None`` and need no memory for
            it. The network traffic is the same.
          max_bytes: the most bytes that a device may hold at a time, by default 256 MiB, and at
            least one byte of each process.

        Returns:
          a new array that the caller may write to, without padding.

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
        from gda.arrays.transport import moving

        return moving.gather(self._live(), process, max_bytes, self._shape_if_padded)

    @public
    @communicates("GlobalArray.fingerprint", _if_shared)
    def fingerprint(self) -> str:
        """Return a digest of shape, dtype and content; communicates where others hold a part.

        64 bits as 16 hex digits, to compare arrays of two processes or runs without moving them.
        It does not depend on mesh, spec, padding, order of devices, number of processes or version
        of JAX. It compares bits: 0.0 and -0.0 differ, and so do NaNs with other bits. It is not
        secure: one can construct an array with the same digest. ``gda.fingerprint`` also takes
        NumPy arrays, and whole trees, of which it returns the digest of each array.

        Processes exchange 8 bytes. The same processes must call it as for ``gather``.

        Raises:
          TypeError: the array is being traced, or has no mesh and spec.
          ValueError: only one other process holds the array.
          RuntimeError: the array was deleted or donated.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda i: np.arange(8)[i])
        >>> g.fingerprint()
        '9399afba15d2590f'
        >>> g.reshard([('y', 'x')]).fingerprint() == g.fingerprint()
        True
        """
        from gda.arrays.fingerprints.fingerprint import fingerprint_of

        return fingerprint_of(self._live(), self.grid)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"{type(self).__name__} has no attribute {name!r}"
            if name in _SUCCESSORS:
                problem += f"; write {_SUCCESSORS[name]}"
            attribute = getattr(type(self), name, None)
            if isinstance(attribute, property):  # its AttributeError has lost its message
                try:
                    attribute.__get__(self)
                except LayoutUnknownError:
                    raise
                except AttributeError as error:
                    cause = not_an_array_error(self.array) if self._is_inert else error
                    problem += f" here: {cause}"
            raise AttributeError(problem)

    # As a Python object.

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole array on the host, without padding.

        Raises:
          RuntimeError: this process does not hold every block of it, or it was deleted.
          TypeError: it is being traced, or holds no data, as what ``jax.eval_shape`` gives.
        """
        array: Any = self.array
        # A tracer has an error of its own. jax.device_get leaves an array of NumPy.
        if not is_tracer(array) and not isinstance(array, np.ndarray | np.generic):
            from gda.arrays.process_local import is_all_here

            array = self._live()
            if not is_all_here(array):
                raise RuntimeError(
                    f"this process does not hold every block of {self!r}; g.gather() gives the "
                    "whole value to every process, and g.local_shards has the blocks of this one; "
                    "for a jax.Array x, g is gda.GlobalArray.from_array(x)"
                )
        value = np.asarray(array)
        if self._shape_if_padded is not None:
            value = value[tuple(map(slice, self._shape_if_padded))]
        return np.asarray(value, dtype=dtype, copy=copy)

    def __setattr__(self, name: str, *_: object) -> NoReturn:
        raise AttributeError(
            f"a {type(self).__name__} is immutable; {name} cannot be set or deleted"
        )

    __delattr__ = __setattr__

    def __repr__(self) -> str:
        return describe(self.array, type(self).__name__, self._shape_if_padded)

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook; None if there is none, so that it shows the text.

        Neither reads nor moves data, and raises nothing.
        """
        from gda.show.markup import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __copy__(self) -> Self:
        return self._with_array(self.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if is_tracer(self.array):
            return self.__copy__()  # in a trace nothing can be written to
        array = self._live()
        # `array.copy()` is jitted, and that loses the layout of arrays without elements.
        return self._with_array(jax.device_put(array, array.sharding, may_alias=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the data without padding, and the layout; the padding of a restored array is 0.

        Raises:
          TypeError: it is being traced, or this process does not hold every block of it.
        """
        from gda.arrays import pickling

        shape = self._shape_if_padded
        return self._unpickled, (shape, *pickling.dump(self._live(), self.sharding, shape))

    @classmethod
    def _unpickled(cls, shape: Shape | None, *state: Any) -> Self:
        from gda.arrays import pickling

        array = pickling.load(pickling.State(*state), is_padded=shape is not None)
        return cls._wrap(array, shape)

"""The base of both containers: a ``jax.Array`` with its layout, shards, moves and copies.

Methods import the code that builds, moves and digests arrays, so that a jitted call loads none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.liveness import (
    OUTSIDE,
    deleted_error,
    describe,
    traced_error,
)
from gda.arrays.shard import Shard, shards_of
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index, Shape, SpecLike, check_shape
from gda.mesh import (
    MeshLike,
    grid_of,
    is_tracer,
    not_an_array_error,
    own_settings,
    sharding_of,
    skip_spec_if_sharding,
)
from gda.multihost.agreement import communicates, if_checked
from gda.storage.options import Options, ProgressLike, Retry

AnyNDArray = np.ndarray[Any, Any]
BlockLike = jax.Array | npt.ArrayLike
BlockCallback = Callable[[Index], BlockLike] | Callable[[Index, AnyNDArray], object]


def _if_shared(given: dict[str, Any]) -> Any:
    """Return the processes that a method needs: all, if several have parts of the array."""
    devices = given["self"].array.sharding.device_set
    return () if len({device.process_index for device in devices}) > 1 else None


class Container:
    """A ``jax.Array`` with a mesh and spec; immutable, and a pytree with that array as its leaf."""

    # An unset slot of shards is a cache that is not filled yet.
    __slots__ = ("__weakref__", "_global_shards", "_local_shards", "array")

    array: jax.Array

    _shape_if_padded: Shape | None = None
    """The shape without padding, where the array may have padding."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> Shape: ...

    @classmethod
    def _from_leaf(cls, leaf: Any, shape: Shape | None = None) -> Self:
        """Return a container of anything; ``shape`` is that of a ``PaddedArray``, without padding.

        JAX's tree functions pass tracers, ``None``, shapes and ``object()``, so nothing is checked.
        """
        self = object.__new__(cls)
        set_array(self, leaf)
        return self

    def _with_array(self, array: Any) -> Self:
        return self._from_leaf(array, self._shape_if_padded)

    @property
    def _is_inert(self) -> bool:
        """True for a container of something that is no array, put here by a function of trees."""
        return not isinstance(self.array, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))

    @classmethod
    def _padding(cls, fill: object) -> dict[str, Any]:
        """Return the options for padding of the functions that build an array."""
        if fill is not None:
            raise TypeError(f"a {cls.__name__} has no padding; omit fill=, or use gda.PaddedArray")
        return {}

    @classmethod
    @communicates("{cls.__name__}.from_callback", if_checked())
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: SpecLike | BlockCallback | None = None,
        data_callback: BlockCallback | None = None,
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

        Does not communicate, unless inside ``gda.checking_agreement()``. Indices and blocks of a
        ``PaddedArray`` are without padding; there is no call for padding alone.

        Args:
          global_shape: sizes of the whole array, without padding.
          mesh: ``jax.sharding.Mesh``, with Auto or Explicit axes. In all constructors, a
            ``NamedSharding`` or ``SingleDeviceSharding`` may replace mesh and spec; the array is
            then in its memory kind, and the callback follows it.
          spec: ``PartitionSpec`` or a sequence of ``None``, axis names and tuples of axis names.
          data_callback: ``data_callback(index)`` returns the block at ``index``, of the shard
            shape: a ``jax.Array`` on any device, or anything that ``numpy.asarray`` takes.
          fill: value of the padding of a ``PaddedArray``, by default 0.
          dtype: cast every block to it. Required with ``into=True``, and in a process that has no
            device of the mesh, or padding alone.
          copy: ``None`` copies a block at once if other code refers to its memory, such as a view,
            a memory map, a buffer that is used again, or any ``jax.Array`` on CPU: no later change
            there changes the array. ``True`` copies all blocks, as is needed for a ``jax.Array``
            that shares its buffer with another one. ``False`` copies none: do not change the
            blocks while the array exists.
          into: call ``data_callback(index, out)``, which fills ``out``, an uninitialised buffer
            that is aligned to 64 bytes. Reading a file straight into it saves a copy.
          max_workers: number of blocks read at a time, by default one in the caller's thread. With
            more, threads call the callback, which must be thread-safe. Contexts of JAX other than
            ``jax.enable_x64`` do not apply in these threads.
          max_bytes: limit of the host memory for blocks that are not yet part of an array: on CPU
            while a block is read, and on an accelerator until it is sent there. A larger block is
            read alone. Memory that the callback allocates does not count. By default no limit.
          progress: ``True`` shows bytes and rate on stderr, which needs rich. A function is called
            with ``(nbytes_done, nbytes_total)`` of this process after each block.
          retry: a ``gda.Retry`` with the errors after which a block is read again.

        After an error in one read, or Ctrl-C, no new read starts, and gda waits until the current
        reads and all threads end. Without ``jax_enable_x64``, JAX narrows 64-bit types to 32 bits
        and rounds floats.

        Raises:
          TypeError: blocks have different dtypes, or one that JAX does not have; ``fill`` is not
            a number, or is given for a ``GlobalArray``.
          ValueError: the spec does not fit the shape and the mesh; a block has another shape or
            is held by several processes; ``fill`` is not a value of the dtype.
          DoesNotFitError: narrowing, or a cast, changes an integer, makes a finite number infinite
            or loses an imaginary part. It is a ``ValueError`` and an ``OverflowError``.
          Exception: any error of the callback, with a note of the index.
        """
        from gda.arrays.construction import from_callbacks

        shape, options = check_shape(global_shape), None
        if (max_workers, max_bytes, retry) != (None, None, None) or progress is not False:
            options = Options(max_workers, max_bytes, progress, retry)
        over = (mesh, *skip_spec_if_sharding(mesh, spec, data_callback))
        array = from_callbacks.array_from_callback(
            shape, *over, dtype, copy, into, options, **cls._padding(fill)
        )
        return cls._from_leaf(array, shape)

    @classmethod
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

        Each distinct block is read once, and copied at once if the source keeps it. Blocks that
        share chunks of the source, or rows of fewer than 32 KiB, are read together, each chunk or
        row once. On CPU, datasets of h5py and TensorStores are read straight into the memory of
        the array. Communicates as ``from_callback`` does. ``gda.load_tree`` reads many sources.

        Args:
          source: has ``shape``, ``dtype`` and NumPy-style slicing: a memory map, ``zarr.Array``,
            ``h5py.Dataset``, TensorStore, netCDF variable, or a value
            of ``gda.storage.open_safetensors``.
          mesh, spec, fill: as in ``from_callback``.
          dtype: cast to it. If the source has bytes without a type, as ``numpy.load`` returns for
            bfloat16, this is the type of these bytes.
          read_once: ``True`` reads what several processes need in one of them only, large blocks in
            parts by all of them, and sends it to the others. All processes with devices of the mesh
            must call this, with the same ``max_bytes``. Until the exchange, the host holds these
            blocks, and at most ``max_bytes``, by default 256 MiB, of parts for other processes.
          max_workers, max_bytes, progress, retry: as in ``from_callback``, but by default large
            memory maps and safetensors are read by a thread for each core, at most 32, and a
            TensorStore makes 32 reads at a time. ``max_bytes`` also limits the memory to split what
            is read together, but for one chunk; on accelerators, what is shared is then read again.

        Raises:
          TypeError: ``source`` is not a source, or has a dtype that JAX does not have.
          ValueError: the spec does not fit, a block has another shape than requested, or other
            processes hold parts of the source: ``gda.reshard_tree`` moves such an array.
          DisagreementError, LateProcessError: with ``read_once``, another process failed, asked for
            something else, or did not arrive.
          DoesNotFitError, Exception: as in ``from_callback``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> gda.PaddedArray.from_source(np.arange(10), mesh, [('x', 'y')])
        PaddedArray(shape=(10,), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P(('x', 'y')))
        """
        from gda.arrays.construction import from_callbacks

        options = Options(max_workers, max_bytes, progress, retry, read_once)
        array = from_callbacks.array_from_source(
            source, mesh, spec, dtype, options, **cls._padding(fill)
        )
        return cls._from_leaf(array, check_shape(source.shape))

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
        """Mesh and spec as JAX's ``NamedSharding``; ``LayoutUnknownError`` if it has none."""
        return sharding_of(self.array)

    @property
    def mesh(self) -> Mesh:
        """The mesh. While tracing over Explicit axes it is an ``AbstractMesh``, without devices."""
        return self.sharding.mesh  # pyright: ignore[reportReturnType]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec, as JAX holds it; ``grid.spec`` has no ``None`` at its end."""
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

        Those of padding alone have a size of 0. While tracing over Explicit axes, there is a shard
        for every position of the mesh, with device ``None``.
        """
        return self._shards("_local_shards")

    addressable_shards = local_shards  # by the name that they have in ``jax.Array``

    @property
    def global_shards(self) -> tuple[Shard[jax.Array | None], ...]:
        """The shards on all devices of the mesh; ``data`` is ``None`` in other processes."""
        return self._shards("_global_shards")

    def _shards(self, slot: str) -> Any:
        try:
            return getattr(self, slot)
        except AttributeError:
            pass  # leave the handler, which would be the context of later errors
        shards = shards_of(
            self.array,
            self.mesh,
            self.grid,
            kind=type(self).__name__,
            is_local=slot == "_local_shards",
            has_padding=self._shape_if_padded is not None,
        )
        object.__setattr__(self, slot, shards)
        return shards

    # Its data on the devices.

    def block_until_ready(self) -> Self:
        """Wait until the data is there, and return the container."""
        self._live().block_until_ready()
        return self

    def delete(self) -> None:
        """Free the device memory now. Every later access to data raises ``RuntimeError``."""
        self._real().delete()

    def is_deleted(self) -> bool:
        """Return True if the data was deleted or donated."""
        return self._real().is_deleted()

    def _live(self, in_jit: str = OUTSIDE) -> jax.Array:
        """Return the array with its data; ``in_jit`` is the advice for one that is traced."""
        array = self._real(in_jit)
        if array.is_deleted():
            raise deleted_error(array, type(self).__name__, self._shape_if_padded)
        return array

    def _real(self, in_jit: str = OUTSIDE) -> jax.Array:
        """Return the array as ``_live``, even if it was deleted."""
        if is_tracer(self.array):
            raise traced_error("the array", in_jit)
        if not isinstance(self.array, jax.Array):
            raise not_an_array_error(self.array)
        return self.array

    # Moves and comparisons, which communicate.

    @communicates("reshard", lambda given: [given["self"], given["mesh_or_spec"]])
    def reshard(
        self,
        mesh_or_spec: MeshLike | SpecLike,
        spec: SpecLike | None = None,
        /,
        *,
        max_device_bytes: int | None = None,
        donate: bool = False,
    ) -> Self:
        """Move the data to another layout; communicates between processes.

        ``g.reshard(spec)`` shards it by another spec over its own mesh, ``g.reshard(mesh, spec)``
        over another mesh of any devices of the program, both in the same memory kind.
        ``g.reshard(sharding)`` moves it to the memory kind of the sharding too. Each process with a
        device in either mesh must call it: one without the data on
        ``GlobalArray.from_array(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))`` with the
        sharding of today. ``ReshardPlan`` tells what is sent. Inside ``jit`` use ``gda.constrain``.

        A ``PaddedArray`` is padded anew with 0; no padding is sent. A ``GlobalArray`` whose shape
        the new mesh does not divide goes there as ``PaddedArray(g.array, g.shape)``.

        Args:
          max_device_bytes: the most bytes that a device holds of pieces on their way, by default
            256 MiB, and at least an element or two.
          donate: delete this array when its data has left. Without it, the new container and this
            one may share blocks that stay, and are then deleted or donated together.

        Raises:
          ValueError: the spec does not fit, or ``max_device_bytes`` is below 1.
          TypeError: the array is being traced.
          DisagreementError, LateProcessError: the processes ask for different moves, or one failed,
            died or did not come within half an hour; in each process.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> p = gda.PaddedArray.from_source(np.arange(5), mesh, ['x'])
        >>> moved = p.reshard(jax.sharding.Mesh(mesh.devices[:2, 0], ('z',)), ['z'])
        >>> moved.padded_shape, moved.gather(), moved.fingerprint() == p.fingerprint()
        ((6,), array([0, 1, 2, 3, 4], dtype=int32), True)
        """
        from gda.arrays.transport import moving

        array: Any = self.array
        if not isinstance(array, jax.ShapeDtypeStruct):
            array = self._live("inside jit use gda.constrain")
        shape = self._shape_if_padded
        moved = moving.reshard(array, mesh_or_spec, spec, shape, max_device_bytes, donate)
        return self._with_array(moved)

    @overload
    def gather(
        self, process: None = None, *, max_device_bytes: int | None = None
    ) -> AnyNDArray: ...
    @overload
    def gather(self, process: int, *, max_device_bytes: int | None = None) -> AnyNDArray | None: ...
    @communicates("{self.__class__.__name__}.gather", _if_shared)
    def gather(
        self, process: int | None = None, *, max_device_bytes: int | None = None
    ) -> AnyNDArray | None:
        """Return the whole value, without padding, as a new NumPy array; communicates.

        All processes of the program must call it, unless the array is of this process alone. The
        blocks go through one device of each process, a few at a time. If every process has all
        blocks already, no data is sent.

        Args:
          process: the only process that needs the value. The others get ``None``.
          max_device_bytes: the most bytes that a device may hold at a time, by default 256 MiB, and
            at least one byte of each process.

        Raises:
          ValueError: there is no such process, ``max_device_bytes`` is below 1, or only one other
            process holds the array.
          TypeError: the array has PRNG keys, which NumPy does not have, or is being traced.
          RuntimeError: the array was deleted or donated.
        """
        from gda.arrays.transport import moving

        return moving.gather(self._live(), process, max_device_bytes, self._shape_if_padded)

    @communicates("GlobalArray.fingerprint", _if_shared)
    def fingerprint(self) -> str:
        """Return a digest of shape, dtype and content; communicates where others hold a part.

        64 bits as 16 hex digits. They do not depend on mesh, spec, padding, order of devices,
        number of processes or version of JAX. They compare bits: 0.0 and -0.0 differ, and so do
        NaNs with other bits. They are not secure: one can construct an array with the same digest.
        ``gda.fingerprint`` also takes NumPy arrays, and whole trees.

        Processes exchange 8 bytes. The same processes must call it as for ``gather``.

        Raises:
          TypeError: the array is being traced, or has no mesh and spec.
          ValueError: only one other process holds the array.
          RuntimeError: the array was deleted or donated.
        """
        from gda.arrays.fingerprints.fingerprint import fingerprint_of

        return fingerprint_of(self._live(), self.grid)

    # As a Python object.

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyNDArray:
        """Return the whole array, without padding; ``RuntimeError`` if blocks are elsewhere."""
        array: Any = self.array
        # A tracer has an error of its own. jax.device_get leaves an array of NumPy.
        if not is_tracer(array) and not isinstance(array, np.ndarray | np.generic):
            from gda.arrays.process_local import check_all_here

            check_all_here(array := self._live(), self)
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
        """Return the picture for a notebook, which reads no data; None if there is none."""
        from gda.show.markup import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __copy__(self) -> Self:
        return self._with_array(self.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if is_tracer(self.array):
            return self.__copy__()  # in a trace nothing can be written to
        array = self._live()
        # `array.copy()` is jitted, and that loses the layout of arrays without elements.
        with own_settings():
            return self._with_array(jax.device_put(array, array.sharding, may_alias=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the data without padding, which is 0 in a restored array, and the layout."""
        from gda.arrays import pickling

        shape = self._shape_if_padded
        return self._unpickled, (shape, *pickling.dump(self._live(), self.sharding, shape))

    @classmethod
    def _unpickled(cls, shape: Shape | None, *state: Any) -> Self:
        from gda.arrays import pickling

        array = pickling.load(pickling.State(*state), is_padded=shape is not None)
        return cls._from_leaf(array, shape)


set_array = Container.array.__set__  # pyright: ignore[reportAttributeAccessIssue]

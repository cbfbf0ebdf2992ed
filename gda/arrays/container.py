"""The base of both containers: one ``jax.Array`` with its layout, shards, life, moves and copies.

Mesh, spec and shards are derived from the array on first use, and kept. ``GlobalArray`` adds
constructors and operators, ``PaddedArray`` padding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, overload

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.arrays import libraries, pickling
from gda.arrays.fingerprints import fingerprint
from gda.arrays.liveness import OUTSIDE, deleted_error, describe, real
from gda.arrays.process_local import is_all_here
from gda.arrays.shard import DataByDevice, LocalShards, Shard
from gda.arrays.transport import moving
from gda.layout.boundary import public
from gda.layout.grid import ShardGrid
from gda.layout.spec import Shape, SpecLike
from gda.mesh import (
    devices_of,
    grid_of,
    is_tracer,
    local_positions,
    not_an_array_error,
    sharding_of,
)
from gda.multihost.agreement import communicates

AnyNDArray = np.ndarray[Any, Any]

_get = object.__getattribute__
_set = object.__setattr__

_NOT_HELD = (int, float, complex, np.generic, np.dtype, PartitionSpec)

held_types: set[type] = set()
"""The types of the values that containers have held so far, for a quick answer."""


def dissolves_around(value: object) -> bool:
    """Return True if a tree function gives this value itself in the place of a container.

    docs/design/jit.md has the reasons.
    """
    if isinstance(value, str):  # Orbax names the leaves by their paths, and maps over their tree
        return value != "array" and not value.endswith(".array")
    if isinstance(value, _NOT_HELD):
        return True
    # To JAX, None is a tree without leaves.
    if value is not None and not jax.tree_util.all_leaves((value,)):
        return True
    held_types.add(type(value))
    return False


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
    def _around(cls, array: Any, shape: Shape | None) -> Self:
        """Return a container of this class; ``shape`` is that without padding, if it has any."""
        raise NotImplementedError

    def _like(self, array: Any) -> Self:
        """Return a container of the same kind and shape around another array."""
        return self._around(array, self._shape_if_padded)

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
    def addressable_shards(self) -> tuple[Shard[jax.Array], ...]:
        """The shards on devices of this process, in device order, without padding.

        The data of a device that holds padding alone has a size of 0, and replica ids are those of
        the padded array. While tracing over Explicit axes no device is known: there is a shard for
        every position of the mesh, with device ``None``.

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
    def local_shards(self) -> tuple[Shard[jax.Array], ...]:
        """``addressable_shards`` by their name in GlobalDeviceArray."""
        return self.addressable_shards

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
        self._real(self._in_jit).delete()

    def is_deleted(self) -> bool:
        """Return True if the data was deleted or donated."""
        return self._real(self._in_jit).is_deleted()

    def _live(self, in_jit: str | None = None) -> jax.Array:
        """Return the array with its data, and of a ``PaddedArray`` with its padding.

        ``in_jit`` are the words for an array that is being traced.
        """
        array = self._real(in_jit or self._in_jit)
        if array.is_deleted():
            raise deleted_error(array, type(self).__name__, self._shape_if_padded)
        return array

    def _real(self, in_jit: str) -> jax.Array:
        """Return the array as ``_live`` does, also one that was deleted."""
        if not isinstance(self.array, jax.Array):
            raise not_an_array_error(self.array)
        return real(self.array, in_jit)

    # Moving it, and comparing it without that. These three communicate.

    @overload
    def reshard(
        self, spec: SpecLike, /, *, max_bytes: int | None = None, donate: bool = False
    ) -> Self: ...
    @overload
    def reshard(
        self,
        sharding: NamedSharding | SingleDeviceSharding,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> Self: ...
    @overload
    def reshard(
        self,
        mesh: Mesh,
        spec: SpecLike,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> Self: ...
    @public
    @communicates("reshard", lambda given: [given["self"], given["mesh_or_spec"]])
    def reshard(
        self,
        mesh_or_spec: Any,
        spec: Any = None,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> Self:
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

        A ``PaddedArray`` is padded as the new layout needs it, with 0; no padding is sent. A
        ``GlobalArray`` whose shape the new mesh does not divide goes there as
        ``PaddedArray(g.array, g.shape)``, and a padded one that the new mesh divides is
        ``GlobalArray(array=p.array)`` there.

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
            failed, died or did not come; in each process, after at most the time limit of
            ``gda.checking_agreement`` once the failure shows. Before the move, a process waits for
            the others for up to half an hour, or for that limit where checks are on.

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
        return self._like(moved)

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
        return moving.gather(self._live(), process, max_bytes, self._shape_if_padded)

    @public
    @communicates("GlobalArray.fingerprint", _if_shared)
    def fingerprint(self) -> str:
        """Return a digest of shape, dtype and content; communicates where others hold a part.

        128 bits as 32 hex digits, to compare arrays of two processes or runs without moving them.
        It does not depend on mesh, spec, padding, order of devices, number of processes or version
        of JAX. It compares bits: 0.0 and -0.0 differ, and so do NaNs with other bits. It is not
        secure: one can construct an array with the same digest. ``gda.fingerprint`` also takes
        NumPy arrays, and whole trees, of which it returns the digest of each array.

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
        return fingerprint.fingerprint_of(self._live(), self.grid)

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
            array = self._live()
            if not is_all_here(array):
                raise RuntimeError(
                    f"this process does not hold every block of {self!r}; g.gather() gives the "
                    "whole value to every process, and gda.compat.global_to_host_array(g) to each "
                    "its own rows; for a jax.Array x, g is gda.GlobalArray.from_array(x)"
                )
        value = np.asarray(array)
        if self._shape_if_padded is not None:
            value = value[tuple(map(slice, self._shape_if_padded))]
        return np.asarray(value, dtype=dtype, copy=copy)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} is immutable; {name} cannot be deleted")

    def __repr__(self) -> str:
        return describe(self.array, type(self).__name__, self._shape_if_padded)

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook; None if there is none, so that it shows the text.

        Neither reads nor moves data, and raises nothing.
        """
        from gda.show.page import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return libraries.treescope_repr(self, path, subtree_renderer)

    def __copy__(self) -> Self:
        return self._like(self.array)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if is_tracer(self.array):
            return self.__copy__()  # in a trace nothing can be written to
        array = self._live()
        # `array.copy()` is jitted, and that loses the layout of arrays without elements.
        return self._like(jax.device_put(array, array.sharding, may_alias=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the data without padding, and the layout; the padding of a restored array is 0.

        Raises:
          TypeError: it is being traced, or this process does not hold every block of it.
        """
        shape = self._shape_if_padded
        return self._unpickled, (shape, *pickling.dump(self._live(), self.sharding, shape))

    @classmethod
    def _unpickled(cls, shape: Shape | None, *state: Any) -> Self:
        array = pickling.load(pickling.State(*state), is_padded=shape is not None)
        return cls._around(array, shape)


# Python's errors about arguments have these names, and users do not know this class.
for _name in ("reshard", "gather", "fingerprint"):
    inspect.unwrap(vars(Container)[_name]).__qualname__ = _name

"""The container for shapes that the mesh does not divide: ``PaddedArray``.

It holds a ``jax.Array`` of the padded shape, for computing, and the shape without padding, which is
the shape of its values, shards and files. The shape is a static part of the pytree: a jitted call
costs more than with a ``GlobalArray``, which has none.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NoReturn, Self

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gda.arrays import libraries, pickling
from gda.arrays.construction import from_callbacks
from gda.arrays.construction.blocks import BlockReader
from gda.arrays.construction.placing import start_of
from gda.arrays.fingerprints import fingerprint
from gda.arrays.liveness import deleted_error, describe, live, real
from gda.arrays.process_local import has_padding_for, is_all_here, without_padding
from gda.arrays.shard import DataByDevice, LocalShards, Shard
from gda.arrays.transport import moving
from gda.layout.boundary import public, set_module
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index, Shape, SpecLike, check_shape, format_spec, shape_at
from gda.mesh import (
    Device,
    MeshLike,
    after_spec,
    devices_of,
    is_tracer,
    local_positions,
    mesh_and_spec,
    named_sharding,
    not_an_array_error,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import together
from gda.multihost.descriptions import describe_wanted, leaf_fields
from gda.storage.options import Options, ProgressLike, Retry

_INSIDE_JIT = "inside jit use .array, mask() and filled(value)"


@set_module("gda")
class PaddedArray:
    """An array of any shape, sharded over a mesh; where the shape does not divide, it is padded.

    Blocks of a dimension that does not divide have ``ceil(size / ways)`` elements, the last ones
    fewer or none. Callbacks never see padding, and no shard, file, fingerprint or NumPy value has
    any. To compute, take ``array``, which has the padded shape, and keep the padding out of results
    with ``mask()`` or ``filled(value)``. There are no operators, because they would compute on the
    padding too. It is a pytree whose only leaf is ``array``: ``jax.jit``, ``jax.grad`` and
    optimisers take and return it.

    Args:
      array: a ``jax.Array`` of the padded shape, ``ShardGrid(shape, ..., pad=True).padded_shape``,
        such as the result of a computation. The constructors below pad.
      shape: sizes without padding.

    >>> import gda, jax, jax.numpy as jnp, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> p = gda.PaddedArray.from_array(np.arange(10, dtype=np.float32), mesh, ['x'])
    >>> p.shape, p.padded_shape, p.local_shards[7].data.shape
    ((10,), (16,), (0,))
    >>> @jax.jit
    ... def mean(p):
    ...     return p.filled(0).sum() / p.size
    >>> float(mean(p))
    4.5
    """

    __slots__ = ("__weakref__", "array", "shape")

    array: jax.Array
    """The array with its padding, for computing."""

    shape: Shape
    """Sizes of the whole array without padding."""

    def __init__(self, array: Any, shape: Any) -> None:
        # JAX's tree functions pass anything for the array, so nothing is checked here.
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "shape", tuple(shape))

    # From data without padding.

    @classmethod
    @public
    def from_callback(
        cls,
        global_shape: Iterable[int],
        mesh: MeshLike,
        spec: Any = None,
        data_callback: Callable[..., Any] | None = None,
        *,
        fill: object = 0,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
        into: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> Self:
        """Build an array block by block, as ``GlobalArray.from_callback`` does.

        The callback gets indices of the array without padding, and is not called for a device that
        holds padding alone. A block that is smaller than the others is copied into a padded one.

        Args:
          global_shape: sizes without padding.
          fill: value of the padding in ``array``.
          dtype: required also in a process whose devices hold padding alone.
          mesh, spec, data_callback, copy, into, max_workers, max_bytes, progress, retry: as in
            ``GlobalArray.from_callback``.

        Raises:
          ValueError: ``fill`` is not a value of the dtype, or as ``GlobalArray.from_callback``.
          TypeError: ``fill`` is not a number, or as ``GlobalArray.from_callback``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
        >>> data = np.arange(15).reshape(5, 3)
        >>> p = gda.PaddedArray.from_callback((5, 3), mesh, ['x', 'y'], lambda index: data[index])
        >>> p
        PaddedArray(shape=(5, 3), dtype=int32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))
        >>> p.local_shards[5].index, p.local_shards[5].data.tolist()
        ((slice(4, 5, None), slice(2, 3, None)), [[14]])
        """
        spec, data_callback = after_spec(mesh, spec, data_callback)
        shape = check_shape(global_shape)
        options = None
        if (max_workers, max_bytes, retry) != (None, None, None) or progress is not False:
            options = Options(max_workers, max_bytes, progress, retry)
        array = from_callbacks.array_from_callback(
            shape,
            mesh,
            spec,
            data_callback,  # pyright: ignore[reportArgumentType]
            dtype=dtype,
            copy=copy,
            into=into,
            options=options,
            pad=True,
            fill=fill,
        )
        return cls(array, shape)

    @classmethod
    @public
    def from_source(
        cls,
        source: Any,
        mesh: MeshLike,
        spec: SpecLike | None = None,
        *,
        fill: object = 0,
        dtype: npt.DTypeLike | None = None,
        read_once: bool = False,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        progress: ProgressLike = False,
        retry: Retry | None = None,
    ) -> Self:
        """Build an array from anything that can be sliced, as ``GlobalArray.from_source`` does.

        Args:
          fill: value of the padding.
          source, mesh, spec, dtype, read_once, max_workers, max_bytes, progress, retry: as in
            ``GlobalArray.from_source``. The source has the shape without padding.

        Raises:
          TypeError, ValueError: as ``from_callback`` and ``GlobalArray.from_source``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> gda.PaddedArray.from_source(np.arange(10), mesh, ['x']).padded_shape
        (16,)
        """
        options = Options(max_workers, max_bytes, progress, retry, read_once)
        array = from_callbacks.array_from_source(
            source, mesh, spec, dtype, options, pad=True, fill=fill
        )
        return cls(array, tuple(map(int, source.shape)))

    @classmethod
    @public
    def from_process_local(
        cls,
        local_data: Any,
        mesh: MeshLike,
        spec: Any = None,
        global_shape: Iterable[int] | None = None,
        *,
        fill: object = 0,
        dtype: npt.DTypeLike | None = None,
    ) -> Self:
        """Build an array from the part that each process has, such as its rows of a last batch.

        The data of a process is its blocks without padding, side by side:
        ``ShardGrid(..., pad=True).view(process).local_shape`` is its shape. If it has the whole
        global size in a dimension, the blocks of this process are taken from it.

        Args:
          local_data: a NumPy array, or anything that ``numpy.asarray`` takes.
          global_shape: sizes without padding; required, because the parts of the processes differ.
          fill: value of the padding.
          mesh, spec, dtype: as in ``from_callback``.

        Raises:
          ValueError: the local data does not have the shape above, or as ``from_callback``.
          TypeError: as ``from_callback``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> gda.PaddedArray.from_process_local(np.arange(10), mesh, ['x'], (10,))
        PaddedArray(shape=(10,), dtype=int32, mesh={'x': 8}, spec=P('x'))
        """
        spec, global_shape = after_spec(mesh, spec, global_shape)
        if global_shape is None:
            raise TypeError("from_process_local needs global_shape, the sizes without padding")
        shape = check_shape(global_shape)
        asked = {"global_shape": shape, "mesh": mesh, "spec": spec, "dtype": dtype}

        def work(_: object) -> Self:
            given = np.asarray(local_data)
            # All at once, because no block tells the dtype where a process has padding alone.
            as_one = ShardGrid(given.shape, {}, ())
            reader = BlockReader(as_one, dtype, copy=False)
            (block,) = reader.read(lambda _: given, as_one.indices())
            local = np.asarray(block)
            over = mesh_and_spec(mesh, spec)
            processes = processes_of(over.mesh)
            grid = ShardGrid(shape, over.mesh.shape, over.spec, pad=True, process_of=processes)
            view = grid.view(jax.process_index())
            places = view.indices_within(local.shape) if view.block_ids else []
            place_at = dict(zip(map(start_of, view.indices), places, strict=True))

            def read(index: Index) -> np.ndarray[Any, Any]:
                return local[place_at[start_of(index)]]

            return cls.from_callback(shape, mesh, spec, read, fill=fill, dtype=local.dtype)

        return together(
            "PaddedArray.from_process_local",
            mesh,
            work,
            partial(leaf_fields, ""),
            asked=lambda _: describe_wanted({**asked, "pad": True, "fill": fill}),
        )

    @classmethod
    @public
    def from_array(
        cls, array: Any, mesh: MeshLike, spec: SpecLike | None = None, *, fill: object = 0
    ) -> Self:
        """Pad an array that is in memory: NumPy's, or a ``jax.Array`` of this process.

        Raises:
          TypeError, ValueError: as ``from_source``; or other processes hold parts of the array.

        >>> import gda, jax, jax.numpy as jnp, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> gda.PaddedArray.from_array(jnp.ones((3, 2)), mesh, ['x']).array.shape
        (8, 2)
        """
        if isinstance(array, PaddedArray):
            raise TypeError("the array is a PaddedArray already; move it with reshard(mesh, spec)")
        if not isinstance(array, np.ndarray):
            array = live(array, otherwise="give other sources to from_source")
            if not array.is_fully_addressable:
                raise ValueError(
                    "other processes hold parts of the array; build it with "
                    "PaddedArray.from_callback in every process"
                )
        return cls.from_source(np.asarray(array), mesh, spec, fill=fill)

    # Its layout.

    @property
    def padded_shape(self) -> Shape:
        """Sizes of ``array``."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements without padding: the divisor of a mean."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, without padding and replicas."""
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        """Mesh and spec as JAX's ``NamedSharding``; as ``GlobalArray.sharding``."""
        return sharding_of(self.array)

    @property
    def mesh(self) -> Mesh:
        """The mesh. While tracing over Explicit axes it is an ``AbstractMesh``, without devices."""
        return self.sharding.mesh  # pyright: ignore[reportReturnType]

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec, as JAX holds it."""
        return self.sharding.spec

    @property
    def grid(self) -> ShardGrid:
        """The index math of this array, ``pad=True``.

        Raises:
          ValueError: ``array`` is not of the padded shape of this grid, nor padded more in a
            dimension that is not sharded, as after XLA replicated it.
        """
        sharding = self.sharding
        mesh: Any = sharding.mesh
        grid = _grid_of(tuple(self.shape), mesh, sharding.spec)
        if not has_padding_for(grid, self.array.shape):
            raise ValueError(
                f"the array of this PaddedArray has shape {self.array.shape}; {self.shape} sharded "
                f"by {format_spec(grid.spec)} over {dict(grid.mesh_shape)} has the padded shape "
                f"{grid.padded_shape}"
            )
        return grid

    # Computing.

    def mask(self) -> jax.Array:
        """Return True for elements and False for padding: a bool array that fits ``array``.

        Its size is 1 in dimensions without padding, so that it broadcasts; it is sharded as
        ``array`` is. Inside ``jit`` it is computed where it is used, and takes no memory.

        Raises:
          ValueError: ``array`` is a part of the padded array, as inside ``jax.shard_map``,
            ``jax.vmap`` and ``jax.lax.scan``.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('x',))
        >>> p = gda.PaddedArray.from_array(np.ones((3, 2)), mesh, ['x'])
        >>> p.mask().tolist()
        [[True], [True], [True], [False]]
        """
        shape, padded_shape = self.shape, self.array.shape
        if (
            len(shape) != len(padded_shape)
            or any(map(operator.gt, shape, padded_shape))
            or _is_in_shard_map(self.array)
        ):
            raise ValueError(
                f"this PaddedArray of shape {shape} holds a part of its array, of shape "
                f"{padded_shape}; into jax.shard_map, jax.vmap and jax.lax.scan pass p.array and "
                "p.mask() in its place"
            )
        sides = zip(shape, padded_shape, strict=True)
        sizes = tuple(padded if size != padded else 1 for size, padded in sides)
        try:
            sharding = self.sharding
        except TypeError:  # over Auto axes inside jit, where XLA decides
            return _mask(shape, sizes, None)
        mesh, spec = sharding.mesh, tuple(sharding.spec)
        entries = [entry if size > 1 else None for entry, size in zip(spec, sizes, strict=False)]
        sharding = named_sharding(sizes, mesh, entries)
        is_explicit = AxisType.Explicit in mesh.axis_types
        if is_tracer(self.array):
            return _mask(shape, sizes, sharding if is_explicit else None)
        return _mask_maker(shape, sizes, sharding, is_explicit)()

    def filled(self, value: jax.typing.ArrayLike) -> jax.Array:
        """Return ``array`` with its padding set to ``value``: 0 before a sum, -inf before a max.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('x',))
        >>> gda.PaddedArray.from_array(np.arange(3.0), mesh, ['x']).filled(-1).tolist()
        [0.0, 1.0, 2.0, -1.0]
        """
        return jax.numpy.where(self.mask(), self.array, value)

    # Shards.

    @property
    def local_shards(self) -> tuple[Shard[jax.Array], ...]:
        """The shards on devices of this process, in device order, without padding.

        The data of a device that holds padding alone has a size of 0. Replica ids are those of the
        padded array.
        """
        shards = LocalShards(self._shards(local_positions(self.mesh)))
        shards.num_global = self.grid.num_devices
        return shards

    @property
    def addressable_shards(self) -> tuple[Shard[jax.Array], ...]:
        """``local_shards`` by their name in ``jax.Array``."""
        return self.local_shards

    @property
    def global_shards(self) -> tuple[Shard[jax.Array | None], ...]:
        """The shards on all devices of the mesh; ``data`` is ``None`` in other processes."""
        devices = devices_of(self.mesh)
        return self._shards(dict(zip(devices, range(len(devices)), strict=True)))

    def _shards(self, positions: Mapping[Device, int]) -> tuple[Shard[Any], ...]:
        which = self.grid.shards_at(positions.values())
        indices = {device: index for device, (index, _) in zip(positions, which, strict=True)}
        data = _WithoutPadding(self.array, indices, self.grid.shard_shape)
        return tuple(Shard(device, *of, data) for device, of in zip(positions, which, strict=True))

    # Its values, without padding.

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole array without padding on the host.

        Raises:
          RuntimeError: this process does not hold every block of it, or it was deleted.
          TypeError: it is being traced, or holds no data.
        """
        array = self.array
        if not isinstance(array, np.ndarray):  # as jax.device_get leaves it
            array = self._live()
            if not is_all_here(array):
                raise RuntimeError(
                    f"this process does not hold every block of {self!r}; p.gather() gives the "
                    "whole value to every process"
                )
        value = np.asarray(array)[tuple(map(slice, self.shape))]
        return np.array(value, dtype=dtype, copy=copy)

    @public
    def gather(
        self, process: int | None = None, *, max_bytes: int | None = None
    ) -> np.ndarray[Any, Any] | None:
        """Return the whole value without padding on every process, or on one; communicates.

        As ``GlobalArray.gather``, with the same arguments and errors.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> gda.PaddedArray.from_array(np.arange(3), mesh, ['x']).gather()
        array([0, 1, 2], dtype=int32)
        """
        return moving.gather(self._live(), process, max_bytes, self.shape)

    @public
    def reshard(
        self,
        mesh_or_spec: Any,
        spec: Any = None,
        /,
        *,
        max_bytes: int | None = None,
        donate: bool = False,
    ) -> PaddedArray:
        """Move the data to another layout, padded as that needs it; communicates.

        As ``GlobalArray.reshard``, with the same arguments and errors; no padding is sent. The new
        padding is 0. A ``GlobalArray`` whose shape the new mesh does not divide goes there as
        ``PaddedArray(g.array, g.shape)``, and a padded one that the new mesh divides is
        ``GlobalArray(array=p.array)`` there.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> p = gda.PaddedArray.from_array(np.arange(10), mesh, ['x'])
        >>> p.reshard(jax.sharding.Mesh(mesh.devices[:4], ('y',)), ['y']).padded_shape
        (12,)
        """
        array: Any = self.array
        if not isinstance(array, jax.ShapeDtypeStruct):
            array = self._live()
        moved = moving.reshard(
            array,
            mesh_or_spec,
            spec,
            shape=self.shape,
            max_bytes=max_bytes,
            donate=donate,
            name="PaddedArray.reshard",
        )
        return PaddedArray(moved, self.shape)

    @public
    def fingerprint(self) -> str:
        """Return the digest of the value without padding; communicates as ``GlobalArray`` does.

        It is the fingerprint of the NumPy array, whatever the padding.

        >>> import gda, jax, numpy as np
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
        >>> data = np.arange(3, dtype=np.int32)
        >>> p = gda.PaddedArray.from_array(data, mesh, ['x'], fill=9)
        >>> p.fingerprint() == gda.fingerprint(data)
        True
        """
        return fingerprint.fingerprint_of(self._live(), self._grid_with_processes())

    # Its life on the devices.

    def block_until_ready(self) -> Self:
        """Wait until the data is there, and return the container."""
        self._live().block_until_ready()
        return self

    def delete(self) -> None:
        """Free the device memory now."""
        self._real().delete()

    def is_deleted(self) -> bool:
        """Return True if the data was deleted or donated."""
        return self._real().is_deleted()

    def _real(self) -> jax.Array:
        if not isinstance(self.array, jax.Array):
            raise not_an_array_error(self.array)
        return real(self.array, _INSIDE_JIT)

    def _live(self) -> jax.Array:
        array = self._real()
        if array.is_deleted():
            raise deleted_error(array, "PaddedArray", self.shape)
        return array

    def _grid_with_processes(self) -> ShardGrid:
        grid, processes = self.grid, processes_of(self.mesh)
        return ShardGrid(self.shape, grid.mesh_shape, grid.spec, pad=True, process_of=processes)

    # As a Python object.

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a PaddedArray is immutable; {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a PaddedArray is immutable; {name} cannot be deleted")

    def __repr__(self) -> str:
        return describe(self.array, "PaddedArray", self.shape)

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook; None if there is none, so that it shows the text."""
        from gda.show.page import html_or_none  # here: only notebooks need it

        return html_or_none(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return libraries.treescope_repr(self, path, subtree_renderer)

    def __copy__(self) -> Self:
        return type(self)(self.array, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if is_tracer(self.array):
            return self.__copy__()  # in a trace nothing can be written to
        array = self._live()
        return type(self)(jax.device_put(array, array.sharding, may_alias=False), self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the data without padding, and the layout; the padding of a restored array is 0.

        Raises:
          TypeError: it is being traced, or this process does not hold every block of it.
        """
        state = pickling.dump(self._live(), self.sharding, self.shape)
        return self._unpickled, (tuple(state), self.shape)

    @classmethod
    def _unpickled(cls, state: tuple[Any, ...], shape: Shape) -> Self:
        return cls(pickling.load(pickling.State(*state), is_padded=True), shape)

    def __eq__(self, other: object) -> bool:
        # jax.tree.map(lambda x: x.sharding, tree) puts shardings into containers, and such trees
        # are compared.
        if hasattr(self.array, "dtype"):
            _refuse_operator()
        return isinstance(other, PaddedArray) and (self.array, self.shape) == (
            other.array,
            other.shape,
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    # NumPy asks this before its own operators.
    __array_priority__ = 200


def _refuse_operator(*_: object) -> NoReturn:
    raise TypeError(
        "a PaddedArray has no operators, because they would compute on its padding too; use "
        "p.array, or p.filled(value), which sets the padding"
    )


for _name in (
    *("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool"),
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rmatmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror"),
    "rxor",
):
    setattr(PaddedArray, f"__{_name}__", _refuse_operator)


class _WithoutPadding(DataByDevice):
    """The data of each device without padding."""

    __slots__ = ("_block_shape", "_index_on")

    kind = "PaddedArray"

    def __init__(
        self, array: jax.Array, index_on: Mapping[Device, Index], block_shape: Shape
    ) -> None:
        super().__init__(array)
        self._index_on, self._block_shape = index_on, block_shape

    def on(self, device: Device | None) -> jax.Array | None:
        data = super().on(device)
        if data is None or device is None:
            return None
        return without_padding(data, shape_at(self._index_on[device], self._block_shape))


def _is_in_shard_map(array: Any) -> bool:
    return is_tracer(array) and AxisType.Manual in jax.typeof(array).sharding.mesh.axis_types


@lru_cache(maxsize=256)
def _grid_of(shape: Shape, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> ShardGrid:
    return ShardGrid(shape, mesh.shape, spec, pad=True)


def _mask(shape: Shape, sizes: Shape, sharding: NamedSharding | None) -> jax.Array:
    mask = jax.numpy.ones((1,) * len(shape), bool)
    for dimension, (size, padded) in enumerate(zip(shape, sizes, strict=True)):
        if padded > 1:
            place = jax.lax.broadcasted_iota(np.int32, sizes, dimension, out_sharding=sharding)
            mask = mask & (place < size)
    return mask


@lru_cache(maxsize=256)
def _mask_maker(
    shape: Shape, sizes: Shape, sharding: NamedSharding, is_explicit: bool
) -> Callable[[], jax.Array]:
    make = partial(_mask, shape, sizes, sharding if is_explicit else None)
    return jax.jit(make, out_shardings=sharding)


jax.tree_util.register_dataclass(PaddedArray, data_fields=["array"], meta_fields=["shape"])
jax.export.register_pytree_node_serialization(
    PaddedArray,
    serialized_name="gda.PaddedArray",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(map(tuple, json.loads(text))),
)

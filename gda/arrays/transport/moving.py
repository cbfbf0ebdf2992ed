"""Moves of the data of an array: to another layout, or the whole to the host of every process."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from gda.arrays.bits import is_narrow
from gda.arrays.buffers import aligned_empty
from gda.arrays.dtypes import is_extended
from gda.arrays.liveness import elsewhere_error
from gda.arrays.process_local import distinct_shards
from gda.arrays.transport.carrying import Order, carry
from gda.arrays.transport.to_host import MAX_BYTES, one_by_one
from gda.layout.grid import ShardGrid
from gda.layout.spec import Index, Shape, SpecLike
from gda.mesh import (
    Device,
    MeshAndSpec,
    MeshLike,
    devices_of,
    grid_of_array,
    mesh_and_spec,
    mesh_of_all,
    named_sharding,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import call_fields, done_by_all, wait_for_arrays, watching
from gda.multihost.descriptions import Description
from gda.multihost.roll import Roll
from gda.multihost.settings import own_settings


class Wanted(NamedTuple):
    """An array, and the layout that it is to have.

    Attributes:
      array: a ``jax.Array``, or in a process without its data a ``jax.ShapeDtypeStruct`` with its
        sharding.
      over: the new mesh and spec. Without a kind of memory, that of the array stays.
      shape: that of the array without padding, if it may be padded; else ``None``.
      path: its place in a tree.
    """

    array: Any
    over: MeshAndSpec
    shape: Shape | None = None
    path: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of both layouts."""
        return *devices_of(sharding_of(self.array).mesh), *devices_of(self.over.mesh)

    @property
    def is_local(self) -> bool:
        """True if this process has the devices of both layouts."""
        mine = jax.process_index()
        return all(device.process_index == mine for device in self.devices)

    def order(self) -> Order:
        """Return both layouts; raise if the new one does not fit."""
        array, (mesh, spec, kind) = self.array, self.over
        shape = array.shape if self.shape is None else self.shape
        before = sharding_of(array)
        if not isinstance(array, jax.Array) and before.addressable_devices:
            raise ValueError(
                "this process has devices of the mesh that the array is on, so it must give the "
                "array and not a jax.ShapeDtypeStruct"
            )
        source, target = (
            ShardGrid(
                shape,
                of_mesh.shape,
                of_spec,
                pad=self.shape is not None,
                process_of=processes_of(of_mesh),
            )
            for of_mesh, of_spec in [(before.mesh, before.spec), (mesh, spec)]
        )
        kind = kind or before.memory_kind
        return Order(
            array, source, target, named_sharding(target.padded_shape, mesh, target.spec, kind)
        )


def reshard(
    array: Any,
    mesh_or_spec: MeshLike | SpecLike,
    spec: SpecLike | None = None,
    *,
    shape: Shape | None = None,
    max_bytes: int | None = None,
    donate: bool = False,
    name: str = "GlobalArray.reshard",
) -> jax.Array:
    """Return the array in another layout, as ``GlobalArray.reshard`` says.

    Args:
      array, shape: as in ``Wanted``.
    """
    mesh: Any = mesh_or_spec
    if not isinstance(mesh_or_spec, Sharding):
        is_mesh = isinstance(mesh_or_spec, Mesh)
        if is_mesh != (spec is not None):
            raise TypeError("write g.reshard(spec), g.reshard(mesh, spec) or g.reshard(sharding)")
        mesh, spec = (mesh, spec) if is_mesh else (sharding_of(array).mesh, mesh)
    wanted = Wanted(array, mesh_and_spec(mesh, spec), shape)
    (moved,) = reshard_all([wanted], name, max_bytes, donate)
    return moved


def reshard_all(
    wanted: Sequence[Wanted], name: str, max_bytes: int | None = None, donate: bool = False
) -> list[jax.Array]:
    """Return the arrays in their new layouts, which ``carrying`` brings about.

    JAX moves an array that is in this process and stays there, and one whose blocks stay whole on
    the same devices.
    """
    between = [each for each in wanted if not each.is_local]
    mesh = mesh_of_all(device for each in between for device in each.devices)
    processes = () if mesh is None else processes_of(mesh).numbers

    def prepare() -> tuple[list[Order], int]:
        return [each.order() for each in wanted], _max_bytes_of(max_bytes)

    def asked(prepared: tuple[list[Order], int]) -> Description:
        orders, most = prepared
        return call_fields(_layouts(wanted, orders), {"max_bytes": most, "donate": donate})

    orders, max_bytes = done_by_all(prepare, asked, name, processes)
    wait_for_arrays(name, [each.array for each in between], processes)
    moved: dict[int, jax.Array] = {}
    for number, order in enumerate(orders):
        if not donate and _is_for_jax(order):
            moved[number] = _moved_by_jax(order, name)
    rest = [order for number, order in enumerate(orders) if number not in moved]
    carried = iter(carry(rest, name, max_bytes, donate))
    return [moved[n] if n in moved else next(carried) for n in range(len(orders))]


def _layouts(wanted: Sequence[Wanted], orders: Sequence[Order]) -> Any:
    """Return the layouts of arrays that move between processes, now and afterwards."""
    layouts = {}
    for each, order in zip(wanted, orders, strict=True):
        if each.is_local:
            continue
        array, before = order.array, sharding_of(order.array)
        now = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=before)
        layout = {"now": now, "wanted": order.sharding}
        if order.source.is_padded or order.target.is_padded:
            layout["shape"] = jax.ShapeDtypeStruct(order.source.global_shape, array.dtype)
        layouts[each.path] = layout
    return layouts.get("", layouts)


def _is_for_jax(order: Order) -> bool:
    """Return whether JAX moves it as well: within this process, or by whole blocks."""
    if not isinstance(order.array, jax.Array) or not order.sharding.addressable_devices:
        return False
    if order.source.is_padded or order.target.is_padded:  # whose new padding is to be 0
        return False
    if not order.array.size:  # JAX may have blocks of other shapes than the sharding says
        return False
    if order.on_cpu and is_narrow(order.array.dtype):  # whose NaNs XLA changes
        return False
    is_same_set = order.array.sharding.device_set == order.sharding.device_set
    are_blocks_whole = order.source.shard_shape == order.target.shard_shape
    return order.is_local or (is_same_set and are_blocks_whole)


def _moved_by_jax(order: Order, name: str) -> jax.Array:
    def move() -> jax.Array:
        with own_settings():
            array = _over_auto_axes(order.array, order.sharding.mesh)
            return jax.device_put(array, order.sharding)

    if order.is_local:
        return move()
    with watching(name, processes_of(order.sharding.mesh).numbers) as roll:
        return roll.result(roll.begin(lambda: move().block_until_ready()))


def _over_auto_axes(array: jax.Array, mesh: Any) -> jax.Array:
    """Return the array for JAX to move to ``mesh``; the data stays where it is.

    JAX 0.8 cannot move an array over Explicit axes to a mesh whose axes have other names or sizes.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape == mesh.shape:
        return array
    before: Any = sharding.mesh
    if AxisType.Explicit not in before.axis_types:
        return array
    twin = Mesh(before.devices, before.axis_names)
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(twin, sharding.spec, memory_kind=sharding.memory_kind),
        [shard.data for shard in array.addressable_shards],
        dtype=array.dtype,
    )


def gather(
    array: jax.Array,
    process: int | None = None,
    max_bytes: int | None = None,
    shape: Shape | None = None,
) -> np.ndarray[Any, Any] | None:
    """Return the whole value on the host of every process, or of one.

    See ``GlobalArray.gather``.

    Args:
      shape: the first elements of each dimension that are wanted, where it is not all of them.
    """
    if is_extended(array.dtype):
        raise TypeError(
            f"NumPy has no {array.dtype}; gather the numbers of the keys: "
            "GlobalArray.from_array(jax.random.key_data(g.array)).gather()"
        )
    name = "GlobalArray.gather" if shape is None else "PaddedArray.gather"
    shape = array.shape if shape is None else shape
    if array.is_fully_addressable:
        _max_bytes_of(max_bytes)
        is_wanted = _is_wanted(process)
        return np.array(np.asarray(array)[tuple(map(slice, shape))]) if is_wanted else None
    pieces = _Pieces(array)

    def prepare() -> tuple[int, np.ndarray[Any, Any] | None]:
        most = _max_bytes_of(max_bytes)
        return most, aligned_empty(shape or (1,), array.dtype) if _is_wanted(process) else None

    def asked(prepared: tuple[int, np.ndarray[Any, Any] | None]) -> Description:
        most, _ = prepared
        return call_fields(array, {"shape": shape, "process": process, "max_bytes": most})

    max_bytes, value = done_by_all(prepare, asked, name)
    wait_for_arrays(name, array)
    with watching(name, pieces.processes) as roll:
        own = pieces.are_everywhere
        for index, piece in pieces.local(max_bytes) if own else pieces.gathered(roll, max_bytes):
            if value is not None:
                place = value[index]
                place[...] = np.atleast_1d(piece)[tuple(map(slice, place.shape))]
    return None if value is None else value.reshape(shape)


def _max_bytes_of(max_bytes: int | None) -> int:
    max_bytes = MAX_BYTES if max_bytes is None else operator.index(max_bytes)
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be 1 or more, not {max_bytes}")
    return max_bytes


def _is_wanted(process: int | None) -> bool:
    if process is None:
        return True
    number, count = operator.index(process), jax.process_count()
    if not 0 <= number < count:
        raise ValueError(f"process must be None or from 0 to {count - 1}, not {process}")
    return number == jax.process_index()


class _Pieces:
    """The blocks of an array on their way to the hosts: those here, or those of all processes.

    Each block is sent once, by a process that holds it, some of its rows in each round, so that no
    device has more than ``max_bytes`` of others at a time. A scalar counts as one row.
    """

    def __init__(self, array: jax.Array) -> None:
        self._grid = grid_of_array(array)
        mesh: Any = sharding_of(array).mesh
        numbers = processes_of(mesh).numbers
        if len(numbers) == 1:
            raise elsewhere_error("gather()", numbers[0])
        self.processes = tuple(range(jax.process_count()))
        self._views = [self._grid.view(process) for process in self.processes]
        self._array = array

    @property
    def are_everywhere(self) -> bool:
        """True if every process has every block."""
        return all(len(view.block_ids) == self._grid.num_shards for view in self._views)

    def local(self, max_bytes: int) -> Iterator[tuple[Index, np.ndarray[Any, Any]]]:
        """Return the blocks of this process."""
        shards = distinct_shards(self._array, self._grid)
        indices = map(self._grid.block_index, shards)
        return one_by_one(zip(indices, shards.values(), strict=True), max_bytes)

    def gathered(self, roll: Roll, max_bytes: int) -> Iterator[tuple[Index, np.ndarray[Any, Any]]]:
        """Yield parts of all blocks. Communicates."""
        written = [view.written_blocks() for view in self._views]
        shards = distinct_shards(self._array, self._grid)
        mine = ((number, shards[number]) for number in written[jax.process_index()])
        on_host = one_by_one(mine, max_bytes)
        block_shape = self._grid.shard_shape or (1,)
        rows, row_shape = block_shape[0], block_shape[1:]
        row_bytes = math.prod(row_shape) * self._array.dtype.itemsize
        if not rows * row_bytes:
            return
        step = min(rows, max(1, max_bytes // (row_bytes * len(written))))
        nothing = None, np.zeros((0, *row_shape), self._array.dtype)
        for turn in range(max(map(len, written))):
            block = np.atleast_1d(next(on_host, nothing)[1])
            for start in range(0, rows, step):
                part = np.zeros((step, *row_shape), self._array.dtype)
                some = block[start : start + step]
                part[: len(some)] = some
                received = roll.all_gather(part.view(np.uint8).ravel())
                for numbers, data in zip(written, received, strict=True):
                    if turn < len(numbers):
                        index = self._rows_of(numbers[turn], start, min(start + step, rows))
                        piece = data.view(self._array.dtype).reshape(part.shape)
                        yield index, piece[: min(step, rows - start)]

    def _rows_of(self, block: int, start: int, stop: int) -> Index:
        first, *rest = self._grid.block_index(block) or (slice(None),)
        offset = first.start or 0
        return slice(offset + start, offset + stop), *rest

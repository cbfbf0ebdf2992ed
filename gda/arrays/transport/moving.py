"""Moves of an array: to another layout, or all of it to the host of every process."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from gda.arrays.buffers import Buffers, aligned_empty
from gda.arrays.dtypes import is_extended, is_narrow, is_weak, plain_dtype, weakly_typed
from gda.arrays.fingerprints.fingerprint import fingerprint_of
from gda.arrays.liveness import check_held
from gda.arrays.process_local import data_by_device, distinct_shards
from gda.arrays.transport.carrying import Relayout, carry
from gda.arrays.transport.exchanging import Sent, exchange
from gda.arrays.transport.staging import box
from gda.arrays.transport.to_host import MAX_BYTES, one_by_one
from gda.layout.cover import Part, move_of
from gda.layout.indices import bounded, common_box, index_at, start_of
from gda.layout.reshard.rounds import MovedPiece
from gda.layout.spec import Index, Shape, SpecLike, check_reduced
from gda.mesh import (
    Device,
    MeshLike,
    devices_of,
    grid_of_array,
    memory_kind_of,
    mesh_and_spec,
    own_settings,
    processes_of,
    sharding_of,
)
from gda.multihost.agreement import check_same_call, communicates, wait_for_arrays, watching
from gda.multihost.failure_watch import FailureWatch

_LEAST_PIECE_BYTES = 2**16
# On CPU, NumPy moves 256 bytes in 0.2 ms, JAX in 0.2 to 0.7 ms, and carry in 2 ms.
_SMALL_BYTES = 4 * 2**20
_MOST_COPIES = 4096  # of pairs of blocks


@communicates("reshard", lambda given: [given["array"], given["mesh_or_spec"]])
def reshard(
    array: Any,
    mesh_or_spec: MeshLike | SpecLike,
    spec: SpecLike | None = None,
    shape: Shape | None = None,
    max_device_bytes: int | None = None,
    donate: bool = False,
) -> jax.Array:
    """Return the array in another layout, as ``GlobalArray.reshard`` says."""
    mesh: Any = mesh_or_spec
    if not isinstance(mesh_or_spec, Sharding):
        is_mesh = isinstance(mesh_or_spec, Mesh)
        if is_mesh != (spec is not None):
            raise TypeError("write g.reshard(spec), g.reshard(mesh, spec) or g.reshard(sharding)")
        mesh, spec = (mesh, spec) if is_mesh else (sharding_of(array).mesh, mesh)
    relayout = Relayout(array, mesh_and_spec(mesh, spec), shape)
    (moved,) = reshard_all([relayout], "reshard", max_device_bytes, donate)
    return moved


def reshard_all(
    relayouts: Sequence[Relayout],
    name: str,
    max_device_bytes: int | None = None,
    donate: bool = False,
    copies: Sequence[Relayout] = (),
    others: Iterable[int] = (),
    kept: Sequence[Relayout] = (),
) -> list[jax.Array]:
    """Return the arrays in their new layouts.

    NumPy moves those of ``_is_small_on_cpu``, JAX those of ``_is_for_jax``, and ``carry`` the
    others. ``copies`` and ``kept`` do not move: the processes compare the values of ``copies``,
    which all have, and the layouts of ``kept``. They meet ``others`` even if nothing moves between
    them.
    """
    # Without moves inside one process, which the others need not know.
    between = [each for each in relayouts if each.processes[1:]]
    copies = [each for each in copies if processes_of(each.sharding.mesh).numbers[1:]]
    numbers = {*others}.union(*(each.processes for each in between))
    numbers = numbers.union(*(processes_of(each.sharding.mesh).numbers for each in copies))
    processes = tuple(sorted(numbers))

    for each in relayouts:
        each.check()
    most_bytes = _most_bytes(max_device_bytes)
    layouts = {each.path: each.described() for each in [*between, *kept]}
    layouts |= {each.path: {"wanted": each.sharding} for each in copies}
    layouts = layouts.get("", layouts)
    arguments: dict[str, object] = {"max_device_bytes": most_bytes, "donate": donate}
    for each in copies:
        arguments[f"value of {each.path}"] = fingerprint_of(each.array, each.source)
    check_same_call(name, layouts, arguments, processes)
    wait_for_arrays(name, [each.array for each in between], processes)
    arrays: dict[Relayout, jax.Array] = {}
    here: list[Relayout] = []
    elsewhere: list[Relayout] = []  # within one other process
    for each in relayouts:
        if not donate and _is_small_on_cpu(each):
            arrays[each] = _moved_on_host(each)
        elif not donate and _is_for_jax(each, most_bytes):
            arrays[each] = _moved_by_jax(each, name)
        else:
            (here if each.is_local or each.processes[1:] else elsewhere).append(each)
    for some in (here, elsewhere):
        arrays |= zip(some, carry(some, name, most_bytes, donate), strict=True)
    return [
        weakly_typed(array) if is_weak(each.array) and not is_weak(array) else array
        for each, array in ((each, arrays[each]) for each in relayouts)
    ]


def _is_small_on_cpu(each: Relayout) -> bool:
    """Return True for a small array that goes between CPU devices of this process."""
    array = each.array
    if not isinstance(array, jax.Array) or is_extended(array.dtype) or not each.is_local:
        return False
    if any(device.platform != "cpu" for device in each.devices):
        return False
    count = each.source.num_shards * each.target.num_shards
    is_small = 0 < array.nbytes <= _SMALL_BYTES and count <= _MOST_COPIES
    return is_small and not array.sharding.is_equivalent_to(each.sharding, array.ndim)


def _moved_on_host(each: Relayout) -> jax.Array:
    array, target = each.array, each.target
    layouts = (array.shape, sharding_of(array)), (target.padded_shape, each.sharding)
    with own_settings(), jax.enable_x64(True):
        dtype = plain_dtype(array.dtype)
        data_on = {
            device.id: np.asarray(data).view(dtype)
            for device, data in data_by_device(array).items()
        }
        parts_of = _parts_of(target.global_shape, *layouts)
        buffers, blocks = Buffers(len(parts_of)), dict[Shape, Any]()
        for start, parts in parts_of.items():
            block = buffers.empty(target.shard_shape, dtype)
            if target.is_padded:
                block[...] = 0
            for part in parts:  # with the dots, a part of a scalar is a view too
                block[(*part.in_box, ...)] = data_on[part.block][(*part.in_block, ...)]
            blocks[start] = block.view(array.dtype)

        def block_at(index: Any) -> Any:
            return blocks[start_of(index)]

        return jax.make_array_from_callback(*layouts[1], block_at)


_Layout = tuple[Shape, NamedSharding]


@lru_cache(maxsize=256)  # most arrays of a tree have the shapes and layouts of others
def _parts_of(shape: Shape, now: _Layout, wanted: _Layout) -> dict[Shape, tuple[Part, ...]]:
    """Return, by start of each new block, its parts in blocks that devices hold, by their ids."""
    whole = index_at((0,) * len(shape), shape)
    held: dict[Shape, tuple[int, Index]] = {}
    for device, block in _boxes(*now).items():
        if (own := common_box(block, whole)) is not None:
            held.setdefault(start_of(own), (device.id, own))
    blocks = dict(held.values())
    return {start_of(box): move_of(blocks, box).parts for box in _boxes(*wanted).values()}


def _boxes(shape: Shape, sharding: NamedSharding) -> dict[Device, Index]:
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    return {device: bounded(index, shape) for device, index in indices.items()}


def _is_for_jax(each: Relayout, most_bytes: int) -> bool:
    """Return True if JAX can move an array correctly and as quickly.

    The devices stay, in their order, and so does the kind of memory: between some other orders XLA
    ends the process, and with another kind JAX raises. The blocks stay whole, or the array is small
    and within this process.
    """
    if not isinstance(each.array, jax.Array) or not each.sharding.addressable_devices:
        return False
    if each.source.is_padded or each.target.is_padded:  # new padding must be 0
        return False
    if not each.array.size:  # JAX may have blocks of other shapes than the sharding says
        return False
    if each.devices[0].platform == "cpu" and is_narrow(each.array.dtype):  # XLA changes NaNs
        return False
    before, after = sharding_of(each.array), each.sharding
    meshes: Any = before.mesh, after.mesh
    if devices_of(meshes[0]) != devices_of(meshes[1]):
        return False
    if memory_kind_of(before) != memory_kind_of(after):
        return False
    if before.mesh.shape != after.mesh.shape and AxisType.Explicit in before.mesh.axis_types:
        return False  # JAX 0.8 cannot
    if each.source.shard_shape == each.target.shard_shape:
        return True
    # XLA may allocate the whole array for each device.
    is_small = each.array.nbytes <= min(most_bytes, _SMALL_BYTES)
    return each.is_local and (is_small or each.source.num_shards == 1)


def _moved_by_jax(each: Relayout, name: str) -> jax.Array:
    def move() -> jax.Array:
        with own_settings(), jax.enable_x64(True):
            return jax.device_put(each.array, each.sharding)

    if each.is_local:
        return move()
    with watching(name, processes_of(each.sharding.mesh).numbers) as watch:
        return watch.result(watch.begin(lambda: move().block_until_ready()))


def gather(
    array: jax.Array,
    process: int | None = None,
    max_device_bytes: int | None = None,
    shape: Shape | None = None,
) -> np.ndarray[Any, Any] | None:
    """Return the whole value as ``GlobalArray.gather``; ``shape`` is that without padding."""
    if is_extended(array.dtype):
        wanted = "GlobalArray.from_array(jax.random.key_data(g.array))"
        raise TypeError(f"NumPy has no {array.dtype}; gather {wanted}")
    check_reduced(sharding_of(array).spec)
    name = "GlobalArray.gather" if shape is None else "PaddedArray.gather"
    shape = array.shape if shape is None else shape
    if array.is_fully_addressable:
        _most_bytes(max_device_bytes)
        is_wanted = _is_wanted(process)
        with own_settings():
            return np.array(np.asarray(array)[tuple(map(slice, shape))]) if is_wanted else None
    check_held(array, "gather()")
    most_bytes = _most_bytes(max_device_bytes)
    value = aligned_empty(shape, array.dtype) if _is_wanted(process) else None
    arguments = {"shape": shape, "process": process, "max_device_bytes": most_bytes}
    check_same_call(name, array, arguments)
    with watching(name, tuple(range(jax.process_count()))) as watch:
        _gather_into(value, array, shape, watch, most_bytes)
    return value


def _gather_into(
    value: np.ndarray[Any, Any] | None,
    array: jax.Array,
    shape: Shape,
    watch: FailureWatch,
    most_bytes: int,
) -> None:
    """Fill ``value`` with the blocks of all processes; it is ``None`` where one only sends."""
    grid, me = grid_of_array(array), jax.process_index()
    shards = distinct_shards(array, grid)
    views = [grid.view(process) for process in range(jax.process_count())]
    if value is not None:
        for block, data in one_by_one(shards.items(), most_bytes):
            place = value[(*grid.block_index(block), ...)]  # with the dots, also of a scalar a view
            place[...] = data[tuple(map(slice, place.shape))]
    if all(len(view.block_ids) == grid.num_shards for view in views):
        return
    # A piece is copied where it is not contiguous on the host, so it is not large.
    itemsize, everybody = array.dtype.itemsize, tuple(range(jax.process_count()))
    most = max(most_bytes // len(everybody), _LEAST_PIECE_BYTES) // itemsize
    pieces: list[MovedPiece] = []
    for process, view in enumerate(views):
        for block in view.written_blocks():
            along = zip(shape, grid.block_index(block), strict=True)
            ranges = [range(size)[part] for size, part in along]
            starts, sizes = tuple(each.start for each in ranges), tuple(map(len, ranges))
            if math.prod(sizes):
                whole = MovedPiece(block, process, me, (0,) * len(sizes), starts, sizes)
                pieces += whole.parts(most)
    mine = ((block, shards[block]) for block in views[me].written_blocks())
    on_host = one_by_one(mine, most_bytes)
    number, data = -1, np.empty(0)

    def memory_of(part: int) -> np.ndarray[Any, Any] | None:
        nonlocal number, data
        piece = pieces[part]
        if value is not None:
            return box(value, piece.target_starts, piece.sizes)
        if piece.source != me:
            return None
        while number != piece.leaf:
            number, data = next(on_host)
        return box(data, piece.source_starts, piece.sizes)

    parts = [Sent(piece.source, everybody, piece.size * itemsize) for piece in pieces]
    exchange(parts, memory_of, watch, most_bytes)


def _most_bytes(max_device_bytes: int | None) -> int:
    most_bytes = MAX_BYTES if max_device_bytes is None else operator.index(max_device_bytes)
    if most_bytes < 1:
        raise ValueError(f"max_device_bytes must be 1 or more, not {most_bytes}")
    return most_bytes


def _is_wanted(process: int | None) -> bool:
    if process is None:
        return True
    number, count = operator.index(process), jax.process_count()
    if not 0 <= number < count:
        raise ValueError(f"process must be None or from 0 to {count - 1}, not {process}")
    return number == jax.process_index()

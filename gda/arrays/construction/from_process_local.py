"""One global array from the part that each process has; ``process_local`` is the way back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from ctypes import addressof, c_char
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gda.arrays.buffers import ALIGNMENT, Buffers
from gda.arrays.construction.blocks import BlockReader, is_on_cpu
from gda.arrays.construction.placing import Block, hashable_over, local_blocks_over
from gda.arrays.dtypes import KEPT_DTYPES, is_extended, is_weak, narrowed_dtype
from gda.arrays.liveness import deleted_error, kind_error, traced_error
from gda.arrays.process_local import data_by_device, local_sharding
from gda.arrays.transport.carrying import Relayout
from gda.arrays.transport.moving import reshard_all
from gda.layout.process_view import infer_global_shape
from gda.layout.spec import Shape, SpecLike, check_reduced, check_shape
from gda.mesh import (
    MeshAndSpec,
    MeshLike,
    is_tracer,
    mesh_and_spec,
    processes_of,
    skip_spec_if_sharding,
    view_of,
)
from gda.multihost.agreement import together
from gda.storage.casts import Origin, cast_into


def array_from_process_local(
    local_data: Any,
    mesh: MeshLike,
    spec: Any = None,
    global_shape: Iterable[int | None] | None = None,
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
    *,
    batch: BatchBuffers | None = None,
) -> jax.Array:
    """Build an array of local data; ``batch`` is for the leaves of a tree."""
    given = local_data, mesh, spec, global_shape, dtype, copy, batch
    return together("GlobalArray.from_process_local", mesh, lambda _: _built(*given))


def _built(
    local_data: Any,
    mesh: MeshLike,
    spec: Any,
    global_shape: Iterable[int | None] | None,
    dtype: npt.DTypeLike | None,
    copy: bool | None,
    batch: BatchBuffers | None,
) -> jax.Array:
    if not isinstance(spec, PartitionSpec):
        spec, global_shape = skip_spec_if_sharding(mesh, spec, global_shape)
    local = as_array(local_data)
    plan = _plan_for(local, mesh, spec, global_shape)
    whole = plan.whole
    # The usual leaf of a batch first, because each microsecond here counts in a loop over steps.
    if (
        dtype is None
        and copy is None
        and type(local) is np.ndarray
        and plan.is_copied_by_jax(local)
    ):
        array = whole.place([local[index] for index in plan.indices], local.dtype)
        if batch is None:
            return array.block_until_ready()
        batch.pending.append(array)
        return array
    whole.check_dtype_is_known(dtype)
    reader = BlockReader(whole, dtype, copy, is_weak=is_weak(local))
    if not whole.devices:
        return whole.place([], reader.dtype)
    if is_extended(local.dtype):
        if reader.wanted_dtype not in (None, local.dtype):
            raise reader.keys_error(whole.indices[0], local.dtype)
        return _from_key_data(local, mesh, spec, global_shape)
    return _placed(local, plan, reader, batch)


def _placed(
    local: Any, plan: _LocalPlan, reader: BlockReader, batch: BatchBuffers | None
) -> jax.Array:
    whole = plan.whole
    if isinstance(local, jax.Array):
        if plan.sharding is not None and _stays_on_devices(local):
            return _from_pieces(local, plan.sharding, reader)
        # On CPU this is the memory of the array itself, so a block must be a copy.
        local, reader.copy = np.asarray(local), reader.copy or None
    if reader.wanted_dtype is None and type(local) is np.ndarray:
        try:
            blocks = _blocks_at_once(local, plan, reader.copy, batch and batch.buffers)
        except (TypeError, ValueError):
            pass  # reported below, with index and element
        else:
            return reader.typed(whole.place(blocks, local.dtype))
    take = iter(plan.indices).__next__
    return reader.place(reader.read(lambda _: local[take()], whole.distinct))


class BatchBuffers:
    """The state that the leaves of a tree share while they are built; its end waits for all."""

    def __init__(self, leaves: int) -> None:
        self.buffers = Buffers(leaves)  # small leaves share their memory
        self.pending: list[jax.Array] = []  # JAX is still copying their data

    def __enter__(self) -> BatchBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        for array in self.pending:
            array.block_until_ready()


class _LocalPlan:
    """The blocks of this process, and their ``indices`` within its local data.

    ``sharding`` is that of the local array; ``None`` if the local data is something else.
    """

    def __init__(
        self,
        local_shape: Shape,
        mesh: Mesh,
        spec: SpecLike,
        memory_kind: str | None,
        global_shape: Shape | None,
    ) -> None:
        if global_shape is None:
            processes = processes_of(mesh)
            me = jax.process_index()
            global_shape = infer_global_shape(local_shape, mesh.shape, spec, processes, me)
        self.whole = local_blocks_over(global_shape, MeshAndSpec(mesh, spec, memory_kind))
        view = view_of(global_shape, mesh, self.whole.grid.spec)
        self.indices = view.indices_within(local_shape) if self.whole.devices else []
        # True if the local data is its blocks one after the other, each in one piece.
        block = self.whole.grid.shard_shape
        rows = len(self.indices) * block[0] if block else 0
        self.is_in_rows = 0 not in local_shape and local_shape == (rows, *block[1:])
        self.alignment = ALIGNMENT * len(self.indices)
        # JAX would copy a block once for each device that holds it.
        is_one_each = len(self.whole.distinct) == len(self.whole.devices)
        is_near = self.whole.is_in_default_memory
        # Accelerators never adopt memory of the host.
        self._is_always_copied = is_near and self.whole.devices[0].platform != "cpu"
        self._may_be_copied_by_jax = is_near and self.is_in_rows and is_one_each
        self.sharding: NamedSharding | None = None
        if view.is_regular and view.local_shape == local_shape:
            with suppress(ValueError):  # the devices form no subcube of the mesh
                self.sharding = local_sharding(global_shape, mesh, spec)
        if self.sharding is not None and memory_kind is not None:
            self.sharding = self.sharding.with_memory_kind(memory_kind)

    def is_copied_by_jax(self, local: np.ndarray[Any, Any]) -> bool:
        """Return True if JAX copies every block, by several threads, until the array is ready."""
        if self._is_always_copied:
            return local.dtype in KEPT_DTYPES
        may_be_copied = self._may_be_copied_by_jax and local.dtype in KEPT_DTYPES
        if not (may_be_copied and local.flags.c_contiguous):
            return False
        try:
            # Other ways to ask for the address take four times as long.
            address = addressof(c_char.from_buffer(local))  # pyright: ignore
        except TypeError:  # read-only, as also after numpy.broadcast_arrays: gda copies it
            return False
        # No block begins where JAX takes memory as it is.
        return address % math.gcd(local.nbytes // len(self.indices), ALIGNMENT) != 0


def _blocks_at_once(
    local: np.ndarray[Any, Any], plan: _LocalPlan, copy: bool | None, buffers: Buffers | None
) -> list[Block]:
    """Return the blocks in memory of gda, quicker than a reader; raise if values do not fit."""
    is_done = copy is False
    final = narrowed_dtype(local.dtype, "local data of dtype ")
    if local.dtype != final:
        narrowed = Buffers(count=1).empty(local.shape, final)
        cast_into(narrowed, local, Origin.of_block("local data", (0,) * local.ndim))
        local = narrowed
        is_done = is_done or (plan.is_in_rows and not local.nbytes % plan.alignment)
    if is_done:
        return [local[index] for index in plan.indices]
    shape, dtype = plan.whole.grid.shard_shape, local.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    step = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if buffers is None:
        buffers = Buffers(count=1)
    memory = buffers.empty((len(plan.indices) * step,), np.dtype(np.uint8))
    if plan.is_in_rows and step == nbytes:
        copied = np.ndarray(local.shape, dtype, memory)
        np.copyto(copied, local)
        return [copied[index] for index in plan.indices]
    blocks: list[Block] = []
    for number, index in enumerate(plan.indices):
        block = np.ndarray(shape, dtype, memory, number * step)
        np.copyto(block, local[index])
        blocks.append(block)
    return blocks


def as_array(local_data: Any) -> Any:
    """Return local data as a ``jax.Array``, or as a NumPy array that other code may change."""
    if type(local_data) is np.ndarray:
        return local_data
    if not isinstance(local_data, jax.Array) and hasattr(local_data, "__jax_array__"):
        local_data = local_data.__jax_array__()
    if is_tracer(local_data):
        raise traced_error("local data")
    if isinstance(local_data, jax.Array):
        if local_data.is_deleted():
            raise deleted_error(local_data, "jax.Array")
        check_reduced(getattr(local_data.sharding, "spec", ()))
        if not local_data.is_fully_addressable:
            raise ValueError(
                f"local data of shape {local_data.shape} is a global array already: other "
                "processes hold parts of it. Use it unchanged, or wrap it with "
                "GlobalArray.from_array"
            )
        return local_data
    if isinstance(local_data, jax.Ref):  # the thread of a prefetch would read it at any time
        raise kind_error(local_data)
    return local_data if isinstance(local_data, np.ndarray) else np.asarray(local_data)


def _stays_on_devices(local: jax.Array) -> bool:
    """Return True if an array moves from device to device, and not through the host."""
    # Values made with x64, which is off now, must be checked. Between CPU devices JAX takes 8
    # times as long as through NumPy.
    is_narrowed = jax.dtypes.canonicalize_dtype(local.dtype) != local.dtype
    return not (is_narrowed or is_on_cpu(local))


def _from_pieces(local: jax.Array, sharding: NamedSharding, reader: BlockReader) -> jax.Array:
    if not local.sharding.is_equivalent_to(sharding, local.ndim):
        relayout = Relayout(local, mesh_and_spec(sharding, None))
        (local,) = reshard_all([relayout], "from_process_local")
    pieces = data_by_device(local)
    devices = reader.plan.devices
    buffers = [pieces[device] for device in devices]
    return reader.assemble(buffers, devices, "the local data", "mesh.local_devices")


def _from_key_data(
    keys: Any, mesh: MeshLike, spec: SpecLike | None, global_shape: Iterable[int | None] | None
) -> jax.Array:
    data = np.asarray(jax.random.key_data(keys))
    shape = None if global_shape is None else (*global_shape, *data.shape[keys.ndim :])
    plan = _plan_for(data, mesh, spec, shape)
    array = plan.whole.place(_blocks_at_once(data, plan, None, None), data.dtype)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(keys))


def _plan_for(
    local: Any, mesh: MeshLike, spec: SpecLike | None, global_shape: Iterable[int | None] | None
) -> _LocalPlan:
    shape = None
    if global_shape is not None:
        given: Any = tuple(global_shape)
        if None in given:  # as in JAX: a size to infer
            over = hashable_over(mesh, spec, local.shape)
            inferred = _cached_plan(local.shape, *over, None).whole.grid.global_shape
            if len(given) == len(inferred):
                given = [
                    own if one is None else one for one, own in zip(given, inferred, strict=True)
                ]
        shape = check_shape(given)
    if isinstance(mesh, Mesh) and isinstance(spec, PartitionSpec):
        return _cached_plan(local.shape, mesh, spec, None, shape)
    over = hashable_over(mesh, spec, local.shape if shape is None else shape)
    return _cached_plan(local.shape, *over, shape)


_cached_plan = lru_cache(maxsize=256)(_LocalPlan)

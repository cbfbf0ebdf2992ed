"""Arrays on their way from a checkpoint or an offer: their blocks on the host, and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gda.arrays.buffers import Buffers
from gda.arrays.construction.placing import LocalBlocks, local_blocks_over
from gda.arrays.dtypes import KEPT_DTYPES
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.arrays.weak_types import weakly_typed
from gda.layout.cover import holders_of
from gda.layout.indices import shape_at, start_of
from gda.layout.spec import Index, Shape
from gda.mesh import (
    MeshAndSpec,
    checked_partition_spec,
    memory_kind_of,
    mesh_grid,
    mesh_on,
    own_settings,
    processes_of,
)
from gda.storage.casts import Origin, cast
from gda.trees.records.recorded_tree import ArrayLeaf, check_keys, key_ndim, saved_type

# The container of an array; ``None`` for a ``jax.Array`` without one.
ContainerClass = type[GlobalArray] | type[PaddedArray] | None


class NeededBlock(NamedTuple):
    """A block of an array, without its padding."""

    number: int | None  # of the blocks of this process; None if this process does not need it
    start: Shape
    shape: Shape
    holders: tuple[int, ...] = ()  # that need it, among the blocks of all processes


@dataclass(eq=False, slots=True)
class Arrival:
    """An array on its way: its record, the blocks that this process needs, and its value."""

    record: ArrayLeaf
    dtype: np.dtype[Any]  # of the value; for keys that of their data
    plan: LocalBlocks | None = None  # of the needed blocks; None for a NumPy array
    wrap: Callable[[Any], Any] = lambda array: array  # makes the value from the array
    blocks: list[Any] = field(default_factory=list)  # None until the chunk of the block is read
    made_of_chunks: Container[int | None] = ()  # the blocks that a piece of a chunk is or fills
    value: Any = None

    @property
    def block_shape(self) -> Shape:
        """The sizes of a block with its padding."""
        return self.record.shape if self.plan is None else self.plan.grid.shard_shape

    @property
    def needed(self) -> Sequence[NeededBlock]:
        if self.plan is None:
            shape = self.record.shape
            return [NeededBlock(0, (0,) * len(shape), shape)]
        return _needed_blocks(self.plan)

    def needed_by(self, processes: tuple[int, ...]) -> Iterator[NeededBlock]:
        """Yield its blocks in all processes; each of ``processes`` has all of a NumPy array."""
        plan = self.plan
        if plan is None:
            yield self.needed[0]._replace(holders=processes)
            return
        mesh: Any = plan.sharding.mesh
        for block, holders in enumerate(holders_of(plan.grid, processes_of(mesh))):
            index = plan.grid.block_index(block)
            needed = _needed_block(plan, plan.number_of(index), index, holders)
            if math.prod(needed.shape):
                yield needed

    @property
    def passing_nbytes(self) -> int:
        """Bytes of its blocks that only pass through the host in this process."""
        return 0 if self.stays_on_host else self._block_nbytes * len(self.needed)

    @property
    def most_passing_nbytes(self) -> int:
        """As ``passing_nbytes``, in the process with most of its blocks: the same in all."""
        plan = self.plan
        if plan is None or next(iter(plan.sharding.device_set)).platform == "cpu":
            return 0
        counts = Counter(process for block in self.needed_by((0,)) for process in block.holders)
        return self._block_nbytes * max(counts.values(), default=0)

    @property
    def _block_nbytes(self) -> int:
        return math.prod(self.block_shape) * self.record.dtype.itemsize

    @property
    def stays_on_host(self) -> bool:
        """True if its blocks become a NumPy array, or are transferred when all have arrived."""
        return self.plan is None or not self.plan.places_early

    @property
    def shared_layout(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and a layout of several processes: the same in all processes."""
        sharding = None
        if self.plan is not None and len(processes_of(self.plan.sharding.mesh).numbers) > 1:
            sharding = self.plan.sharding
        return jax.ShapeDtypeStruct(self.record.shape, self.dtype, sharding=sharding)

    def allocate(self, buffers: Buffers, but: Container[int | None] = ()) -> None:
        needed, shape, dtype = self.needed, self.block_shape, self.record.dtype
        self.blocks = [None] * len(needed)
        for number, block in enumerate(needed):
            if number not in but:
                self.blocks[number] = data = buffers.empty(shape, dtype)
                if block.shape != shape:
                    data[...] = 0

    def finish(self) -> None:
        """Make the value from the blocks, which have the recorded dtype."""
        blocks, self.blocks = self.blocks, []
        plan, dtype = self.plan, self.dtype
        if dtype != self.record.dtype:
            blocks = [
                cast(data, dtype, Origin.of_block("the saved array", block.start))
                for data, block in zip(blocks, self.needed, strict=True)
            ]
        if plan is None:
            self.value = self.wrap(blocks[0])
            return
        filling = plan.place(blocks, dtype, lambda: np.zeros(plan.grid.shard_shape, dtype))
        self.value = self.wrap(filling)


@lru_cache(maxsize=256)
def _needed_blocks(plan: LocalBlocks) -> list[NeededBlock]:
    return [_needed_block(plan, number, index) for number, index in enumerate(plan.distinct)]


def _needed_block(
    plan: LocalBlocks, number: int | None, index: Index, holders: tuple[int, ...] = ()
) -> NeededBlock:
    return NeededBlock(number, start_of(index), shape_at(index, plan.grid.shard_shape), holders)


def number_arrival(record: ArrayLeaf, dtype: np.dtype[Any]) -> Arrival:
    return Arrival(record, dtype, wrap=lambda array: array[()])


def uncommitted_arrival(
    record: ArrayLeaf, dtype: np.dtype[Any], container: ContainerClass, stays_weak: bool
) -> Arrival:
    """Return the arrival of an array that is not committed to devices, such as a step count."""
    _check_jax_has(record, dtype)

    def wrap(data: Any) -> Any:
        with own_settings():
            array = jax.device_put(data)  # jax.numpy would commit it to the current mesh
        return _contained(array, record.key_impl, stays_weak, container, saved_type(record)[0])

    return Arrival(record, dtype, wrap=wrap)


def sharded_arrival(
    record: ArrayLeaf,
    dtype: np.dtype[Any],
    over: Sharding | MeshAndSpec,
    container: ContainerClass,
    pad: bool,
    stays_weak: bool,
) -> Arrival:
    """Return the arrival of a ``jax.Array`` of a layout, in a container or in none."""
    _check_jax_has(record, dtype)
    placement = _placement(record.shape, record.key_impl, over, container, pad, stays_weak)
    return Arrival(record, dtype, *placement)


@lru_cache(maxsize=256)  # a tree has many arrays of few shapes and layouts
def _placement(
    shape: Shape,
    key_impl: str | None,
    over: Sharding | MeshAndSpec,
    container: ContainerClass,
    pad: bool,
    stays_weak: bool,
) -> tuple[LocalBlocks, Callable[[Any], Any]]:
    """Return the blocks of this process, and the function that makes the value."""
    # The data of keys has more dimensions, which are not sharded.
    rank = len(shape) - key_ndim(key_impl)
    if isinstance(over, MeshAndSpec):
        mesh, given, kind = over
        mesh_grid(shape[:rank], mesh, given, pad)  # before JAX finds a mistake in them
        sharding: Any = NamedSharding(mesh, given, memory_kind=kind)  # pyright: ignore
    else:
        sharding = over
    named = sharding
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        named = NamedSharding(mesh_on(device), PartitionSpec())
    if not isinstance(named, NamedSharding) or not isinstance(named.mesh, Mesh):
        raise ValueError(
            f"like has the sharding {sharding!r}, which has no mesh and spec; use a NamedSharding"
        )
    spec = checked_partition_spec(named.spec, shape[:rank], named.mesh.shape)
    plan = local_blocks_over(shape, MeshAndSpec(named.mesh, spec, memory_kind_of(sharding)), pad)
    container = PaddedArray if plan.grid.is_padded else container

    def wrap(array: Any) -> Any:
        if isinstance(sharding, SingleDeviceSharding) and array.is_fully_addressable:
            with own_settings():
                array = jax.device_put(array, sharding)
        return _contained(array, key_impl, stays_weak, container, shape[:rank])

    return plan, wrap


def _contained(
    array: Any, key_impl: str | None, stays_weak: bool, container: ContainerClass, shape: Shape
) -> Any:
    if key_impl is not None:
        array = jax.random.wrap_key_data(array, impl=key_impl)
    if stays_weak:
        array = weakly_typed(array)
    if container is PaddedArray:
        return PaddedArray(array, shape)
    return array if container is None else GlobalArray.from_array(array)


def kept_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that JAX has for arrays of a recorded dtype."""
    return dtype if dtype in KEPT_DTYPES else jax.dtypes.canonicalize_dtype(dtype)


def _check_jax_has(record: ArrayLeaf, dtype: np.dtype[Any]) -> None:
    """Raise unless JAX has this dtype, and PRNG keys like the recorded ones."""
    if (final := kept_dtype(dtype)) != dtype:
        raise TypeError(
            f"it has dtype {dtype}, which JAX narrows to {final} without jax_enable_x64; set it, "
            "ask for another dtype, or pass a NumPy array in like="
        )
    check_keys(record)

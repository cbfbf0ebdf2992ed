"""Arrays on their way from a checkpoint or an offer: their blocks on the host, and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gda.arrays.buffers import Buffers
from gda.arrays.construction.placing import LocalBlocks, local_blocks_over
from gda.arrays.dtypes import KEPT_DTYPES, weakly_typed
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.layout.indices import index_at, sizes_of, start_of
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


@dataclass(eq=False, slots=True)
class Arrival:
    """An array on its way: its record, the blocks that this process needs, and its value."""

    record: ArrayLeaf
    dtype: np.dtype[Any]  # of the value; for keys that of their data
    plan: LocalBlocks | None = None  # of the needed blocks; None for a NumPy array
    wrap: Callable[[Any], Any] = lambda array: array  # makes the value from the array
    blocks: list[Any] = field(default_factory=list)  # None until the chunk of the block is read
    made_of_chunks: Container[int | None] = ()  # blocks that get their memory from chunks
    value: Any = None

    @property
    def block_shape(self) -> Shape:
        """The sizes of a block with its padding."""
        return self.record.shape if self.plan is None else self.plan.grid.shard_shape

    @property
    def boxes(self) -> Mapping[int, Index]:
        """The needed blocks by number, with every start and stop."""
        if self.plan is None:
            return {0: index_at((0,) * len(self.record.shape), self.record.shape)}
        return self.plan.boxes

    @property
    def boxes_of_all(self) -> Mapping[int, Index]:
        """The blocks that all processes need, as ``boxes``; each needs all of a NumPy array."""
        return self.boxes if self.plan is None else self.plan.of_all[0]

    @property
    def holders(self) -> Mapping[int, tuple[int, ...]] | None:
        """The processes that need each of ``boxes_of_all``; ``None`` if all need all."""
        return None if self.plan is None else self.plan.of_all[1]

    @property
    def passing_nbytes(self) -> int:
        """Bytes of the blocks that pass through the host on their way to devices."""
        return 0 if self.stays_on_host else self.block_nbytes * len(self.boxes)

    @property
    def most_passing_nbytes(self) -> int:
        """The largest ``passing_nbytes`` of any process."""
        plan = self.plan
        if plan is None or next(iter(plan.sharding.device_set)).platform == "cpu":
            return 0
        counts = Counter(process for holders in plan.of_all[1].values() for process in holders)
        return self.block_nbytes * max(counts.values(), default=0)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block with its padding."""
        return math.prod(self.block_shape) * self.record.dtype.itemsize

    @property
    def stays_on_host(self) -> bool:
        """True if its blocks become a NumPy array, or are transferred when all have arrived."""
        return self.plan is None or not self.plan.places_early

    @property
    def shared_layout(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype, and the layout if it is over several processes: the same in all of them."""
        sharding = None
        if self.plan is not None and len(processes_of(self.plan.sharding.mesh).numbers) > 1:
            sharding = self.plan.sharding
        return jax.ShapeDtypeStruct(self.record.shape, self.dtype, sharding=sharding)

    def allocate(self, buffers: Buffers, but: Container[int | None] = ()) -> None:
        shape, dtype = self.block_shape, self.record.dtype
        self.blocks = [None] * len(self.boxes)
        for number, box in self.boxes.items():
            if number not in but:
                self.blocks[number] = data = buffers.empty(shape, dtype)
                if sizes_of(box) != shape:
                    data[...] = 0

    def finish(self) -> None:
        """Make the value from the blocks, which have the recorded dtype."""
        blocks, self.blocks = self.blocks, []
        plan, dtype = self.plan, self.dtype
        if dtype != self.record.dtype:
            blocks = [
                cast(data, dtype, Origin.of_block("the saved array", start_of(box)))
                for data, box in zip(blocks, self.boxes.values(), strict=True)
            ]
        if plan is None:
            self.value = self.wrap(blocks[0])
            return
        filling = plan.place(blocks, dtype, lambda: np.zeros(plan.grid.shard_shape, dtype))
        self.value = self.wrap(filling)


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
    return array if container is None else GlobalArray._from_leaf(array)


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

"""The constructors of one ``jax.Array``: from callbacks, sources and device buffers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gda.arrays.construction.blocks import LARGE_BYTES, BlockReader, is_on_cpu
from gda.arrays.construction.pending import PendingArray, pending_array_of_source
from gda.arrays.construction.placing import Block, LocalBlocks, local_blocks_of
from gda.arrays.construction.reading import read_all
from gda.arrays.construction.reading_once import read_builds, reads_wanted
from gda.arrays.dtypes import is_extended
from gda.arrays.liveness import calls_back
from gda.layout.spec import Index, SpecLike
from gda.layout.text import format_index
from gda.mesh import Device, MeshLike, is_tracer
from gda.multihost.agreement import communicates, if_checked, together
from gda.multihost.descriptions import Description, describe_wanted
from gda.storage.options import Options
from gda.storage.sources import check_not_awaitable


def array_from_callback(
    global_shape: Iterable[int],
    mesh: MeshLike,
    spec: SpecLike | None,
    data_callback: Callable[..., Any],
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
    into: bool = False,
    options: Options | None = None,
    *,
    pad: bool = False,
    fill: object = 0,
) -> jax.Array:
    _check_function(data_callback)
    if into and dtype is None:
        raise ValueError("into=True needs dtype=, the type of the buffer that the callback fills")
    if into and copy is not None:
        raise ValueError("copy= is for blocks that the callback returns; omit it with into=True")

    def work(plan: LocalBlocks) -> jax.Array:
        early = options is not None or (plan.places_early and not _is_small(plan))
        reader = BlockReader(plan, dtype, copy, fill=fill, borrows=early)
        read = partial(reader.fill if into else reader.read, data_callback)
        if not early:  # nothing overlaps: blocks are read one by one, and placed at once
            return reader.place(read(plan.distinct))
        pending = PendingArray(reader, read)
        read_all([pending], options or Options(), "from_callback")
        return pending.array()

    name = f"{'PaddedArray' if pad else 'GlobalArray'}.from_callback"
    return _planned(work, name, global_shape, mesh, spec, dtype, fill if pad else None)


def array_from_source(
    source: Any,
    mesh: MeshLike,
    spec: SpecLike | None,
    dtype: npt.DTypeLike | None,
    options: Options,
    *,
    pad: bool = False,
    fill: object = 0,
) -> jax.Array:
    def prepare() -> PendingArray:
        return pending_array_of_source(source, mesh, spec, dtype, options, pad=pad, fill=fill)

    def request(pending: PendingArray) -> Description:
        wanted = _wanted(pending.reader.dtype, fill if pad else None, pending.plan)
        return wanted | reads_wanted([pending], options)

    def work(pending: PendingArray) -> jax.Array:
        read_builds([pending], options, "from_source")
        return pending.array()

    name = "PaddedArray.from_source" if pad else "GlobalArray.from_source"
    return together(
        name, mesh, work, prepare=prepare, request=request, communicates=options.read_once
    )


def array_from_batched_callback(
    global_shape: Iterable[int],
    mesh: MeshLike,
    spec: SpecLike | None,
    data_callback: Callable[[list[Index]], Iterable[Any]],
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
) -> jax.Array:
    _check_function(data_callback)

    def work(plan: LocalBlocks) -> jax.Array:
        reader = BlockReader(plan, dtype, copy)
        blocks: list[Block] = []
        if plan.devices:
            found = calls_back(data_callback)(list(plan.indices))
            returned = _returned_blocks(found, plan, reader)
            del found  # so that only the reader refers to the blocks
            blocks = reader.read(lambda _: next(returned), plan.distinct)
            next(returned, None)  # checks the last replicas
        return reader.place(blocks)

    return _planned(work, "GlobalArray.from_batched_callback", global_shape, mesh, spec, dtype)


def array_from_batched_callback_with_devices(
    global_shape: Iterable[int],
    mesh: MeshLike,
    spec: SpecLike | None,
    data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
    dtype: npt.DTypeLike | None = None,
) -> jax.Array:
    _check_function(data_callback)

    def work(plan: LocalBlocks) -> jax.Array:
        reader = BlockReader(plan, dtype)
        request = list(zip(plan.distinct, plan.holders, strict=True))
        buffers: list[Any] = []
        if request:
            buffers = _as_list(data_callback(request), len(plan.devices), "device")
        expected = [device for _, devices in request for device in devices]
        order = "the devices that the callback was given"
        return reader.assemble(buffers, expected, "the callback's array", order)

    name = "GlobalArray.from_batched_callback_with_devices"
    return _planned(work, name, global_shape, mesh, spec, dtype)


@communicates("GlobalArray", if_checked())
def array_from_device_buffers(
    global_shape: Any, mesh: Any, spec: Any, device_buffers: Any, dtype: npt.DTypeLike | None
) -> jax.Array:
    if device_buffers is None:
        raise TypeError(
            "GlobalArray takes global_shape, mesh, spec and device_buffers; for an array on the "
            "host write GlobalArray.from_source(array, mesh, spec), for a jax.Array that has its "
            "sharding GlobalArray.from_array(array)"
        )

    def work(plan: LocalBlocks) -> jax.Array:
        order = "mesh.local_devices"
        buffers = _as_list(device_buffers, len(plan.devices), f"device of {order}")
        wanted = BlockReader(plan, dtype)
        reader = BlockReader(plan) if buffers else wanted
        array = reader.assemble(buffers, plan.devices, "device_buffers", order)
        if wanted.dtype is not None and array.dtype != wanted.dtype:
            raise TypeError(
                f"device_buffers have dtype {array.dtype}, not {wanted.dtype}; give that dtype, or "
                "convert them with .astype"
            )
        return array

    return _planned(work, "GlobalArray", global_shape, mesh, spec, dtype)


def _planned(
    work: Callable[[LocalBlocks], jax.Array],
    name: str,
    global_shape: Iterable[int],
    mesh: MeshLike,
    spec: SpecLike | None,
    dtype: npt.DTypeLike | None,
    padded_with: object = None,
) -> jax.Array:
    """Return the result of ``work``; if checks are on, processes compare the plan first."""

    def prepare() -> LocalBlocks:
        plan = local_blocks_of(global_shape, mesh, spec, padded_with is not None)
        plan.check_dtype_is_known(dtype)
        return plan

    request = partial(_wanted, dtype, padded_with)
    return together(name, mesh, work, prepare=prepare, request=request)


def _wanted(dtype: Any, padded_with: object, plan: LocalBlocks) -> Description:
    return describe_wanted(plan.grid.global_shape, plan.sharding, dtype, padded_with)


def _is_small(plan: LocalBlocks) -> bool:
    """Return True if blocks are small in any dtype, so that all are sent together."""
    return math.prod(plan.grid.shard_shape) * 16 < LARGE_BYTES


def _check_function(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"data_callback must be a function, not {type(callback).__name__}")


def _returned_blocks(returned: Any, plan: LocalBlocks, reader: BlockReader) -> Iterator[Any]:
    """Yield the blocks that a batched callback returned, the first of each index.

    An iterator may make all blocks in one buffer, so each is settled before the next is asked for.
    The blocks of a list are released one by one, so that the reader may be their only owner.
    """
    count = len(plan.indices)
    take: Callable[[], Any]
    if isinstance(returned, list | tuple):
        remaining = deque(_as_list(returned, count, _PER_INDEX))
        _check_one_each(remaining, plan)
        take = remaining.popleft
    else:
        take = iter(_iterable(returned, count, _PER_INDEX)).__next__

    def blocks() -> Iterator[Any]:
        for i, index in enumerate(plan.indices):
            try:
                if i in plan.firsts:
                    yield take()
                else:
                    reader.check_unused(index, take())
            except StopIteration:
                raise ValueError(
                    f"expected {count} arrays, one per {_PER_INDEX}, not {i}"
                ) from None
            except Exception as error:
                reader.note(error, index)
                raise
        with suppress(IndexError, StopIteration):
            take()
            raise ValueError(f"expected {count} arrays, one per {_PER_INDEX}, not more")

    return blocks()


def _check_one_each(arrays: Iterable[Any], plan: LocalBlocks) -> None:
    """Raise ``ValueError`` if memory that NumPy may fill again is the block of several indices."""
    known: dict[int, tuple[Any, int]] = {}
    for array, block in zip(arrays, plan.block_of_device, strict=True):
        memory = _memory_of(array)
        if memory is None:
            continue
        other, number = known.setdefault(memory, (array, block))
        if number != block and not (array is other and isinstance(array, jax.Array)):
            first, second = (format_index(plan.distinct[each]) for each in (number, block))
            raise ValueError(
                f"the callback returned one buffer for the indices {first} and {second}; a buffer "
                "that is filled again and again holds only the last block. Return array.copy(), or "
                "yield the blocks one by one: each is copied before the next. To give one block to "
                "several indices on purpose, first set block.flags.writeable = False"
            )


def _memory_of(array: Any) -> int | None:
    """Return the address of a block that may be filled again; ``None`` if it is read-only."""
    if isinstance(array, jax.Array):
        if is_tracer(array) or array.is_deleted() or is_extended(array.dtype):
            return None
        if len(array.devices()) > 1 or not is_on_cpu(array):
            return None
        array = np.asarray(array)  # perhaps of memory that NumPy has filled
    elif not isinstance(array, np.ndarray) or not array.flags.writeable:
        return None
    return array.__array_interface__["data"][0] if array.size else None


_PER_INDEX = "index, repeats included"


def _iterable(returned: Any, count: int, per: str) -> Iterable[Any]:
    check_not_awaitable(returned)
    is_one = isinstance(returned, np.ndarray | jax.Array | Mapping | str)
    if is_one or not isinstance(returned, Iterable):
        raise TypeError(
            f"expected a sequence of {count} arrays, one per {per}, not {type(returned).__name__}"
        )
    return returned


def _as_list(returned: Any, count: int, per: str) -> list[Any]:
    arrays = list(_iterable(returned, count, per))
    if len(arrays) != count:
        raise ValueError(f"expected {count} arrays, one per {per}, not {len(arrays)}")
    return arrays

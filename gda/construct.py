"""From callbacks to one ``jax.Array``: which blocks are read, and how they are placed.

``jax.make_array_from_callback``, fed with blocks that were read before, is the fastest public way
to place blocks: lists through ``device_put`` take 4 to 5 times as long, a loop of ``device_put`` 6
to 8 times (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec

from gda.agreement import checked, describe, together
from gda.blocks import Block, BlockReader, narrowed_dtype
from gda.grid import ShardGrid
from gda.indices import Device, check_mesh, local_positions, mesh_grid
from gda.progress import shown
from gda.reading import (
    AsyncTask,
    Future,
    Options,
    ProgressLike,
    Retry,
    Task,
    Transfer,
    run,
)
from gda.sharding import is_tracer, named_sharding
from gda.sources import AsyncSource, Source, source_of
from gda.spec import Index, Shape, SpecLike, check_shape, check_spec


@checked("GlobalArray.from_callback")
def array_from_callback(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[..., Any],
    *,
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
    into: bool = False,
    max_workers: int | None = None,
    max_bytes: int | None = None,
    progress: ProgressLike = False,
    retry: Retry | None = None,
) -> jax.Array:
    """Build an array by one call of ``data_callback`` per distinct index of this process.

    See ``GlobalArray.from_callback``, which says what the arguments mean and what is raised.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    if into and dtype is None:
        raise ValueError("into=True needs dtype=, the type of the buffer that the callback fills")
    if into and copy is not None:
        raise ValueError("copy= says what happens to memory of the callback; into=True has none")
    has_options = not (max_workers is max_bytes is retry is None and progress is False)
    if not has_options and not plan.places_early:
        reader = plan.reader(dtype, copy)
        read = reader.fill if into else reader.read
        return plan.place(read(data_callback, plan.distinct), reader.dtype)
    options = Options(max_workers, max_bytes, progress, retry)
    reader = plan.reader(dtype, copy, in_threads=options.are_for_threads)
    build = Build(plan, reader, partial(reader.fill if into else reader.read, data_callback))
    read_all([build], options, "from_callback")
    return build.array()


def array_from_source(
    source: Any, mesh: Mesh, spec: SpecLike, dtype: npt.DTypeLike | None, options: Options
) -> jax.Array:
    """Build an array of the slices of a source that this process needs.

    See ``GlobalArray.from_source``.
    """
    builds: list[Build] = []

    def wanted() -> jax.ShapeDtypeStruct:
        builds.append(build_of_source(source, mesh, spec, dtype, options))
        return builds[0].wanted()

    def work() -> jax.Array:
        if not builds:
            wanted()
        read_all(builds, options, "from_source")
        return builds[0].array()

    return together(
        "GlobalArray.from_source", mesh, work, describe, wanted=lambda: describe(wanted())
    )


@checked("GlobalArray.from_batched_callback")
def array_from_batched_callback(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[[list[Index]], Iterable[Any]],
    *,
    dtype: npt.DTypeLike | None = None,
    copy: bool | None = None,
) -> jax.Array:
    """Build an array by one call of ``data_callback`` with the index of every local device.

    See ``GlobalArray.from_batched_callback``.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    reader = plan.reader(dtype, copy)
    blocks: list[Block] = []
    if plan.devices:
        batch = _Batch(data_callback(list(plan.indices)), plan, reader)
        blocks = reader.read(batch.next_distinct, plan.distinct)
        batch.check_rest()
    return plan.place(blocks, reader.dtype)


@checked("GlobalArray.from_batched_callback_with_devices")
def array_from_batched_callback_with_devices(
    global_shape: Iterable[int],
    mesh: Mesh,
    spec: SpecLike,
    data_callback: Callable[[list[tuple[Index, tuple[Device, ...]]]], Iterable[jax.Array]],
    *,
    dtype: npt.DTypeLike | None = None,
) -> jax.Array:
    """Build an array from on-device arrays that one call of ``data_callback`` returns.

    See ``GlobalArray.from_batched_callback_with_devices``.
    """
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(dtype)
    _check_callable(data_callback)
    reader = plan.reader(dtype, None)
    holders: list[list[Device]] = [[] for _ in plan.distinct]
    for device, block in zip(plan.devices, plan.block_of_device, strict=True):
        holders[block].append(device)
    request = list(zip(plan.distinct, map(tuple, holders), strict=True))
    buffers: list[Any] = []
    if request:
        buffers = _as_list(data_callback(request), len(plan.devices), "device")
    expected = [device for _, devices in request for device in devices]
    return plan.assemble(buffers, expected, reader, "the callback's array")


@checked("GlobalArray")
def array_from_device_buffers(
    global_shape: Iterable[int], mesh: Mesh, spec: SpecLike, device_buffers: Iterable[jax.Array]
) -> jax.Array:
    """Build an array of single-device arrays in ``mesh.local_devices`` order."""
    plan = plan_of(global_shape, mesh, spec)
    plan.check_dtype_is_known(None)
    buffers = _as_list(device_buffers, len(plan.devices), "device of mesh.local_devices")
    return plan.assemble(buffers, plan.devices, plan.reader(None, None), "device_buffers")


class Plan:
    """What this process reads for one shape, mesh and spec, and where it goes.

    Attributes:
      devices, indices: the devices of this process, in device order, and what each holds.
      distinct: the indices without repeats; a *block* is a position in this list.
      block_of_device: the block of each device.
      firsts: the devices, by position in ``devices``, that are the first to hold their block.
    """

    def __init__(self, grid: ShardGrid, mesh: Mesh, spec: SpecLike) -> None:
        local = local_positions(mesh)
        self.grid = grid
        self.sharding = named_sharding(grid.global_shape, mesh, spec)
        self.devices = tuple(local)
        self.indices = [index for index, _ in grid.shards_at(local.values())]
        first_at: dict[tuple[int | None, ...], int] = {}
        for i, index in enumerate(self.indices):
            first_at.setdefault(_start(index), i)
        self.firsts = set(first_at.values())
        self.distinct = [self.indices[i] for i in first_at.values()]
        self._block_at = {start: block for block, start in enumerate(first_at)}
        self.block_of_device = [self._block_at[_start(index)] for index in self.indices]
        self._first_device = self.devices[0] if local else None
        self._platform = self.devices[0].platform if local else ""
        # JAX copies an unaligned block for every device that holds it, and an aligned one for none.
        has_replicas = len(self.distinct) < len(self.devices)
        self._align = has_replicas and self._platform == "cpu"
        # JAX asks with the index objects of its own cached map. They are kept here, so that as
        # long as this plan lives no other object has their id.
        asked: Any = self.sharding.addressable_devices_indices_map(grid.global_shape).values()
        self._asked: list[Index] = list(asked)
        self._block_of_id = {id(index): self._block_at[_start(index)] for index in self._asked}

    def check_dtype_is_known(self, dtype: object) -> None:
        if dtype is None and not self.devices:
            raise ValueError(
                f"no device of the mesh {dict(self.grid.mesh_shape)} belongs to process "
                f"{jax.process_index()}, so no block tells the dtype; pass dtype="
            )

    @property
    def places_early(self) -> bool:
        """Whether blocks go to their devices while others are read: on all but CPU."""
        return self._platform != "" and places_early(self._platform)

    def reader(
        self,
        dtype: npt.DTypeLike | None,
        copy: bool | None,
        *,
        always_align: bool = False,
        in_threads: bool = False,
    ) -> BlockReader:
        count = len(self.distinct)
        align = self._align or (always_align and self._platform == "cpu")
        return BlockReader(self.grid, dtype, copy, self._first_device, count, align, in_threads)

    def place(self, blocks: Sequence[Block], dtype: Any) -> jax.Array:
        """Build the array of one block per distinct index."""
        if not self.devices:
            # JAX would ask for the one block of a replicated array here too.
            return jax.make_array_from_single_device_arrays(
                self.grid.global_shape, self.sharding, [], dtype=dtype
            )
        block_of_id, block_at = self._block_of_id, self._block_at

        def block_for(index: Any) -> Block:
            try:
                return blocks[block_of_id[id(index)]]
            except KeyError:
                return blocks[block_at[_start(index)]]

        return jax.make_array_from_callback(
            self.grid.global_shape,
            self.sharding,
            block_for,
        )

    def assemble(
        self,
        buffers: Sequence[object],
        expected: Sequence[Device],
        reader: BlockReader,
        what: str,
    ) -> jax.Array:
        """Check single-device arrays against the devices they must be on; put them together."""
        index_of = dict(zip(self.devices, self.indices, strict=True))
        checked: dict[Device, jax.Array] = {}
        for i, (buffer, device) in enumerate(zip(buffers, expected, strict=True)):
            if not isinstance(buffer, jax.Array) or is_tracer(buffer):
                kind = "traced array" if is_tracer(buffer) else type(buffer).__name__
                raise TypeError(
                    f"{what}[{i}] is a {kind}, not a jax.Array on {device}; put it there with "
                    "jax.device_put, or use from_callback for host data"
                )
            if buffer.is_deleted():
                raise RuntimeError(f"{what}[{i}], for {device}, was deleted or donated")
            if buffer.devices() != {device}:
                on = ", ".join(sorted(map(str, buffer.devices())))
                raise ValueError(f"{what}[{i}] is on {on}; expected there is {device}")
            reader.check_shape(index_of[device], buffer.shape)
            checked[device] = buffer
        arrays: dict[Device, Any] = {
            device: reader.settle_jax(index_of[device], buffer)
            for device, buffer in checked.items()
        }
        return jax.make_array_from_single_device_arrays(
            self.grid.global_shape,
            self.sharding,
            [arrays[device] for device in self.devices],
            dtype=reader.dtype,
        )


def places_early(platform: str) -> bool:
    # On CPU there is nothing to send, and placing all at once was 1.2 to 1.4 times faster.
    return platform != "cpu"


class Build:
    """An array while its blocks are read, many at a time.

    Args:
      plan: what is read.
      reader: of the array's blocks.
      read: gets a list of one index and returns a list of its block; called in any thread.
      begin: begins to fill a buffer with the block at an index; used instead of ``read``.
      dtype: of what is read, if that is known.
      note: adds to an error which array it was.
    """

    def __init__(
        self,
        plan: Plan,
        reader: BlockReader,
        read: Callable[[list[Index]], list[Block]],
        begin: Callable[[Index, np.ndarray[Any, Any]], Future] | None = None,
        dtype: np.dtype[Any] | None = None,
        note: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        self.plan = plan
        self._reader, self._read, self._begin = reader, read, begin
        self._dtype = dtype
        self._note = note
        self._places_early = plan.places_early
        self._blocks: list[Any] = [None] * len(plan.distinct)
        self._arrays: dict[Device, jax.Array] = {}
        self._holders: list[list[Device]] = [[] for _ in plan.distinct]
        for device, block in zip(plan.devices, plan.block_of_device, strict=True):
            self._holders[block].append(device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as it is read; as if of 8 bytes an element where nobody knows yet."""
        dtype = self._dtype or self._reader.dtype
        return math.prod(self._reader.shape) * (8 if dtype is None else dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that this process reads."""
        return len(self._blocks) * self.block_bytes

    def tasks(self, report: Callable[[int], object]) -> Iterator[Task | AsyncTask]:
        """Return what is to be done for each block; ``report`` is told the bytes of one read."""
        for number, index in enumerate(self.plan.distinct):
            nbytes = self._held_bytes()
            finish = partial(self._keep, number, index, report)
            if self._begin is None:
                yield Task(nbytes, partial(self._work, index), finish)
            else:
                yield self._async_task(self._begin, nbytes, number, index, report)

    def array(self) -> jax.Array:
        """Return the array, after all tasks are done."""
        plan, dtype = self.plan, self._reader.dtype
        if not (self._places_early and plan.devices):
            return plan.place(self._blocks, dtype)
        arrays = [self._arrays[device] for device in plan.devices]
        shape = plan.grid.global_shape
        return jax.make_array_from_single_device_arrays(shape, plan.sharding, arrays, dtype=dtype)

    def wanted(self) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and layout of the array."""
        shape, sharding = self.plan.grid.global_shape, self.plan.sharding
        return jax.ShapeDtypeStruct(shape, self._reader.dtype, sharding=sharding)

    def _held_bytes(self) -> int:
        read, dtype = self._dtype, self._reader.dtype
        if read is None or dtype is None or read == dtype:
            return self.block_bytes
        return self.block_bytes + math.prod(self._reader.shape) * dtype.itemsize

    def _work(self, index: Index) -> Block:
        try:
            return self._read([index])[0]
        except Exception as error:
            self._note(error)
            raise

    def _async_task(
        self,
        begin: Callable[[Index, np.ndarray[Any, Any]], Future],
        nbytes: int,
        number: int,
        index: Index,
        report: Callable[[int], object],
    ) -> AsyncTask:
        assert self._dtype is not None
        dtype = self._dtype
        out: list[np.ndarray[Any, Any]] = []

        def start() -> Future:
            out[:] = [self._reader.empty(dtype)]
            return begin(index, out[0])

        def finish(_: object) -> Transfer | None:
            return self._keep(number, index, report, self._reader.settle_own(index, out.pop()))

        return AsyncTask(nbytes, start, finish, partial(self._note_both, index))

    def _note_both(self, index: Index, error: Exception) -> None:
        self._reader.note(error, index)
        self._note(error)

    def _keep(
        self, number: int, index: Index, report: Callable[[int], object], block: Block
    ) -> Transfer | None:
        try:
            block = self._reader.finish(index, block)
        except Exception as error:
            self._note_both(index, error)
            raise
        report(self.block_bytes)
        if not self._places_early:
            self._blocks[number] = block
            return None
        holders = self._holders[number]
        # A list at once: the transfers of one block do not wait for each other.
        arrays: list[jax.Array] = jax.device_put([block] * len(holders), holders)
        self._arrays.update(zip(holders, arrays, strict=True))
        return Transfer(
            lambda: _are_sent(arrays),
            lambda: jax.block_until_ready(arrays),
        )


def _are_sent(arrays: list[Any]) -> bool:
    return all(array.is_ready() for array in arrays)


def build_of_source(
    source: Any,
    mesh: Mesh,
    spec: SpecLike,
    dtype: npt.DTypeLike | None,
    options: Options,
    note: Callable[[Exception], object] = lambda _: None,
) -> Build:
    """Return how an array of a source is built; reads nothing.

    Raises:
      TypeError, ValueError: it cannot be built; what ``GlobalArray.from_source`` says.
    """
    found = source_of(source)
    plan = plan_of(found.shape, mesh, spec)
    in_threads = options.are_for_threads
    reader = plan.reader(dtype, None, always_align=True, in_threads=in_threads)
    _check_raw(found.dtype, reader.asked)
    if reader.dtype is None:
        reader.dtype = narrowed_dtype(found.dtype, f"the {type(source).__name__} has dtype ")
    read = partial(reader.read, partial(_read_source, found, reader))
    # What has no elements is not asked for: some libraries refuse.
    has_elements = math.prod(reader.shape) > 0
    begin = found.begin if isinstance(found, AsyncSource) and has_elements else None
    return Build(plan, reader, read, begin, _native(found.dtype), note)


def _read_source(source: Source, reader: BlockReader, index: Index) -> Any:
    if not math.prod(reader.shape):
        return reader.empty(_native(source.dtype))
    block = source.read(index, reader.empty)
    dtype = getattr(block, "dtype", None)
    is_other = isinstance(dtype, np.dtype) and _native(dtype) != _native(source.dtype)
    if is_other and reader.asked is None:
        raise TypeError(
            f"the source says that its dtype is {source.dtype}, but gave a block of {dtype}, as "
            f"libraries do that scale what they read; pass dtype={dtype} to have that"
        )
    return block


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")


def _check_raw(dtype: np.dtype[Any], asked: Any) -> None:
    is_raw = dtype.type is np.void and dtype.names is None
    if is_raw and asked is not None and asked.itemsize != dtype.itemsize:
        raise TypeError(
            f"the source has elements of {dtype.itemsize} bytes that NumPy has no type for "
            f"({dtype}); they cannot be {asked}, of {asked.itemsize} bytes"
        )


def read_all(builds: Sequence[Build], options: Options, description: str) -> None:
    """Read the blocks of all arrays in one go, so that those of small ones overlap too."""
    done = total = 0

    with shown(options.progress, description) as show:

        def report(nbytes: int) -> None:
            nonlocal done, total
            # Not before: the size of a callback's blocks is known when one was read.
            total = total or sum(build.nbytes for build in builds)
            done += nbytes
            show(done, total)

        run(
            chain.from_iterable(build.tasks(report) for build in builds),
            max_workers=options.max_workers,
            max_bytes=options.max_bytes,
            retry=options.retry,
        )


# Blocks have one shape, so where one starts tells which it is; slices themselves are not hashable
# before Python 3.12.
def _start(index: Index) -> tuple[int | None, ...]:
    return tuple([s.start for s in index])


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"data_callback must be a function, not {type(callback).__name__}")


class _Batch:
    """What a batched callback returned, taken block by block.

    A result that is not a list or a tuple may make its blocks as it is walked through, all in one
    buffer, so each is settled before the next is asked for. Of a list each block is let go of as it
    is taken, which leaves the reader as the only holder of one that nobody else keeps.
    """

    def __init__(self, returned: Any, plan: Plan, reader: BlockReader) -> None:
        self._count = count = len(plan.indices)
        self._plan, self._reader = plan, reader
        self._taken = 0
        self._take: Callable[[], Any]
        if isinstance(returned, list | tuple):
            remaining = _as_list(returned, count, _PER_INDEX)
            remaining.reverse()
            self._take = remaining.pop
        else:
            self._take = iter(_iterable(returned, count, _PER_INDEX)).__next__

    def next_distinct(self, _: Index) -> Any:
        """Return the block of the next device that holds what no device before it does."""
        while self._taken not in self._plan.firsts:
            self._pass_over()
        return self._next()

    def check_rest(self) -> None:
        """Look at the blocks of the last replicas; raise if their number is not right."""
        while self._taken < self._count:
            self._pass_over()
        try:
            self._take()
        except (IndexError, StopIteration):
            return
        raise ValueError(f"expected {self._count} arrays, one per {_PER_INDEX}, not more")

    def _pass_over(self) -> None:
        index, block = self._plan.indices[self._taken], self._next()
        try:
            self._reader.check_unused(index, block)
        except Exception as error:
            self._reader.note(error, index)
            raise

    def _next(self) -> Any:
        index = self._plan.indices[self._taken]
        try:
            block = self._take()
        except StopIteration:
            raise ValueError(
                f"expected {self._count} arrays, one per {_PER_INDEX}, not {self._taken}"
            ) from None
        except Exception as error:
            self._reader.note(error, index)
            raise
        self._taken += 1
        return block


_PER_INDEX = "index, repeats included"


def _iterable(returned: Any, count: int, per: str) -> Iterable[Any]:
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


def plan_of(global_shape: Iterable[int], mesh: Mesh, spec: SpecLike) -> Plan:
    """Return the plan, from a cache where the same array was built before."""
    shape = check_shape(global_shape)
    check_mesh(mesh)
    hashable = spec if isinstance(spec, PartitionSpec) else check_spec(spec, shape)
    return _cached_plan(shape, mesh, hashable)


@lru_cache(maxsize=256)
def _cached_plan(shape: Shape, mesh: Mesh, spec: SpecLike) -> Plan:
    return Plan(mesh_grid(shape, mesh, spec), mesh, spec)

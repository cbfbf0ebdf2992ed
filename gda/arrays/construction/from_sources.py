"""Arrays while their blocks are read, many at a time; the step from a source to such an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from gda.arrays.construction.blocks import LARGE_BYTES, Block, BlockReader, BorrowedBlock
from gda.arrays.construction.placing import LocalBlocks, hashable_over, local_blocks_over
from gda.arrays.construction.reading_by_boxes import BoxReads
from gda.arrays.dtypes import is_extended, narrowed_dtype
from gda.arrays.weak_types import is_weak, weakly_typed
from gda.layout.dtype_names import is_raw, native
from gda.layout.indices import bounded, shape_at
from gda.layout.sharing import blocks_read_together
from gda.layout.spec import Index, Shape, SpecLike
from gda.mesh import Device, MeshLike
from gda.storage.options import Options, shown
from gda.storage.read_boxes import READ_BYTES
from gda.storage.sources import AsyncSource, Source, array_here, source_of
from gda.storage.tasks import AsyncTask, Task, Transfer, run


class PendingArray:
    """An array while its blocks are read, many at a time.

    Args:
      read: gets a list of one index and returns a list of its block; called in any thread.
      source: that of the blocks, if they are slices of one; used instead of ``read`` for blocks
        that are read together, and for all blocks of an ``AsyncSource``.
      dtype: of what is read, if that is known.
      options: of the reads of a source.
      note: adds to an error which array it was.
      is_weak: True for an array of a weak type.
      key_impl: of an array of PRNG keys, whose data the source has.
    """

    def __init__(
        self,
        plan: LocalBlocks,
        reader: BlockReader,
        read: Callable[[list[Index]], list[Block]],
        source: Source | None = None,
        dtype: np.dtype[Any] | None = None,
        note: Callable[[Exception], object] = lambda _: None,
        options: Options | None = None,
        is_weak: bool = False,
        key_impl: Any = None,
    ) -> None:
        self.plan = plan
        self._key_impl = key_impl
        self._is_weak = is_weak
        self.reader, self._read, self.source = reader, read, source
        self.dtype = dtype
        self._note, self._options = note, options
        self._places_early = plan.places_early
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._blocks: list[Any] = [None] * len(plan.distinct)
        # On accelerators: those of large blocks, or the whole array of small ones.
        self._arrays: dict[Device, jax.Array] = {}
        self._whole: jax.Array | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as it is read; as if of 8 bytes an element until that is known."""
        dtype = self.dtype or self.reader.dtype
        return math.prod(self.reader.shape) * (8 if dtype is None else dtype.itemsize)

    @property
    def builds(self) -> tuple[PendingArray]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self.block_bytes

    def tasks(
        self, report: Callable[[int], object], others: Collection[int | None] = ()
    ) -> Iterator[Task | AsyncTask]:
        """Yield the tasks for each block except ``others``; ``report`` is told the bytes of one."""
        if (reads := self._reads_together(report, others)) is not None:
            yield from reads.tasks()
            others = {*others, *reads.numbers}
        for number, index in enumerate(self.plan.distinct):
            if number not in others:
                finish = partial(self.keep, number, report)
                yield Task(self._held_bytes(), partial(self._work, number, index), finish)

    def _reads_together(
        self, report: Callable[[int], object], others: Collection[int | None]
    ) -> BoxReads | None:
        source, options = self.source, self._options
        # Empty blocks are not read: some libraries refuse.
        if source is None or options is None or not math.prod(self.reader.shape):
            return None
        # A library reads few chunks at a time, also of a block that shares none.
        fewest = 1 if isinstance(source, AsyncSource) else 2
        groups = [
            own
            for group in _local_groups(self.plan, source.chunks, source.dtype.itemsize)
            if len(own := [n for n in group if n not in others]) >= fewest
        ]
        if not groups:
            return None
        indices = self.plan.distinct

        def done(number: int, block: Block) -> Transfer | None:
            sizes = shape_at(indices[number], self.reader.shape)
            if padding := self.block_bytes - math.prod(sizes) * source.dtype.itemsize:
                report(padding)
            return self._placed(number, block)

        return BoxReads(
            source,
            self.reader,
            indices=indices,
            groups=groups,
            options=options,
            done=done,
            report=report,
            note=self.note_where,
            has_rounds=self._places_early,
        )

    def array(self) -> jax.Array:
        array = self._array()
        if self._key_impl is not None:
            return jax.random.wrap_key_data(array, impl=self._key_impl)
        return weakly_typed(array) if self._is_weak or self.reader.is_weak else array

    def _array(self) -> jax.Array:
        if self._whole is not None:
            return self._whole
        plan, dtype = self.plan, self.reader.dtype
        if not (self._places_early and plan.devices):
            return plan.place(self._blocks, dtype, self.reader.padding)
        if plan.has_padding_alone:
            self._arrays |= plan.sent(len(self._blocks), self.reader.padding())
        return plan.joined(self._arrays, dtype)

    def wanted(self) -> jax.ShapeDtypeStruct:
        plan = self.plan
        return jax.ShapeDtypeStruct(plan.shape, self.reader.dtype, sharding=plan.sharding)

    def _held_bytes(self) -> int:
        """Bytes of one block as it is read, of the read, and of its copy if it has to be cast."""
        read, dtype = self.dtype, self.reader.dtype
        nbytes = self.block_bytes + (0 if self.source is None else self.source.buffer_bytes)
        if read is None or dtype is None or read == dtype:
            return nbytes
        return nbytes + math.prod(self.reader.shape) * dtype.itemsize

    def _work(self, number: int, index: Index) -> Block | dict[Device, jax.Array]:
        try:
            with jax.enable_x64(self._x64):  # which belongs to a thread
                block = self._read([index])[0]
                if isinstance(block, BorrowedBlock):
                    sent = self.plan.sent(number, block.view(np.ndarray))
                    jax.block_until_ready(list(sent.values()))
                    return sent
                return block
        except Exception as error:
            self._note(error)  # the reader has noted the index
            raise

    def note_where(self, index: Index, error: Exception) -> None:
        self.reader.note(error, index)
        self._note(error)

    def settle_own(
        self, number: int, index: Index, report: Callable[[int], object], memory: Any
    ) -> Transfer | None:
        """Keep a block of memory that the reader gave, and that is filled."""
        try:
            block = self.reader.settle_own(index, memory)
        except Exception as error:
            self.note_where(index, error)
            raise
        return self.keep(number, report, block)

    def keep(
        self, number: int, report: Callable[[int], object], block: Block | dict[Device, jax.Array]
    ) -> Transfer | None:
        report(self.block_bytes)
        if isinstance(block, dict):
            self._arrays |= block
            return None
        return self._placed(number, block)

    def _placed(self, number: int, block: Block) -> Transfer | None:
        """Keep a block on the host, or send it to its devices: small ones with the last of them."""
        if self._places_early and self.block_bytes >= LARGE_BYTES:
            sent = self.plan.sent(number, block)
            self._arrays |= sent
            arrays: list[Any] = list(sent.values())
        else:
            self._blocks[number] = block
            if not self._places_early or any(each is None for each in self._blocks):
                return None
            self._whole = self.plan.place(self._blocks, self.reader.dtype, self.reader.padding)
            self._blocks, arrays = [], [self._whole]
        return Transfer(lambda: are_sent(arrays), lambda: jax.block_until_ready(arrays))


def are_sent(arrays: list[Any]) -> bool:
    return all(array.is_ready() for array in arrays)


def pending_array_of_source(
    source: Any,
    mesh: MeshLike,
    spec: SpecLike | None,
    dtype: npt.DTypeLike | None,
    options: Options,
    note: Callable[[Exception], object] = lambda _: None,
    *,
    pad: bool = False,
    fill: object = 0,
) -> PendingArray:
    keys = array_here(source)
    key_impl = None
    if isinstance(keys, jax.Array) and is_extended(keys.dtype):
        # Their data has more dimensions, which no spec may shard.
        local_blocks_over(keys.shape, hashable_over(mesh, spec, keys.shape), pad)
        if dtype is not None and dtype != keys.dtype:
            raise TypeError(f"the source has dtype {keys.dtype}, of PRNG keys; omit dtype=")
        source, key_impl, dtype = (
            np.asarray(jax.random.key_data(keys)),
            jax.random.key_impl(keys),
            None,
        )
    found = source_of(source)
    plan = local_blocks_over(found.shape, hashable_over(mesh, spec, found.shape), pad)
    reader = plan.reader(dtype, None, fill=fill, always_align=True, borrows=True)
    raw, wanted = found.dtype, reader.wanted_dtype
    if is_raw(raw) and wanted is not None and wanted.itemsize != raw.itemsize:
        raise TypeError(
            f"the source has elements of {raw.itemsize} bytes without a NumPy type ({raw}); they "
            f"cannot be {wanted}, of {wanted.itemsize} bytes. Pass the dtype that was saved"
        )
    if reader.dtype is None:
        reader.dtype = narrowed_dtype(found.dtype, f"the {type(source).__name__} has dtype ")
    read = partial(reader.read, partial(_read_source, found, reader))
    is_read = not found.is_in_memory and not found.dtype.hasobject
    return PendingArray(
        plan,
        reader,
        read,
        source=found,
        dtype=native(found.dtype),
        note=note,
        options=options if is_read else None,
        # Of NumPy no type is weak.
        is_weak=wanted is None and not isinstance(source, np.ndarray) and is_weak(source),
        key_impl=key_impl,
    )


@lru_cache(maxsize=256)  # most arrays of a model have the shapes and layouts of others
def _local_groups(plan: LocalBlocks, chunks: Shape | None, itemsize: int) -> list[list[int]]:
    shape = plan.grid.global_shape
    blocks = {number: bounded(index, shape) for number, index in enumerate(plan.distinct)}
    return groups_of(blocks, shape, chunks, itemsize)


def groups_of(
    blocks: Mapping[int, Index], shape: Shape, chunks: Shape | None, itemsize: int
) -> list[list[int]]:
    return blocks_read_together(blocks, shape, chunks, -(-READ_BYTES // max(itemsize, 1)))


def _read_source(source: Source, reader: BlockReader, index: Index) -> Any:
    if not math.prod(reader.shape):
        return reader.empty(native(source.dtype), index)
    return source.read(index, partial(reader.empty, index=index))


class Reads(Protocol):
    """Reads of the blocks of some arrays."""

    @property
    def builds(self) -> Sequence[PendingArray]:
        """The arrays that threads may read; small tensors take longer to place than to read."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        ...

    def tasks(self, report: Callable[[int], object], /) -> Iterable[Task | AsyncTask]:
        """Return the tasks; ``report`` is told the bytes of each read."""
        ...


def read_all(pending: Sequence[Reads], options: Options, description: str) -> None:
    """Read the blocks of all arrays in one go, so that those of small ones overlap too."""
    with shown(options.progress, description) as show:
        report = reporter(pending, show)
        tasks = chain.from_iterable(each.tasks(report) for each in pending)
        run(tasks, with_workers(options, pending))


def with_workers(options: Options, pending: Sequence[Reads]) -> Options:
    """Return the options, with the number of threads that suits all sources if none was given."""
    builds = [build for each in pending for build in each.builds]
    if options.max_workers is not None or not builds:
        return options
    workers = min(1 if each.source is None else each.source.workers for each in builds)
    # Several threads would mostly wait for Python's lock.
    is_small = sum(each.nbytes for each in builds) < len(builds) * LARGE_BYTES
    return options if is_small or workers == 1 else replace(options, max_workers=workers)


def reporter(pending: Sequence[Reads], show: Callable[[int, int], object]) -> Callable[[int], None]:
    done = total = 0

    def report(nbytes: int) -> None:
        nonlocal done, total
        # Not before: the size of a callback's blocks is known when one was read.
        total = total or sum(each.nbytes for each in pending)
        done += nbytes
        show(done, total)

    return report

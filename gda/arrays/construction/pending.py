"""Arrays while their blocks are read, and the step from a source to such an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gda.arrays.construction.blocks import LARGE_BYTES, BlockReader, BorrowedBlock
from gda.arrays.construction.placing import Block, local_blocks_of
from gda.arrays.dtypes import is_extended, is_weak, narrowed_dtype
from gda.layout.dtype_names import native
from gda.layout.spec import Index, SpecLike
from gda.mesh import Device, MeshLike
from gda.multihost.descriptions import leaf_path, note_path
from gda.storage.options import Options
from gda.storage.sources import Source, array_here, source_of, typed
from gda.storage.tasks import Task, Transfer


class PendingArray:
    """An array while its blocks are read, many at a time.

    Args:
      read: takes a list of one index and returns a list of its block, in any thread.
      source: that of the blocks, if they are slices of one.
      options: of the reads of a source; ``None`` for one in memory, which uses ``read``.
      keys: the path in its tree, for errors.
      key_impl: of an array of PRNG keys, whose data the source has.
    """

    def __init__(
        self,
        reader: BlockReader,
        read: Callable[[list[Index]], list[Block]],
        source: Source | None = None,
        options: Options | None = None,
        keys: Sequence[Any] = (),
        key_impl: Any = None,
    ) -> None:
        self.plan = plan = reader.plan
        self._key_impl = key_impl
        self.reader, self._read, self.source = reader, read, source
        self.dtype = None if source is None else native(source.dtype)  # of what is read
        self._keys, self.options = keys, options
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self._blocks: list[Any] = [None] * len(plan.distinct)
        # On accelerators: those of large blocks, or the whole array of small ones.
        self._arrays: dict[Device, jax.Array] = {}
        self._whole: jax.Array | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as it is read; with 8 bytes an element until the dtype is known."""
        dtype = self.dtype or self.reader.dtype
        return math.prod(self.reader.shape) * (8 if dtype is None else dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return len(self._blocks) * self.block_bytes

    def array(self) -> jax.Array:
        array = self._array()
        if self._key_impl is not None:
            return jax.random.wrap_key_data(array, impl=self._key_impl)
        return self.reader.typed(array)

    def _array(self) -> jax.Array:
        if self._whole is not None:
            return self._whole
        plan, dtype = self.plan, self.reader.dtype
        if not (self.plan.places_early and plan.devices):
            return plan.place(self._blocks, dtype, self.reader.padding)
        if plan.has_padding_alone:
            self._arrays |= plan.sent(len(self._blocks), self.reader.padding())
        return plan.joined(self._arrays, dtype)

    def wanted(self) -> jax.ShapeDtypeStruct:
        plan = self.plan
        return jax.ShapeDtypeStruct(plan.shape, self.reader.dtype, sharding=plan.sharding)

    def held_bytes(self) -> int:
        """Bytes of one block as it is read, of the read, and of its copy if it has to be cast."""
        read, dtype = self.dtype, self.reader.dtype
        nbytes = self.block_bytes + (0 if self.source is None else self.source.buffer_bytes)
        if read is None or dtype is None or read == dtype:
            return nbytes
        return nbytes + math.prod(self.reader.shape) * dtype.itemsize

    def _read_block(self, number: int) -> Block | dict[Device, jax.Array]:
        """Return a block, or a large one on its devices; in any thread."""
        try:
            with jax.enable_x64(self._x64):  # which belongs to a thread
                block = self._read([self.plan.distinct[number]])[0]
                if isinstance(block, BorrowedBlock):
                    return self._sent(number, block.view(np.ndarray))
                return block
        except Exception as error:
            note_path(error, leaf_path(self._keys))  # the reader has noted the index
            raise

    def note_where(self, index: Index, error: Exception) -> None:
        self.reader.note(error, index)
        note_path(error, leaf_path(self._keys))

    def send_if_possible(self, number: int, data: np.ndarray[Any, Any]) -> bool:
        """Send a complete block, and wait for it, if its memory allows; return True then."""
        if data.dtype != self.reader.dtype or not self.reader.borrows(data):
            return False
        self._arrays |= self._sent(number, data)
        return True

    def _sent(self, number: int, data: np.ndarray[Any, Any]) -> dict[Device, jax.Array]:
        """Send a block whose memory other code may change; wait for it."""
        sent = self.plan.sent(number, data)
        jax.block_until_ready([*sent.values()])
        return sent

    def task(self, report: Callable[[int], object], number: int) -> Task:
        """Return the task that reads a block by itself."""
        return Task(
            self.held_bytes(),
            partial(self._read_block, number),
            partial(self._keep, number, report),
        )

    def _keep(
        self,
        number: int,
        report: Callable[[int], object],
        block: Block | dict[Device, jax.Array],
    ) -> Transfer | None:
        """Keep a block that was read, or send it to its devices."""
        report(self.block_bytes)
        if isinstance(block, dict):
            self._arrays |= block
            return None
        return self._placed(number, block)

    def keep_filled(self, number: int, memory: np.ndarray[Any, Any]) -> Transfer | None:
        """Keep a filled block in memory that the reader gave."""
        index = self.plan.distinct[number]
        try:
            block = self.reader.from_numpy(index, memory, sole=True)
        except Exception as error:
            self.note_where(index, error)
            raise
        return self._placed(number, block)

    def _placed(self, number: int, block: Block) -> Transfer | None:
        """Keep a block on the host, or send it to its devices: small ones with the last of them."""
        if self.plan.places_early and self.block_bytes >= LARGE_BYTES:
            sent = self.plan.sent(number, block)
            self._arrays |= sent
            arrays: list[Any] = list(sent.values())
        else:
            self._blocks[number] = block
            if not self.plan.places_early or any(each is None for each in self._blocks):
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
    keys: Sequence[Any] = (),
    *,
    pad: bool = False,
    fill: object = 0,
) -> PendingArray:
    here = array_here(source)
    key_impl = None
    if isinstance(here, jax.Array) and is_extended(here.dtype):
        # The data of PRNG keys has more dimensions, which no spec may shard.
        local_blocks_of(here.shape, mesh, spec, pad)
        if dtype is not None and dtype != here.dtype:
            raise TypeError(f"the source has dtype {here.dtype}, of PRNG keys; omit dtype=")
        source, dtype = np.asarray(jax.random.key_data(here)), None
        key_impl = jax.random.key_impl(here)
    found = source_of(source)
    plan = local_blocks_of(found.shape, mesh, spec, pad)
    reader = BlockReader(
        plan,
        dtype,
        fill=fill,
        always_align=True,
        borrows=True,
        is_weak=is_weak(source),
    )
    found = typed(found, reader.wanted_dtype)
    if reader.dtype is None:
        reader.dtype = narrowed_dtype(found.dtype, f"the {type(source).__name__} has dtype ")
    is_read = not found.is_in_memory and not found.dtype.hasobject
    return PendingArray(
        reader,
        partial(reader.read_source, found),
        source=found,
        options=options if is_read else None,
        keys=keys,
        key_impl=key_impl,
    )

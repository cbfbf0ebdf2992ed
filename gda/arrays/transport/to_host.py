"""Blocks from devices and sources to the host: ahead of use, within a budget of bytes."""

from __future__ import annotations

import functools
import gc
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import numpy as np

from gda.arrays.transport.source_blocks import SourceBlock
from gda.mesh import own_settings
from gda.storage.sources import apart

K = TypeVar("K")
BlockData: TypeAlias = jax.Array | np.ndarray[Any, Any] | SourceBlock

MAX_BYTES = 256 * 1024 * 1024

_PINNED = "pinned_host"
_LARGE_BYTES = 2**20  # for smaller blocks the call that pins takes longer than the copy


class _Budget:
    """The bytes that are held."""

    # Not of an iterator: blocks that referred to it would live on after an error, with all arrays
    # to come, until Python collects garbage.
    held = 0


class HostBlock(Generic[K]):
    """A block on its way to the host, which counts for ``nbytes`` until released."""

    def __init__(self, key: K, data: BlockData, nbytes: int, budget: _Budget) -> None:
        self.key = key
        self.nbytes = nbytes
        self._data: BlockData | None = data
        self._copy: jax.Array | None = None
        self._budget = budget
        self._guard = threading.Lock()

    def begin(self) -> None:
        if isinstance(self._data, SourceBlock):
            self._data.begin()
        elif self._copy is None and not isinstance(self._data, np.ndarray | None):
            self._copy = _copy_begun(self._data)

    def values(self) -> np.ndarray[Any, Any]:
        """Return the block, read-only, when it is on the host; a block of a source is read here.

        Any thread may ask. On CPU it is the memory of the device itself where NumPy can have that.
        """
        if isinstance(self._data, np.ndarray):
            return self._data
        with self._guard:  # several threads would each make a copy
            if isinstance(self._data, SourceBlock):
                self._data = self._data.read()
            self.begin()
            with own_settings():
                return np.asarray(self._data if self._copy is None else self._copy)

    def release(self) -> None:
        """Release the copy; its memory lives as long as its ``values`` are used."""
        is_copy = self._copy is not None
        self._data = self._copy = None
        if is_copy:
            # JAX frees some copies, such as those of int4, only when Python collects garbage. That
            # of the youngest objects takes a microsecond.
            gc.collect(0)
        self._budget.held -= self.nbytes


def host_blocks(
    blocks: Iterable[tuple[K, BlockData, int]], max_bytes: int
) -> Iterator[HostBlock[K]]:
    """Yield blocks in order, their copies to the host begun as far ahead as a budget allows.

    A block, given as key, data and bytes, counts from the time when its copy is begun until the
    caller releases it, in any order, but in the thread that iterates. One that does not fit is
    yielded all the same when none before it is left; its copy begins when ``values`` is called.
    """
    budget = _Budget()
    coming = (HostBlock(*block, budget) for block in blocks)
    begun: deque[HostBlock[K]] = deque()
    following = next(coming, None)
    while begun or following is not None:
        while following is not None:
            fits = budget.held + following.nbytes <= max_bytes
            if begun and not fits:
                break
            if fits:
                following.begin()
            budget.held += following.nbytes
            begun.append(following)
            following = next(coming, None)
        yield begun.popleft()


def one_by_one(
    blocks: Iterable[tuple[K, jax.Array]], max_bytes: int
) -> Iterator[tuple[K, np.ndarray[Any, Any]]]:
    """Yield key and values of each block in order; release a block before the next."""
    for block in host_blocks(((key, data, data.nbytes) for key, data in blocks), max_bytes):
        yield block.key, block.values()
        block.release()


def is_host(device: Any) -> bool:
    return device.platform == "cpu"


def is_on_accelerator(data: BlockData) -> bool:
    """Return True if a block is on a device that is not a CPU."""
    return isinstance(data, jax.Array) and not all(map(is_host, data.devices()))


def pinned(data: jax.Array) -> jax.Array | None:
    """Begin a copy of a block in pinned memory of the host; ``None`` if its device has none.

    NumPy gets a view of it. NumPy's own copy, into fresh memory, took 30 times as long on an H200.
    """
    if not is_on_accelerator(data) or not _has_pinned_memory(*data.devices()):
        return None
    # Else it would be a part of a program that is being traced.
    with own_settings(), jax.ensure_compile_time_eval():
        return jax.device_put(data, data.sharding.with_memory_kind(_PINNED), may_alias=False)


@functools.cache
def _has_pinned_memory(device: Any) -> bool:
    return _PINNED in [memory.kind for memory in device.addressable_memories()]


def _copy_begun(data: jax.Array) -> jax.Array:
    if is_on_accelerator(data) and data.sharding.memory_kind == _PINNED:
        return apart(data)  # NumPy gets a view of it
    if data.nbytes >= _LARGE_BYTES and (copy := pinned(data)) is not None:
        return copy
    own = apart(data)
    with own_settings():
        own.copy_to_host_async()
    return own

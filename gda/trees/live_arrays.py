"""The live arrays of this process by name.

Provisional: see ``docs/stable.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import NamedSharding

from gda.arrays.dtypes import is_extended
from gda.arrays.liveness import traced_error
from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import packed_nbytes
from gda.layout.spec import Shape, format_layout
from gda.mesh import Device, is_tracer, memory_kind_of
from gda.multihost.descriptions import leaf_path
from gda.show.memory_report import UNNAMED, ArrayMemory, DeviceMemory, MemoryReport
from gda.trees.leaves import Tree, held_by, is_container


@set_module("gda")
@public
def memory(**named_trees: Tree) -> MemoryReport:
    """Return the live arrays of this process by name, with their bytes on each device.

    Arrays that are in no tree are grouped by shape, dtype and sharding, with their number. Buffers
    that several arrays share, by their addresses, count once: for the arrays of the trees in their
    order, then for the others. An array in several places has one row with all its names. Bytes are
    those in this process, replicas included, and packed for types below a byte such as int4.

    It never communicates, copies data or waits for a computation. 1,000 arrays, each on 8 devices,
    take some 0.1 s the first time, because JAX splits each.

    Args:
      named_trees: pytrees of ``GlobalArray``s, ``PaddedArray``s and ``jax.Array``s, whose names
        begin the names of their arrays. Other leaves are ignored: they take no memory of a device.
        Arrays on other platforms than JAX's default one are known only if they are in a tree.

    Raises:
      TypeError: an array in a tree is being traced.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> w = jax.device_put(np.zeros((1024, 64), 'float32'), NamedSharding(mesh, P('x')))
    >>> report = gda.memory(params={'layers': {'w': w}}, ema=[w])
    >>> row = next(row for row in report.arrays if row.names)
    >>> row.names
    ('params/layers/w', 'ema/0')
    >>> row.layout, row.nbytes, row.nbytes_per_device
    ("P('x') on x=8", 262144, 32768)
    """
    with jax.ensure_compile_time_eval():  # so that it adds nothing to a program being traced
        return _report([*_leaves_of(named_trees)])


# Of an array in a tree: the name of the tree, the path and the array. No class of its own, because
# to make 10,000 of one takes 2 ms.
_Leaf = tuple[str, Any, jax.Array]


def _leaves_of(trees: dict[str, Any]) -> Iterator[_Leaf]:
    """Yield the arrays in trees, as JAX counts them: of PRNG keys, their data."""
    is_key: dict[type, bool | None] = {}  # by class; None for no array: to check each leaf is slow
    for tree, values in trees.items():
        for path, value in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_container)[0]:
            array = held_by(value)
            kind = type(array)
            if kind not in is_key:
                if is_tracer(array):
                    raise traced_error(leaf_path(path, tree))
                is_key[kind] = is_extended(array.dtype) if isinstance(array, jax.Array) else None
            if (of_keys := is_key[kind]) is not None:
                # JAX has no data of keys with reduced axes; their buffers stay without a name.
                with suppress(ValueError):
                    yield tree, path, jax.random.key_data(array) if of_keys else array


def _report(leaves: Sequence[_Leaf]) -> MemoryReport:
    names: dict[int, tuple[str, ...]] = {}  # one for each place of an array
    named: dict[int, tuple[str, jax.Array]] = {}  # with the first of its trees
    for tree, path, array in leaves:
        key = id(array)
        names[key] = (*names.get(key, ()), leaf_path(path, tree))
        named.setdefault(key, (tree, array))
    live = {id(array): array for array in jax.live_arrays()}
    ledger = _Ledger()
    for key, (tree, array) in named.items():
        if not array.is_deleted():
            ledger.enter(array, tree, names[key])
    # The parts of an array come after it, so that its row has their bytes.
    unnamed = [array for key, array in live.items() if key not in named and not _failed(array)]
    for array in sorted(unnamed, key=lambda array: array.sharding.num_devices == 1):
        ledger.enter(array, UNNAMED, ())
    return MemoryReport(
        tuple(sorted(ledger.rows(), key=attrgetter("nbytes"), reverse=True)),
        tuple(_devices(ledger.sums)),
    )


_Place = tuple[Device, str | None]  # a device and a kind of its memory


class _Ledger:
    """The rows of a report and the buffers that they count."""

    def __init__(self) -> None:
        self.sums: Counter[tuple[_Place, str]] = Counter()  # bytes by place and tree
        self._counted: set[tuple[_Place, int]] = set()  # buffers by their addresses
        self._named: dict[object, ArrayMemory] = {}
        self._unnamed: dict[object, ArrayMemory] = {}
        self._layout_of = cache(_layout_of)

    def enter(self, array: jax.Array, tree: str, names: tuple[str, ...]) -> None:
        """Count the buffers of an array that no row counts yet, in a row for it."""
        kind = array.sharding, array.shape, array.dtype
        places, block_bytes, description = self._layout_of(*kind)
        if _failed(array):
            block_bytes = 0
        addresses = _addresses(array) if block_bytes else None
        buffers = None if addresses is None else tuple(zip(places, addresses, strict=True))
        new = places
        if buffers is not None:
            new = [buffer[0] for buffer in buffers if buffer not in self._counted]
            self._counted.update(buffers)
        for place in new:
            self.sums[place, tree] += block_bytes
        if not (new or names) and block_bytes:
            return  # such as the data of a shard
        rows = self._named if names else self._unnamed
        key = (buffers or object()) if names else kind
        row = rows.get(key) or ArrayMemory((), 0, *description, 0, 0)
        rows[key] = row._replace(
            names=row.names + names,
            num_arrays=1 if names else row.num_arrays + 1,
            nbytes=row.nbytes + block_bytes * len(new),
            nbytes_per_device=row.nbytes_per_device + (block_bytes if new else 0),
        )

    def rows(self) -> list[ArrayMemory]:
        return [*self._named.values(), *self._unnamed.values()]


def _layout_of(
    sharding: Any, shape: Shape, dtype: Any
) -> tuple[list[_Place], int, tuple[Shape, str, str, str | None]]:
    """Return places and bytes of the blocks in this process, and the words for the array."""
    devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
    memory = memory_kind_of(sharding)
    if isinstance(sharding, NamedSharding):
        layout = format_layout(sharding.spec, sharding.mesh.shape)
    elif sharding.num_devices == 1 and devices:
        layout = device_name(devices[0])
    else:
        layout = type(sharding).__name__
    block = sharding.shard_shape(shape) if devices else (0,)
    block_bytes = packed_nbytes(math.prod(block), dtype)
    return [(each, memory) for each in devices], block_bytes, (shape, str(dtype), layout, memory)


def _addresses(array: jax.Array) -> list[int] | None:
    """Return the addresses of blocks by device, for which JAX splits the array; None if unknown."""
    try:
        if array.sharding.num_devices == 1:
            return [array.unsafe_buffer_pointer()]
        shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        return [shard.data.unsafe_buffer_pointer() for shard in shards]
    except (RuntimeError, NotImplementedError):  # deleted meanwhile, or its computation failed
        return None


def _failed(array: Any) -> bool:
    """Return True if an array has no data, because its computation failed; never waits.

    JAX counts it as alive while something refers to it, such as the traceback of a full memory.
    """
    try:
        if array.is_ready():
            array.block_until_ready()
    except RuntimeError:  # the class of JAX's errors, also of an array that was deleted meanwhile
        return True
    return False


def device_name(device: Device) -> str:
    return f"{device.platform.upper()} {device.id}"


def _devices(sums: dict[tuple[_Place, str], int]) -> Iterator[DeviceMemory]:
    """Yield the devices of this process and of its arrays, by platform, kind of memory and id."""
    places = {(device, None) for device in jax.local_devices()} | {place for place, _ in sums}
    trees = [*dict.fromkeys(tree for _, tree in sums)]
    for place in sorted(places, key=lambda at: (at[0].platform, at[1] or "", at[0].id)):
        device, kind = place
        by_tree = {tree: sums.get((place, tree), 0) for tree in trees}
        stats = _stats(device) if kind is None else {}
        yield DeviceMemory(
            device_name(device),
            kind,
            sum(by_tree.values()),
            by_tree,
            stats.get("bytes_in_use"),
            stats.get("bytes_limit"),
        )


def _stats(device: Any) -> dict[str, int]:
    """Return the device's report of its memory; empty if it has none, as for a CPU."""
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}

"""The live arrays of this process by name, and the error of a full memory with them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any

import jax
from jax.tree_util import keystr

from gda.arrays.dtypes import is_extended
from gda.arrays.liveness import traced_error
from gda.layout.boundary import public, set_module
from gda.mesh import Device, is_tracer
from gda.show.memory_report import UNNAMED, ArrayMemory, DeviceMemory, MemoryReport
from gda.trees.leaves import held_by, is_container
from gda.trees.memory.addresses import Address, Blocks, addresses_of, blocks_of, name_of


@set_module("gda")
@public
def memory(**named_trees: Any) -> MemoryReport:
    """Return the live arrays of this process by name, with their bytes on each device.

    Arrays that are in no tree are grouped by shape, dtype and sharding, with their number. Buffers
    that several arrays share count once: for the arrays of the trees in their order, then for the
    others. An array in several places has one row with all its names. Bytes are those of
    ``nbytes``, in this process, replicas included; beside them is what the device itself reports.

    It never communicates, copies or keeps data and waits for no computation. 10,000 arrays take
    some 50 ms. Sharded arrays of one shape may share buffers without any sign of it, through
    ``jax.device_put`` to another mesh and back; this is seen for the largest 1,024 blocks.

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
    ("params['layers']['w']", 'ema[0]')
    >>> row.layout, row.nbytes, row.nbytes_per_device
    ("P('x') on x=8", 262144, 32768)
    """
    with jax.ensure_compile_time_eval():  # so that it adds nothing to a program being traced
        return _report([*_leaves_of(named_trees)])


@set_module("gda")
@public
def explaining_oom(**named_trees: Any) -> AbstractContextManager[None]:
    """Add the table of ``gda.memory`` to an error that a device is out of memory, as a note.

    The error, of JAX or a ``MemoryError``, goes on as it is, and others are untouched. JAX computes
    asynchronously, so wait inside the block for what it computes.

    The trees are known by weak references: an array that is replaced inside the block is freed as
    without it, and loses its name in the table. So use one block for each step, not one for the
    loop.

    Args:
      named_trees: as for ``memory``.

    Raises:
      TypeError: an array in a tree is being traced.

    >>> import gda, jax, jax.numpy as jnp
    >>> params = {'w': jnp.zeros((1024, 1024))}
    >>> try:
    ...     with gda.explaining_oom(params=params):
    ...         jnp.zeros((2**20, 2**30)).block_until_ready()
    ... except jax.errors.JaxRuntimeError as error:
    ...     "params['w']" in error.__notes__[-1]
    True
    """
    with jax.ensure_compile_time_eval():
        leaves = _leaves_of(named_trees)
        return _ExplainingOom([(tree, path, weakref.ref(array)) for tree, path, array in leaves])


class _ExplainingOom(AbstractContextManager[None]):
    def __init__(self, leaves: Sequence[_Leaf]) -> None:
        self._leaves = leaves

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or not _is_out_of_memory(error):
            return
        try:
            held = [(tree, path, reference()) for tree, path, reference in self._leaves]
            with jax.ensure_compile_time_eval():
                report = _report([leaf for leaf in held if leaf[2] is not None])
            note = f"gda: the memory when this was raised:\n{report}"
        except Exception as other:  # the error is more important than its table
            note = f"gda: no table of the memory, because of {type(other).__name__}: {other}"
        error.add_note(note)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError)


# Of an array in a tree: the name of the tree, the path, and the array or a reference to it. No
# class of its own, because to make 10,000 of one takes 2 ms.
_Leaf = tuple[str, Any, Any]


def _leaves_of(trees: dict[str, Any]) -> Iterator[_Leaf]:
    """Yield the arrays in trees, as JAX counts them: of PRNG keys, their data."""
    is_key: dict[type, bool | None] = {}  # by class, None of others: a look at each leaf is slow
    for tree, values in trees.items():
        for path, value in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_container)[0]:
            array = held_by(value)
            kind = type(array)
            if kind not in is_key:
                if is_tracer(array):
                    raise traced_error(tree + keystr(path))
                is_key[kind] = is_extended(array.dtype) if isinstance(array, jax.Array) else None
            if (of_keys := is_key[kind]) is not None:
                yield tree, path, jax.random.key_data(array) if of_keys else array


def _report(leaves: Sequence[_Leaf]) -> MemoryReport:
    names: dict[int, tuple[str, ...]] = {}  # one for each place of an array
    named: dict[int, tuple[str, jax.Array]] = {}  # with the first of its trees
    for tree, path, array in leaves:
        key = id(array)
        names[key] = (*names.get(key, ()), tree + keystr(path))
        named.setdefault(key, (tree, array))
    live = {id(array): array for array in jax.live_arrays()}
    missing = [key for key in named if key not in live]  # deleted, or on another platform
    deleted = [key for key in missing if named[key][1].is_deleted()]
    gone = [name for key in deleted if named.pop(key) for name in names[key]]
    arrays = [array for _, array in named.values()]
    arrays += [array for key, array in live.items() if key not in named]
    blocks = blocks_of(arrays)
    addresses = addresses_of(arrays, blocks)
    ledger = _Ledger()
    for number, (key, (tree, _)) in enumerate(named.items()):
        ledger.enter(blocks[number], addresses[number], tree, names[key])
    # The parts of an array come after it, so that they count as its aliases.
    for is_single in (False, True):
        for number in range(len(named), len(arrays)):
            if blocks[number].is_single == is_single:
                ledger.enter(blocks[number], addresses[number], UNNAMED, ())
    return MemoryReport(
        tuple(sorted(ledger.rows(), key=attrgetter("nbytes"), reverse=True)),
        tuple(_devices(ledger.sums)),
        tuple(gone),
        ledger.num_aliases,
        jax.process_index(),
        jax.process_count(),
    )


@dataclass(slots=True)
class _Row:
    """A row of the report, while arrays are added to it."""

    blocks: Blocks
    names: tuple[str, ...]
    count: int = 0
    nbytes: int = 0
    nbytes_per_device: int = 0
    nbytes_shared: int = 0

    def finished(self) -> ArrayMemory:
        sizes = self.nbytes, self.nbytes_per_device, self.nbytes_shared
        return ArrayMemory(self.names, self.count, *self.blocks.description, *sizes)


_Place = tuple[Device, str | None]  # a device and a kind of its memory


class _Ledger:
    """The arrays and the buffers that are counted."""

    def __init__(self) -> None:
        self._counted: dict[Address, tuple[_Row, int]] = {}  # the row and the bytes
        self._named: list[_Row | ArrayMemory] = []
        self._unnamed: dict[Blocks, _Row] = {}
        # The bytes in one memory, or in that of each device of some blocks, by place and tree.
        self.sums: Counter[tuple[Blocks | _Place, str]] = Counter()
        self.num_aliases = 0

    def enter(
        self,
        blocks: Blocks,
        addresses: list[Address] | None,
        tree: str,
        names: tuple[str, ...],
    ) -> None:
        """Count the buffers of an array that are not counted yet, in a row for it."""
        each = blocks.block_bytes
        if names and addresses is None:
            # Most arrays are such, and their rows are finished: nothing is added to them later.
            self.sums[blocks, tree] += each
            row = names, 1, *blocks.description, blocks.nbytes, each, 0
            self._named.append(ArrayMemory._make(row))
            return
        owners = [self._counted.get(address) for address in addresses] if addresses else ()
        if not any(owners):
            row = self._row(blocks, names)
            row.nbytes += blocks.nbytes
            row.nbytes_per_device += each
            self.sums[blocks, tree] += each
            for address in addresses or ():
                self._counted[address] = row, each
            return
        new = [each - min(owner[1], each) if owner else each for owner in owners]
        if not any(new) and self._is_alias(blocks, owners, names):
            return
        row = self._row(blocks, names)
        row.nbytes += sum(new)
        row.nbytes_shared += blocks.nbytes - sum(new)
        row.nbytes_per_device += max(new)
        for address, nbytes in zip(addresses or (), new, strict=True):
            self.sums[(address[0], blocks.memory_kind), tree] += nbytes
            if nbytes:
                self._counted[address] = row, each

    def _is_alias(
        self, blocks: Blocks, owners: Sequence[tuple[_Row, int] | None], names: tuple[str, ...]
    ) -> bool:
        """Return True if an array needs no row, because others count all of its buffers."""
        if not names:
            self.num_aliases += 1
            return True
        rows = [owner[0] for owner in owners if owner]
        is_same = rows[0].blocks.nbytes == blocks.nbytes and all(row is rows[0] for row in rows)
        if is_same:
            rows[0].names += names
        return is_same

    def _row(self, blocks: Blocks, names: tuple[str, ...]) -> _Row:
        """Return the row of an array, with the array in its count."""
        if names:
            row = _Row(blocks, names)
            self._named.append(row)
        elif (row := self._unnamed.get(blocks)) is None:
            row = self._unnamed[blocks] = _Row(blocks, ())
        row.count += 1
        return row

    def rows(self) -> list[ArrayMemory]:
        rows = (*self._named, *self._unnamed.values())
        return [row.finished() if isinstance(row, _Row) else row for row in rows]


def _devices(sums: dict[tuple[Blocks | _Place, str], int]) -> Iterator[DeviceMemory]:
    """Yield the devices of this process and of its arrays, by platform, kind of memory and id."""
    places: set[_Place] = {(device, None) for device in jax.local_devices()}
    found: Counter[tuple[Device, str | None, str]] = Counter()
    for (where, tree), nbytes in sums.items():
        for device, kind in where.places if isinstance(where, Blocks) else (where,):
            found[device, kind, tree] += nbytes
            places.add((device, kind))
    trees = [*dict.fromkeys(tree for *_, tree in sums)]
    for device, kind in sorted(places, key=lambda at: (at[0].platform, at[1] or "", at[0].id)):
        by_tree = {tree: found[device, kind, tree] for tree in trees}
        stats = _stats(device) if kind is None else {}
        yield DeviceMemory(
            name_of(device),
            kind,
            sum(by_tree.values()),
            by_tree,
            stats.get("bytes_in_use"),
            stats.get("bytes_limit"),
        )


def _stats(device: Any) -> dict[str, int]:
    """Return what the device reports of its memory; nothing if it does not, as a CPU."""
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}

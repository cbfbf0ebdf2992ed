"""A check that all replicas of every block of a tree hold the same bits.

Provisional: see ``docs/stable.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np
from jax.sharding import Mesh

from gda.arrays.fingerprints.formula import LANES, Words
from gda.arrays.fingerprints.replica_sums import PendingReplicas, begin_replicas
from gda.arrays.liveness import kind_error, real
from gda.layout.boundary import public, set_module
from gda.layout.grid import ShardGrid
from gda.layout.indices import shape_at
from gda.layout.numbering import IntArray
from gda.layout.spec import Index, Shape
from gda.layout.text import (
    counted,
    format_index,
    format_numbers,
    format_processes,
    join_some,
    shortened,
)
from gda.mesh import Device, devices_of, processes_of, sharding_of
from gda.multihost.agreement import communicates, done_by_all, user_location, watching
from gda.multihost.descriptions import describe, leaf_path
from gda.multihost.failure_watch import watched
from gda.trees.leaves import (
    array_of,
    grid_of_leaf,
    held_by,
    is_array,
    is_container,
    is_leaf,
    is_value,
    with_paths,
    without_data,
)

_NAME = "gda.check_replicas_agree"


@set_module("gda")
@dataclass(frozen=True)
class ReplicaMismatch:
    """A block whose replicas differ, in ``ReplicaMismatchError.mismatches``.

    Attributes:
      path: the leaf, such as ``layers/0``.
      index: the block, in the whole array.
      shape: the shape of the block, without padding.
      groups: the ids of the devices with equal bits, the smallest group first.
      processes: the processes of each group.

    >>> import gda
    >>> groups, processes = ((3,), (0, 1, 2)), ((1,), (0, 1))
    >>> mismatch = gda.ReplicaMismatch('w', (slice(0, 4),), (4,), groups, processes)
    >>> mismatch.minority
    (3,)
    >>> print(mismatch)
    at w, block [0:4] of shape (4,): device 3 (process 1) has other bits than devices 0-2 \
(processes 0, 1), the majority
    """

    path: str
    index: Index
    shape: Shape
    groups: tuple[tuple[int, ...], ...]
    processes: tuple[tuple[int, ...], ...]

    @property
    def minority(self) -> tuple[int, ...]:
        """Ids of all devices outside the largest group; empty if two groups are the largest."""
        if len(self.groups[-1]) == len(self.groups[-2]):
            return ()
        return tuple(device for group in self.groups[:-1] for device in group)

    def __str__(self) -> str:
        named = [
            f"device{'s' * (len(group) > 1)} {format_numbers(group)} ({format_processes(of)})"
            for group, of in zip(self.groups, self.processes, strict=True)
        ]
        block = f"block {format_index(self.index)} of shape {self.shape}"
        where = f"at {self.path}, {block}" if self.path else block
        if not self.minority:
            return f"{where}: {_listed(named)} have different bits, and there is no majority"
        *others, majority = named
        verb = "each have" if len(others) > 1 else "has" if len(self.minority) == 1 else "have"
        return f"{where}: {_listed(others)} {verb} other bits than {majority}, the majority"


def _listed(groups: list[str]) -> str:
    return join_some(groups).replace("; ", " and ")


@set_module("gda")
class ReplicaMismatchError(ValueError):
    """Replicas of a block hold different bits.

    Every process that holds a part of the array raises it, with the same message.

    Attributes:
      mismatches: a ``ReplicaMismatch`` for each such block, in the order of the leaves.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('x',))
    >>> on_each = [jax.device_put(np.float32([0, i == 2]), d) for i, d in enumerate(mesh.devices)]
    >>> everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    >>> w = jax.make_array_from_single_device_arrays((2,), everywhere, on_each)
    >>> try:
    ...     gda.check_replicas_agree({'w': w})
    ... except gda.ReplicaMismatchError as error:
    ...     print(error.mismatches[0].path, error.mismatches[0].minority)
    w (2,)
    """

    def __init__(self, message: str, mismatches: Iterable[ReplicaMismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


@overload
def check_replicas_agree(tree: Any, *, wait: Literal[True] = True) -> None: ...
@overload
def check_replicas_agree(tree: Any, *, wait: Literal[False]) -> ReplicaCheck: ...
@set_module("gda")
@communicates(_NAME, lambda given: [given["tree"]])
def check_replicas_agree(tree: Any, *, wait: bool = True) -> ReplicaCheck | None:
    """Check that all replicas of every block of a tree hold the same bits.

    Every device sums up its own blocks as ``fingerprint`` does, and 8 bytes of each block are
    compared. A change of one element is always found, any other change but for a chance of 2**-62.
    NaNs are compared by their bits, keys by their numbers. Padding of a ``PaddedArray``
    counts too.

    If several processes hold parts of an array, all of these must call it with the same tree; it
    communicates once for the whole tree. It copies small blocks for a moment, at most 32 MiB of
    them at a time, and on CPU floats below 32 bits.

    Args:
      tree: a pytree of ``GlobalArray``, ``PaddedArray``, ``jax.Array`` and PRNG keys. Other leaves,
        such as NumPy arrays and numbers, are ignored; so are arrays without replicas.
      wait: with ``False``, return a ``ReplicaCheck`` after starting the sums. It waits for nothing,
        and the arrays may be donated or deleted afterwards.

    Raises:
      ReplicaMismatchError: replicas differ. The message has the first blocks and their devices.
      DisagreementError: the processes have different trees, or the check failed in another one.
      LateProcessError: a process did not come. It is a ``TimeoutError``.
      RuntimeError: an array was deleted or donated.
      TypeError: an array is being traced, or has no mesh and spec, or ``tree`` is something else.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
    >>> params = gda.load_tree({'w': np.ones((8, 2)), 'b': np.ones(8)}, mesh, P('x'))
    >>> gda.check_replicas_agree(params)
    """
    if is_leaf(tree) and not (is_array(tree) or is_value(tree) or isinstance(tree, np.ndarray)):
        raise kind_error(tree, "check an array, or a tree that has some")
    check = ReplicaCheck(tree)
    if wait:
        return check.result()
    check._start()
    return check


class _Replicated(NamedTuple):
    """An array with replicas: its leaf by number, and its layout."""

    number: int
    mesh: Mesh
    grid: ShardGrid
    is_shared: bool  # between processes


@set_module("gda")
class ReplicaCheck:
    """A check of replicas that devices are working on: ``check_replicas_agree(wait=False)``.

    >>> import gda, jax.numpy as jnp
    >>> check = gda.check_replicas_agree({'w': jnp.ones(4)}, wait=False)
    >>> check.result()
    >>> check.is_ready()
    True
    """

    def __init__(self, tree: Any) -> None:
        self._leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
        found = with_paths(tree, _layout_of, range(len(self._leaves)), self._leaves)
        layouts = [each for each in found if each is not None]
        self._arrays = [each for each in layouts if each.grid.num_replicas > 1]
        shared = [each for each in layouts if each.is_shared]
        numbers = (processes_of(each.mesh).numbers for each in shared)
        self._processes = tuple(sorted(set().union(*numbers)))
        # Without data, which a check on its way must not hold.
        described: dict[int, Any] = dict.fromkeys(range(len(self._leaves)), 0)
        described |= {each.number: without_data(self._leaves[each.number]) for each in shared}
        self._described = jax.tree.unflatten(structure, described.values())
        self._numbers = jax.tree.unflatten(structure, described)
        self._sums: PendingReplicas | None = None
        self._mismatches: list[ReplicaMismatch] | None = None  # until it is compared

    @public
    def is_ready(self) -> bool:
        """Return True if the devices of this process have finished; never waits."""
        return self._mismatches is not None or self._start().is_ready()

    @public
    def result(self) -> None:
        """Wait, and compare, once; the errors are those of ``check_replicas_agree``.

        If several processes hold parts of an array, all of these must call it.
        """
        if self._mismatches is None:
            if jax.process_index() in self._processes:
                mine = done_by_all(
                    self._sums_here, lambda _: describe(self._described), _NAME, self._processes
                )
                self._mismatches = self._compare_shared(mine)
            else:
                self._sums_here()
                self._mismatches = []
        _raise_for(self._mismatches, len(self._arrays))

    def _start(self) -> PendingReplicas:
        """Start the sums, unless they were started, and let go of the arrays."""
        if self._sums is None:
            arrays: Any = with_paths(self._numbers, _live_array, self._leaves)
            self._sums = begin_replicas([arrays[each.number] for each in self._arrays])
            self._leaves = []
        return self._sums

    def _sums_here(self) -> list[Words]:
        """Return the sums of this process, after comparing arrays that no other process holds."""
        # JAX begins no sum while other programs wait for a process that has ended.
        what = f"{_NAME} ({user_location()})"
        sums = watched(lambda: self._start().result(), what, self._processes)
        # An array of one other process has no sums here.
        own = [
            (each, of_devices)
            for each, of_devices in zip(self._arrays, sums, strict=True)
            if not each.is_shared and len(of_devices)
        ]
        _raise_for([*self._compare(own)], len(self._arrays))
        return sums

    def _compare_shared(self, mine: list[Words]) -> list[ReplicaMismatch]:
        """Exchange the sums of arrays that several processes hold, and compare them."""
        shared = [
            (each, sums) for each, sums in zip(self._arrays, mine, strict=True) if each.is_shared
        ]
        layouts = [each for each, _ in shared]
        places = [
            [processes_of(each.mesh).positions(process) for each in layouts]
            for process in self._processes
        ]
        most = max((sum(map(len, of_process)) for of_process in places), default=0)
        if not most:
            return []
        line = np.zeros((most, LANES), "<u4")
        here = np.concatenate([sums for _, sums in shared])
        line[: len(here)] = here
        with watching(_NAME, self._processes) as watch:
            received = watch.all_gather(line.reshape(-1).view(np.uint8))
        rows = received.view("<u4").reshape(len(self._processes), most, LANES)
        everywhere = [np.zeros((each.grid.num_devices, LANES), np.uint32) for each in layouts]
        for of_process, row in zip(places, rows, strict=True):
            parts = np.split(row, np.cumsum(list(map(len, of_process))))
            for sums, positions, part in zip(everywhere, of_process, parts, strict=False):
                sums[positions] = part
        return [*self._compare(zip(layouts, everywhere, strict=True))]

    def _compare(self, arrays: Iterable[tuple[_Replicated, Words]]) -> Iterator[ReplicaMismatch]:
        """Yield the blocks that differ, by the sums of all devices of some arrays."""
        for array, sums in arrays:
            grid, devices = array.grid, devices_of(array.mesh)
            differing = (sums != sums[_first_holders(grid)]).any(1)
            for block in np.unique(grid.block_ids[differing]).tolist():
                by_sums: dict[bytes, list[Device]] = {}
                for position in np.flatnonzero(grid.block_ids == block):
                    by_sums.setdefault(sums[position].tobytes(), []).append(devices[position])
                groups = sorted(by_sums.values(), key=len)
                index = grid.block_index(block)
                yield ReplicaMismatch(
                    self._paths[array.number],
                    index,
                    shape_at(index, grid.shard_shape),
                    tuple(tuple(sorted(each.id for each in group)) for group in groups),
                    tuple(
                        tuple(sorted({each.process_index for each in group})) for group in groups
                    ),
                )

    @cached_property
    def _paths(self) -> list[str]:
        return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(self._numbers)]

    def __repr__(self) -> str:
        return f"ReplicaCheck({counted(len(self._arrays), 'replicated array')})"


_MOST_CHARACTERS = 1200  # of a message
_CHARACTERS_OF_BLOCK = 450


def _raise_for(mismatches: list[ReplicaMismatch], num_arrays: int) -> None:
    if not mismatches:
        return
    first_of = {mismatch.path: mismatch for mismatch in reversed(mismatches)}
    texts = [shortened(str(each), _CHARACTERS_OF_BLOCK) for each in first_of.values()]
    head = f"the replicas of {len(texts)} of {counted(num_arrays, 'array')} differ"
    raise ReplicaMismatchError(f"{head}: {join_some(texts[::-1], _MOST_CHARACTERS)}", mismatches)


@lru_cache(maxsize=256)
def _first_holders(grid: ShardGrid) -> IntArray:
    """Return, for each device, the position of the first device that holds the same block."""
    _, firsts, blocks = np.unique(grid.block_ids, return_index=True, return_inverse=True)
    return firsts[blocks]


def _layout_of(number: int, leaf: Any) -> _Replicated | None:
    if not is_array(leaf):
        return None
    array = real(held_by(leaf))
    mesh: Any = sharding_of(array).mesh
    return _Replicated(number, mesh, grid_of_leaf(leaf), len(processes_of(mesh).numbers) > 1)


def _live_array(leaf: Any) -> jax.Array | None:
    return array_of(leaf) if is_array(leaf) else None

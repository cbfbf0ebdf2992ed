"""A check that all replicas of every block of a tree hold the same bits.

Provisional: see ``docs/stable.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gda.arrays.fingerprints.formula import LANES, Words
from gda.arrays.fingerprints.replica_sums import sums_of_replicas
from gda.arrays.liveness import kind_error, real
from gda.layout.boundary import set_module
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
)
from gda.mesh import Device, devices_of, processes_of, sharding_of
from gda.multihost.agreement import communicates, tells_alone, timeout_of_calls, watching
from gda.multihost.descriptions import describe, leaf_path
from gda.multihost.failure_watch import watched
from gda.multihost.places import here
from gda.multihost.steps import all_do
from gda.trees.leaves import (
    Keys,
    Tree,
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


@set_module("gda")
@communicates(_NAME, lambda given: [given["tree"]])
def check_replicas_agree(tree: Tree) -> None:
    """Check that all replicas of every block of a tree hold the same bits.

    Every device sums up its own blocks as ``fingerprint`` does, and 8 bytes of each block are
    compared. A change of one element is always found, any other change but for a chance of 2**-62.
    NaNs are compared by their bits, keys by their numbers. Padding of a ``PaddedArray``
    counts too.

    If several processes hold parts of an array, all of these must call it with the same tree; it
    communicates once for the whole tree. Of a tree without arrays all processes must call it.

    It copies small blocks for a moment, at most 32 MiB of them at a time.

    Args:
      tree: a pytree of ``GlobalArray``, ``PaddedArray``, ``jax.Array`` and PRNG keys. Other leaves,
        such as NumPy arrays and numbers, are ignored; so are arrays without replicas.

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
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    rows = with_paths(tree, _layout_of, *zip(*found, strict=True))
    arrays = [row for row in rows if row is not None and row.has_replicas]
    described = [0 if row is None or not row.is_shared else without_data(row.leaf) for row in rows]
    known = [row for row in rows if row is not None]
    numbers = (processes_of(row.mesh).numbers for row in known if row.is_shared)
    # Without an array, the tree does not tell who takes part: all do, and compare it.
    of_arrays: set[int] = set().union(*numbers) if known else {*range(jax.process_count())}
    processes = tuple(sorted(of_arrays))

    def sums_here() -> list[Words]:
        """Return the sums of this process, after comparing arrays that no other process holds."""
        live = with_paths(tree, _live_array, rows)
        replicated = [
            array
            for array, row in zip(live, rows, strict=True)
            if row is not None and row.has_replicas
        ]
        # JAX begins no sum while other programs wait for a process that has ended.
        sums = watched(lambda: sums_of_replicas(replicated), here(_NAME), processes)
        # Arrays that another process alone holds have no sums here.
        own = [
            (each, of_devices)
            for each, of_devices in zip(arrays, sums, strict=True)
            if not each.is_shared and len(of_devices)
        ]
        _raise_for([*_compare(own)], len(arrays))
        return sums

    if jax.process_index() not in processes:
        try:
            sums_here()
        finally:
            tells_alone(_NAME, "no array of the tree is in this process and in others")
        return
    request = jax.tree.unflatten(structure, described)
    mine = all_do(
        sums_here,
        what=_NAME,
        timeout=timeout_of_calls(),
        agreed=lambda _: describe(request),
        share=lambda _: None,
        processes=processes,
    ).mine
    _raise_for(_compare_shared(arrays, mine, processes), len(arrays))


@dataclass(frozen=True, eq=False)
class _Array:
    """An array of the tree, and its layout."""

    keys: Keys
    leaf: Any
    mesh: Mesh
    grid: ShardGrid
    is_shared: bool  # between processes

    @property
    def has_replicas(self) -> bool:
        return self.grid.num_replicas > 1


def _layout_of(keys: Keys, leaf: Any) -> _Array | None:
    if not is_array(leaf):
        if isinstance(leaf, jax.Ref):
            raise kind_error(leaf)
        return None
    mesh: Any = sharding_of(real(held_by(leaf))).mesh
    return _Array(keys, leaf, mesh, grid_of_leaf(leaf), len(processes_of(mesh).numbers) > 1)


def _live_array(row: _Array | None) -> Any:
    return None if row is None else array_of(row.leaf)


def _compare_shared(
    arrays: Sequence[_Array], mine: Sequence[Words], processes: tuple[int, ...]
) -> list[ReplicaMismatch]:
    """Exchange the sums of arrays that several processes hold, and compare them."""
    shared = [(each, sums) for each, sums in zip(arrays, mine, strict=True) if each.is_shared]
    layouts = [each for each, _ in shared]
    places = [
        [processes_of(each.mesh).positions(process) for each in layouts] for process in processes
    ]
    most = max((sum(map(len, of_process)) for of_process in places), default=0)
    if not most:
        return []
    line = np.zeros((most, LANES), "<u4")
    here = np.concatenate([sums for _, sums in shared])
    line[: len(here)] = here
    with watching(_NAME, processes) as watch:
        received = watch.all_gather(line.reshape(-1).view(np.uint8))
    rows = received.view("<u4").reshape(len(processes), most, LANES)
    everywhere = [np.zeros((each.grid.num_devices, LANES), np.uint32) for each in layouts]
    for of_process, row in zip(places, rows, strict=True):
        parts = np.split(row, np.cumsum(list(map(len, of_process))))
        for sums, positions, part in zip(everywhere, of_process, parts, strict=False):
            sums[positions] = part
    return [*_compare(zip(layouts, everywhere, strict=True))]


def _compare(arrays: Iterable[tuple[_Array, Words]]) -> Iterator[ReplicaMismatch]:
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
                leaf_path(array.keys),
                index,
                shape_at(index, grid.shard_shape),
                tuple(tuple(sorted(each.id for each in group)) for group in groups),
                tuple(tuple(sorted({each.process_index for each in group})) for group in groups),
            )


def _raise_for(mismatches: list[ReplicaMismatch], num_arrays: int) -> None:
    if not mismatches:
        return
    first_of = {mismatch.path: mismatch for mismatch in reversed(mismatches)}
    texts = [str(each) for each in first_of.values()]
    head = f"the replicas of {len(texts)} of {counted(num_arrays, 'array')} differ"
    raise ReplicaMismatchError(f"{head}: {join_some(texts[::-1])}", mismatches)


@lru_cache(maxsize=256)
def _first_holders(grid: ShardGrid) -> IntArray:
    """Return, for each device, the position of the first device that holds the same block."""
    _, firsts, blocks = np.unique(grid.block_ids, return_index=True, return_inverse=True)
    return firsts[blocks]

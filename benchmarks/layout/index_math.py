"""Index math: which part of an array each device holds, and which replica of it that is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import methodcaller
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.pairs import Side
from benchmarks.work import AtMost, Faster, Floor, Within, Work
from gda.layout import numbering

P = PartitionSpec
CUT = P("x", "y")

# JAX keeps what it worked out for a sharding and a shape, gda what it worked out for a mesh and a
# spec. A cold round is one with a shape that nobody saw before, so no two rounds share a number.
_unseen = itertools.count(1)


def unseen_shape(mesh_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a shape that a mesh of two axes divides and that this process has not met."""
    return mesh_sizes[0] * next(_unseen), mesh_sizes[1] * 3


def mesh_of(sizes: Sequence[int], names: Sequence[str] = ("x", "y")) -> Mesh:
    """Return a mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: prod(sizes)]).reshape(tuple(sizes)), tuple(names))


# JAX exports no function for replica ids; they are found by counting equal indices.

Count = Callable[[Iterable[Any]], list[int]]


def counted_as_jax(indices: Iterable[Any]) -> list[int]:
    """Count as JAX does for ``Shard.replica_id``; word for word its ``device_replica_id_map``."""
    seen: dict[int, int] = Counter()
    replica_ids = []
    for index in indices:
        assert all(v.step is None for v in index if isinstance(v, slice))
        key = hash(tuple((v.start, v.stop) if isinstance(v, slice) else v for v in index))
        replica_ids.append(seen[key])
        seen[key] += 1
    return replica_ids


def counted_lean(indices: Iterable[Any]) -> list[int]:
    """Count as quickly as Python counts."""
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    replica_ids = []
    for index in indices:
        key = tuple([(s.start, s.stop) for s in index])
        replica_ids.append(seen.get(key, 0))
        seen[key] = replica_ids[-1] + 1
    return replica_ids


def uncounted(indices: Iterable[Any]) -> list[int]:
    return []


_COUNTS = (uncounted, counted_as_jax)
_HOW: dict[Count, str] = {
    counted_as_jax: "equal indices counted as JAX does",
    counted_lean: "equal indices counted as quickly as Python can",
    uncounted: "no replica ids",
}


def _lists(shape: tuple[int, ...], mesh: Mesh) -> object:
    grid = gda.ShardGrid(shape, mesh.shape, CUT)
    return grid.indices(), grid.replica_ids


def _arrays(shape: tuple[int, ...], mesh: Mesh) -> object:
    grid = gda.ShardGrid(shape, mesh.shape, CUT)
    return grid.starts, grid.stops, grid.replica_ids


def _view(grid: gda.ShardGrid) -> object:
    return grid.view(65536).indices


def _all_devices(sizes: tuple[int, int], first_time: bool) -> list[Side]:
    mesh = mesh_of(sizes)
    # From about 512 devices on arrays are quicker to make than objects, and as good to compute on.
    answer = _arrays if mesh.size >= 512 else _lists
    # Several shapes a sample, each result dropped at once, so that the figure is not about what the
    # other side left in the processor's caches. But a mesh and spec are new only once.
    calls = 1 if first_time else 20

    def fresh() -> tuple[Any, ...]:
        if first_time:
            numbering.layout_of.cache_clear()
        return ([unseen_shape(sizes) for _ in range(calls)],)

    def ours(shapes: list[tuple[int, ...]]) -> None:
        for shape in shapes:
            answer(shape, mesh)

    def both_maps(shape: tuple[int, ...], count: Count) -> tuple[Mapping[Any, Any], list[int]]:
        indices = NamedSharding(mesh, CUT).devices_indices_map(shape)
        return indices, count(indices.values())

    def rival(count: Count) -> Callable[[list[tuple[int, ...]]], None]:
        def run(shapes: list[tuple[int, ...]]) -> None:
            for shape in shapes:
                both_maps(shape, count)

        return run

    shape = unseen_shape(sizes)
    grid = gda.ShardGrid(shape, mesh.shape, CUT)
    for count in _HOW:
        indices, replica_ids = both_maps(shape, count)
        assert grid.indices() == list(indices.values())
        assert count is uncounted or grid.replica_ids.tolist() == replica_ids
    return [Side(run, fresh, calls=calls) for run in (ours, *map(rival, _HOW))]


def _python_objects() -> list[Side]:
    sizes = (32, 32)
    mesh = mesh_of(sizes)

    def fresh() -> tuple[Any, ...]:
        return unseen_shape(sizes), mesh, CUT

    def rival(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> dict[Any, Any]:
        indices = NamedSharding(mesh, spec).devices_indices_map(shape)
        replica_ids = counted_as_jax(indices.values())
        pairs = zip(indices.values(), replica_ids, strict=True)
        return dict(zip(indices, pairs, strict=True))

    arguments = fresh()
    assert gda.get_shard_indices_replica_ids(*arguments) == rival(*arguments)
    return [Side(gda.get_shard_indices_replica_ids, fresh), Side(rival, fresh)]


def _eight_local(side: int) -> list[Side]:
    # Without devices JAX has no public function that answers: devices_indices_map of a sharding
    # over an AbstractMesh raises. Underneath it are these two.
    from jax._src.op_shardings import op_sharding_to_indices

    sizes, local = (side, side), range(side * side // 2, side * side // 2 + 8)
    mesh_shape = {"x": side, "y": side}
    sharding: Any = NamedSharding(AbstractMesh(sizes, ("x", "y")), CUT)
    shapes = [unseen_shape(sizes)]

    def ours(shapes: list[tuple[int, ...]]) -> list[list[tuple[Any, int]]]:
        return [gda.ShardGrid(shape, mesh_shape, CUT).shards_at(local) for shape in shapes]

    def rival(count: Count, shapes: list[tuple[int, ...]]) -> list[list[tuple[Any, int]]]:
        (shape,) = shapes
        hlo_sharding = sharding._to_xla_hlo_sharding(len(shape))
        indices = op_sharding_to_indices(hlo_sharding, shape, side * side)
        # A replica id depends on all devices before it, so all are counted.
        replica_ids = count(indices)
        return [[(indices[i], replica_ids[i] if replica_ids else 0) for i in local]]

    def floor(shapes: list[tuple[int, ...]]) -> list[list[tuple[Any, int]]]:
        answers = []
        for rows, columns in shapes:
            high, wide = rows // side, columns // side
            answer = []
            for position in local:
                i, j = divmod(position, side)
                rows_of = slice(i * high, (i + 1) * high)
                answer.append(((rows_of, slice(j * wide, (j + 1) * wide)), 0))
            answers.append(answer)
        return answers

    rivals = [partial(rival, count) for count in _COUNTS]
    for each in (*rivals, floor):
        assert each(shapes) == ours(shapes)
    # The rival walks over a million objects and leaves the processor's caches empty, so one sample
    # of gda's is twenty shapes.
    twenty = Side(ours, lambda: ([unseen_shape(sizes) for _ in range(20)],), calls=20)
    one = [Side(each, lambda: ([unseen_shape(sizes)],)) for each in rivals]
    return [twenty, *one, replace(twenty, run=floor)]


def _a_million(mesh_shape: dict[str, int], spec: PartitionSpec) -> list[Side]:
    def ours(shape: tuple[int, ...]) -> tuple[Any, ...]:
        grid = gda.ShardGrid(shape, mesh_shape, spec)
        return grid.starts, grid.stops, grid.replica_ids

    def fresh() -> tuple[Any, ...]:
        return (unseen_shape((1024, 1024)),)

    assert len(ours(*fresh())[2]) == 1024**2
    return [Side(ours, fresh)]


def _array_answers(grid: gda.ShardGrid) -> object:
    return grid.starts, grid.stops, grid.replica_ids


def _padded_million(answer: Callable[[gda.ShardGrid], object]) -> list[Side]:
    """A shape that a mesh of 1024 times 1024 does not divide, and one that it does."""
    mesh_shape = {"x": 1024, "y": 1024}
    process_of = gda.Processes(np.arange(1024**2) // 8)

    def side(missing: int) -> Side:
        def run(shape: tuple[int, ...]) -> object:
            return answer(gda.ShardGrid(shape, mesh_shape, CUT, pad=True, process_of=process_of))

        def fresh() -> tuple[Any, ...]:
            rows, columns = unseen_shape((1024, 1024))
            return ((rows, columns - missing),)

        (shape,) = fresh()
        assert gda.ShardGrid(shape, mesh_shape, CUT, pad=True).is_padded == bool(missing)
        return Side(run, fresh)

    return [side(missing=1000), side(missing=0)]


def _list_or_array(sizes: tuple[int, int]) -> list[Side]:
    weights = (sizes[1], 1)
    repeats = range(max(1, 4096 // prod(sizes)))

    def side(numbers: Callable[[], Any]) -> Side:
        def run() -> None:
            for _ in repeats:
                numbers()

        return Side(run, calls=len(repeats))

    spread_list, spread = numbering._spread_list, numbering._spread
    assert spread_list(sizes, weights) == spread(sizes, weights).tolist()
    return [
        side(lambda: spread_list(sizes, weights)),
        side(lambda: spread(sizes, weights)),
        side(lambda: spread(sizes, weights).tolist()),
    ]


_SIZES = {(4, 2): Faster(4), (8, 8): Faster(8), (32, 32): Faster(50)}
_MAP = "devices_indices_map of a new NamedSharding"
_PRIVATE = "op_sharding_to_indices over an AbstractMesh (private), "
_PLAIN = "8 tuples of slices made in a loop of plain Python"

WORKS = [
    *[
        Work(
            f"all indices and replica ids, cold, {prod(sizes):,} devices",
            partial(_all_devices, sizes, False),
            {
                f"{_MAP}, {how}": faster if count is counted_as_jax else None
                for count, how in _HOW.items()
            },
            devices=prod(sizes),
        )
        for sizes, faster in _SIZES.items()
    ],
    *[
        Work(
            f"index and replica id of 8 local devices of {side * side:,}",
            partial(_eight_local, side),
            # No public function answers without devices.
            {f"{_PRIVATE}{_HOW[count]}": Faster(times) for count in _COUNTS} | {_PLAIN: None},
            floor=Floor(_PLAIN, "An answer in Python is made of these objects."),
            seconds=seconds,
        )
        for side, times, seconds in [(256, 3_000, 1), (1024, 50_000, 6)]
    ],
    Work(
        "the same as Python objects, cold, (32, 32): get_shard_indices_replica_ids",
        _python_objects,
        {f"{_MAP}, {_HOW[counted_as_jax]}": Faster(8)},
        devices=1024,
    ),
    *[
        Work(
            f"all of 1,048,576 devices as arrays, {spec} on {tuple(mesh_shape.values())}",
            partial(_a_million, mesh_shape, spec),
            limit=Within(30),
        )
        for mesh_shape, spec in [
            ({"x": 1024, "y": 1024}, P("x", "y")),
            ({"x": 64, "y": 128, "z": 128}, P("z", "x")),
        ]
    ],
    *[
        Work(
            f"{name} of 1,048,576 devices, a shape that is padded",
            partial(_padded_million, answer),
            {"a shape that divides": AtMost(share)},
        )
        for name, answer, share in [
            ("starts, stops and replica ids", _array_answers, 1.1),
            ("indices", methodcaller("indices"), 1.1),
            ("the view of one process", _view, 1.1),
        ]
    ],
    # For information: the cost of the first time, and what `numbering.SMALL` relies on.
    *[
        Work(
            f"the same, first time for this mesh and spec, {prod(sizes):,} devices",
            partial(_all_devices, sizes, True),
            {f"{_MAP}, {how}": None for how in _HOW.values()},
            devices=prod(sizes),
        )
        for sizes in _SIZES
    ],
    *[
        Work(
            f"numbers of {prod(sizes):,} devices",
            partial(_list_or_array, sizes),
            {"NumPy": None, "NumPy, then tolist": None},
            ours="lists",
        )
        for sizes in [(4, 2), (8, 8), (32, 16), (64, 64)]
    ],
]

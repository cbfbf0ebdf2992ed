"""Index math: which part of an array each device holds, and which replica of it that is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import gda
from benchmarks.pairs import Side
from benchmarks.work import Faster, Within, Work
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


def _all_devices(sizes: tuple[int, int], count: Count, first_time: bool = False) -> list[Side]:
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

    def both_maps(shape: tuple[int, ...]) -> tuple[Mapping[Any, Any], list[int]]:
        indices = NamedSharding(mesh, CUT).devices_indices_map(shape)
        return indices, count(indices.values())

    def rival(shapes: list[tuple[int, ...]]) -> None:
        for shape in shapes:
            both_maps(shape)

    shape = unseen_shape(sizes)
    indices, replica_ids = both_maps(shape)
    grid = gda.ShardGrid(shape, mesh.shape, CUT)
    assert grid.indices() == list(indices.values())
    assert count is uncounted or grid.replica_ids.tolist() == replica_ids
    return [Side(ours, fresh, calls=calls), Side(rival, fresh, calls=calls)]


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


def _eight_local(side: int, count: Count) -> list[Side]:
    # Without devices JAX has no public function that answers: devices_indices_map of a sharding
    # over an AbstractMesh raises. Underneath it are these two.
    from jax._src.op_shardings import op_sharding_to_indices

    sizes, local = (side, side), range(side * side // 2, side * side // 2 + 8)
    mesh_shape = {"x": side, "y": side}
    sharding: Any = NamedSharding(AbstractMesh(sizes, ("x", "y")), CUT)

    def ours(shapes: list[tuple[int, ...]]) -> list[list[tuple[Any, int]]]:
        return [gda.ShardGrid(shape, mesh_shape, CUT).shards_at(local) for shape in shapes]

    def rival(shape: tuple[int, ...]) -> list[Any]:
        hlo_sharding = sharding._to_xla_hlo_sharding(len(shape))
        indices = op_sharding_to_indices(hlo_sharding, shape, side * side)
        # A replica id depends on all devices before it, so all are counted.
        replica_ids = count(indices)
        return [(indices[i], replica_ids[i] if replica_ids else 0) for i in local]

    shape = unseen_shape(sizes)
    assert ours([shape]) == [rival(shape)]
    # The rival walks over a million objects and leaves the processor's caches empty, so one sample
    # of gda's is twenty shapes.
    return [
        Side(ours, lambda: ([unseen_shape(sizes) for _ in range(20)],), calls=20),
        Side(rival, lambda: (unseen_shape(sizes),)),
    ]


def _a_million(mesh_shape: dict[str, int], spec: PartitionSpec) -> list[Side]:
    def ours(shape: tuple[int, ...]) -> tuple[Any, ...]:
        grid = gda.ShardGrid(shape, mesh_shape, spec)
        return grid.starts, grid.stops, grid.replica_ids

    def fresh() -> tuple[Any, ...]:
        return (unseen_shape((1024, 1024)),)

    assert len(ours(*fresh())[2]) == 1024**2
    return [Side(ours, fresh)]


def _list_or_array(
    sizes: tuple[int, int], wanted: type[list[Any]] | type[np.ndarray]
) -> list[Side]:
    weights = (sizes[1], 1)
    repeats = range(max(1, 4096 // prod(sizes)))

    def with_list() -> Any:
        values: Any = None
        for _ in repeats:
            values = numbering._spread_list(sizes, weights)
            if wanted is np.ndarray:
                values = np.array(values, np.int64)
        return values

    def with_numpy() -> Any:
        values: Any = None
        for _ in repeats:
            values = numbering._spread(sizes, weights)
            if wanted is list:
                values = values.tolist()
        return values

    assert np.array_equal(with_list(), with_numpy())
    return [Side(with_list, calls=len(repeats)), Side(with_numpy, calls=len(repeats))]


_SIZES = [(4, 2), (8, 8), (32, 32)]
_ROUNDS = {8: 200, 64: 100, 1024: 20}
_FASTER = {8: Faster(4), 64: Faster(8), 1024: Faster(50)}
_MAP = "devices_indices_map of a new NamedSharding"


def _all_devices_work(name: str, sizes: tuple[int, int], count: Count, **more: Any) -> Work:
    devices = prod(sizes)
    return Work(
        f"{name}, {devices:,} devices",
        partial(_all_devices, sizes, count, first_time=more.pop("first_time", False)),
        f"{_MAP}, {_HOW[count]}",
        devices=devices,
        rounds=_ROUNDS[devices],
        **more,
    )


WORKS = [
    *[
        _all_devices_work(
            "all indices and replica ids, cold",
            sizes,
            counted_as_jax,
            target=_FASTER[prod(sizes)],
        )
        for sizes in _SIZES
    ],
    *[
        Work(
            f"index and replica id of 8 local devices of {side * side:,}",
            partial(_eight_local, side, count),
            f"op_sharding_to_indices over an AbstractMesh, {_HOW[count]} (private: no public "
            "function answers without devices)",
            Faster(times),
            rounds=rounds,
        )
        for side, times, rounds in [(256, 3_000, 15), (1024, 50_000, 5)]
        for count in [uncounted, counted_as_jax]
    ],
    Work(
        "the same as Python objects, cold, (32, 32): get_shard_indices_replica_ids",
        _python_objects,
        f"{_MAP}, {_HOW[counted_as_jax]}",
        Faster(8),
        devices=1024,
        rounds=60,
    ),
    *[
        Work(
            f"all of 1,048,576 devices as arrays, {spec} on {tuple(mesh_shape.values())}",
            partial(_a_million, mesh_shape, spec),
            target=Within(30),
            rounds=30,
        )
        for mesh_shape, spec in [
            ({"x": 1024, "y": 1024}, P("x", "y")),
            ({"x": 64, "y": 128, "z": 128}, P("z", "x")),
        ]
    ],
    # For information: stricter rivals, and the cost of the first time.
    *[
        _all_devices_work("all indices and replica ids, cold", sizes, count)
        for count in [counted_lean, uncounted]
        for sizes in _SIZES
    ],
    *[
        _all_devices_work(
            "the same, first time for this mesh and spec",
            sizes,
            counted_as_jax,
            first_time=True,
        )
        for sizes in _SIZES
    ],
    *[
        Work(
            f"numbers of {prod(sizes):,} devices, {'a list' if wanted is list else 'an array'}",
            partial(_list_or_array, sizes, wanted),
            "NumPy" + (", then tolist" if wanted is list else ""),
            ours="lists" + ("" if wanted is list else ", then numpy.array"),
        )
        for wanted in [list, np.ndarray]
        for sizes in [(4, 2), (8, 8), (32, 16), (64, 64)]
    ],
]

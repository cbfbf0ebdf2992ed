"""Index math: which part of an array each device holds, and which replica of it that is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

P = PartitionSpec
CUT = P("x", "y")

# JAX keeps what it worked out for a sharding and a shape, gda what it worked out for a mesh and a
# spec. A cold call has a shape, a mesh and a spec that neither has met.
_unseen = itertools.count(1)


def unseen_shape(mesh_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a shape that a mesh of two axes divides and that this process has not met."""
    return mesh_sizes[0] * next(_unseen), mesh_sizes[1] * 3


def mesh_of(sizes: Sequence[int], names: Sequence[str] = ("x", "y")) -> Mesh:
    """Return a mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: prod(sizes)]).reshape(tuple(sizes)), tuple(names))


def unseen_mesh(sizes: Sequence[int]) -> tuple[Mesh, PartitionSpec]:
    """Return a mesh of two axes whose names are new, and the spec that shards by both."""
    number = next(_unseen)
    names = f"x{number}", f"y{number}"
    return mesh_of(sizes, names), P(*names)


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


def _view(grid: gda.ShardGrid) -> object:
    return grid.view(65536).indices


Asked = tuple[tuple[int, ...], Mesh, PartitionSpec]


def _all_devices(sizes: tuple[int, int], is_cold: bool) -> list[Side]:
    """Return the sides that answer with a dictionary of device to index and replica id."""
    mesh = mesh_of(sizes)
    # Several calls a sample, each result dropped at once, so that the figure is not about what the
    # other side left in the processor's caches.
    calls = 5

    def asked() -> Asked:
        return unseen_shape(sizes), *(unseen_mesh(sizes) if is_cold else (mesh, CUT))

    def rival(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, *, count: Count) -> object:
        indices = NamedSharding(mesh, spec).devices_indices_map(shape)
        if count is uncounted:
            return indices
        pairs = zip(indices.values(), count(indices.values()), strict=True)
        return dict(zip(indices, pairs, strict=True))

    def side(answer: Callable[..., object]) -> Side:
        def run(questions: list[Asked]) -> None:
            for question in questions:
                answer(*question)

        return Side(run, lambda: ([asked() for _ in range(calls)],), calls=calls)

    question = asked()
    expected = gda.get_shard_indices_replica_ids(*question)
    for count in (counted_as_jax, counted_lean):
        assert rival(*question, count=count) == expected
    rivals = [partial(rival, count=count) for count in _HOW]
    return [side(each) for each in (gda.get_shard_indices_replica_ids, *rivals)]


def _eight_local() -> list[Side]:
    side = 256
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

    def plain(shapes: list[tuple[int, ...]]) -> list[list[tuple[Any, int]]]:
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
    for each in (*rivals, plain):
        assert each(shapes) == ours(shapes)
    # The rival walks over all devices and leaves the processor's caches empty, so one sample of
    # gda's is twenty shapes.
    twenty = Side(ours, lambda: ([unseen_shape(sizes) for _ in range(20)],), calls=20)
    one = [Side(each, lambda: ([unseen_shape(sizes)],)) for each in rivals]
    return [twenty, *one, replace(twenty, run=plain)]


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


_SIZES = {(4, 2): Faster(4), (8, 8): Faster(8), (32, 32): Faster(8)}
_MAP = "devices_indices_map of a new NamedSharding"
_PRIVATE = "op_sharding_to_indices over an AbstractMesh (private), "
_PLAIN = "8 tuples of slices made in a loop of plain Python"

WORKS = [
    *[
        Work(
            f"all indices and replica ids, cold, {prod(sizes):,} devices",
            partial(_all_devices, sizes, True),
            {
                f"{_MAP}, {how}": faster if count is counted_as_jax else None
                for count, how in _HOW.items()
            },
            devices=prod(sizes),
        )
        for sizes, faster in _SIZES.items()
    ],
    Work(
        "index and replica id of 8 local devices of 65,536, mesh and spec known",
        _eight_local,
        # No public function answers without devices.
        {f"{_PRIVATE}{_HOW[count]}": Faster(3_000) for count in _COUNTS} | {_PLAIN: None},
        floor=Floor("An answer in Python is made of these objects.", (_PLAIN,)),
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
    # For information: the next arrays over a mesh.
    *[
        Work(
            f"the same, of a new shape over a known mesh and spec, {prod(sizes):,} devices",
            partial(_all_devices, sizes, False),
            {f"{_MAP}, {how}": None for how in _HOW.values()},
            devices=prod(sizes),
        )
        for sizes in _SIZES
    ],
]

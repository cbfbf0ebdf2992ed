"""Moves between two layouts: applied to NumPy blocks they give the target, from the nearest."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trials import rarely

import gda
from gda import ReshardPlan, ShardGrid
from gda.layout.reshard import flow as flows
from gda.layout.reshard.plan import Move
from gda.testing.strategies import mesh_shapes, partition_specs

ROWS = ShardGrid((4, 4), {"x": 2}, ("x", None))
COLUMNS = ShardGrid((4, 4), {"x": 2}, (None, "x"))
WIDER = ShardGrid((4, 8), {"x": 2}, ("x",))
HUGE = ShardGrid((2**31, 2**30), {"x": 4}, ())  # 2**63 elements on four devices
KNOWN = ShardGrid((4, 4), {"x": 2}, ("x",), process_of=[0, 1])


def indices(*bounds: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def test_rows_become_columns_and_a_scalar_reaches_a_new_device() -> None:
    plan = ReshardPlan(ROWS, COLUMNS, itemsize=4)
    assert list(plan.moves()) == [
        Move(0, 0, indices((0, 2), (0, 2)), indices((0, 2), (0, 2)), 16),
        Move(1, 0, indices((0, 2), (0, 2)), indices((2, 4), (0, 2)), 16),
        Move(0, 1, indices((0, 2), (2, 4)), indices((0, 2), (0, 2)), 16),
        Move(1, 1, indices((0, 2), (2, 4)), indices((2, 4), (0, 2)), 16),
    ]
    assert (plan.num_moves, plan.nbytes_total) == (4, 64)
    assert (plan.nbytes_kept, plan.nbytes_moved, plan.nbytes_within_processes) == (32, 32, 32)
    assert plan.nbytes_between_processes == 0
    plan = ReshardPlan(ShardGrid((), {"x": 1}, ()), ShardGrid((), {"x": 2}, ()), itemsize=8)
    assert list(plan.moves()) == [Move(0, 0, (), (), 8), Move(0, 1, (), (), 8)]


def test_the_first_sender_is_another_one_for_each_block() -> None:
    # Two blocks, each in both processes, and one new device that needs all: one piece of each.
    source = ShardGrid((4,), {"data": 2, "model": 2}, ("model",), process_of=[0, 0, 1, 1])
    target = ShardGrid((4,), {"x": 1}, (), process_of=[2])
    plan = ReshardPlan(source, target, itemsize=1, target_ids=[9])
    assert [move.source // 2 for move in plan.moves()] == [0, 1]


def test_totals_need_no_list_where_each_of_65_536_sends_to_each() -> None:
    mesh, processes = {"x": 65536}, np.arange(65536) // 8
    source = ShardGrid((65536, 65536), mesh, ("x",), process_of=processes)
    target = ShardGrid((65536, 65536), mesh, (None, "x"), process_of=processes)
    plan = ReshardPlan(source, target, itemsize=1)
    assert plan.num_moves == 2**32
    assert plan.nbytes_kept == 65536
    assert plan.nbytes_within_processes == 65536 * 7
    one = ReshardPlan(
        ShardGrid((65536, 65536), mesh, ("x",)),
        ShardGrid((65536, 65536), mesh, (None, "x")),
        itemsize=1,
    )
    assert one.nbytes_within_processes == one.nbytes_moved == 65536 * 65535


@pytest.mark.parametrize(
    ("specs", "within"),
    [
        # Eight rows of the mesh: of their 64 blocks on both sides, eight stay on their device.
        ((("x", "y"), ("y", "x")), [0, 8 * 56 * 4096]),
        ((("xy",), (None, "xy")), [7 * 4096, 511 * 4096]),
    ],
)
def test_totals_cost_as_much_however_large_the_processes_are(
    specs: Any, within: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, cost = flows.summed, 0

    def counted(keys: Any, values: Any, length: int) -> Any:
        nonlocal cost
        cost += len(keys)
        return summed(keys, values, length)

    monkeypatch.setattr(flows, "summed", counted)
    mesh = {"x": 64, "y": 64} if "x" in specs[0] else {"xy": 4096}
    for size, expected in zip((8, 512), within, strict=True):
        processes = np.arange(4096) // size
        grids = [ShardGrid((4096, 4096), mesh, spec, process_of=processes) for spec in specs]
        assert ReshardPlan(*grids, itemsize=1).nbytes_within_processes == expected
    assert cost <= 4 * 4096


def test_more_bytes_than_a_float_can_count() -> None:
    size = 2**52
    source = ShardGrid((size,), {"x": 2}, (), process_of=[0, 0])
    target = ShardGrid((size,), {"x": 3}, (), process_of=[1, 1, 1])
    plan = ReshardPlan(source, target, itemsize=1, target_ids=[7, 8, 9])
    assert plan.nbytes_between_processes == 3 * size
    assert [move.source for move in plan.moves()] == [0, 1, 1]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_array_without_elements(shape: tuple[int, int]) -> None:
    source = ShardGrid(shape, {"x": 2}, ("x",), process_of=[0, 1])
    target = ShardGrid(shape, {"x": 4}, (None, "x"), process_of=[0, 1, 2, 2])
    plan = ReshardPlan(source, target, itemsize=4)
    assert list(plan.moves()) == []
    assert (plan.num_moves, plan.nbytes_total, plan.nbytes_kept, plan.nbytes_moved) == (0, 0, 0, 0)
    assert (plan.nbytes_within_processes, plan.nbytes_between_processes) == (0, 0)


def test_repr() -> None:
    assert repr(ReshardPlan(ROWS, COLUMNS, itemsize=1024)) == (
        "ReshardPlan((4, 4): P('x') on {'x': 2} -> P(None, 'x') on {'x': 2}, 4 moves; "
        "8.0 KiB kept, 8.0 KiB within processes, 0 B between processes)"
    )


def test_the_grids_of_arrays(auto_mesh: Any) -> None:
    g = gda.GlobalArray.from_callback(
        (8, 8), auto_mesh, ("x",), lambda index: np.ones((8, 8))[index]
    )
    plan = ReshardPlan(g.grid, g.reshard((None, "y")).grid, itemsize=g.dtype.itemsize)
    assert plan.nbytes_total == 8 * 4 * 8 * g.dtype.itemsize
    # A grid without process numbers is one of process 0.
    plan = ReshardPlan(g.grid, ShardGrid((8, 8), {"x": 8}, ("x",)), itemsize=4)
    assert plan.nbytes_between_processes == 0


# Whatever the two layouts.


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    rank = draw(st.integers(0, 3))
    pads = draw(st.booleans())
    cuts = []
    for _ in range(2):
        mesh = draw(mesh_shapes(max_devices=12))
        cuts.append((mesh, draw(partition_specs(mesh, max_entries=rank))))
    sizes = []
    for dimension in range(rank):
        ways = []
        for mesh, spec in cuts:
            entry = spec[dimension] if dimension < len(spec) else None
            names = (entry,) if isinstance(entry, str) else entry or ()
            ways.append(math.prod(mesh[name] for name in names))
        some = st.integers(1, 14) if pads else st.integers(1, 2).map(math.lcm(*ways).__mul__)
        sizes.append(draw(some))
    knows = draw(st.booleans())
    grids, ids = [], []
    for mesh, spec in cuts:
        count = math.prod(mesh.values())
        regular = st.integers(1, 6).map(lambda size, n=count: [i // size for i in range(n)])
        drawn = st.lists(st.integers(0, 3), min_size=count, max_size=count)
        processes = draw(regular | drawn)
        known = processes if knows else None
        grids.append(ShardGrid(sizes, mesh, spec, pad=pads, process_of=known))
        some = st.lists(st.integers(0, 15), min_size=count, max_size=count, unique=True)
        ids.append(draw(st.none() | some))
    return ReshardPlan(
        *grids, itemsize=draw(st.integers(1, 8)), source_ids=ids[0], target_ids=ids[1]
    )


def ids_of(grid: ShardGrid, ids: Any) -> list[int]:
    return list(range(grid.num_devices)) if ids is None else [int(number) for number in ids]


def process_at(grid: ShardGrid, position: int) -> int:
    return 0 if grid.process_of is None else int(grid.process_of[position])


def check_plan(plan: ReshardPlan) -> None:
    source, target = plan.source, plan.target
    whole = np.arange(math.prod(source.global_shape)).reshape(source.global_shape)
    have = [whole[(..., *source.index(i))] for i in range(source.num_devices)]
    get = [np.full_like(whole[(..., *target.index(i))], -1) for i in range(target.num_devices)]
    source_ids, target_ids = ids_of(source, plan.source_ids), ids_of(target, plan.target_ids)
    near: Counter[Any] = Counter()
    kept = within = between = 0
    sizes: dict[Any, list[int]] = {}
    moves = list(plan.moves())
    for move in moves:
        piece = have[move.source][(..., *move.source_index)]
        there = get[move.target][(..., *move.target_index)]
        assert piece.shape == there.shape
        assert piece.size
        assert (there == -1).all(), "an element is written twice"
        there[...] = piece
        assert move.nbytes == piece.size * plan.itemsize
        # From the nearest of those that hold the source block.
        block = source.block_id(move.source)
        holders = [i for i in range(source.num_devices) if source.block_id(i) == block]
        mine = [i for i in holders if source_ids[i] == target_ids[move.target]]
        process = process_at(target, move.target)
        same = [i for i in holders if process_at(source, i) == process]
        if mine:
            assert move.source == mine[0]
            kept += move.nbytes
            continue
        assert move.source in (same or holders)
        group = (block, process) if same else (block,)
        sizes.setdefault((len(same or holders), group), []).append(move.nbytes)
        if same:
            near[move.source, group] += move.nbytes
            within += move.nbytes
        else:
            between += move.nbytes
    for i, block in enumerate(get):
        np.testing.assert_array_equal(block, whole[target.index(i)])
    asked_of = Counter(source.block_id(move.source) for move in moves)
    for (count, group), asked in sizes.items():
        if len(group) == 2:  # Within a process none sends more than an equal share and one piece.
            sent = [amount for (_, of), amount in near.items() if of == group]
            assert max(sent) < sum(asked) / count + max(asked)
        elif len(asked) == asked_of[group[0]]:
            # If no device has the block nearby, all send equally many pieces to within one.
            senders = Counter(move.source for move in moves)
            holders = [i for i in range(source.num_devices) if source.block_id(i) == group[0]]
            counts = [senders[i] for i in holders]
            assert max(counts) - min(counts) <= 1
    assert plan.num_moves == len(moves)
    assert plan.nbytes_kept == kept
    assert plan.nbytes_moved == within + between
    assert plan.nbytes_within_processes == within
    assert plan.nbytes_between_processes == between


# Of each block, four of twelve equal pieces are asked for from afar, of three devices. The others
# keep their turns, and so one device sends three.
MOST_FROM_NEARBY = ReshardPlan(
    ShardGrid((3, 3), {"x": 3, "y": 3}, ("x",), process_of=[0] * 9),
    ShardGrid(
        (3, 3),
        {"x": 3, "y": 2, "z": 2},
        (None, "x"),
        process_of=[0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1],
    ),
    itemsize=1,
)
# Each source block meets two target blocks, and one of these meets both. Three devices ask for each
# of the pieces, two have it.
DIVIDED_BOTH_WAYS = ReshardPlan(
    ShardGrid((6,), {"x": 2, "y": 2}, ("x",), process_of=[0] * 4),
    ShardGrid((6,), {"x": 3, "y": 3}, ("x",), process_of=[1] * 9),
    itemsize=1,
    target_ids=range(4, 13),
)


@settings(max_examples=60)
@given(plans())
def test_moves_give_the_target_from_the_nearest_devices(plan: ReshardPlan) -> None:
    check_plan(plan)


@given(plans(), st.integers(1, 7))
@example(MOST_FROM_NEARBY, 1)
@example(DIVIDED_BOTH_WAYS, 1)
@rarely(2)
def test_in_whatever_chunks_it_is_worked_out(plan: ReshardPlan, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows, "AT_A_TIME", size)
        check_plan(plan)


# Bad input.


def test_impossible_plans_are_refused() -> None:
    for change, error, says in [
        ({"source": (4, 4)}, TypeError, "source must be a gda.ShardGrid, not tuple; of a GlobalA"),
        ({"target": WIDER}, ValueError, r"source has the global shape \(4, 4\) and the target"),
        ({"target": KNOWN}, ValueError, "the target has process numbers and the source has none"),
        (
            {"itemsize": "float32"},
            TypeError,
            "expected itemsize, the bytes of one .* not 'float32'",
        ),
        ({"source_ids": [0.5, 1]}, TypeError, "source_ids must give a number for each .* float64"),
        ({"itemsize": 0}, ValueError, "itemsize must be .*, not 0"),
        ({"source": HUGE, "target": HUGE}, ValueError, r"together have 2\*\*63 elements or more"),
        ({"source_ids": [1]}, ValueError, r"source_ids has the shape \(1,\), but the mesh"),
        ({"target_ids": [3, 3]}, ValueError, "target_ids has 3 twice; each device has a number of"),
    ]:
        arguments: dict[str, Any] = {"source": ROWS, "target": COLUMNS, "itemsize": 4}
        with pytest.raises(error, match=says):
            ReshardPlan(**(arguments | change))

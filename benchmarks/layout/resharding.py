"""Plans for moving between layouts of up to a million devices, none of which exists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

import gda
from benchmarks.pairs import Side
from benchmarks.work import Within, Work
from gda.layout import numbering
from gda.layout.reshard.rounds import Relocation, Streams

P = PartitionSpec
Specs = tuple[PartitionSpec, PartitionSpec]

PER_PROCESS = 8
POSITIONS = 4_096  # of the work of one process

# Every device changes places with the one across the diagonal: a move for each.
TRANSPOSED = (P("x", "y"), P("y", "x"))
# Rows over all devices become columns over all devices: each sends a piece to each.
ALL_TO_ALL = (P(("x", "y"), None), P(None, ("x", "y")))
_NAMES = {
    TRANSPOSED: "P('x', 'y') to P('y', 'x')",
    ALL_TO_ALL: "rows to columns, all devices to all",
}


def plan_of(devices: int, specs: Specs, per_process: int = PER_PROCESS) -> gda.ReshardPlan:
    """Return a new plan, of which nothing is worked out, over a square mesh."""
    side = isqrt(devices)
    process_of = np.arange(devices) // per_process
    source, target = (
        gda.ShardGrid((devices * 4,) * 2, {"x": side, "y": side}, spec, process_of=process_of)
        for spec in specs
    )
    return gda.ReshardPlan(source, target, itemsize=4)


def summary_of(plan: gda.ReshardPlan) -> tuple[Any, ...]:
    """Ask for all totals."""
    return (
        *(plan.num_moves, plan.nbytes_kept, plan.nbytes_moved),
        *(plan.nbytes_within_processes, plan.nbytes_between_processes),
    )


def _list_moves(plan: gda.ReshardPlan) -> None:
    deque(plan.moves(), maxlen=0)


def _planning(
    ask: Callable[[gda.ReshardPlan], object], devices: int, specs: Specs, per_process: int
) -> list[Side]:
    plan = plan_of(devices, specs, per_process)
    block = 4 * 4 * devices * 4
    if specs == TRANSPOSED:
        moves = list(plan.moves())
        assert len(moves) == plan.num_moves == devices
        assert sum(move.nbytes for move in moves) == block * devices
        assert plan.nbytes_kept == block * isqrt(devices)
        assert all(move.source == _across(move.target, isqrt(devices)) for move in moves)
    else:
        assert plan.num_moves == devices**2
        assert plan.nbytes_within_processes == 4 * 4 * 4 * devices * (per_process - 1)
        assert plan.nbytes_kept == 4 * 4 * 4 * devices
    assert plan.nbytes_kept + plan.nbytes_moved == block * devices

    def forget_layouts() -> tuple[()]:
        # As in a process that asks once.
        numbering.layout_of.cache_clear()
        return ()

    return [Side(lambda: ask(plan_of(devices, specs, per_process)), forget_layouts)]


def _rounds_of_one(specs: Specs, disjoint: bool) -> list[Side]:
    """Plan what one process does, as it does once its programs are compiled."""
    count = POSITIONS // 2 if disjoint else POSITIONS
    ids = [range(count), range(count, 2 * count) if disjoint else range(count)]
    grids = [
        gda.ShardGrid(
            (count * 4,) * 2, {"x": count}, spec, process_of=np.array(some) // PER_PROCESS
        )
        for spec, some in zip(specs, ids, strict=True)
    ]
    routes = Relocation(0, (grids[0], grids[1]), (ids[0], ids[1])).routes()
    assert routes is not None
    processes = (1, count // PER_PROCESS + 1) if disjoint else (1,)

    def plan() -> int:
        """Return the number of boxes that the processes pack or unpack."""
        boxes = 0
        for process in processes:
            move = Relocation(0, (grids[0], grids[1]), (ids[0], ids[1]))
            streams = Streams([move], routes, process)
            for this in streams.rounds(16):
                for packets in (*streams.sent.values(), *streams.received.values()):
                    boxes += sum(1 for packet in packets.values() for _ in packet.boxes(this))
        return boxes

    far = count if disjoint else count - PER_PROCESS
    assert plan() == 2 * PER_PROCESS * far
    return [Side(plan)]


def _across(position: int, side: int) -> int:
    row, column = divmod(position, side)
    return column * side + row


def _work(
    ask: Callable[[gda.ReshardPlan], object],
    devices: int,
    specs: Specs,
    limit: Within | None,
    per_process: int = PER_PROCESS,
) -> Work:
    does = {summary_of: "all totals of", _list_moves: "all moves of"}[ask]
    of = "" if per_process == PER_PROCESS else f" in processes of {per_process:,}"
    return Work(
        f"{does} a plan, {_NAMES[specs]}, {devices:,} devices{of}",
        partial(_planning, ask, devices, specs, per_process),
        limit=limit,
        seconds=0.5,
    )


WORKS = [
    *[
        _work(ask, 65_536, specs, Within(2_000))
        for ask, specs in [
            (summary_of, TRANSPOSED),
            (_list_moves, TRANSPOSED),
            (summary_of, ALL_TO_ALL),
        ]
    ],
    # The limits grow as the devices do, not as the devices of a process.
    _work(summary_of, 65_536, ALL_TO_ALL, Within(2_000), 1_024),
    _work(summary_of, 1_048_576, ALL_TO_ALL, Within(32_000), 64),
    *[
        Work(
            f"all that one process plans and lists, rows to columns, {name}",
            partial(_rounds_of_one, (P("x"), P(None, "x")), disjoint),
            limit=Within(1_000),
        )
        for name, disjoint in [
            (f"{POSITIONS:,} devices to the same ones", False),
            (f"{POSITIONS // 2:,} devices to as many others, a sender and a receiver", True),
        ]
    ],
    # The cost of a list of a million moves.
    _work(_list_moves, 1_024, ALL_TO_ALL, None),
]

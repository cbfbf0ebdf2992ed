"""The pieces that processes pull: every element once, from near and idle processes."""

import math
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gda
from gda.exchange.pieces import Needed, PulledPiece, pulled_pieces
from gda.layout.indices import start_of
from gda.layout.reshard.flow import tiling_of
from gda.testing.strategies import mesh_shapes, partition_specs


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], devices_of_each: int = 2) -> gda.ShardGrid:
    mesh = draw(mesh_shapes(max_devices=12))
    spec = draw(partition_specs(mesh, max_entries=len(shape)))
    devices = math.prod(mesh.values())
    process_of = draw(st.permutations([device // devices_of_each for device in range(devices)]))
    return gda.ShardGrid(shape, mesh, spec, pad=True, process_of=process_of)


@st.composite
def both_grids(draw: st.DrawFn, own_processes: bool = False) -> tuple[gda.ShardGrid, gda.ShardGrid]:
    """Two grids of one shape; each device has a process of its own, or two have one."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    each = grids(shape, 1 if own_processes else 2)
    return draw(each), draw(each)


def needed_by(grid: gda.ShardGrid, process: int) -> Needed:
    """Return the blocks of a process, found one device after another."""
    processes: Any = grid.processes
    holders: dict[int, set[int]] = {}
    starts = {}
    for device in range(grid.num_devices):
        index = grid.index(device)
        if all(
            len(range(*each.indices(n))) for each, n in zip(index, grid.global_shape, strict=True)
        ):
            start = start_of(index)
            number = tiling_of(grid).block_at(start)
            holders.setdefault(number, set()).add(int(processes.process_of[device]))
            starts[number] = start
    mine = [number for number in holders if process in holders[number]]
    return Needed(
        tiling_of(grid),
        tuple([starts[number] for number in mine]),
        tuple([sorted(holders[number]).index(process) for number in mine]),
        max(map(len, holders.values()), default=1),
    )


def place(piece: PulledPiece) -> tuple[slice, ...]:
    return tuple([slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True)])


@given(both_grids(), st.frozensets(st.integers(0, 5)))
def test_every_element_is_pulled_once_from_a_near_process_if_any_has_it(
    both: tuple[gda.ShardGrid, gda.ShardGrid], near: frozenset[int]
) -> None:
    source, target = both
    processes: Any = source.processes
    held: dict[int, set[Any]] = {}
    for device in range(source.num_devices):
        held.setdefault(int(processes.process_of[device]), set()).add(
            tuple(
                each.indices(n)[:2]
                for each, n in zip(source.index(device), source.global_shape, strict=True)
            )
        )
    for process in target.processes.numbers:  # pyright: ignore
        needed = needed_by(target, process)
        counts = np.zeros(source.global_shape, int)
        expected = np.zeros_like(counts)
        for start in needed.starts:
            steps = zip(start, needed.tiling.shard_shape, strict=True)
            expected[tuple([slice(a, a + n) for a, n in steps])] += 1
        for piece in pulled_pieces(source, needed, near):
            counts[place(piece)] += 1
            servers = {
                server
                for server, boxes in held.items()
                if any(
                    all(
                        a <= s.start and s.stop <= b
                        for s, (a, b) in zip(place(piece), box, strict=True)
                    )
                    for box in boxes
                )
            }
            assert piece.server in (servers & near or servers)
        np.testing.assert_array_equal(counts, expected)


@given(both_grids(own_processes=True))
def test_replicas_of_a_block_get_nearly_equally_many_requests(
    both: tuple[gda.ShardGrid, gda.ShardGrid],
) -> None:
    source, target = both
    requests: dict[int, Counter[int]] = {}
    for process in target.processes.numbers:  # pyright: ignore
        for piece in pulled_pieces(source, needed_by(target, process), frozenset()):
            block = tiling_of(source).block_at(piece.start)
            requests.setdefault(block, Counter())[piece.server] += 1
    for counts in requests.values():
        least = min(counts.values()) if len(counts) == source.num_replicas else 0
        assert max(counts.values()) - least <= 1

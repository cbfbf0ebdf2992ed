"""Rounds carry each element once, and no process looks at the pieces of others."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gda import ReshardPlan, ShardGrid
from gda.layout.reshard.rounds import MovedPiece, Relocation, Round, Routes, Streams, rounds_of
from gda.testing.strategies import mesh_shapes, partition_specs

ROWS, COLUMNS = ("x",), (None, "x")


class Side(NamedTuple):
    """A layout: devices by their ids, of which some in a row are in one process."""

    mesh: dict[str, int]
    spec: Any
    ids: Sequence[int]

    def grid(self, shape: tuple[int, ...], per_process: int) -> ShardGrid:
        process_of = np.array(self.ids) // per_process
        return ShardGrid(shape, self.mesh, self.spec, pad=True, process_of=process_of)


def line(spec: Any, *ids: int) -> Side:
    return Side({"x": len(ids)}, spec, ids)


class Case(NamedTuple):
    shape: tuple[int, ...]
    before: Side
    after: Side
    per_process: int

    def grids(self, times: int = 1) -> tuple[ShardGrid, ShardGrid]:
        shape = tuple(size * times for size in self.shape)
        before, after = (side.grid(shape, self.per_process) for side in self[1:3])
        return before, after

    def move(self, leaf: int = 0, times: int = 1, beside: tuple[int, ...] = ()) -> Relocation:
        return Relocation(leaf, self.grids(times), (self.before.ids, self.after.ids), beside)

    def processes(self) -> list[int]:
        return sorted({each // self.per_process for side in self[1:3] for each in side.ids})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(0, 3))
    sides = []
    for _ in range(2):
        mesh = draw(mesh_shapes(max_devices=8))
        spec = draw(partition_specs(mesh, max_entries=rank))
        sides.append(Side(mesh, spec, draw(st.permutations(range(10)))[: math.prod(mesh.values())]))
    shape = tuple(draw(st.integers(1, 14)) for _ in range(rank))
    return Case(shape, *sides, draw(st.integers(1, 4)))


def box(starts: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


def carried(flats: dict[int, np.ndarray], routes: Routes, buffer: int) -> dict[int, np.ndarray]:
    """Return the buffers of devices as a collective leaves them."""
    ids = sorted(flats)
    if routes.pairs is None:
        slots = np.stack([flats[device].reshape(len(ids), -1) for device in ids])
        return {device: slots[:, at].ravel() for at, device in enumerate(ids)}
    pairs = routes.pairs[buffer].tolist()
    for side in zip(*pairs, strict=True):
        assert len(set(side)) == len(pairs), "a lane has a device twice"
    return {ids[target]: flats[ids[source]] for source, target in pairs}


class Moved(NamedTuple):
    """The number of elements that went between devices, and the lengths of rounds."""

    sent: int
    lengths: set[int]


def move_all(case: Case, leaves: list[Relocation], times: list[int], most: int) -> Moved:
    """Carry arrays as all processes together do it; check the new blocks."""
    ids = sorted({*case.before.ids, *case.after.ids})
    old, new = [], []
    for leaf, n in zip(leaves, times, strict=True):
        source, target = case.grids(n)
        whole = np.arange(math.prod((*source.global_shape, *leaf._beside)))
        whole = whole.reshape((*source.global_shape, *leaf._beside))
        old.append({device: whole[source.index(at)] for at, device in enumerate(case.before.ids)})
        new.append({device: whole[target.index(at)] for at, device in enumerate(case.after.ids)})
    got = [{device: np.full_like(block, -1) for device, block in of.items()} for of in new]
    routes = leaves[0].routes()
    streams = [Streams(leaves, routes, process) for process in case.processes()]

    def put(piece: MovedPiece, data: np.ndarray) -> None:
        into = got[piece.leaf][piece.target][(*box(piece.target_starts, piece.sizes), ...)]
        assert (into == -1).all(), "an element arrives twice"
        into[...] = data.reshape(piece.sizes)

    def read(piece: MovedPiece) -> np.ndarray:
        return old[piece.leaf][piece.source][(*box(piece.source_starts, piece.sizes), ...)]

    for piece in (piece for each in streams for piece in each.near):
        assert piece.source // case.per_process == piece.target // case.per_process
        put(piece, read(piece))
    sent = 0
    rounds = [each.rounds(most) for each in streams]
    assert all(some == rounds[0] for some in rounds)
    for this, buffer in product(rounds[0], range(0 if routes is None else len(routes.widths))):
        flats = {device: np.full(routes.widths[buffer] * this.length, -7) for device in ids}
        for part, piece in boxes_of(streams, "sent", this, buffer):
            flats[piece.source][part] = read(piece).ravel()
        arrived = carried(flats, routes, buffer)
        sent += sum(map(len, arrived.values()))
        if routes.pairs is None:  # what stays on its device
            sent -= len(ids) * this.length
        for part, piece in boxes_of(streams, "received", this, buffer):
            put(piece, arrived[piece.target][part])
    for blocks, right in zip(got, new, strict=True):
        for device, block in right.items():
            np.testing.assert_array_equal(blocks[device], block)
    return Moved(sent, {this.length for this in rounds[0]})


def boxes_of(
    streams: list[Streams], side: str, this: Round, buffer: int
) -> Iterator[tuple[slice, MovedPiece]]:
    """Yield the boxes of a round in a buffer of each device, with their places."""
    for each in streams:
        for (_, number), packets in getattr(each, side).items():
            for slot, packet in packets.items() if number == buffer else ():
                for place, piece in packet.boxes(this):
                    start = slot * this.length + place
                    yield slice(start, start + piece.size), piece


def plan(case: Case) -> ReshardPlan:
    ids = {"source_ids": case.before.ids, "target_ids": case.after.ids}
    return ReshardPlan(*case.grids(), itemsize=1, **ids)


@given(cases(), st.integers(1, 300), st.sampled_from([(), (2,)]))
def test_any_layout_becomes_any_other(case: Case, most: int, beside: tuple[int, ...]) -> None:
    leaves = [case.move(0, 1, beside), case.move(1, 2, beside)]
    times = [1, 2]
    if leaves[0].key != leaves[1].key:
        del leaves[1], times[1]
    move_all(case, leaves, times, most)


@settings(max_examples=60)
@given(cases())
def test_what_leaves_a_process_for_others_is_what_they_expect(case: Case) -> None:
    move = case.move()
    leaving = [far for process in case.processes() for far in move.leaving(process)]
    expected = [far for process in case.processes() for far in move.arriving(process)[1]]
    assert sorted(leaving) == sorted(expected)
    for piece, *_ in expected:
        assert piece.source // case.per_process != piece.target // case.per_process


@pytest.mark.parametrize(
    "case",
    [
        Case((64, 128), line(ROWS, *range(8)), line(COLUMNS, *range(8)), 2),
        Case((40, 120), line(ROWS, *range(40)), line(COLUMNS, *range(40)), 1),
        Case((96, 128), line(ROWS, *range(4)), line(COLUMNS, *range(4, 8)), 2),
        Case((100, 570), line(ROWS, *range(8)), line(COLUMNS, 7, 0, 3, 1, 5, 2), 2),
        Case((1680, 3), line(ROWS, *range(8)), line(ROWS, *range(7)), 1),
        Case((1679, 2), line(ROWS, *range(5)), line(ROWS, *range(5, 16)), 1),
        Case((96, 60), Side({"x": 4, "y": 2}, ROWS, range(8)), line(COLUMNS, 6, 2, 5, 1, 3), 2),
    ],
)
def test_no_more_travels_than_the_plan_says(case: Case) -> None:
    for most in (64, 10**6):
        sent, lengths = move_all(case, [case.move()], [1], most)
        expected = plan(case).nbytes_between_processes
        assert expected <= sent <= 1.05 * expected
        assert len(lengths) <= 2


# Programs.


def all_to_all(count: int, others: int | None = None, per_process: int = 8) -> Case:
    """Rows on some devices become columns on as many others, or on these."""
    ids = range(count) if others is None else range(count, count + others)
    shape = (count * 4, (others or count) * 4)
    return Case(shape, line(ROWS, *range(count)), line(COLUMNS, *ids), per_process)


@pytest.mark.parametrize("count", [8, 64])
def test_all_to_all_is_two_programs_for_any_number_of_devices(count: int) -> None:
    even = all_to_all(count, per_process=1).move().routes()
    assert (even.pairs is None) == (count > 32)
    assert len(even.widths) == (1 if count > 32 else count)
    move = all_to_all(count, count).move()
    lanes = move.routes()
    assert lanes.pairs is not None
    assert lanes.widths == [1] * count
    assert [len(pairs) for pairs in lanes.pairs] == [count] * count
    uneven = all_to_all(count, count - 1).move()
    assert len(uneven.routes().widths) == count
    for each, routes in [(move, lanes), (uneven, uneven.routes())]:
        for most in (1, 3, 10, 1000):
            rounds = Streams([each], routes, 0).rounds(most)
            assert len({this.length for this in rounds}) <= 2


def test_arrays_of_one_layout_share_the_programs() -> None:
    before, after = line(ROWS, *range(8)), line(COLUMNS, 7, 0, 3, 1, 5, 2)
    rows = [Case(shape, before, after, 2).move() for shape in [(64, 60), (8, 6), (800, 12)]]
    assert len(set(rows)) == 1
    assert Case((64, 6), before, after._replace(ids=[6, 0, 3, 1, 5, 2]), 2).move() != rows[0]
    # So do arrays of another rank, whose other dimensions are whole.
    biases = Case((8,), before, before._replace(ids=range(8, 16)), 2).move()
    kernels = Case((3, 8), before._replace(spec=COLUMNS), line(COLUMNS, *range(8, 16)), 2).move()
    assert biases == kernels


def test_replicas_share_a_lane() -> None:
    whole = Side({"x": 8}, (), range(8))
    routes = Case((8, 3), whole, line(ROWS, *range(8, 16)), 2).move().routes()
    assert routes.widths == [1]
    assert len(routes.pairs[0]) == 8


# The work of one process.


def calls_of(case: Case) -> tuple[int, int]:
    """Return the calls of functions in Python that one process makes, and the boxes it handles."""
    calls = boxes = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    move = case.move()
    routes = move.routes()
    sys.setprofile(count)
    try:
        streams = Streams([move], routes, 1)
        for this in streams.rounds(1000):
            for packets in (*streams.sent.values(), *streams.received.values()):
                boxes += sum(1 for packet in packets.values() for _ in packet.boxes(this))
    finally:
        sys.setprofile(None)
    return calls, boxes + len(streams.near)


def test_the_work_of_a_process_grows_with_its_own_pieces() -> None:
    for others in (None, 64):
        few, few_boxes = calls_of(all_to_all(64, others))
        many, many_boxes = calls_of(all_to_all(192, others and 192))
        assert many_boxes <= 3.2 * few_boxes
        assert many <= 4 * few
        assert many <= 50 * many_boxes


# Pieces and rounds.


@given(st.data())
def test_a_range_of_a_piece_is_few_boxes(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    size = math.prod(sizes)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    numbers = np.arange(size).reshape(sizes)
    zero = (0,) * len(sizes)
    boxes = [*MovedPiece(0, 0, 1, zero, zero, sizes).between(start, stop)]
    found = [numbers[box(each.source_starts, each.sizes)].ravel() for each in boxes]
    assert np.concatenate(found).tolist() == [*range(start, stop)]
    assert len(boxes) <= max(2 * len(sizes) - 1, 1)
    assert all(each.source_starts == each.target_starts for each in boxes)


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_rounds_have_two_lengths_at_most(total: int, most: int) -> None:
    total = min(total, 100 * most)
    rounds = rounds_of(total, most)
    assert [this.start for this in rounds] == [*range(0, total, most)]
    length = sum(this.length for this in rounds)
    assert total <= length <= total * 65 / 64
    assert {this.length for this in rounds[:-1]} <= {most}
    assert rounds[-1].length <= most


def test_a_large_piece_goes_in_parts_of_whole_rows() -> None:
    piece = MovedPiece(0, 0, 1, (0, 0), (8, 0), (10, 100))
    assert [part.sizes for part in piece.parts(250)] == [(2, 100)] * 5
    assert next(piece.parts(30)).sizes == (1, 30)
    streams = Streams([all_to_all(8).move(times=100)], all_to_all(8).move().routes(), 0)
    assert {this.length % 400 for this in streams.rounds(999)[:-1]} == {0}

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from trials import rarely

import gda
from gda.layout.text import format_numbers
from gda.show.subject import Subject
from gda.show.words import Gap, fold
from gda.testing.strategies import mesh_shapes, sharded_cases

XY = {"x": 4, "y": 2}
TWO_PROCESSES = [0, 0, 0, 0, 1, 1, 1, 1]


def picture(x: Any, **options: Any) -> str:
    """Return the text with an empty line before and after it, to be compared with one below."""
    return f"\n{gda.show.text(x, **options)}\n"


# Pictures.


def test_padding_is_marked() -> None:
    grid = gda.ShardGrid((5, 3), XY, ("x", "y"), pad=True)
    assert (
        picture(grid, dtype="int8")
        == """
ShardGrid (5, 3) int8
mesh    x=4,y=2: 8 devices
spec    P('x', 'y')
blocks  8 of (2, 2), each on 1 device
bytes   4 B per device, 32 B in all
padding 17 of 32 elements, 53.1 %
░       padding in a part of the block, ░░░ in all of it

┌──────────────┬──────────────┐
│ 0:2, 0:2     │ 0:2, 2:3 ░   │
│ device 0     │ device 1     │
├──────────────┼──────────────┤
│ 2:4, 0:2     │ 2:4, 2:3 ░   │
│ device 2     │ device 3     │
├──────────────┼──────────────┤
│ 4:5, 0:2 ░   │ 4:5, 2:3 ░   │
│ device 4     │ device 5     │
├──────────────┼──────────────┤
│ 5:5, 0:2 ░░░ │ 5:5, 2:3 ░░░ │
│ device 6     │ device 7     │
└──────────────┴──────────────┘
"""
    )


def test_a_scalar_and_a_replicated_array() -> None:
    text = picture(gda.ShardGrid((), {"x": 4}, ()))
    assert "spec    P()\nblocks  1, the whole, on each of 4 devices\n\n" in text
    assert "\n│ ()   devices 0-3 │\n" in text
    whole = picture(gda.ShardGrid((8, 2), XY, (), process_of=TWO_PROCESSES), dtype="bfloat16")
    assert "bytes   32 B per device, 256 B in all, 32 B without replicas\n\n" in whole
    assert "\n│ :, :   devices 0-7   processes 0, 1 │\n" in whole


def test_many_blocks_are_folded() -> None:
    grid = gda.ShardGrid((4096,), {"x": 1024}, ("x",), process_of=np.arange(1024) // 8)
    text = picture(grid, width=50)
    assert text.count("\n│ ") == 16
    assert text.endswith(
        """
│ … 1,009 more                          │
├───────────────────────────────────────┤
│ 4076:4080   device 1019   process 127 │
├───────────────────────────────────────┤
│ 4080:4084   device 1020   process 127 │
├───────────────────────────────────────┤
│ 4084:4088   device 1021   process 127 │
├───────────────────────────────────────┤
│ 4088:4092   device 1022   process 127 │
├───────────────────────────────────────┤
│ 4092:4096   device 1023   process 127 │
└───────────────────────────────────────┘
"""
    )


def test_blocks_of_three_dimensions_are_below_each_other() -> None:
    grid = gda.ShardGrid((4, 4, 16), {"a": 2, "b": 2, "c": 2}, ("c", "b", "a"))
    lines = picture(grid).splitlines()
    assert [line for line in lines if line.startswith("│ 0:2, 2:4")] == [
        "│ 0:2, 2:4, 0:8    device 2 │",
        "│ 0:2, 2:4, 8:16   device 6 │",
    ]


# The text around a picture.


def named(grid: gda.ShardGrid, ids: Any) -> Subject:
    return Subject(grid, device_kind="TPU", device_ids=np.array(ids))


def test_devices_of_a_mesh_go_by_their_names() -> None:
    grid = gda.ShardGrid((8,), {"x": 4}, ())
    assert "│ :   TPU 4, 5, 7, 6 │" in picture(named(grid, [4, 5, 7, 6]))


def test_places_in_a_mesh_without_devices_can_have_another_word() -> None:
    grid = gda.ShardGrid((64, 64), {"x": 8, "y": 8}, ("x",))
    assert "positions 0-7" in picture(Subject(grid, device_kind="position"))


def test_names_move_no_cursor() -> None:
    name = "\x1b[2J\nx"
    text = picture(gda.ShardGrid((8,), {name: 4}, (name,)))
    assert "\x1b" not in text
    assert "mesh    \\x1b[2J\\nx=4: 4 devices\nspec    P(" in text


def test_a_memory_that_is_not_the_default_is_named() -> None:
    grid = gda.ShardGrid((8,), {"x": 4}, ("x",))
    assert "memory" not in picture(grid)
    assert "memory  pinned_host\n" in picture(Subject(grid, memory_kind="pinned_host"))


def test_an_empty_mesh_and_axes_of_size_1() -> None:
    assert "mesh    no axes: 1 device\n" in picture(gda.ShardGrid((8, 2), {}, ()))
    ones = picture(gda.ShardGrid((8, 2), {"x": 1, "y": 1}, ("x", "y"), process_of=[3]))
    assert "mesh    x=1,y=1: 1 device, 1 process\n" in ones
    assert "blocks  1, the whole, on 1 device\n" in ones
    assert "│ :, :   device 0   process 3 │" not in ones  # of one process there is nothing to say


def test_long_names_and_huge_sizes() -> None:
    name = "a_very_long_name_" * 10
    text = picture(gda.ShardGrid((8,), {name: 4}, (name,)), width=40)
    assert text.replace("\n        ", "").count(name) == 2
    assert max(map(len, text.splitlines())) == 40
    beyond_int64 = picture(gda.ShardGrid((2**70,), {"x": 2}, ("x",)))
    assert f"{2**69}:{2**70}" in beyond_int64


# Against what the grid says of every device.


def numbers_in(text: str) -> list[int]:
    """Return the numbers that ``0-3, 7`` or ``0, 8, … 56`` stand for."""
    runs = [range(int(a), int(b or a) + 1) for a, b in re.findall(r"(\d+)(?:-(\d+))?", text)]
    if "…" not in text:
        return [number for run in runs for number in run]
    first, second, last = runs
    step = second[0] - first[0]
    starts = range(first[0], last[0] + (1 if step > 0 else -1), step)
    return [start + place for start in starts for place in range(len(first))]


def cells_of(text: str) -> list[list[str]]:
    """Return the lines of every cell of boxes without labels at their edges."""
    cells: list[list[str]] = []
    rows: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if "│" in line:
            rows[-1].append(line.split("│"))
        elif rows[-1]:
            rows.append([])
    for row in rows:
        for places in itertools.zip_longest(*row, fillvalue=""):
            lines = [place.strip() for place in places if place.strip()]
            cells += [lines] if lines else []
    return cells


def process_of(draw: st.DrawFn, num_devices: int) -> list[int] | None:
    per_process = draw(st.sampled_from([None, 1, 2, 3, 8]))
    if per_process is None:
        return None
    numbers = [device // per_process * 2 for device in range(num_devices)]
    return draw(st.permutations(numbers)) if draw(st.booleans()) else numbers


@st.composite
def grids(draw: st.DrawFn, max_devices: int) -> gda.ShardGrid:
    case = draw(sharded_cases(mesh_shapes(max_devices=max_devices)))
    mesh_shape = dict(case.mesh)
    processes = process_of(draw, case.grid.num_devices)
    return gda.ShardGrid(case.global_shape, mesh_shape, case.spec, process_of=processes)


@given(grids(max_devices=64))
def test_every_block_is_there_once_with_all_its_devices(grid: gda.ShardGrid) -> None:
    text = gda.show.text(grid, width=4000)
    drawn = text.partition("\n\n")[2]
    assume("more" not in text and drawn[0] in "┌[")  # not folded, no index beside the box
    expected: dict[str, list[int]] = {}
    for device, index in enumerate(grid.indices()):
        parts = [":" if s == slice(None) else f"{s.start}:{s.stop}" for s in index]
        expected.setdefault(", ".join(parts) or "()", []).append(device)
    found: dict[str, list[int]] = {}
    for lines in cells_of(drawn):
        index, *fields = [field for line in lines for field in re.split(" {3,}", line)]
        words = " ".join(fields)
        devices, _, processes = words.partition(" process")
        assert index not in found
        found[index] = numbers_in(devices)
        if grid.process_of is not None and grid.num_processes > 1:
            owners = sorted({int(grid.process_of[device]) for device in expected[index]})
            assert numbers_in(processes) == owners or "…" in processes
    assert found == expected


@rarely(2)
@given(grids(max_devices=20_000), st.integers(20, 140))
def test_no_line_is_too_wide_and_no_index_wrong(grid: gda.ShardGrid, width: int) -> None:
    text = gda.show.text(grid, width=width, dtype="float32")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    drawn = text.partition("\n\n")[2]
    assert len(drawn.splitlines()) <= 250  # of blocks below each other in 20 columns
    slices = {(0, 0)} | {
        (start, start + step)
        for size, step in zip(grid.global_shape, grid.shard_shape, strict=True)
        for start in range(0, size, step or 1)
    }
    for start, stop in re.findall(r"(?<![\d…])(\d+):(\d+)(?![\d…])", drawn):
        assert (int(start), int(stop)) in slices


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True))
def test_numbers_can_be_read_back(numbers: list[int]) -> None:
    text = format_numbers(numbers)
    written, _, left = text.removesuffix(" more").rpartition(", … ")
    shown = numbers_in(written if "more" in text else text)
    assert shown == numbers[: len(shown)]
    assert len(shown) + int(left if "more" in text else 0) == len(numbers)


@given(st.integers(0, 10_000), st.integers(3, 50))
def test_folding_keeps_the_ends(count: int, room: int) -> None:
    kept = fold(count, room)
    assert len(kept) == min(count, room)
    whole: list[int] = []
    for place in kept:
        whole += range(len(whole), len(whole) + place.count) if isinstance(place, Gap) else [place]
    assert whole == list(range(count))
    gaps = [place.count for place in kept if isinstance(place, Gap)]
    assert len(gaps) == (count > room)
    assert all(gap > 1 for gap in gaps)
    if gaps:
        assert kept[-1] == count - 1


# Meshes larger than anybody has.


def test_a_million_devices() -> None:
    owners = np.arange(2**20) // 8
    grid = gda.ShardGrid((2**20,) * 2, {"x": 1024, "y": 1024}, ("x", "y"), process_of=owners)
    text = gda.show.text(grid, dtype="bfloat16")
    assert len(text.splitlines()) < 60
    assert "1,048,576 devices, 131,072 processes" in text


# Errors.


def test_a_width_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"width=19 is too narrow .* give 20 columns or more"):
        gda.show.text((8,), {"x": 4}, ("x",), width=19)

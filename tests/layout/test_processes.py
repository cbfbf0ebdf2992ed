import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.numbering import Layout, layout_of
from gda.layout.processes import Processes, check_process_of, turns_of, writing_of

XY = (("x", 4), ("y", 2))


def layout(spec: tuple[Any, ...], mesh: tuple[tuple[str, int], ...] = XY) -> Layout:
    """Return the layout of arrays without empty dimensions."""
    return layout_of(mesh, spec, (False,) * len(spec))


def writers(layout: Layout, process_of: Any, turn: int = 0) -> list[int]:
    """Return the process that writes each block."""
    writing = writing_of(layout, Processes(process_of))
    return writing.writers(np.arange(layout.num_shards), turn).tolist()


# Usual cases.


def test_the_processes_of_a_mesh_are_integers_of_any_kind() -> None:
    flat = check_process_of([0, 0, 0, 0, 1, 1, 1, 1], layout(("x",)))
    assert check_process_of(np.uint8([0, 0, 0, 0, 1, 1, 1, 1]), layout(("x",))) == flat
    assert check_process_of(flat, layout(("y",))) is flat


def llama_2_7b() -> list[tuple[int, tuple[str, ...]]]:
    """Return the bytes of each parameter in bfloat16, and the axes that shard it."""
    rows, columns = ("model", "data"), ("data", "model")
    matrix, wide = (4096 * 4096, rows), (11008 * 4096, rows)
    up, down = [wide] * 2, [(11008 * 4096, columns)]
    layer = [(4096, ()), *down, *up, (4096, ()), matrix, (4096 * 4096, columns), *[matrix] * 2]
    vocabulary = (32000 * 4096, rows)
    return [(2 * size, spec) for size, spec in [vocabulary, *layer * 32, (4096, ()), vocabulary]]


def test_processes_that_all_hold_llama_2_7b_write_about_as_much_of_it() -> None:
    for num_processes, is_sharded_inside, largest_over_mean in [
        (2, True, 1.001),
        (3, True, 1.004),
        (3, False, 1.022),
        (8, False, 1.117),
    ]:
        mesh = (("replica", num_processes), ("data", 4), ("model", 2))
        process_of = Processes(np.repeat(np.arange(num_processes), 8))
        sizes = [size for size, _ in llama_2_7b()]
        specs = [spec if is_sharded_inside else () for _, spec in llama_2_7b()]
        written = np.zeros(num_processes)
        for size, spec, turn in zip(sizes, specs, turns_of(sizes, specs), strict=True):
            writing = writing_of(layout(spec, mesh), process_of)
            num_blocks = len(writing.counts)
            writers = writing.writers(np.arange(num_blocks), turn)
            written += np.bincount(writers, minlength=num_processes) * (size / num_blocks)
        assert written.sum() == sum(sizes)
        assert written.max() / written.mean() < largest_over_mean


# A value.


def test_processes_do_not_follow_the_array_they_were_made_from() -> None:
    given = np.zeros(4, np.int64)
    processes = Processes(given)
    given[:] = 5
    assert processes.numbers == (0,)
    for array in (processes.process_of, processes.positions(0), processes.ranks):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        processes.process_of = given  # pyright: ignore[reportAttributeAccessIssue]


def test_processes_are_equal_by_content() -> None:
    processes = Processes([0, 0, 1])
    assert {processes: 1}[Processes(np.array([0, 0, 1], np.int32))] == 1
    assert processes != Processes([0, 1, 1])
    assert processes != Processes([0, 0, 1, 1])
    assert processes != [0, 0, 1]
    for same in (pickle.loads(pickle.dumps(processes)), copy.deepcopy(processes)):
        assert same == processes
        assert hash(same) == hash(processes)
        assert not same.process_of.flags.writeable


# Properties: counting by hand is right.

any_processes = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(any_processes | any_processes.map(sorted))
def test_each_process_has_its_devices_in_any_order(process_of: list[int]) -> None:
    processes = Processes(process_of)
    for process in (*range(7), -1, 2**70):
        expected = [i for i, owner in enumerate(process_of) if owner == process]
        positions = processes.positions(process)
        assert positions.tolist() == expected
        assert positions.dtype == np.int64
        assert not positions.flags.writeable
    assert processes.numbers == tuple(sorted(set(process_of)))
    assert [processes.numbers[rank] for rank in processes.ranks] == process_of


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    mesh = tuple(zip("abc", sizes, strict=False))
    names = draw(st.permutations([name for name, _ in mesh]))
    used = names[: draw(st.integers(0, len(names)))]
    spec = tuple(used) if draw(st.booleans()) else (tuple(used) or None,)
    empty = tuple(draw(st.integers(0, 9)) == 9 for _ in spec)
    return layout_of(mesh, spec, empty)


@st.composite
def owned_layouts(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    layout, most = draw(layouts()), draw(st.integers(0, 6))
    count = layout.num_devices
    return layout, draw(st.lists(st.integers(0, most), min_size=count, max_size=count))


def holders_of(layout: Layout, process_of: list[int]) -> list[list[int]]:
    """Return for each block the processes that hold it, ascending."""
    holders: list[set[int]] = [set() for _ in range(layout.num_shards)]
    for block, process in zip(layout.block_ids.tolist(), process_of, strict=True):
        holders[block].add(process)
    return list(map(sorted, holders))


@given(owned_layouts(), st.integers(-3, 9))
def test_each_block_goes_to_the_holder_with_least_so_far_and_on_by_the_turn(
    owned: tuple[Layout, list[int]], turn: int
) -> None:
    layout, process_of = owned
    holders = holders_of(layout, process_of)
    written, chosen = Counter(), {}
    for block in sorted(range(len(holders)), key=lambda block: len(holders[block])):
        chosen[block] = min(holders[block], key=lambda process: written[process])
        written[chosen[block]] += 1
    assert writers(layout, process_of) == [chosen[block] for block in range(len(holders))]
    assert writers(layout, process_of, turn) == [
        held[(held.index(chosen[block]) + turn) % len(held)] for block, held in enumerate(holders)
    ]


@given(layouts(), st.integers(0, 3), st.integers(0, 9))
def test_shares_of_hosts_in_a_row_are_even_at_every_turn(
    layout: Layout, leading: int, turn: int
) -> None:
    hosts = int(np.prod(layout.sizes[:leading], dtype=int))
    process_of = np.arange(layout.num_devices) // (layout.num_devices // hosts)
    written = Counter(writers(layout, process_of, turn))
    by_blocks: dict[frozenset[int], list[int]] = {}
    for host in range(hosts):
        held = frozenset(layout.block_ids[process_of == host].tolist())
        by_blocks.setdefault(held, []).append(written[host])
    for shares in by_blocks.values():
        assert max(shares) - min(shares) <= 1


# Errors.

NOT_INTEGERS = (
    "process_of must give the process of each device in device order, integers such as "
    "[0, 0, 1, 1], not "
)
WRONG_SHAPE = (
    "but the mesh {'x': 4, 'y': 2} has 8 devices; give the process of each device in device order"
)
NEGATIVE = "; processes are numbered from 0 to 2**63 - 1"

BAD: list[tuple[Any, type[Exception], str]] = [
    ([0] * 6, ValueError, f"process_of has the shape (6,), {WRONG_SHAPE}"),
    (np.zeros((4, 2), int), ValueError, f"process_of has the shape (4, 2), {WRONG_SHAPE}"),
    (Processes([0, 1]), ValueError, f"process_of has the shape (2,), {WRONG_SHAPE}"),
    ([0.0] * 8, TypeError, NOT_INTEGERS + "float64"),
    ([2**70] * 8, TypeError, NOT_INTEGERS + "object"),
    ([0, 1, -1, 0, 0, 0, 0, 0], ValueError, "process_of says -1 for device 2" + NEGATIVE),
]


def test_process_of_must_name_one_process_a_device() -> None:
    for process_of, error, message in BAD:
        with pytest.raises(error) as info:
            check_process_of(process_of, layout(("x",)))
        assert str(info.value) == message

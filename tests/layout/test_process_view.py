import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gda import ShardGrid
from gda.layout.process_view import ProcessView, infer_global_shape
from gda.layout.processes import Processes
from gda.testing.strategies import mesh_shapes, sharded_cases

P = PartitionSpec
XY = {"x": 4, "y": 2}
TWO_HOSTS = [0, 0, 0, 0, 1, 1, 1, 1]
WHOLE = slice(None)


def test_a_process_without_devices_has_nothing_to_do() -> None:
    view = ShardGrid((8, 2), XY, P("x"), process_of=TWO_HOSTS).view(5)
    assert view.positions.tolist() == []
    assert (view.block_ids, view.indices, view.rows) == ((), [], ())
    assert (view.size, view.written_blocks(turn=3)) == (0, ())
    assert view.coordinates == ((), ())
    assert not view.is_regular
    assert not ShardGrid((), XY, P(), process_of=TWO_HOSTS).view(5).is_regular


def test_ten_thousand_hosts_need_not_exist() -> None:
    mesh, hosts = {"data": 10_000, "model": 8}, 10_000
    process_of = Processes(np.arange(8 * hosts) // 8)
    batch = ShardGrid((40_000, 128), mesh, P("data"), process_of=process_of)
    weights = ShardGrid((128, 512), mesh, P(None, "model"), process_of=process_of)
    bias = ShardGrid((128,), mesh, P(), process_of=process_of)
    assert batch.num_processes == hosts
    written = []
    for host in (*range(16), *range(16, hosts, 97)):
        rows = slice(4 * host, 4 * host + 4)
        view = batch.view(host)
        assert view.rows == (rows,)
        assert view.indices == [(rows, WHOLE)]
        assert view.written_blocks() == (host,)
        assert (view.size, weights.view(host).size) == (512, 128 * 512)
        written += weights.view(host).written_blocks()
    assert written == list(range(8))
    assert [bias.view(host).written_blocks(turn=7) for host in (6, 7, 8)] == [(), (0,), ()]
    assert infer_global_shape((4, 128), mesh, P("data"), process_of, 9_999) == (40_000, 128)


# A value.


def test_repr() -> None:
    grid = ShardGrid((8, 2), XY, P("x"), process_of=TWO_HOSTS)
    assert repr(grid.view(1)) == "ProcessView(process 1: 4 devices, 2 blocks of shape (2, 2))"
    one = ShardGrid((8, 2), {"x": 1}, P(), process_of=[3]).view(np.int64(3))
    assert repr(one) == "ProcessView(process 3: 1 device, 1 block of shape (8, 2))"


# Properties: NumPy on the whole array is right.


@st.composite
def grids(draw: st.DrawFn, may_pad: bool = True) -> ShardGrid:
    """Draw a grid whose devices belong to any processes, or to hosts one after the other."""
    case = draw(sharded_cases(mesh_shapes(max_devices=36)))
    count = case.grid.num_devices
    if draw(st.booleans()):
        hosts = draw(st.sampled_from([n for n in range(1, count + 1) if not count % n]))
        process_of = np.arange(count) // (count // hosts)
    else:
        # Of few processes each has many devices, so that regular ones come up.
        most = draw(st.integers(0, 5))
        process_of = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    shape = case.global_shape
    if may_pad and draw(st.booleans()):
        shape = draw(st.tuples(*[st.integers(0, 14)] * len(shape)))
    return ShardGrid(shape, case.mesh, case.spec, pad=may_pad, process_of=process_of)


def views_of(grid: ShardGrid) -> list[ProcessView]:
    assert grid.processes is not None
    return [grid.view(process) for process in grid.processes.numbers]


def whole_array(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return an array whose elements tell where they are."""
    return np.arange(math.prod(shape)).reshape(shape)


@given(grids())
def test_process_reads_each_block_of_its_devices_once(grid: ShardGrid) -> None:
    whole = whole_array(grid.global_shape)
    indices = grid.indices()
    for view in views_of(grid):
        mine = np.flatnonzero(grid.process_of == view.process).tolist()
        # By number: the indices of blocks that are padding alone may be equal.
        distinct = {grid.block_id(i): indices[i] for i in reversed(mine)}
        assert view.block_ids == tuple(dict.fromkeys(map(grid.block_id, mine)))
        assert view.indices == [distinct[block] for block in view.block_ids]
        assert view.indices == [grid.block_index(block) for block in view.block_ids]
        assert view.size == sum(whole[index].size for index in distinct.values())


@given(grids())
def test_rows_are_the_part_of_dimension_0_that_is_read(grid: ShardGrid) -> None:
    if not grid.global_shape:
        assert all(view.rows == () for view in views_of(grid))
        return
    for view in views_of(grid):
        is_read = np.zeros(grid.global_shape[0], bool)
        for index in view.indices:
            is_read[index[0]] = True
        # The beginning of a run, and its end.
        edges = np.flatnonzero(np.diff(is_read, prepend=False, append=False)).reshape(-1, 2)
        expected = [slice(*edge) for edge in edges.tolist()] or [slice(*grid.global_shape[:1] * 2)]
        assert list(view.rows) == expected


@given(grids(), st.integers(0, 9))
def test_each_block_is_written_once_by_a_process_that_holds_it(grid: ShardGrid, turn: int) -> None:
    times_written = np.zeros(grid.global_shape, int)
    written: list[int] = []
    for view in views_of(grid):
        blocks = view.written_blocks(turn)
        assert blocks == tuple(block for block in view.block_ids if block in blocks)
        written += blocks
        for block in blocks:
            times_written[grid.block_index(block)] += 1
    assert (times_written == 1).all()
    assert sorted(written) == list(range(grid.num_shards))


@pytest.mark.parametrize("turn", [2**63 - 1, 2**70, -(2**70)])
def test_every_integer_is_a_turn(turn: int) -> None:
    grid = ShardGrid((4, 6), {"x": 4, "y": 3}, ("x",), process_of=[0, 1, 2] * 4)
    for view in views_of(grid):
        assert view.written_blocks(turn) == view.written_blocks(turn % 3)


@given(grids())
def test_local_indices_put_the_blocks_together(grid: ShardGrid) -> None:
    whole = whole_array(grid.global_shape)
    for view in views_of(grid):
        blocks = np.unravel_index(view.block_ids, grid.parts) if grid.parts else [()]
        coordinates = {*zip(*map(np.ndarray.tolist, blocks), strict=True)} if grid.parts else {()}
        assert view.coordinates == tuple(
            tuple(sorted({c[dimension] for c in coordinates}))
            for dimension in range(len(grid.global_shape))
        )
        assert view.is_regular == (coordinates == set(itertools.product(*view.coordinates)))
        if not view.is_regular:
            with pytest.raises(ValueError, match="do not form a regular grid"):
                view.local_shape  # noqa: B018
            continue
        view.check_regular()
        local = np.full(view.local_shape, -1)
        for index, inside in zip(view.indices, view.indices_within(view.local_shape), strict=True):
            assert (local[inside] == -1).all()
            local[inside] = whole[index]
        # The part of the whole in which each dimension keeps the rows that this process holds.
        kept: list[Any] = [np.zeros(size, bool) for size in grid.global_shape]
        for index in view.indices:
            for is_kept, s in zip(kept, index, strict=True):
                is_kept[s] = True
        np.testing.assert_array_equal(local, whole[np.ix_(*kept)] if kept else whole)


@given(grids(), st.data())
def test_indices_within_data_that_has_all_of_some_dimensions(
    grid: ShardGrid, data: st.DataObject
) -> None:
    whole = whole_array(grid.global_shape)
    for view in views_of(grid):
        kept: list[Any] = [np.zeros(size, bool) for size in grid.global_shape]
        for is_kept, column in zip(kept, zip(*view.indices, strict=True), strict=False):
            for part in column:
                is_kept[part] = True
            is_kept |= data.draw(st.booleans(), label="all of it")
        local = whole[np.ix_(*kept)] if kept else whole
        # Blocks must be all combinations along the dimensions of which there is a part.
        blocks = np.unravel_index(view.block_ids, grid.parts) if grid.parts else []
        pairs = zip(blocks, kept, strict=True)
        parted = [column.tolist() for column, is_kept in pairs if not is_kept.all()]
        if parted and len({*zip(*parted, strict=True)}) < math.prod(
            len({*each}) for each in parted
        ):
            with pytest.raises(ValueError, match="do not form a regular grid"):
                view.indices_within(local.shape)
            continue
        indices = view.indices_within(local.shape)
        for index, inside in zip(view.indices, indices, strict=True):
            np.testing.assert_array_equal(local[inside], whole[index])


@given(grids())
def test_a_view_that_was_pickled_is_the_same(grid: ShardGrid) -> None:
    for view in views_of(grid):
        again = pickle.loads(pickle.dumps(view))
        assert again == view
        assert hash(again) == hash(view)
        assert again.block_ids == view.block_ids
        assert again.indices == view.indices
        assert again.written_blocks(1) == view.written_blocks(1)


@given(grids(may_pad=False), st.data())
def test_inferred_shape_has_the_given_local_shape(grid: ShardGrid, data: st.DataObject) -> None:
    assert grid.processes is not None
    process = data.draw(st.sampled_from(grid.processes.numbers), label="process")
    arguments = dict(grid.mesh_shape), grid.spec, grid.processes, process
    if not grid.view(process).is_regular:
        with pytest.raises(ValueError, match="do not form a regular grid"):
            infer_global_shape(grid.global_shape, *arguments)
        return
    sides = [st.integers(1, 24) if size else st.just(0) for size in grid.global_shape]
    local_shape = data.draw(st.tuples(*sides), label="local shape")
    extents = map(len, grid.view(process).coordinates)
    if any(size % extent for size, extent in zip(local_shape, extents, strict=True)):
        with pytest.raises(ValueError, match="is not divisible by"):
            infer_global_shape(local_shape, *arguments)
    else:
        inferred = infer_global_shape(local_shape, *arguments)
        again = ShardGrid(inferred, grid.mesh_shape, grid.spec, process_of=grid.processes)
        assert again.view(process).local_shape == local_shape


# Errors.

NO_DEVICE = (
    "process 5 has no device of the mesh {'x': 4, 'y': 2}, so it has no local shape; the mesh has "
    "devices of processes 0, 1"
)
DIAGONAL = [0, 1, 1, 0, 0, 1, 1, 0]
NOT_REGULAR = (
    "process 0 holds the blocks (0, 0); (1, 1); (2, 0); (3, 1) of P('x', 'y') on the mesh {'x': 4, "
    "'y': 2}, which do not form a regular grid, so it has no local shape; choose another order of "
    "the devices or another spec, or use GlobalArray.from_callback, which reads any blocks"
)
GRID = ShardGrid((8, 2), XY, P("x", "y"), process_of=TWO_HOSTS)
CROSSED = ShardGrid((8, 2), XY, P("x", "y"), process_of=DIAGONAL)
NOT_A_PROCESS = "expected the number of a process, not '1'"


def infer(
    local_shape: Any, spec: Any, process_of: Any = TWO_HOSTS, process: Any = 1
) -> Callable[[], object]:
    return lambda: infer_global_shape(local_shape, XY, spec, process_of, process)


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: GRID.view(5).local_shape, ValueError, NO_DEVICE),
    (lambda: CROSSED.view(0).local_shape, ValueError, NOT_REGULAR),
    (
        lambda: GRID.view(1).indices_within((4,)),
        ValueError,
        "the local data has shape (4,), and global_shape is (8, 2); they must have the same numb",
    ),
    (
        lambda: GRID.view(1).indices_within((6, 2)),
        ValueError,
        "local data of shape (6, 2) does not fit global_shape (8, 2), sharded by P('x', 'y') on "
        "the mesh {'x': 4, 'y': 2}: dimension 0 has local size 6; expected is 4, the 2 blocks of "
        "process 1 side by side, or 8, the whole dimension",
    ),
    (infer((4, 2), P("x"), process=5), ValueError, NO_DEVICE),
    (lambda: GRID.view("1"), TypeError, NOT_A_PROCESS),
    (lambda: GRID.processes.positions("1"), TypeError, NOT_A_PROCESS),
    (lambda: GRID.view(1).written_blocks(None), TypeError, "expected a turn, such as the number "),
    (lambda: GRID.view(1).indices_within(3), TypeError, "local_shape must be a sequence of integ"),
    (lambda: Processes([[0, 1]]), ValueError, "process_of has the shape (1, 2); give the process"),
    (lambda: GRID.view(-1), ValueError, "process is -1; processes are numbered from 0"),
    (
        infer((2, 3), P(None, ("x", "y"))),
        ValueError,
        "local shape (2, 3) of process 1 cannot be sharded by P(None, ('x', 'y')) on the mesh "
        "{'x': 4, 'y': 2}: dimension 1 of local size 3 holds 4 of the 8 blocks, and 3 is not "
        "divisible by 4; 4 is the nearest size that divides",
    ),
    (infer((4,), P("x", "y")), ValueError, "spec P('x', 'y') has 2 entries, but local shape (4,)"),
]


def test_a_wrong_question_is_refused() -> None:
    for ask, error, message in BAD:
        with pytest.raises(error) as info:
            ask()
        assert str(info.value).startswith(message)

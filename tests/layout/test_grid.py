import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gda import ShardGrid
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

P = PartitionSpec
XY = {"x": 4, "y": 2}
WHOLE = slice(None)

Ints = npt.NDArray[np.int64]


def by_definition(
    shape: tuple[int, ...], mesh_shape: dict[str, int], spec: Sequence[Any]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return starts, stops, block numbers and replica ids, from what they are said to mean."""
    coordinates = dict(
        zip(mesh_shape, np.indices(tuple(mesh_shape.values())), strict=True),
    )
    num_devices = math.prod(mesh_shape.values())
    starts = np.zeros((num_devices, len(shape)), np.int64)
    stops = np.full((num_devices, len(shape)), shape, np.int64)
    for dimension, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if names:
            sizes = [mesh_shape[name] for name in names]
            parts = np.ravel_multi_index([coordinates[name] for name in names], sizes)
            step = shape[dimension] // math.prod(sizes)
            starts[:, dimension] = parts.ravel() * step
            stops[:, dimension] = starts[:, dimension] + step
    # Sorted by where they start, the distinct blocks are in row-major order. The constant column is
    # for scalars, which start nowhere.
    rows = np.column_stack([np.zeros(num_devices, np.int64), starts])
    _, blocks = np.unique(rows, axis=0, return_inverse=True)
    blocks = blocks.ravel()
    # Sorting is stable, so within the devices of one block the order is device order.
    order = np.argsort(blocks, kind="stable")
    _, first = np.unique(blocks[order], return_index=True)
    counts = np.diff([*first, num_devices])
    replica_ids = np.empty(num_devices, np.int64)
    replica_ids[order] = np.arange(num_devices) - np.repeat(first, counts)
    return starts, stops, blocks, replica_ids


# Facts about the mesh (4, 2) of axes x and y and the shape (8, 2).


def test_blocks_of_an_empty_dimension_are_replicas_of_each_other() -> None:
    grid = ShardGrid((2, 0), XY, P("y", "x"))
    assert grid.indices() == [(slice(0, 1), slice(0, 0)), (slice(1, 2), slice(0, 0))] * 4
    assert grid.indices() == [grid.index(device) for device in range(8)]
    assert grid.replica_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("spec", [P("x"), P("x", None), ["x"], P("x", None, None), P(("x",))])
def test_trailing_nones_and_the_type_of_the_spec_do_not_matter(spec: Any) -> None:
    grid = ShardGrid((8, 2), XY, spec)
    assert grid == ShardGrid((8, 2), XY, ("x",))
    assert hash(grid) == hash(ShardGrid((8, 2), XY, ("x",)))
    assert grid.spec == ("x",)


@pytest.mark.parametrize("device", [7, np.int64(7), (3, 1), [3, 1], np.array([3, 1])])
def test_a_device_is_named_by_its_position_or_its_coordinates(device: Any) -> None:
    grid = ShardGrid((8, 2), XY, P("x"))
    assert grid.index(device) == (slice(6, 8), WHOLE)
    assert grid.block_id(device) == 3
    assert grid.replica_id(device) == 1


def test_a_grid_that_knows_the_processes_answers_for_each() -> None:
    grid = ShardGrid((8, 2), XY, P("x"), process_of=[0, 0, 0, 0, 3, 3, 3, 3])
    assert grid.process_of is not None
    assert grid.process_of.tolist() == [0, 0, 0, 0, 3, 3, 3, 3]
    assert grid.num_processes == 2
    assert grid.view(3).indices == [(slice(4, 6), WHOLE), (slice(6, 8), WHOLE)]
    other = ShardGrid((4, 2), XY, P("y"), process_of=grid.processes)
    assert other.processes is grid.processes
    assert ShardGrid((8, 2), XY, P("x")).process_of is None


def test_slices_hold_plain_integers_also_where_numpy_integers_came_in() -> None:
    grid = ShardGrid(np.array([8, 2]), {"x": np.int64(4), "y": np.int64(2)}, P("x"))
    holders = grid.locate(np.array([5, 1]))  # pyright: ignore[reportArgumentType]
    assert repr(grid.shards_at(holders)[1]) == ("((slice(4, 6, None), slice(None, None, None)), 1)")
    assert repr(grid.block_index(grid.block_ids[4])) == (
        "(slice(4, 6, None), slice(None, None, None))"
    )
    assert repr(grid) == "ShardGrid((8, 2), {'x': 4, 'y': 2}, P('x'))"


# A value.


def test_the_processes_are_a_part_of_the_value() -> None:
    grid = ShardGrid((8, 2), XY, P("x"), process_of=[0, 0, 0, 0, 1, 1, 1, 1])
    assert {grid: 1}[ShardGrid((8, 2), XY, P("x"), process_of=np.repeat([0, 1], 4))] == 1
    assert grid != ShardGrid((8, 2), XY, P("x"))
    assert grid != ShardGrid((8, 2), XY, P("x"), process_of=[0, 0, 1, 1, 0, 0, 1, 1])
    assert repr(grid) == "ShardGrid((8, 2), {'x': 4, 'y': 2}, P('x'), process_of=<2 processes>)"
    for same in (pickle.loads(pickle.dumps(grid)), copy.copy(grid), copy.deepcopy(grid)):
        assert same == grid
        assert hash(same) == hash(grid)
        assert same.view(1).indices == grid.view(1).indices


def test_a_grid_cannot_be_changed() -> None:
    grid = ShardGrid((8, 2), XY, P("x"))
    with pytest.raises(AttributeError) as info:
        grid.global_shape = (4, 2)
    assert str(info.value) == "a ShardGrid is immutable; make a new one with another global_shape"
    with pytest.raises(AttributeError, match="a ShardGrid is immutable"):
        del grid.shard_shape
    with pytest.raises(TypeError):
        grid.mesh_shape["x"] = 8  # pyright: ignore[reportIndexIssue]
    for array in (grid.starts, grid.stops, grid.replica_ids, grid.block_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert grid == ShardGrid((8, 2), XY, P("x"))


def test_a_million_devices_need_not_exist() -> None:
    mesh_shape = {"x": 1024, "y": 32, "z": 32}
    grid = ShardGrid((65_536, 64, 5), mesh_shape, P(("z", "x"), "y"))
    assert (grid.num_devices, grid.num_shards, grid.num_replicas) == (1_048_576, 1_048_576, 1)
    assert grid.shard_shape == (2, 2, 5)
    assert grid.starts.shape == grid.stops.shape == (1_048_576, 3)
    assert not grid.replica_ids.any()
    for x, y, z in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (700, 17, 30), (1023, 31, 31)]:
        position = x * 1024 + y * 32 + z
        row, column = 2 * (z * 1024 + x), 2 * y
        assert grid.starts[position].tolist() == [row, column, 0]
        assert grid.stops[position].tolist() == [row + 2, column + 2, 5]
        assert grid.index((x, y, z)) == (slice(row, row + 2), slice(column, column + 2), WHOLE)
        assert grid.locate((row + 1, column, 4)).tolist() == [position]


def test_the_largest_size_has_blocks_below_2_to_63() -> None:
    size = 2**63 - 1
    grid = ShardGrid((size,), {"x": 4}, P("x"), pad=True)
    assert grid.stops.ravel().tolist() == [index[0].stop for index in grid.indices()]
    assert grid.starts.ravel().tolist() == [index[0].start for index in grid.indices()]
    with pytest.raises(OverflowError, match="has elements beyond int64; ask index"):
        _ = ShardGrid((size + 1,), {"x": 4}, P("x")).stops


def test_one_device_of_a_mesh_of_any_size_can_be_asked_about() -> None:
    grid = ShardGrid((1 << 50, 3), {"x": 1 << 30, "y": 1 << 20, "z": 3}, P(("y", "x")))
    assert grid.index((5, 7, 2)) == (slice(7 * (1 << 30) + 5, 7 * (1 << 30) + 6), WHOLE)
    assert grid.replica_id((5, 7, 2)) == 2
    assert grid.shards_at([grid.num_devices - 1]) == [((slice((1 << 50) - 1, 1 << 50), WHOLE), 2)]
    more = ShardGrid((1 << 80, 3), {"x": 1 << 79}, P("x"))
    assert more.index((1 << 79) - 1) == (slice((1 << 80) - 2, 1 << 80), WHOLE)


# Properties: NumPy on the whole array is right.

small_cases = sharded_cases(mesh_shapes(max_devices=64))
large_cases = sharded_cases(mesh_shapes(max_devices=3000, axis_names=("a", "b", "c", "d")))


@given(small_cases | large_cases)
def test_arrays_of_all_devices_follow_the_definition(case: ShardedCase[dict[str, int]]) -> None:
    grid = case.grid
    starts, stops, blocks, replica_ids = by_definition(case.global_shape, case.mesh, case.spec)
    for answer, expected in (
        (grid.starts, starts),
        (grid.stops, stops),
        (grid.block_ids, blocks),
        (grid.replica_ids, replica_ids),
    ):
        assert answer.dtype == np.int64
        assert not answer.flags.writeable
        assert answer.shape == expected.shape
        np.testing.assert_array_equal(answer, expected)
    assert grid.num_shards == blocks.max() + 1
    assert grid.num_replicas == replica_ids.max() + 1


@given(small_cases)
def test_one_device_and_all_devices_give_the_same_answers(
    case: ShardedCase[dict[str, int]],
) -> None:
    grid = case.grid
    indices = grid.indices()
    blocks = [grid.block_index(block) for block in range(grid.num_shards)]
    shards = list(zip(indices, grid.replica_ids.tolist(), strict=True))
    assert grid.shards_at(range(grid.num_devices)) == shards
    assert grid.shards_at(range(grid.num_devices)[::-1]) == shards[::-1]
    assert grid.shards_at(range(grid.num_devices)[::3]) == shards[::3]  # no regular blocks
    for position, coordinates in enumerate(itertools.product(*map(range, case.mesh.values()))):
        for device in (position, coordinates):
            assert grid.index(device) == indices[position]
            assert grid.replica_id(device) == grid.replica_ids[position]
            assert grid.block_id(device) == grid.block_ids[position]
        assert blocks[grid.block_ids[position]] == indices[position]


@given(sharded_cases(mesh_shapes(max_devices=64)), st.data())
def test_an_element_is_located_where_a_search_finds_it(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    grid = case.grid
    assume(0 not in grid.global_shape)
    point = data.draw(
        st.tuples(*[st.integers(0, size - 1) for size in grid.global_shape]), label="point"
    )
    inside = (grid.starts <= point) & (point < grid.stops)
    located = grid.locate(point)
    assert located.dtype == np.int64
    assert located.tolist() == np.flatnonzero(inside.all(axis=1)).tolist()
    assert grid.replica_ids[located].tolist() == list(range(grid.num_replicas))


@given(small_cases)
def test_the_shortest_spec_makes_the_same_grid(case: ShardedCase[dict[str, int]]) -> None:
    assert ShardGrid(case.global_shape, case.mesh, case.grid.spec) == case.grid
    assert eval(repr(case.grid), {"ShardGrid": ShardGrid, "P": P}) == case.grid
    grid = ShardGrid((2, 8), XY, [None, ["y", "x"]])
    assert repr(grid) == "ShardGrid((2, 8), {'x': 4, 'y': 2}, P(None, ('y', 'x')))"


# Sizes that the mesh does not divide.


@given(small_cases, st.data())
def test_a_padded_grid_is_that_of_the_padded_shape_without_the_padding(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 14)] * len(case.global_shape)), label="shape")
    grid = ShardGrid(shape, case.mesh, case.spec, pad=True)
    even = ShardGrid(grid.padded_shape, case.mesh, case.spec)
    assert grid.shard_shape == even.shard_shape
    assert (grid.block_ids == even.block_ids).all()
    assert (grid.replica_ids == even.replica_ids).all()
    assert (grid.starts == np.minimum(even.starts, shape)).all()
    assert (grid.stops == np.minimum(even.stops, shape)).all()
    assert grid.indices() == [grid.index(i) for i in range(grid.num_devices)]
    assert [index for index, _ in grid.shards_at(range(grid.num_devices))] == grid.indices()
    whole, padded = np.arange(math.prod(shape)).reshape(shape), np.full(even.global_shape, -1)
    padded[tuple(map(slice, shape))] = whole
    for index, of_even in zip(grid.indices(), even.indices(), strict=True):
        block = padded[(..., *of_even)]
        assert whole[(..., *index)].ravel().tolist() == block[block >= 0].tolist()
        assert [s == WHOLE for s in index] == [s == WHOLE for s in of_even]
    for point in np.ndindex(shape):
        assert (grid.locate(point) == even.locate(point)).all()
    assert eval(repr(grid), {"ShardGrid": ShardGrid, "P": P}) == grid
    assert pickle.loads(pickle.dumps(grid)) == grid
    assert (grid == even) == (shape == even.global_shape)


# Errors.

BAD: list[tuple[tuple[Any, Any, Any], type[Exception], str]] = [
    (((6, 2), XY, P("x")), ValueError, "global shape (6, 2) cannot be sharded by P('x') on the m"),
    # An iterator can be read only once: the second look at it, for the message, sees nothing.
    (((8, 2), XY, iter(["q"])), ValueError, "spec P('q') shards dimension 0 by mesh axis 'q', bu"),
    (((8.0, 2), XY, P()), TypeError, "global_shape must be a sequence of integers such as (8, 2)"),
    (((8, 2), {"x": 4.0}, P("x")), TypeError, "sizes of mesh axes must be integers: {'x': 4.0}"),
]


def test_a_wrong_argument_is_refused() -> None:
    for arguments, error, message in BAD:
        # A grid that is right, of equal numbers, must not have opened a way past the checks.
        ShardGrid((8, 2), {"x": 4, "y": 2}, P("x"))
        ShardGrid((8, 2), {"x": 4}, P("x"))
        with pytest.raises(error) as info:
            ShardGrid(*arguments)
        assert str(info.value).startswith(message)


GRID, EMPTY = ShardGrid((8, 2), XY, P("x")), ShardGrid((0, 2), XY, P())
OUTSIDE = "device {} is outside the 8 devices of the mesh {{'x': 4, 'y': 2}}"
OUTSIDE_AT = "mesh coordinates {} are outside the mesh {{'x': 4, 'y': 2}}"
NOT_POSITIONS = "expected flat positions of devices, such as [0, 3], not "
NOT_A_BLOCK = "expected the number of a block, not "
NOT_A_DEVICE = "a position, or mesh coordinates such as (0, 1)"
NOT_A_POINT = "the position of an element, such as (0, 1)"

BAD_QUESTIONS: list[tuple[Callable[[Any], object], Any, type[Exception], str]] = [
    (GRID.index, 8, IndexError, OUTSIDE.format(8)),
    (GRID.replica_id, -1, IndexError, OUTSIDE.format(-1)),
    (GRID.block_id, (4, 0), IndexError, OUTSIDE_AT.format("(4, 0)")),
    (GRID.view, 0, ValueError, f"{GRID!r} has no process numbers; make it with process_of=, the "),
    (GRID.index, (1.0, 0), TypeError, f"expected {NOT_A_DEVICE}, not (1.0, 0)"),
    (GRID.index, "x", TypeError, f"expected {NOT_A_DEVICE}, not 'x'"),
    (GRID.shards_at, [0, 8], IndexError, OUTSIDE.format(8)),
    (GRID.shards_at, [1.0], TypeError, f"{NOT_POSITIONS}[1.0]"),
    (GRID.shards_at, 3, TypeError, f"{NOT_POSITIONS}3"),
    (GRID.block_index, 4, IndexError, f"block 4 is outside the 4 blocks of {GRID!r}; they are nu"),
    (GRID.block_index, "x", TypeError, f"{NOT_A_BLOCK}'x'"),
    (GRID.block_index, True, TypeError, f"{NOT_A_BLOCK}True"),
    (GRID.index, (0,), IndexError, f"{OUTSIDE_AT.format('(0,)')}; give a number for each axis"),
    (GRID.locate, (8, 0), IndexError, "point (8, 0) is outside the global shape (8, 2)"),
    (GRID.locate, (0.5, 0), TypeError, f"expected {NOT_A_POINT}, not (0.5, 0)"),
    (GRID.locate, "ab", TypeError, f"expected {NOT_A_POINT}, not 'ab'"),
    (EMPTY.locate, (0, 0), IndexError, "point (0, 0) is outside the global shape (0, 2)"),
]


def test_a_wrong_question_is_refused() -> None:
    for ask, argument, error, message in BAD_QUESTIONS:
        with pytest.raises(error) as info:
            ask(argument)
        assert str(info.value).startswith(message)

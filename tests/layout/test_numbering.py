import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from trials import rarely

from gda.layout.numbering import SMALL, Layout, layout_of
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

P = PartitionSpec
XY = (("x", 4), ("y", 2))


def layout_of_case(case: ShardedCase[dict[str, int]]) -> Layout:
    empty = tuple(size == 0 for size in case.global_shape)
    return layout_of(tuple(case.mesh.items()), case.spec, empty)


def coordinates_of(layout: Layout) -> list[tuple[int, ...]]:
    """Return the mesh coordinates of every device, in device order."""
    return list(np.ndindex(*layout.sizes))


# What people meet.


def test_the_first_name_of_an_entry_is_the_slowest() -> None:
    mesh = (("x", 2), ("y", 3))
    x_first = layout_of(mesh, P(("x", "y")), (False,))
    y_first = layout_of(mesh, P(("y", "x")), (False,))
    assert x_first.block_list == [x * 3 + y for x in range(2) for y in range(3)]
    assert y_first.block_list == [y * 2 + x for x in range(2) for y in range(3)]


def test_the_last_dimension_is_the_fastest() -> None:
    layout = layout_of(XY, P("y", "x"), (False, False))
    assert layout.block_list == [y * 4 + x for x in range(4) for y in range(2)]
    assert (layout.parts, layout.num_shards) == ((2, 4), 8)


@pytest.mark.parametrize(
    ("spec", "replica_ids"),
    [
        (P("x", "y"), [0, 0, 0, 0, 0, 0, 0, 0]),
        (P("x"), [0, 1, 0, 1, 0, 1, 0, 1]),
        (P("y"), [0, 0, 1, 1, 2, 2, 3, 3]),
        (P(None, "y"), [0, 0, 1, 1, 2, 2, 3, 3]),
        (P(("x", "y")), [0, 0, 0, 0, 0, 0, 0, 0]),
        (P(), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_replicas_are_counted_along_the_axes_that_the_spec_leaves_over(
    spec: PartitionSpec, replica_ids: list[int]
) -> None:
    layout = layout_of(XY, spec, (False, False))
    assert layout.replica_list == replica_ids
    assert layout.num_replicas == max(replica_ids) + 1


def test_an_axis_on_an_empty_dimension_makes_replicas_and_no_blocks() -> None:
    layout = layout_of(XY, P("x", "y"), (True, False))
    assert (layout.parts, layout.num_shards, layout.num_replicas) == ((4, 2), 2, 4)
    assert layout.block_list == [0, 1] * 4
    assert layout.replica_list == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mesh_without_axes_is_one_device() -> None:
    layout = layout_of((), P(None), (False,))
    assert (layout.num_devices, layout.num_shards, layout.num_replicas) == (1, 1, 1)
    assert (layout.block_list, layout.numbers(0), layout.position(())) == ([0], (0, 0), 0)


def test_arrays_of_different_sizes_share_a_layout() -> None:
    layout = layout_of(XY, P("x"), (False, False))
    assert layout_of(XY, P("x"), (False, False)) is layout
    assert layout_of(XY, P("x"), (False, True)) is not layout


def test_positions_are_row_major_over_the_mesh() -> None:
    layout = layout_of(XY, P(), ())
    assert [layout.position(at) for at in coordinates_of(layout)] == list(range(8))


def test_the_holders_of_a_block_are_found_without_walking_over_the_mesh() -> None:
    layout = layout_of((("x", 1 << 20), ("y", 1 << 20), ("z", 3)), P(("y", "x")), (False,))
    y, x = 123_456, 654_321
    first = (x * (1 << 20) + y) * 3
    assert layout.holders(y * (1 << 20) + x).tolist() == [first, first + 1, first + 2]


def test_the_mesh_shape_of_a_layout_cannot_be_changed() -> None:
    layout = layout_of(XY, P("x"), (False,))
    with pytest.raises(TypeError):
        layout.mesh_shape["x"] = 8  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match="read-only"):
        layout.small_replica_ids[0] = 1


# Properties.


@given(sharded_cases(mesh_shapes(max_devices=200)))
def test_one_device_is_numbered_as_all_are(case: ShardedCase[dict[str, int]]) -> None:
    layout = layout_of_case(case)
    assert layout.num_devices == math.prod(case.mesh.values())
    assert layout.num_devices == layout.num_shards * layout.num_replicas
    numbers = [layout.numbers(position) for position in range(layout.num_devices)]
    assert numbers == list(zip(layout.block_list, layout.replica_list, strict=True))
    assert len(set(numbers)) == layout.num_devices


@given(sharded_cases(mesh_shapes(max_devices=200)), st.data())
def test_the_holders_of_a_block_are_the_devices_numbered_so_in_order_of_replica(
    case: ShardedCase[dict[str, int]], data: st.DataObject
) -> None:
    layout = layout_of_case(case)
    block = data.draw(st.integers(0, layout.num_shards - 1), label="block")
    numbers = [layout.numbers(position) for position in layout.holders(block)]
    assert numbers == [(block, replica) for replica in range(layout.num_replicas)]


@rarely(2)
@given(
    sharded_cases(
        mesh_shapes(max_devices=4 * SMALL, min_axes=2).filter(
            lambda mesh: math.prod(mesh.values()) > SMALL // 2
        )
    )
)
def test_lists_and_arrays_agree_on_both_sides_of_where_one_is_made_of_the_other(
    case: ShardedCase[dict[str, int]],
) -> None:
    layout = layout_of_case(case)
    coordinates = np.indices(layout.sizes).reshape(len(layout.sizes), -1)
    for weights, numbers in (
        (layout.block_weights, layout.block_list),
        (layout.replica_weights, layout.replica_list),
    ):
        expected = np.array(weights) @ coordinates
        assert numbers == expected.tolist()
        assert set(map(type, numbers)) == {int}
        np.testing.assert_array_equal(layout.spread(weights), expected)


@given(mesh_shapes(max_devices=10**9), st.data())
def test_coordinates_and_positions_are_two_names_of_a_device(
    mesh_shape: dict[str, int], data: st.DataObject
) -> None:
    layout = layout_of(tuple(mesh_shape.items()), P(), ())
    position = data.draw(st.integers(0, layout.num_devices - 1), label="position")
    coordinates = np.unravel_index(position, layout.sizes)
    assert layout.position(coordinates) == position  # pyright: ignore[reportArgumentType]


# What cannot be.


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_the_mesh_is_refused(position: int) -> None:
    with pytest.raises(IndexError) as info:
        layout_of(XY, P(), ()).numbers(position)
    assert str(info.value) == (
        f"device {position} is outside the 8 devices of the mesh {{'x': 4, 'y': 2}}"
    )


@pytest.mark.parametrize("coordinates", [(4, 0), (0, -1), (0,), (0, 0, 0), ()])
def test_coordinates_outside_the_mesh_are_refused(coordinates: tuple[int, ...]) -> None:
    with pytest.raises(IndexError) as info:
        layout_of(XY, P(), ()).position(coordinates)
    assert str(info.value) == (
        f"mesh coordinates {coordinates} are outside the mesh {{'x': 4, 'y': 2}}"
    )


@pytest.mark.parametrize("coordinates", [None, 1.5, "ab", (1.0, 0)])
def test_coordinates_that_are_no_integers_are_refused(coordinates: Any) -> None:
    with pytest.raises(TypeError) as info:
        layout_of(XY, P(), ()).position(coordinates)
    assert str(info.value) == (
        "a device is given by its flat position or its mesh coordinates, integers such as 3 or "
        f"(1, 0), not {coordinates!r}"
    )


def test_a_layout_of_a_wrong_spec_is_refused() -> None:
    with pytest.raises(ValueError, match="uses mesh axis 'x' twice"):
        layout_of(XY, P("x", "x"), (False, False))

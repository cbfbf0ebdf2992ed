import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gda.layout.numbering import Layout, layout_of
from gda.testing.strategies import ShardedCase, mesh_shapes, sharded_cases

P = PartitionSpec
XY = (("x", 4), ("y", 2))


def layout_of_case(case: ShardedCase[dict[str, int]]) -> Layout:
    empty = tuple(size == 0 for size in case.global_shape)
    return layout_of(tuple(case.mesh.items()), case.spec, empty)


# Usual cases.


def test_a_mesh_without_axes_is_one_device() -> None:
    layout = layout_of((), P(None), (False,))
    assert (layout.num_devices, layout.num_shards, layout.num_replicas) == (1, 1, 1)
    assert (layout.block_ids.tolist(), layout.numbers(0), layout.position(())) == ([0], (0, 0), 0)


def test_arrays_of_different_sizes_share_a_layout() -> None:
    layout = layout_of(XY, P("x"), (False, False))
    assert layout_of(XY, P("x"), (False, False)) is layout
    assert layout_of(XY, P("x"), (False, True)) is not layout


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
        layout.replica_ids[0] = 1


# Properties.


@given(sharded_cases(mesh_shapes(max_devices=2000)))
def test_all_devices_and_one_have_the_same_numbers(case: ShardedCase[dict[str, int]]) -> None:
    layout = layout_of_case(case)
    coordinates = np.indices(layout.sizes).reshape(len(layout.sizes), -1)
    for weights, numbers in (
        (layout.block_weights, layout.block_ids),
        (layout.replica_weights, layout.replica_ids),
    ):
        np.testing.assert_array_equal(numbers, np.array(weights, int) @ coordinates)
    last = layout.num_devices - 1
    assert layout.numbers(last) == (layout.block_ids[last], layout.replica_ids[last])


@given(mesh_shapes(max_devices=10**9), st.data())
def test_coordinates_and_positions_are_two_names_of_a_device(
    mesh_shape: dict[str, int], data: st.DataObject
) -> None:
    layout = layout_of(tuple(mesh_shape.items()), P(), ())
    position = data.draw(st.integers(0, layout.num_devices - 1), label="position")
    coordinates = np.unravel_index(position, layout.sizes)
    assert layout.position(coordinates) == position  # pyright: ignore[reportArgumentType]

from jax.sharding import PartitionSpec

from gda.layout.numbering import layout_of

P = PartitionSpec
XY = (("x", 4), ("y", 2))


def test_arrays_of_different_sizes_share_a_layout() -> None:
    layout = layout_of(XY, P("x"), (False, False))
    assert layout_of(XY, P("x"), (False, False)) is layout
    assert layout_of(XY, P("x"), (False, True)) is not layout


def test_the_holders_of_a_block_are_found_without_walking_over_the_mesh() -> None:
    layout = layout_of((("x", 1 << 20), ("y", 1 << 20), ("z", 3)), P(("y", "x")), (False,))
    y, x = 123_456, 654_321
    first = (x * (1 << 20) + y) * 3
    assert layout.holders(y * (1 << 20) + x).tolist() == [first, first + 1, first + 2]

"""The map from the indices of a view to boxes of its source."""

import pytest

from gda.storage.views.mapping import chunks_of_bytes, identity, num_chunks

pytestmark = pytest.mark.no_jax


def test_a_reshape_and_its_reverse_are_the_same_map() -> None:
    w = identity((6, 4, 1))
    assert w.reshaped((2, 12)).reshaped((3, 8)).reshaped((6, 4, 1)) == w
    assert w.reshaped((4, 6)) is None
    assert identity((24,)).reshaped((6, 4)).reshaped((4, 6)).shape == (4, 6)


def test_digits_that_touch_more_chunks_together_are_read_one_by_one() -> None:
    (box,) = identity((64, 8)).indexed([range(0, 64, 16), range(8)]).boxes((slice(0, 4),) * 2)
    assert len([*box.parts((8, 8))]) == 4
    assert len([*box.parts((16, 8))]) == 1
    assert num_chunks((slice(7, 9), slice(0, 8)), (8, 8)) == 2


def test_the_parts_at_an_index_are_found_without_a_look_at_each_element() -> None:
    half = 2**50
    columns = identity((2 * half, 3)).reshaped((2, half, 3)).transposed((2, 1, 0))
    (box,) = columns.boxes((slice(0, 3), slice(0, half), slice(0, 2)))
    parts = [*box.parts_at((slice(half - 5, half + 7), slice(1, 3)))]
    assert parts == [
        (range(1, 3), range(half - 5, half), range(1)),
        (range(1, 3), range(7), range(1, 2)),
    ]
    (backwards,) = identity((half,)).indexed([range(half - 1, -1, -3)]).boxes((slice(0, 9),))
    (digits,) = backwards.parts_at((slice(half - 12, half - 2),))
    assert [*digits[0]] == [1, 2, 3]


def test_chunks_of_bytes_are_contiguous() -> None:
    assert chunks_of_bytes((100, 8), 2, 2**15) == (100, 8)
    assert chunks_of_bytes((4, 100, 2**14), 4, 2**15) == (1, 1, 2**13)
    assert chunks_of_bytes((), 4, 1) == ()
    assert chunks_of_bytes((0, 3), 4, 1) == (1, 1)

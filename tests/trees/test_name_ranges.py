"""One name for names that differ only in numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.trees.name_ranges import with_ranges

NUMBERS = st.sampled_from(["", "0", "1", "2", "7", "07", "10", "11", "99"])
NAMES = st.tuples(st.sampled_from(["a", "b", ""]), NUMBERS, st.sampled_from(".x"), NUMBERS)


@given(st.lists(NAMES.map("".join), unique=True))
def test_ranges_stand_for_every_name_once(names: list[str]) -> None:
    rows = with_ranges(names)
    assert sorted(name for _, members in rows for name in members) == sorted(names)
    for label, members in rows:
        if len(members) == 1:
            assert label == members[0]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ([], []),
        (["w"], ["w"]),
        (["h.9.w", "h.10.w", "h.2.w"], ["h.2,9-10.w"]),
        (["h.00", "h.01", "h.02"], ["h.00-02"]),
        (["h.0", "h.00"], ["h.0,00"]),
        (["h.09", "h.10"], ["h.09-10"]),
        ([f"h.{i}.e.{j}" for i in range(4) for j in range(8)], ["h.0-3.e.0-7"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.2"], ["a.0.e.0-1", "a.1.e.0,2"]),
        (["1" * 5000], ["1" * 5000]),
    ],
)
def test_ranges(names: list[str], labels: list[str]) -> None:
    assert [label for label, _ in with_ranges(names)] == labels

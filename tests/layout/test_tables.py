"""Tables and lines that fit the columns of a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from gda.layout.tables import table, wrap


def test_wrapped() -> None:
    for text, lines in [
        ("a b", ["a b"]),
        ("(65,536, 8)", ["(65,536, 8)"]),
        ("f32[65536,8192]", ["f32[65536,", "8192]"]),
        ("a" * 26, ["a" * 12, "a" * 12, "aa"]),
        ("", [""]),
    ]:
        assert wrap(text, 12) == lines


def test_a_table_that_is_too_wide_is_wrapped_in_its_widest_column() -> None:
    rows = [["name", "spec"], ["w", "P('data', 'model')"]]
    assert table(rows, width=16) == ["name  spec", "w     P('data',", "      'model')"]


def test_numbers_in_columns_to_the_right_are_not_broken() -> None:
    trees = [f"tree {n}" for n in range(9)]
    rows = [["device", *trees], ["TPU 0-7", *["1012.0 MiB"] * 9]]
    header, row = table(rows, right=trees, width=100)
    assert row == "  ".join(["TPU 0-7", *["1012.0 MiB"] * 9])
    assert len(header) == len(row)
    # The name of a column, and columns to the left, are wrapped in their place.
    rows = [["mesh", "over data, model"], ["data=16, model=4", "16.0 MiB"]]
    assert table(rows, right={"over data, model"}, width=18) == [
        "mesh          over",
        "             data,",
        "             model",
        "data=16,  16.0 MiB",
        "model=4",
    ]


def test_a_table_does_nothing_to_a_terminal() -> None:
    assert table([["a\x1b[2J", "b"], ["c", "d"]]) == ["a\\x1b[2J  b", "c         d"]
    assert table([]) == []


# Properties.


@given(st.text("ab,0 é", max_size=40), st.integers(1, 20))
def test_wrapping_keeps_all_but_spaces(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(len, lines)) <= width

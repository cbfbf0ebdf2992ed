"""The one short notation of indices, processes and meshes."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gda.layout.text import (
    MOST_NAMED,
    format_bytes,
    format_index,
    format_mesh,
    format_numbers,
    format_processes,
    join_some,
    shortened,
    where_they_differ,
)


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([1], "process 1"),
        ([0, 2, 3], "processes 0, 2, 3"),
        ([5, 4, 3, 2], "processes 2-5"),
        ([0, 1, 2, 9, 10, 20, 21, 22], "processes 0-2, 9, 10, 20-22"),
        (range(0, 64, 8), "processes 0, 8, … 56"),
        ([1, 5, 7, 12, 13, 20, 28, 40, 41, 50, 60], "processes 1, 5, 7, 12, 13, 20, 28, … 4 more"),
        ([], "processes "),
    ],
)
def test_processes_are_written_short(processes: Sequence[int], text: str) -> None:
    assert format_processes(processes) == text


def test_an_index_can_be_pasted_into_numpy() -> None:
    assert format_index((slice(0, 2), slice(None), slice(None, 3))) == "[0:2, :, 0:3]"
    assert format_index(()) == "[()]"  # x[] is no Python


def test_the_name_of_a_mesh_axis_does_nothing_to_a_terminal() -> None:
    assert format_mesh({"x": 4, "\x1b[2J": 2}) == "x=4,\\x1b[2J=2"
    assert format_mesh({}) == "no axes"


UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"]


@example(1023)
@example(1024)
@given(st.integers(0, 2**75))
def test_a_size_is_in_the_largest_unit_of_which_it_has_one(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    size = 1024 ** UNITS.index(unit)
    assert abs(float(number) * size - nbytes) <= (0.05 * size if size > 1 else 0)
    assert float(nbytes) >= size or not nbytes  # sizes of EiB are rounded as floats
    assert nbytes < 1024 * size or unit == UNITS[-1]


numbers_in_runs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=12).map(
    lambda runs: [
        number
        for (_, length), end in zip(
            runs, itertools.accumulate(sum(run) for run in runs), strict=True
        )
        for number in range(end - length, end)
    ]
)


@given(
    numbers_in_runs | st.builds(range, st.integers(0, 9), st.integers(10, 99), st.integers(1, 9))
)
def test_written_numbers_can_be_read_back(numbers: Sequence[int]) -> None:
    numbers = [*numbers]
    text = format_numbers(numbers)
    found: list[list[int]] = []
    for part in filter(None, text.split(", ")):
        if more := re.fullmatch(r"… ([\d,]+) more", part):
            assert len(numbers) == sum(map(len, found)) + int(more[1])
            assert len(numbers) > 8
            numbers = numbers[: sum(map(len, found))]
            continue
        first, _, last = part.removeprefix("… ").partition("-")
        run = [*range(int(first), int(last or first) + 1)]
        if part.startswith("… "):  # equal runs at equal distances
            between = range(found[0][0], run[0], found[1][0] - found[0][0])
            found = [[start + each for each in range(len(run))] for start in between]
        found.append(run)
    assert [*itertools.chain(*found)] == numbers
    assert len(text.split(", ")) <= 16


@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=12), st.integers(0, 40))
def test_as_many_parts_are_shown_as_fit(parts: list[str], most: int) -> None:
    fitting = [n for n in range(1, MOST_NAMED + 1) if len("; ".join(parts[:n])) <= most]
    shown = parts[: max(fitting, default=1)]
    more = [f"and {len(parts) - len(shown)} more"] if len(parts) > len(shown) else []
    assert join_some(parts, most) == "; ".join([*shown, *more])


@given(st.text("abc", max_size=20), st.integers(4, 20))
def test_a_text_loses_its_middle_alone(text: str, most: int) -> None:
    short = shortened(text, most)
    assert min(len(text), most - 1) <= len(short) <= most
    first, _, last = short.partition("…")
    assert text.startswith(first)
    assert text.endswith(last)


@given(st.text("ab", max_size=40), st.text("a", max_size=40), st.text("b", max_size=40))
def test_texts_are_shown_where_they_differ(common: str, one: str, other: str) -> None:
    texts, most = [common + one, common + "!" + other], 20
    for text, shown in zip(texts, where_they_differ(texts, most), strict=True):
        assert len(shown) <= most
        middle = shown.strip("…")
        assert shown[:1] == "…" or text.startswith(middle)
        assert shown[-1:] == "…" or text.endswith(middle)
        assert middle in text
        assert (shown == text) == (max(map(len, texts)) <= most or middle == text)
    assert len({*where_they_differ(texts, most)}) == 2

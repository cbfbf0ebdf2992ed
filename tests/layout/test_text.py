"""The one short notation of indices, processes and meshes."""

from collections.abc import Sequence

import pytest

from gda.layout.text import format_index, format_mesh, format_processes


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

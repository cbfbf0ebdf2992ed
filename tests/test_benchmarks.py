"""The command of the benchmarks, its rounds, and how its table judges targets."""

from pathlib import Path

import pytest
from running import fresh_python

from benchmarks.pairs import Side, measure
from benchmarks.report import render
from benchmarks.work import Faster, Floor, OfFloor, Within, Work

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]


def rows_of(work: Work, seconds: dict[str, float], spread: float = 0) -> list[list[str]]:
    """Return the cells of the table of targets; ``spread`` is that of the quartiles."""
    benchmarks = [
        {
            "extra_info": {"work": work.name, "way": way},
            "stats": {"median": value, "q1": value - spread, "q3": value + spread, "rounds": 5},
        }
        for way, value in seconds.items()
    ]
    page = render([{"benchmarks": benchmarks}], {"Section": [work]}, quick=False)
    table = page.partition("## Targets")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    page = tmp_path / "RESULTS.md"
    command = ["-m", "benchmarks", "--quick", "--only", "numbers of 8 devices", "--output"]
    done = fresh_python(*command, page, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| numbers of 8 devices | lists |" in page.read_text()
    assert "The figures say\nnothing." in page.read_text()


def test_rounds_end_when_the_ratio_is_settled_or_the_time_is_over() -> None:
    (steady,) = measure([Side(lambda: 1.0, times_itself=True)], seconds=100)
    assert len(steady) == 10
    values = iter(range(1, 1000))
    (changing,) = measure([Side(lambda: next(values), times_itself=True)], seconds=100, most=40)
    assert len(changing) == 40
    (hasty,) = measure([Side(lambda: next(values), times_itself=True)], seconds=0)
    assert len(hasty) == 3


def test_a_target_is_compared_with_the_rival() -> None:
    work = Work("sum", list, {"JAX": Faster(2)}, limit=Within(3))
    rival, limit = rows_of(work, {"gda": 2e-3, "JAX": 3e-3})
    assert (rival[4], rival[5], rival[7]) == ("1.50 times faster", "2 times faster", "**no**")
    assert (limit[5], limit[7]) == ("3 ms at most", "yes")


@pytest.mark.parametrize(
    ("ours", "floor", "spread", "is_", "reached"),
    [
        (2.4, 2.2, 0, "1.25 times faster; 0.92 of the speed of the floor", "yes, the floor"),
        (2.9, 2.2, 0, "1.03 times faster; 0.76 of the speed of the floor", "**no**"),
        # A floor below the target does not replace it, nor one whose fast rounds reach it.
        (2.4, 1.0, 0, "1.25 times faster", "**no**"),
        (1.4, 1.0, 0, "2.14 times faster", "yes"),
        (2.4, 2.2, 0.8, "1.25 times faster", "**no**"),
    ],
)
def test_a_floor_replaces_a_target_that_it_misses(
    ours: float, floor: float, spread: float, is_: str, reached: str
) -> None:
    work = Work("sum", list, {"JAX": Faster(2), "loop": None}, floor=Floor("loop", "All is read."))
    (row,) = rows_of(work, {"gda": ours, "JAX": 3, "loop": floor}, spread)
    assert (row[4], row[7]) == (is_, reached)


def test_a_share_of_the_speed_of_a_floor() -> None:
    work = Work("save", list, {"write": OfFloor(0.8)}, table_of="write")
    (row,) = rows_of(work, {"gda": 2, "write": 1.5})
    assert (row[4], row[5], row[7]) == ("0.75 of its speed", "0.8 of its speed", "**no**")


def test_a_work_that_failed_is_no_target_reached() -> None:
    (row,) = rows_of(Work("sum", list, {"JAX": Faster(2)}), {"gda": 1})
    assert row[7] == "failed"

"""The command of the benchmarks, its rounds, and how its table judges targets."""

import pickle
from functools import partial
from pathlib import Path

import pytest
from running import fresh_python

from benchmarks import measuring
from benchmarks.less import LESS
from benchmarks.measuring import Measuring
from benchmarks.pages import (
    pages,
    picture_of,
    with_losses,
)
from benchmarks.pairs import Side, measure
from benchmarks.report import line, render, render_accelerator
from benchmarks.results import Measured, Results, Stats, load
from benchmarks.work import Faster, Floor, Within, Work
from benchmarks.works import on_accelerator, sections

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
LOST = {"gda": 3.0, "JAX": 2.0}
RAW = "raw read into fresh memory"


def measured(work: Work, seconds: dict[str, float], spread: float = 0) -> Results:
    ways = {way: Stats(value, value - spread, value + spread) for way, value in seconds.items()}
    return {work.name: Measured("2026-01-01, here", 5, ways)}


def rows_of(work: Work, seconds: dict[str, float], spread: float = 0) -> list[list[str]]:
    """Return the cells of the table of a section; ``spread`` is that of the quartiles."""
    page = render(measured(work, seconds, spread), {"Section": [work]}, quick=False)
    table = page.partition("### Section")[2].partition("\n##")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_a_work_that_fails_costs_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONGEST", 2.0)
    fine = partial(list, [Side(int)])
    works = [
        Work("fine", fine),
        Work("raises", partial(eval, "1 / 0")),
        Work("fine after it", fine),
        Work("dies", partial(eval, "__import__('signal').raise_signal(9)")),
        Work("fine in the next process", fine),
        Work("hangs", partial(eval, "__import__('time').sleep(60)")),
        Work("fine at the end", fine),
    ]
    with Measuring(works, quick=True) as running:
        found = {work.name: running.measure(work) for work in running.works}
    memory = "as the system does when memory runs out"
    assert {name: reason for name, reason in found.items() if isinstance(reason, str)} == {
        "raises": "ZeroDivisionError: division by zero",
        "dies": f"its process was killed by SIGKILL, {memory}",
        "hangs": "stopped after 2 s",
    }
    assert all(len(found[name][0]) == 2 for name in found if name.startswith("fine"))


def test_after_the_last_minute_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MINUTES", 0)
    work = Work("late", partial(list, [Side(int)]))
    with Measuring([work], quick=True) as running:
        assert running.measure(work) == "the 0 minutes were over"


def test_every_work_can_be_sent_to_a_process() -> None:
    for works in [*sections().values(), *on_accelerator().values()]:
        assert len(pickle.loads(pickle.dumps(works))) == len(works)


def test_the_speed_of_the_disk_is_that_of_a_way_that_does_less() -> None:
    works = [work for each in sections().values() for work in each]
    assert {work.raw for work in works if work.raw} <= LESS.keys()
    assert {way for work in works if work.floor for way in work.floor.ways} <= LESS.keys()


# Pages and pictures.


def test_pages_and_pictures_are_those_of_the_results() -> None:
    texts = pages(load(), sections())
    assert sum(path.suffix == ".svg" for path in texts) == 6
    differing = [path.name for path, text in texts.items() if path.read_text("utf-8") != text]
    assert differing == [], "run: python -m benchmarks --pages"
    guide, results = (ROOT / each for each in ("docs/benchmarks.md", "benchmarks/RESULTS.md"))
    for path in texts:
        if path.suffix == ".svg":
            assert f"](pictures/{path.name})" in guide.read_text()
            assert f"](../docs/pictures/{path.name})" in results.read_text()


def test_a_loss_that_the_page_does_not_explain_stands_under_others() -> None:
    works = [Work("read", list), Work("write", list)]
    results = {work.name: each for work in works for each in measured(work, LOST).values()}
    page = "<!-- slower: save --><!-- end --> <!-- slower: others --> *former* <!-- end -->"
    said = [f"*{work.name}, 3.00 s; JAX, 2.00 s; 1.50 times slower*" for work in works]
    assert with_losses(page, results, works) == (
        "<!-- slower: save -->\n  *none now* <!-- end --> "
        f"<!-- slower: others -->\n  {said[0]}\n  {said[1]} <!-- end -->"
    )


# Rounds and targets.


def test_rounds_end_when_the_ratio_is_settled_or_the_time_is_over() -> None:
    (steady,) = measure([Side(lambda: 1.0, times_itself=True)], seconds=100)
    assert len(steady) == 10
    values = iter(range(1, 1000))
    (changing,) = measure([Side(lambda: next(values), times_itself=True)], seconds=100, most=40)
    assert len(changing) == 40
    (hasty,) = measure([Side(lambda: next(values), times_itself=True)], seconds=0)
    assert len(hasty) == 5
    (late,) = measure([Side(lambda: next(values), times_itself=True)], seconds=100, until=0.0)
    assert len(late) == 1


@pytest.mark.parametrize(
    ("ours", "floor", "spread", "is_", "reached"),
    [
        (2.4, 2.2, 0, "1.25 times faster; 0.92 of the speed of the floor", "yes, the floor"),
        # A floor below the target does not replace it, nor one whose fast rounds reach it.
        (2.4, 1.0, 0, "1.25 times faster", "**no**"),
        (2.4, 2.2, 0.8, "1.25 times faster", "**no**"),
    ],
)
def test_a_floor_replaces_a_target_that_it_misses(
    ours: float, floor: float, spread: float, is_: str, reached: str
) -> None:
    work = Work(
        "sum", list, {"JAX": Faster(2), RAW: None}, floor=Floor("All is read.", ("slow", RAW))
    )
    (row,) = rows_of(work, {"gda": ours, "JAX": 3, RAW: floor, "slow": 9}, spread)
    assert (row[4], row[7]) == (is_, reached)


def test_a_work_that_was_not_measured_is_no_target_reached() -> None:
    work = Work("sum", list, {"JAX": Faster(2)}, limit=Within(3))
    (row, _) = rows_of(work, {"gda": 1})
    assert row[7] == "not measured"
    results = {work.name: Measured("2026-01-01, here", 0, {}, "OSError: no")}
    page = render(results, {"Section": [work]}, quick=False)
    assert "## Section: 0 of 2 targets reached" in page
    assert page.count("| not measured: OSError: no |") == 2
    assert line(work, results[work.name]) == "sum: not measured: OSError: no"
    assert 'role="img"' in picture_of(results, [work], {"sum": "Sum"})


# On an accelerator.


def test_the_section_of_an_accelerator_has_every_way_with_its_speed() -> None:
    work = Work("load", list, {"Orbax": None}, ours="gda.load_tree", nbytes=3 * 10**9)
    page = render_accelerator(measured(work, {"gda.load_tree": 1.5, "Orbax": 3}), [work])
    assert "| load | gda.load_tree | 1.50 s | 2.00 GB/s |  | 5 | 1 |" in page
    assert "| load | Orbax | 3.00 s | 1.00 GB/s | 2.00 times faster | 5 | 1 |" in page
    assert render_accelerator({}, [work]) == ""
    failed = {work.name: Measured("2026-01-01, here", 0, {}, "OSError: no")}
    assert "| load | not measured: OSError: no |" in render_accelerator(failed, [work])


def test_without_an_accelerator_none_is_measured() -> None:
    done = fresh_python(
        "-m", "benchmarks", "--accelerator", cwd=ROOT, JAX_PLATFORMS="cpu", GDA_ACCELERATOR=""
    )
    assert done.returncode == 2
    assert "JAX finds no accelerator; GDA_ACCELERATOR=cpu takes CPU devices" in done.stderr

"""The command of the benchmarks, and its pages."""

import pickle
from functools import partial
from pathlib import Path

import pytest
from running import fresh_python

from benchmarks import measuring
from benchmarks.less import LESS
from benchmarks.measuring import Measuring
from benchmarks.pages import pages
from benchmarks.pairs import Side
from benchmarks.results import load
from benchmarks.work import Work
from benchmarks.works import on_accelerator, sections

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]


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


def test_without_an_accelerator_none_is_measured() -> None:
    done = fresh_python(
        "-m", "benchmarks", "--accelerator", cwd=ROOT, JAX_PLATFORMS="cpu", GDA_ACCELERATOR=""
    )
    assert done.returncode == 2
    assert "JAX finds no accelerator; GDA_ACCELERATOR=cpu takes CPU devices" in done.stderr

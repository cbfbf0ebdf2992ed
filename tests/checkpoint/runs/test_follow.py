"""The steps of a run for a program beside it."""

from pathlib import Path
from typing import Any

import pytest
from training import check, state_of, train

import gda
from gda.checkpoint import Run
from gda.checkpoint.runs import follow as module
from gda.multihost.steps import all_do


def test_each_complete_step_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BETWEEN_LOOKS", 0.01)
    run = Run(tmp_path, every=10, keep=2)
    steps = gda.checkpoint.follow(tmp_path, timeout=0.05)
    assert [*gda.checkpoint.follow(tmp_path / "none", timeout=0.01)] == []
    train(run, 0, 20, 10)
    run.wait()
    assert next(steps) == 10
    train(run, 20, 50, 10)
    run.wait()
    assert [next(steps), next(steps)] == [40, 50]  # 20 and 30 were removed
    assert run.rollback(40, newest=50)
    run.resume(state_of(0))
    train(run, 40, 60, 10)
    run.wait()
    assert [*steps] == [60]


def test_a_step_that_was_rolled_back_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BETWEEN_LOOKS", 0.01)
    with Run(tmp_path, every=1) as run:
        train(run, 0, 20, 10)
        run.wait()
        steps = gda.checkpoint.follow(tmp_path, timeout=0.05)
        assert [next(steps), next(steps)] == [10, 20]
        run.rollback(10, newest=20)
        run.resume(state_of(0))
        train(run, 10, 15, 5)
        run.wait()
        assert next(steps) == 15
        train(run, 15, 20, 5)
    assert [*steps] == [20]


def test_a_wrong_timeout_is_refused(tmp_path: Path) -> None:
    for timeout in ("x", -1, float("nan")):
        with pytest.raises(
            ValueError, match="timeout must be a number of seconds, at least 0, not"
        ):
            gda.checkpoint.follow(tmp_path, timeout=timeout)  # pyright: ignore


@pytest.mark.processes(2, devices=4)
def test_processes_meet_again_and_again_while_no_step_comes(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: list[float] = []

    def counted(*args: Any, timeout: float, **options: Any) -> Any:
        meetings.append(timeout)
        return all_do(*args, timeout=timeout, **options)

    monkeypatch.setattr(module, "all_do", counted)
    monkeypatch.setattr(module, "_AT_A_TIME", 0.05)
    monkeypatch.setattr(module, "_BETWEEN_LOOKS", 0.01)
    assert [*gda.checkpoint.follow(shared_tmp_path, timeout=0.3)] == []
    assert len(meetings) > 1
    assert {*meetings} == {600}


@pytest.mark.processes(2, devices=4)
def test_all_processes_get_the_same_steps(shared_tmp_path: Path) -> None:
    with Run(shared_tmp_path, every=10) as run:
        train(run, 0, 20, 10)
    found = []
    for step in gda.checkpoint.follow(shared_tmp_path, timeout=0.01):
        found.append(step)
        check(gda.checkpoint.restore(run.path(step), state_of(0)), step)
    assert found == [10, 20]

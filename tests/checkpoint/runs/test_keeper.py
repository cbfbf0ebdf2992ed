"""Runs on object stores, two programs, kills at any moment, and the log of who is late."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest
import tensorstore as ts
from forks import Forks
from running import wait_for
from training import check, state_of, train
from trials import Trials, tried

import gda
from gda.checkpoint import Run, SaveError
from gda.checkpoint.runs import keeper
from gda.checkpoint.step_folders import folder
from gda.multihost import meeting
from gda.storage.stores.directory import FileStore
from gda.storage.stores.object_store import KvStore


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "directory":
        return tmp_path / "a"
    return ts.KvStore.open("memory://").result() / "runs/a/"


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_run_on_an_object_store(place: Any) -> None:
    run = Run(place, every=10, keep=2, keep_every=50, keep_best=(1, "loss"))
    assert run.resume(state_of(0))[1] == 0
    for step in range(10, 71, 10):
        run.save(step, state_of(step), metrics={"loss": abs(step - 30)})
    run.close()
    assert run.steps() == [30, 50, 60, 70]
    store = gda.storage.stores.opening.open_store(place, 10)
    assert {*store.entries()} == {"run.json", *(f"{s:08d}" for s in run.steps())}
    key = next(n for n in store.entries("00000070") if n.startswith("data-"))
    leaf = next(n for n in store.entries(f"00000070/{key}") if n != "zarr.json")
    store.replace(f"00000070/{key}/{leaf}/c", b"x")
    for file in store.entries(f"00000070/{key}/{leaf}"):
        if file != "zarr.json":
            store.replace(f"00000070/{key}/{leaf}/{file}", b"x")
    run = Run(place, every=10, keep=2)
    state, step = run.resume(state_of(0))
    check(state, 60)
    assert run.steps() == [30, 50, 60]
    train(run, step, 70)  # in place of the damaged one
    run.close()
    assert Run(place, every=10).resume(state_of(0))[1] == 70
    assert run.steps() == [60, 70]
    assert Run(place, every=1).rollback(60, newest=70)
    assert [*gda.checkpoint.follow(place, timeout=0)] == [60]


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_the_data_of_known_steps_is_not_listed(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(place, every=1, keep=2)
    train(run, 0, 2)
    run.wait()
    store = gda.storage.stores.opening.open_store(place, 10)
    for step in run.steps():
        (data,) = [name for name in store.entries(f"{step:08d}") if name.startswith("data-")]
        for number in range(500):
            store.write(f"{step:08d}/{data}/large/c.{number}", b"")
    keys = 0
    listed = KvStore._listed

    def counted(self: KvStore, *args: Any) -> list[str]:
        nonlocal keys
        found = listed(self, *args)
        keys += len(found)
        return found

    monkeypatch.setattr(KvStore, "_listed", counted)
    run.save(3, state_of(3))
    assert keys < 50  # while the loop waits
    run.wait()
    run._keeper.wait(60)  # the removal of step 1 lists its data
    store.write("00000009/manifest.json", b"")  # as a copy of another program
    keys = 0
    assert run.steps() == [2, 3, 9]
    assert keys < 50


def test_a_spec_of_files_is_a_directory(tmp_path: Path) -> None:
    spec = {"driver": "file", "path": f"{tmp_path}/a/"}
    for place in (spec, ts.KvStore.Spec(spec), ts.KvStore.open(spec).result()):
        run = Run(place, every=10, keep=1)
        step = run.resume(state_of(0))[1]
        train(run, step, step + 20)
        run.close()
    assert {each.name for each in (tmp_path / "a").iterdir()} == {".lock", "run.json", "00000060"}


def test_the_newer_program_takes_over(place: Any) -> None:
    old, new = Run(place, every=10, keep=2), Run(place, every=10, keep=2)
    old.resume(state_of(0))
    train(old, 0, 20)
    old.wait()
    step = new.resume(state_of(0))[1]
    with pytest.raises(SaveError, match="another program took over .*: its run.json is of ") as e:
        old.save(30, state_of(30))
    assert old._folder.url in str(e.value)
    train(new, step, 40)
    new.close()
    with pytest.raises(SaveError, match="took over"):
        old.rollback(30, newest=40)
    assert new.steps() == [30, 40]
    for step in new.steps():
        gda.checkpoint.verify(new.path(step))


def test_a_program_that_was_taken_over_during_a_save_does_not_stop_the_next(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Run(place, every=10), Run(place, every=10)
    old.resume(state_of(0))
    fetched = keeper.fetched

    def taken_over(metrics: Any) -> Any:
        new.resume(state_of(0))  # removes what the old one has written of step 10
        return fetched(metrics)

    monkeypatch.setattr(keeper, "fetched", taken_over)
    assert old.save(10, state_of(10), metrics={"loss": 1})
    with pytest.raises(SaveError, match="took over"):
        old.wait()
    monkeypatch.undo()
    new._keeper.wait(60)
    assert "00000010" not in old._folder.store().entries()
    train(new, 0, 10)
    new.close()
    assert new.steps() == [10]
    assert new.metrics(10) == {}


def test_a_step_that_lost_its_manifest_is_damaged(place: Any) -> None:
    run = Run(place, every=10)
    train(run, 0, 20, 10)
    run.close()
    gda.storage.stores.opening.open_store(place, 10).remove("00000020/manifest.json")
    with pytest.raises(gda.checkpoint.CorruptionError, match="step 20: .* has no manifest.json"):
        Run(place, every=10, timeout=1).resume(state_of(0), damaged="raise")
    assert Run(place, every=10, timeout=1).resume(state_of(0))[1] == 10


def test_a_slow_removal_takes_nothing_of_a_step_that_another_program_saves(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = type(gda.storage.stores.opening.open_store(place, 10))
    remove, removes, may_remove = store.remove, threading.Event(), threading.Event()

    def slowly(self: Any, name: str) -> None:
        if threading.current_thread().name == "gda-remove" and not removes.is_set():
            removes.set()
            may_remove.wait(60)
        remove(self, name)

    monkeypatch.setattr(store, "remove", slowly)
    old, new = Run(place, every=10), Run(place, every=10)
    old.resume(state_of(0))
    train(old, 0, 20, 10)
    assert old.rollback(10, newest=20)
    assert removes.wait(60)
    train(new, new.resume(state_of(0))[1], 20, 10)
    new.wait()
    may_remove.set()
    old._keeper.wait(60)
    assert new.steps() == [10, 20]
    gda.checkpoint.verify(new.path(20))
    new.close()


def test_a_save_and_a_removal_leave_the_record_of_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, every=1, keep=1)
    run.resume(state_of(0))
    record = (tmp_path / "run.json").stat()
    train(run, 0, 3)
    run.close()
    assert run.steps() == [3]
    assert (tmp_path / "run.json").stat().st_ino == record.st_ino


def test_a_step_that_was_committed_by_a_program_at_its_end_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Run(tmp_path, every=10), Run(tmp_path, every=10)
    old.resume(state_of(0))
    train(old, 0, 10)
    old.wait()
    with monkeypatch.context() as patch:  # the new one takes over during the commit
        patch.setattr(folder.RunFolder, "check_owner", lambda self, mine: mine)
        patch.setattr(folder.RunFolder, "finish", lambda *_: None)
        assert new.resume(state_of(0))[1] == 10
        old.save(20, state_of(20))
        old.wait()
    with pytest.raises(FileExistsError, match=r"neither saved nor resumed at; call run.resume\(st"):
        train(new, 10, 20)
    assert new.resume(state_of(0))[1] == 20
    train(new, 20, 30)
    new.close()
    assert new.steps() == [10, 20, 30]


@tried("a run is killed while it saves and removes", sample=1, full=200)
def test_a_run_that_is_killed_has_the_step_that_was_durable(
    tmp_path: Path, forks: Forks, trials: Trials
) -> None:
    for _ in range(trials.most):
        (pid,) = forks.start("save_run_until_killed", 1, path=str(tmp_path))
        lines = [forks.line()]
        time.sleep(trials.chance.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        durable = max(int(step) for _, step in [*lines, *forks.rest()])
        run = Run(tmp_path, every=1, keep=1)
        state, step = run.resume(state_of(0))
        assert step >= durable
        check(state, step)
        run._keeper.wait(60)
        names = {each.name for each in tmp_path.iterdir()} - {f"{s:08d}" for s in run.steps()}
        # A kill may leave an empty folder, which the save of that step takes.
        assert names - {f"{step + 1:08d}"} == {"run.json", ".lock"}
        assert not [*tmp_path.glob(f"{step + 1:08d}/*")]
        run.save(step + 1, state_of(step + 1), now=True)
        run.close()
        assert run.steps() == [step + 1]
        trials.count("killed")


@pytest.mark.processes(2, devices=4)
def test_processes_that_are_awaited_are_named(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = shared_tmp_path / "told"

    def tells(record: logging.LogRecord) -> bool:
        told.touch()
        return "still waiting for process 1" in record.getMessage()

    monkeypatch.setattr(logging.getLogger("gda"), "filters", [tells])
    monkeypatch.setattr(meeting, "_BETWEEN_LINES", 0.1)
    run = Run(shared_tmp_path / "run", every=10)
    if jax.process_index() == 1:
        wait_for([told])
    assert run.steps() == []
    assert bool(caplog.messages) == (jax.process_index() == 0)


@pytest.mark.processes(2, devices=4)
def test_processes_that_name_different_rollbacks_do_none(shared_tmp_path: Path) -> None:
    run = Run(shared_tmp_path, every=10)
    run.resume(state_of(0))
    train(run, 0, 30, 10)
    run.wait()
    with pytest.raises(gda.DisagreementError, match="if the newest is 20"):
        run.rollback(10, newest=[30, 20][jax.process_index()])
    assert run.steps() == [10, 20, 30]


@pytest.mark.processes(2, devices=4)
def test_a_resume_that_fails_in_one_process_has_failed_in_all(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(shared_tmp_path, every=10) as run:
        train(run, 0, 20, 10)
    run = Run(shared_tmp_path, every=10)
    me = jax.process_index()
    with pytest.raises(gda.DisagreementError, match="process 1: .*'set aside'|process 1: .*raise"):
        run.resume(state_of(0), damaged=("set aside", "raise")[me])
    with monkeypatch.context() as patch:
        if me == 1:
            patch.setattr(FileStore, "read_into", refuse)
        with pytest.raises(PermissionError):
            run.resume(state_of(0))
    for step in (10, 30):
        with pytest.raises(ValueError, match=r"after resume\(\), nothing is saved"):
            run.save(step, state_of(step))
    assert run.steps() == [10, 20]
    assert run.resume(state_of(0))[1] == 20
    run.close(30, state_of(30))
    assert run.steps() == [10, 20, 30]


def refuse(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied")

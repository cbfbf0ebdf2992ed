"""Files of a run that are late, and small files of it with a wrong bit or a lost end."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import flip
from leaks import no_thread_is_left  # noqa: F401, of every test
from training import check, state_of
from trials import Trials, tried

import gda
from gda.checkpoint import PerProcess, Run
from gda.checkpoint.runs import resuming
from gda.storage.stores.directory import FileStore

ERRORS = (OSError, ValueError, RuntimeError)
LARGE = np.zeros((256, 1024), np.float32)


def state(step: int) -> Any:
    return {**state_of(step), "large": LARGE + step, "own": PerProcess(step)}


# Late.


KINDS = {
    "a chunk": "data-*/*/c*",
    "metadata": "data-*/*/zarr.json",
    "PerProcess": "data-*/*.own.*",
    "a manifest": "manifest.json",
    "a folder of an array": "data-*/*.large",
    "the folder of all arrays": "data-*",
}


@tried("a file or a folder of a step shows late", sample=3, full=200)
def test_what_is_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    monkeypatch.setattr(FileStore, "is_local", False)
    monkeypatch.setattr(resuming, "_BETWEEN_LOOKS", 0.01)
    with Run(tmp_path / "run", every=100) as run:
        for step in (100, 200, 300):
            run.save(step, state(step))
    newest, chance = tmp_path / "run/00000300", trials.chance
    for number in range(trials.most):
        kinds = chance.sample([*KINDS], 1 if number % 2 else 2)
        late = {kind: chance.choice(sorted(newest.glob(KINDS[kind]))) for kind in kinds}
        if any(
            one != other and one in other.parents
            for one in late.values()
            for other in late.values()
        ):
            late.popitem()
        timers = []
        for i, file in enumerate(late.values()):
            hidden = file.rename(tmp_path / f"hidden{i}")
            timers.append(threading.Timer(chance.uniform(0, 0.3), hidden.rename, [file]))
        for timer in timers:
            timer.start()
        found, step = Run(tmp_path / "run", every=100).resume(state(0))
        for timer in timers:
            timer.join()
        assert step == 300, late
        check(found, 300)
        assert found["own"].value == 300
        assert (found["large"] == 300).all()
        assert not [*tmp_path.glob("run/*damaged*")]
        trials.count(next(iter(late)) if len(late) == 1 else "two of them")


# A wrong bit, or a lost end.


OPTIONS: dict[str, Any] = {"every": 1, "keep": 2, "keep_best": (1, "loss")}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run with a record of every kind, and the rest of a save that was killed."""
    path = tmp_path / "whole"
    run = Run(path, **OPTIONS)
    run.resume(state_of(0))
    for step, loss in enumerate([9, 1, 5, 7, 8, 6, 4], 1):
        run.save(step, state_of(step), metrics={"loss": loss})
        run.wait()
        if step == 3:
            run.hold(3)
    run.rollback(6, newest=7)
    run.resume(state_of(0))
    run.save(7, state_of(70), metrics={"loss": 3})
    run.wait()
    (path / "00000008/data-0").mkdir(parents=True)
    (path / "00000008/unfinished").touch()
    shutil.copy(path / "00000007/begun.json", path / "00000008")
    run.close()
    assert run.steps() == [2, 3, 6, 7]
    return path


def go_on(path: Path) -> list[Any]:
    """Go on with a run after every error; return what each call said."""
    run, said = Run(path, **OPTIONS), list[Any]()
    calls: list[Callable[[], Any]] = [
        run.steps,
        lambda: run.metrics(2),
        lambda: run.resume(state_of(0))[1],
        run.best,
        lambda: run.rollback(6, newest=7),
        lambda: run.rollback(2, newest=7),
        lambda: run.resume(state_of(0))[1],
        lambda: run.save(8, state_of(8), metrics={"loss": 20}),
        run.wait,
        lambda: run.record(2, {"more": 1}),
        lambda: run.metrics(2),
        lambda: run.save(9, state_of(9), metrics={"loss": 10}),
        lambda: run.save(10, state_of(10)),
        run.wait,
        run.close,
    ]
    for call in calls:
        try:
            said.append(call())
        except ERRORS as error:
            said.append(error)
    run._keeper.wait(60)
    return said


def complete(path: Path) -> set[str]:
    return {each.parent.name for each in path.glob("*/manifest.json")}


@tried("a bit of a record of a run is flipped, or its end is lost", sample=6, full=400)
def test_a_damaged_record_removes_nothing(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture, trials: Trials
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    usual = [str(each) for each in go_on(path)]
    before, kept = complete(whole), complete(path)
    assert kept == {"00000002", "00000003", "00000009", "00000010"}
    names = {"run.json", "metrics.json", "held.json", "begun.json"}
    records = sorted(each.relative_to(whole) for name in names for each in whole.rglob(name))
    assert {each.name for each in records} == names
    for _ in range(trials.most):
        shutil.rmtree(path)
        shutil.copytree(whole, path)
        caplog.clear()
        record = path / trials.chance.choice(records)
        data = record.read_bytes()
        at = trials.chance.randrange(len(data))
        how = "flip" if trials.chance.random() < 0.7 else "truncate"
        record.write_bytes(flip(data, at) if how == "flip" else data[:at])
        said = go_on(path)
        note = f"{how} {at} of {record}: {said}\n{caplog.messages}"
        assert complete(path) >= kept & before, note
        for step in complete(path):
            gda.checkpoint.verify(path / step)
        if [str(each) for each in said] == usual and complete(path) == kept:
            trials.count("unchanged")
            continue
        named = [str(record)] if record.name != "begun.json" else [str(record), record.parent.name]
        texts = [*map(str, said), *caplog.messages]
        assert any(name in text for name in named for text in texts), note
        trials.count("file named")

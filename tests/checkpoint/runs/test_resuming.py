"""Damaged steps, which all processes find damaged together, and files that are late."""

import os
import threading
from pathlib import Path
from typing import Any

import damaged
import jax
import numpy as np
import pytest
from training import DATA, check, state_of, train

import gda
from gda.checkpoint import CorruptionError, Run, SaveError, saving
from gda.checkpoint.runs import resuming
from gda.checkpoint.runs import run as run_module
from gda.checkpoint.step_folders import folder
from gda.multihost import shared_folders, steps
from gda.storage.stores.directory import FileStore


def saved(path: Path) -> Run:
    with Run(path, every=100) as run:
        train(run, 0, 300, 100)
    return run


def chunk_of(path: Path) -> Path:
    """Return the file with the arrays of a step."""
    return max(path.glob("data-*/*/c*"), key=lambda each: each.stat().st_size)


def flip(file: Path) -> None:
    file.write_bytes(damaged.flip(file.read_bytes(), 9))


def truncate(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink], ids=["bits", "empty", "missing"])
def test_a_damaged_step_is_set_aside(
    tmp_path: Path,
    harm: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resuming, "LATE_SECONDS", 0.1)
    run = saved(tmp_path)
    for number in (1, 2):
        file = chunk_of(tmp_path / "00000300")
        harm(file)
        with pytest.raises(CorruptionError, match="step 300: ") as error:
            Run(tmp_path, every=100).resume(state_of(0), damaged="raise")
        assert str(file) in str(error.value)
        run = Run(tmp_path, every=100)
        state, step = run.resume(state_of(0))
        assert step == 200
        check(state, 200)
        place = f"{tmp_path}/00000300.damaged-{number}"
        line = f"step 300 is damaged and was set aside as {place}: "
        assert any(message.startswith(line) for message in caplog.messages)
        assert run.steps() == [100, 200]
        train(run, 200, 300, 100)  # again, and is damaged again
        run.close()
        assert Path(place).exists()


@pytest.mark.parametrize("harm", [flip, truncate], ids=["bits", "empty"])
def test_a_damaged_manifest_is_damage(tmp_path: Path, harm: Any) -> None:
    run = saved(tmp_path)
    harm(tmp_path / "00000300/manifest.json")
    assert run.resume(state_of(0))[1] == 200


def test_a_run_with_damaged_steps_alone_does_not_begin_anew(tmp_path: Path) -> None:
    run = saved(tmp_path)
    for step in (100, 200, 300):
        flip(chunk_of(Path(run.path(step))))
    for _ in range(2):
        with pytest.raises(CorruptionError, match="has no step that can be read") as error:
            Run(tmp_path, every=100).resume(state_of(0))
        assert [each.partition(":")[0] for each in error.value.problems] == [
            "step 300",
            "step 200",
            "step 100",
        ]
    assert run.steps() == [100, 200, 300]


def refuse(*_: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def test_an_error_of_the_store_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(FileStore, "read_into", refuse)
    with pytest.raises(PermissionError):
        Run(tmp_path, every=100).resume(state_of(0))
    monkeypatch.undo()
    assert Run(tmp_path, every=100).resume(state_of(0))[1] == 300


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("reads_once", [False, True])
def test_an_error_of_the_store_in_one_process_is_no_damage(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_once: bool
) -> None:
    run = saved(shared_tmp_path)
    run.steps()  # all wait
    with monkeypatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(FileStore, "read_into", refuse)
        with pytest.raises((PermissionError, SaveError), match="Permission denied"):
            Run(shared_tmp_path, every=100).resume(state_of(0), read_once=reads_once)
    state, step = Run(shared_tmp_path, every=100).resume(state_of(0), read_once=reads_once)
    assert step == 300
    check(state, 300)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize("reads_once", [False, True])
def test_damage_that_one_process_sees_is_damage_for_all(
    shared_tmp_path: Path, caplog: pytest.LogCaptureFixture, reads_once: bool
) -> None:
    run = saved(shared_tmp_path)
    place = shared_tmp_path / "00000300"
    if jax.process_index() == 0:
        files = [*place.glob("data-*/*/c*")]
        (file,) = [each for each in files if (DATA + 300)[6:].tobytes() in each.read_bytes()]
        assert (DATA + 300)[:2].tobytes() not in file.read_bytes()  # which the other needs
        flip(file)
    run.steps()  # all wait
    with pytest.raises(CorruptionError, match="step 300: process 1: "):
        Run(shared_tmp_path, every=100).resume(state_of(0), damaged="raise")
    state, step = Run(shared_tmp_path, every=100).resume(state_of(0), read_once=reads_once)
    assert step == 200
    check(state, 200)
    assert any("step 300 is damaged and was set aside" in each for each in caplog.messages)


@pytest.mark.processes(2, devices=4)
def test_a_file_that_one_process_sees_late_is_no_damage(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(shared_tmp_path)
    looks = 0
    read = FileStore.read

    def late(self: FileStore, name: str, most_bytes: int) -> bytes:
        nonlocal looks
        if jax.process_index() == 1 and name == "manifest.json" and looks < 3:
            looks += 1
            raise FileNotFoundError(2, "No such file or directory", name)
        return read(self, name, most_bytes)

    monkeypatch.setattr(FileStore, "read", late)
    state, step = Run(shared_tmp_path, every=100).resume(state_of(0))
    assert looks == 3 * jax.process_index()
    assert step == 300
    check(state, 300)
    assert not list(shared_tmp_path.glob("*damaged*"))


@pytest.mark.parametrize(
    "pattern", ["data-*/*/c*", "data-*/*.own.0", "data-*/*/zarr.json", "data-*/*.w", "data-*"]
)
def test_a_file_that_is_late_is_waited_for_once_with_one_line(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    large = np.zeros((512, 1024), np.float32)
    with Run(tmp_path, every=100) as run:
        for step in (100, 200):
            run.save(step, {"w": large + step, "own": gda.checkpoint.PerProcess(step)})
    monkeypatch.setattr(FileStore, "is_local", False)
    file = next((tmp_path / "00000200").glob(pattern))
    hidden = file.rename(tmp_path / "hidden")
    threading.Timer(1, lambda: hidden.rename(file)).start()
    like = {"w": large, "own": gda.checkpoint.PerProcess(0)}
    state, step = Run(tmp_path, every=100).resume(like)
    assert (step, state["own"].value, state["w"][0, 0]) == (200, 200, 200)
    assert not [*tmp_path.glob("*damaged*")]
    assert len([each for each in caplog.messages if "; waiting 60 s for it" in each]) == 1


def test_a_file_of_a_local_disk_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    assert FileStore("/proc").is_local is False  # as every file system that is not known
    monkeypatch.setattr(FileStore, "is_local", True)
    chunk_of(tmp_path / "00000300").unlink()
    assert Run(tmp_path, every=100).resume(state_of(0))[1] == 200
    assert not any("; waiting" in each for each in caplog.messages)


@pytest.mark.processes(2, devices=4)
def test_folders_of_each_process_are_refused(
    tmp_path: Path, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shared_tmp_path, every=100, timeout=20)
    timeouts: list[float] = []

    def all_do(*args: Any, timeout: float, **more: Any) -> Any:
        timeouts.append(timeout)
        return steps.all_do(*args, timeout=timeout, **more)

    monkeypatch.setattr(shared_folders, "all_do", all_do)
    monkeypatch.setattr(shared_folders, "LATE_SECONDS", 0.1)
    mine = tmp_path if jax.process_index() == 1 else shared_tmp_path
    monkeypatch.setattr(folder, "open_store", lambda path, timeout: FileStore(str(mine)))
    with pytest.raises(OSError, match="is not one folder for all processes: ") as error:
        run.resume(state_of(0))
    assert "process 1 cannot see" in str(error.value)
    assert timeouts == [20.1]  # or the others would give up first


@pytest.mark.processes(2, devices=4)
def test_a_background_failure_of_one_process_is_raised_in_all_at_the_same_step(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shared_tmp_path, every=10**9)
    write = FileStore.write_sealed

    def refuse(self: FileStore, name: str, payload: Any) -> int:
        if jax.process_index() == 1 and "00000200" in self.url:
            raise OSError(28, "No space left on device", self.join(name))
        return write(self, name, payload)

    monkeypatch.setattr(FileStore, "write_sealed", refuse)
    train(run, 0, 200, 100, now=True)
    step = 200

    def go_on() -> None:
        nonlocal step
        while True:  # no step is due
            step += 1
            run.save(step, state_of(step))

    with pytest.raises((OSError, gda.checkpoint.SaveError), match="No space left"):
        go_on()
    gda.check_processes_agree(step)
    assert run.steps() == [100]
    run.close(step, state_of(step))
    assert run.steps() == [100, step]
    state, found = Run(shared_tmp_path, every=100).resume(state_of(0))
    assert found == step
    check(state, step)


@pytest.mark.processes(2, devices=4)
def test_processes_that_save_different_steps_are_told(shared_tmp_path: Path) -> None:
    run = Run(shared_tmp_path, every=100)
    with pytest.raises(gda.DisagreementError, match="save of step 10[01]"):
        run.save(100 + jax.process_index(), state_of(0))
    assert run.steps() == []


@pytest.mark.processes(2, devices=4)
def test_rules_that_differ_between_processes_are_named(shared_tmp_path: Path) -> None:
    run = Run(shared_tmp_path, every=100, keep=1 + jax.process_index())
    with pytest.raises(gda.DisagreementError, match="process 0: keep 1, process 1: 2"):
        run.resume(state_of(0))
    assert not [*shared_tmp_path.iterdir()]


@pytest.mark.processes(2, devices=4)
def test_a_training_may_go_on_in_all_processes_after_any_error_of_one(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shared_tmp_path, every=100, on_error="log")
    run.resume(state_of(0))
    metrics = {"loss": "none"} if jax.process_index() == 0 else None
    assert not run.save(100, state_of(100), metrics=metrics)  # a TypeError
    with monkeypatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(saving, "given_leaves", lambda *_: 1 / 0)
        assert not run.save(200, state_of(200))
    with monkeypatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(saving, "with_blocks", lambda *_: 1 / 0)
        run.save(300, state_of(300))  # the others hear of it when they have written
    assert run.save(400, state_of(400))
    run.close()
    assert run.steps() == [400]


@pytest.mark.processes(2, devices=4)
def test_a_base_that_one_process_cannot_read_is_told_to_all(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(shared_tmp_path / "base")
    run = Run(shared_tmp_path / "new", every=100)
    if jax.process_index() == 1:
        monkeypatch.setattr(run_module, "restore", lambda *_, **__: 1 / 0)
    with pytest.raises((ZeroDivisionError, gda.checkpoint.SaveError), match="division by zero"):
        run.resume(state_of(0), start_from=shared_tmp_path / "base@200")
    monkeypatch.undo()
    assert run.resume(state_of(0), start_from=shared_tmp_path / "base@200")[1] == 0


def test_a_step_of_a_newer_gda_is_not_set_aside(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = tmp_path / "00000300/manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"gda-checkpoint": 1', b'"gda-checkpoint": 2', 1))
    with pytest.raises(gda.checkpoint.NewerFormatError, match="update gda"):
        Run(tmp_path, every=100).resume(state_of(0))
    manifest.write_bytes(text)
    assert Run(tmp_path, every=100).resume(state_of(0))[1] == 300


def test_a_manifest_that_is_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(FileStore, "is_local", False)
    manifest = tmp_path / "00000300/manifest.json"
    hidden = manifest.rename(tmp_path / "hidden")
    threading.Timer(1, lambda: hidden.rename(manifest)).start()
    assert Run(tmp_path, every=100).resume(state_of(0))[1] == 300
    assert len([each for each in caplog.messages if "; waiting 60 s for it" in each]) == 1

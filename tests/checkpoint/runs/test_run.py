"""Runs as a training uses them: which steps are saved, kept, resumed and removed."""

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaks import no_thread_is_left  # noqa: F401, of every test
from training import check, state_of, train

import gda
from gda.checkpoint import CheckpointNotFoundError, CorruptionError, Run, SaveError
from gda.checkpoint.converting import convert
from gda.checkpoint.format.files_at import FileKind
from gda.checkpoint.pending import Pending
from gda.checkpoint.runs import keeper
from gda.checkpoint.saving import Save, Taken
from gda.checkpoint.step_folders.folder import RunFolder
from gda.checkpoint.step_folders.rules import Rules
from gda.storage import save_safetensors
from gda.storage.stores.directory import FileStore


def resumed(path: Any, **options: Any) -> tuple[Run, int]:
    """Return a run that has resumed, after a check of its state."""
    run = Run(path, **({"every": 10} | options))
    state, step = run.resume(state_of(0))
    check(state, step)
    run._keeper.wait(60)  # for the removal of leftovers
    return run, step


# Which steps are saved.


def test_close_saves_the_last_state(tmp_path: Path) -> None:
    run, step = resumed(tmp_path)
    assert step == 0
    train(run, 0, 25)
    run.close(25, state_of(25))
    assert run.steps() == [10, 20, 25]
    assert resumed(tmp_path)[1] == 25


def test_close_without_a_state_warns_of_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 25)
    assert run.steps() == [10, 20]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning == (
        f"step 25 of {tmp_path} reached save and is not saved; call close(step, state) at the end"
    )


def test_close_warns_of_a_step_that_save_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 10)
        with pytest.raises(TypeError):
            run.save(20, {"w": object()})
    assert f"step 20 of {tmp_path} reached save and is not saved" in caplog.text


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 20, 10)
    run.wait()
    before = os.stat(run.path(20)).st_mtime_ns
    assert not run.save(20, state_of(20), now=True)
    assert not run.save(20, state_of(20), now=True)
    run.close(20, state_of(20))
    assert run.steps() == [10, 20]
    assert os.stat(run.path(20)).st_mtime_ns == before
    again, step = resumed(tmp_path)
    assert not again.save(step, state_of(step), now=True)


def test_strides_save_the_first_step_after_each_multiple(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        assert not run.save(0, state_of(0))
        assert run.save(0, state_of(0), now=True)
        assert run.save(25, state_of(25))
        assert not run.is_due(29)
        assert run.is_due(31)
        train(run, 25, 46, 7)  # 32, 39, 46
    assert run.steps() == [0, 25, 32, 46]
    run, step = resumed(tmp_path)
    assert step == 46
    train(run, 46, 61)  # aligned to 0, not to 46
    run.close()
    assert run.steps() == [0, 25, 32, 46, 50, 60]


def test_a_run_that_has_not_resumed_does_not_save_beside_steps(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 10)
    run.wait()
    for call in (lambda run: run.save(1, state_of(1)), lambda run: run.is_due(1)):
        with pytest.raises(ValueError, match="has steps up to 10, and this run has not resumed: c"):
            call(Run(tmp_path, every=10))
    # Nothing was written: the first program still owns the folder.
    assert run.save(20, state_of(20))
    run.close()


def test_a_step_below_the_newest_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        run.save(30, state_of(30))
        said = rf"step 29 is below step 30, the newest of {tmp_path}: to go back, call run.rollback"
        with pytest.raises(ValueError, match=said):
            run.save(29, state_of(29))


def test_a_checkpoint_is_no_folder_of_a_run(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "a", state_of(1))
    with pytest.raises(ValueError, match="a is a checkpoint, and a run is a folder of them: pass"):
        Run(tmp_path / "a", every=10).resume(state_of(0))


def test_close_refuses_a_step_without_its_state(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 10)
        with pytest.raises(ValueError, match=r"close\(\) needs both the step and the state"):
            run.close(15)
    assert run.steps() == [10]


def test_a_step_is_a_whole_number_also_of_another_library(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        for step in (True, 1.0, "1", None):
            with pytest.raises(TypeError, match="a step must be a whole number, such as 100, not"):
                run.save(step, {})  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="from 0 on, not -1"):
            run.save(-1, {})
        assert run.save(np.int64(10), {"n": 1})
        assert run.save(jnp.int32(20), {"n": 2})
        assert run.save(2**40, {"n": 3})
        run.wait()
        assert run.steps() == [10, 20, 2**40]
    assert Path(run.path(10)).name == "00000010"
    assert Path(run.path(2**40)).name == str(2**40)
    assert Run(tmp_path, every=10).resume({"n": 0}) == ({"n": 3}, 2**40)


def test_two_names_of_one_step_are_refused(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 10)
    shutil.copytree(tmp_path / "00000010", tmp_path / "010")
    with pytest.raises(ValueError, match="has step 10 twice, as"):
        run.steps()


def test_a_run_goes_on_after_its_program_has_changed_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Run("runs/a", every=10) as run:
        run.save(10, state_of(10))
        os.chdir("elsewhere")
        run.save(20, state_of(20))
    assert resumed(tmp_path / "runs/a")[0].steps() == [10, 20]


def test_wrong_options_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"every": 0},
        {"every": 1.5},
        {"keep": 0},
        {"keep_every": -1},
        {"keep_best": 2},
        {"keep_best": (0, "loss")},
        {"keep_best": (2, "loss", "lowest")},
        {"on_error": "ignore"},
        {"unchanged": "copy"},
        {"keep_best": (2, 3)},
        {"grace": "x"},
        {"grace": -1},
        {"on_complete": 3},
        {"signals": signal.SIGTERM},
        {"signals": ["SIGTERM"]},
        {"save_on": [signal.SIGKILL]},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match="must be"):
            Run(tmp_path / "a", **({"every": 10} | options)).save(10, {})
        assert not (tmp_path / "a").exists()


# Which steps are kept.


def test_what_is_kept_does_not_depend_on_restarts(tmp_path: Path) -> None:
    losses = {600: 0.1, 900: math.nan, 1200: None}
    run = Run(tmp_path, every=300, keep_best=(1, "loss"))
    for step in range(300, 6001, 300):
        each, before = resumed(tmp_path, every=300, keep=2, keep_every=1000, keep_best=(1, "loss"))
        assert before == step - 300
        loss = losses.get(step, 1 + step / 1000)
        each.save(step, state_of(step), metrics=None if loss is None else {"loss": loss})
        each.close()
    assert run.steps() == [600, 1200, 2100, 3000, 4200, 5100, 5700, 6000]
    assert run.best() == 600
    assert run.metrics(600) == {"loss": 0.1}
    assert {each.name for each in tmp_path.iterdir()} == {
        *{"run.json", ".lock"},
        *(f"{step:08d}" for step in run.steps()),
    }


def test_the_newest_is_kept_whatever_the_best_is(tmp_path: Path) -> None:
    with Run(tmp_path, every=1, keep=1, keep_best=(1, "accuracy", "max")) as run:
        for step, accuracy in enumerate([0.5, 0.9, math.inf, 0.7, math.inf], 1):
            run.save(step, state_of(step), metrics={"accuracy": accuracy})
            run.wait()
            assert run.latest() == step
        assert run.best() == 5  # of equal ones, the newer
        run.save(6, state_of(6), metrics={"accuracy": 0.1})
    assert run.steps() == [5, 6]


def test_a_function_may_choose_the_steps_to_keep(tmp_path: Path) -> None:
    with Run(tmp_path, every=1, keep=lambda steps: [s for s in steps if s % 3 == 0]) as run:
        train(run, 0, 8)
    assert run.steps() == [3, 6, 8]


def test_a_step_that_is_held_stays(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path, every=1, keep=1)
    run.save(1, state_of(1))
    run.wait()
    run.hold(1)
    train(run, 1, 3)
    run.close()
    run, _ = resumed(tmp_path, every=1, keep=1)
    run.save(4, state_of(4))
    run.close()
    assert run.steps() == [1, 4]


def test_metrics_may_come_from_the_device_and_later(tmp_path: Path) -> None:
    with Run(tmp_path, every=1, keep=1, keep_best=(1, "loss")) as run:
        run.save(1, state_of(1), metrics={"loss": jnp.float32(3), "rate": np.float64(0.5)})
        run.save(2, state_of(2), metrics={"loss": jnp.ones((1,))})
        for value in (np.array([0.5]), jax.device_get(jnp.bfloat16(0.5)), np.True_):
            assert keeper.fetched(keeper.begun_to_fetch({"loss": value}))["loss"] in (0.5, 1)
        run.save(3, state_of(3), metrics={"loss": 2})
        run.wait()
        assert run.steps() == [2, 3]
        evaluator = Run(tmp_path, every=1)
        evaluator.record(3, {"loss": jnp.float32(0.5), "accuracy": 1})
        assert run.metrics(3) == {"loss": 0.5, "accuracy": 1}
        assert run.best() == 3
        with pytest.raises(CheckpointNotFoundError, match="has no step 1; it has the steps 2, 3"):
            evaluator.record(1, {"loss": 1})
        with pytest.raises(TypeError, match="metric 'loss' must be a real number"):
            run.save(4, state_of(4), metrics={"loss": jnp.ones(2)})
        with pytest.raises(TypeError, match="metrics must be a dict of numbers by name, such as"):
            run.save(5, state_of(5), metrics=0.5)  # pyright: ignore[reportArgumentType]
        run.save(6, state_of(6), metrics={"rate": 1})
    assert run.steps() == [3, 6]


def test_metrics_may_be_donated_after_the_call(tmp_path: Path) -> None:
    take = jax.jit(lambda state: state, donate_argnums=0)
    with Run(tmp_path, every=1) as run:
        for step in (1, 2, 3):
            state = {"w": jnp.ones(8), "loss": jnp.float32(step) + 0}
            run.save(step, state, metrics={"loss": state["loss"]})
            take(state)
    assert [run.metrics(step)["loss"] for step in run.steps()] == [1, 2, 3]


def test_the_best_step_of_a_run_is_that_of_its_restart(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path, every=1, keep_best=(1, "loss"))
    run.save(1, state_of(1), metrics={"loss": 1})
    run.save(2, state_of(2), metrics={"loss": 2})
    run.close()
    shutil.move(tmp_path, tmp_path.parent / "moved")
    assert resumed(tmp_path.parent / "moved", keep_best=(1, "loss"))[0].best() == 1
    assert gda.checkpoint.restore(f"{tmp_path.parent}/moved@best")["n"] == 1
    assert gda.checkpoint.open(tmp_path.parent / "moved@latest")["n"] == 2
    for name in ("latest", "best", "3"):
        with pytest.raises(CheckpointNotFoundError):
            gda.checkpoint.inspect(f"{tmp_path.parent}/other@{name}")


@pytest.mark.parametrize("name", ["run@1", "run@7", "run@latest"])
def test_no_checkpoint_hides_a_step_of_a_run(tmp_path: Path, name: str) -> None:
    gda.checkpoint.save(tmp_path / name, {"n": 5})  # there is no run
    shutil.rmtree(tmp_path / name)
    run, _ = resumed(tmp_path / "run", every=1)
    run.close(1, state_of(1))
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=f"/{name} names a step of the run .*/run, which"):
            gda.checkpoint.save(tmp_path / name, {"n": 5}, overwrite=overwrite)
    assert gda.checkpoint.restore(f"{tmp_path}/run@1")["n"] == 1
    assert not (tmp_path / name).exists()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: gda.checkpoint.save(path, {"n": 5}),
    "save_async": lambda path: gda.checkpoint.save_async(path, {"n": 5}),
    "Run.resume": lambda path: Run(path, every=1).resume({"n": 5}),
    "Run.save": lambda path: Run(path, every=1).save(1, {"n": 5}),
    "save_safetensors": lambda path: save_safetensors(path, {"n": np.arange(5)}),
    "convert": lambda path: convert(f"{path.parent}/run@1", str(path)),
    "convert to safetensors": lambda path: convert(
        f"{path.parent}/run@1", str(path), kind=FileKind.SAFETENSORS
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", ["run", "folder of steps", "empty folder in the way"])
def test_nothing_is_written_that_hides_a_step(tmp_path: Path, writer: str, case: str) -> None:
    hiding = tmp_path / "run@2"
    for step in (1, 2):
        gda.checkpoint.save(tmp_path / f"run/{step}", {"n": np.arange(step)})
    if case == "run":
        Run(tmp_path / "run", every=1).resume({"n": np.arange(2)})
    elif case == "empty folder in the way":
        hiding.mkdir()
    with pytest.raises(FileExistsError, match=r"run@2 names a step of the run .*/run, which files"):
        WRITERS[writer](hiding)
    assert not hiding.exists() or not [*hiding.iterdir()]


# Removal.


def test_a_removal_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = FileStore.remove

    def refuse(self: FileStore, name: str) -> None:
        if ".removed-" in name:
            raise PermissionError(13, "an uploader has it open", name)
        remove(self, name)

    monkeypatch.setattr(FileStore, "remove", refuse)
    with Run(tmp_path, every=1, keep=1) as run:
        train(run, 0, 3)
    assert run.steps() == [3]
    assert len([m for m in caplog.messages if "could not be removed: [Errno 13]" in m]) == 2
    assert len([*tmp_path.glob("0000000[12]*")]) == 2
    monkeypatch.undo()
    assert resumed(tmp_path)[1] == 3
    assert not [*tmp_path.glob("0000000[12]*")]


@pytest.mark.parametrize("name", ["5", "000005", "0000000005"])
def test_a_complete_step_counts_beside_one_of_its_number_that_was_begun(
    tmp_path: Path, name: str
) -> None:
    with Run(tmp_path / "other", every=1) as other:
        train(other, 0, 5, 5)
    shutil.copytree(tmp_path / "other/00000005", tmp_path / "00000005")
    (tmp_path / "00000005/manifest.json").unlink()  # a save that was killed
    gda.checkpoint.save(tmp_path / name, state_of(5))
    run, step = resumed(tmp_path)
    assert step == 5
    assert run.steps() == [5]
    assert Path(run.path(5)).name == name
    assert gda.checkpoint.restore(f"{tmp_path}@latest")["n"] == 5


def test_only_what_a_run_has_begun_is_removed(tmp_path: Path) -> None:
    copied, foreign = tmp_path / "00000005", tmp_path / "00000007"
    with Run(tmp_path / "other", every=1) as other:
        train(other, 0, 5, 5)
    shutil.copytree(tmp_path / "other/00000005", copied)
    (copied / "manifest.json").rename(copied / "later")  # a copy that goes on, manifest last
    foreign.mkdir()
    (foreign / "data").write_text("x")
    gda.checkpoint.save(tmp_path / "8", state_of(8))
    run, step = resumed(tmp_path, every=1, keep=1)
    assert step == 8
    train(run, 8, 12)
    run.close()
    assert run.steps() == [8, 12]
    assert copied.exists()
    assert foreign.exists()
    (copied / "later").rename(copied / "manifest.json")
    assert run.steps() == [5, 8, 12]


def test_files_of_another_program_in_the_folder_of_a_step_stop_its_save(tmp_path: Path) -> None:
    (tmp_path / "00000010").mkdir()
    (tmp_path / "00000010/data").write_text("x")
    run, _ = resumed(tmp_path)
    with pytest.raises(FileExistsError, match="has files that this run did not begin; move them"):
        run.save(10, state_of(10))
    assert os.listdir(tmp_path / "00000010") == ["data"]


def note(path: Path, *names: str) -> None:
    """Mark folders as a program does that is killed while it saves or removes steps."""
    for name in names:
        (path / name / "unfinished").touch()


def test_what_a_killed_program_has_left_is_removed_at_the_next_resume(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 30)
    run.close()
    for name in ("00000020", "00000030"):
        (tmp_path / name / "manifest.json").rename(tmp_path / name / "manifest.json.new")
    (tmp_path / "00000040").mkdir()
    shutil.copy(tmp_path / "00000010/begun.json", tmp_path / "00000040")
    for name in ("00000050", "00000060"):
        (tmp_path / name).mkdir()
    (tmp_path / "00000060/begun.json").touch()  # which was being written
    note(tmp_path, *(f"000000{n}0" for n in range(1, 7)))
    run, step = resumed(tmp_path)
    run.close()
    assert step == 10
    assert {each.name for each in tmp_path.iterdir()} == {"run.json", ".lock", "00000010"}
    assert "unfinished" not in os.listdir(tmp_path / "00000010")


def test_a_step_that_lost_its_manifest_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 30)
    run.close()
    (tmp_path / "00000030/manifest.json").unlink()
    with pytest.raises(CorruptionError, match="step 30: .*/00000030 has no manifest.json"):
        Run(tmp_path, every=10).resume(state_of(0), damaged="raise")
    run, step = resumed(tmp_path)
    assert step == 20
    place = tmp_path / "00000030.damaged-1"
    assert any(f"set aside as {place}: " in message for message in caplog.messages)
    assert [*place.glob("data-*/*/c*")]
    train(run, 20, 30)
    run.close()
    assert resumed(tmp_path)[1] == 30


def test_a_run_whose_steps_all_lost_their_manifests_does_not_begin_anew(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 20)
    run.close()
    for manifest in tmp_path.glob("*/manifest.json"):
        manifest.unlink()
    with pytest.raises(CorruptionError, match="has no step that can be read"):
        resumed(tmp_path)


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "some"])
def test_a_step_that_is_being_copied_in_stays(
    tmp_path: Path, is_empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = resumed(tmp_path / "a", keep=2)
    train(run, 0, 10)
    run.wait()
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    train(run, 10, 40)
    run.close()
    copy = tmp_path / "a/00000010"
    copy.mkdir()
    if not is_empty:
        for name in (".lock", "begun.json"):
            shutil.copy(tmp_path / "backup/00000010" / name, copy)
    assert resumed(tmp_path / "a")[1] == 40
    shutil.copytree(tmp_path / "backup/00000010", copy, dirs_exist_ok=True)
    assert run.steps() == [10, 30, 40]
    named = [each for each in caplog.messages if each.startswith("00000010 of")]
    assert len(named) == (not is_empty)


def test_a_save_sets_the_data_of_another_run_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        run, _ = resumed(tmp_path / name)
        train(run, 0, 10)
        run.close()
    run, _ = resumed(tmp_path / "b")
    other = shutil.copytree(tmp_path / "a/00000010", tmp_path / "b/00000020")
    (other / "manifest.json").unlink()
    train(run, 10, 20)
    run.close()
    assert run.steps() == [10, 20]
    assert [*(tmp_path / "b/00000020.damaged-1").glob("data-*/*/c*")]
    assert any("set aside as" in message for message in caplog.messages)


def test_leftovers_are_removed_while_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 20)
    run.close()
    (tmp_path / "00000010/manifest.json").unlink()
    note(tmp_path, "00000010")
    remove, may_remove = RunFolder.remove_rest, threading.Event()

    def slowly(self: RunFolder, *args: Any) -> None:
        may_remove.wait(60)
        remove(self, *args)

    monkeypatch.setattr(RunFolder, "remove_rest", slowly)
    run = Run(tmp_path, every=10)
    assert run.resume(state_of(0))[1] == 20
    train(run, 20, 30, 10)
    run.wait()
    assert [*tmp_path.glob("00000010*")]
    may_remove.set()
    run.close()
    assert not [*tmp_path.glob("00000010*")]


def test_a_full_disk_is_freed_by_the_removal_of_old_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, write = tmp_path / "00000010", tmp_path / "00000020/manifest.json", FileStore.write

    def full(self: FileStore, name: str, data: Any) -> Any:
        if old.exists() and new.exists():
            raise OSError(28, "No space left on device", name)
        return write(self, name, data)

    run, _ = resumed(tmp_path, keep=1)
    monkeypatch.setattr(FileStore, "write", full)
    train(run, 0, 20, 10)
    run.close()
    assert {each.name for each in tmp_path.iterdir()} == {".lock", "run.json", "00000020"}


@pytest.mark.parametrize("has_steps", [True, False])
def test_the_first_file_of_a_step_alone_is_no_step(tmp_path: Path, has_steps: bool) -> None:
    run, _ = resumed(tmp_path)
    if has_steps:
        train(run, 0, 10)
    run.close(20, state_of(20))
    shutil.move(tmp_path / "00000020", tmp_path / "backup")
    (tmp_path / "00000020").mkdir()
    for name in (".lock", "begun.json"):
        shutil.copy(tmp_path / "backup" / name, tmp_path / "00000020")
    run, step = resumed(tmp_path)
    assert step == 10 * has_steps
    assert {*os.listdir(tmp_path / "00000020")} == {".lock", "begun.json"}  # perhaps of a copy
    train(run, step, 20, 10)
    run.close()
    assert run.steps() == [10, 20]
    assert {*os.listdir(tmp_path / "00000020.damaged-1")} == {".lock", "begun.json"}


def test_an_old_list_of_a_step_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may list a step as it was before its commit."""
    run, _ = resumed(tmp_path)
    train(run, 0, 20, 10)
    run.close()
    numbered = FileStore.numbered

    def late(self: FileStore, *args: Any) -> dict[str, list[str]]:
        return numbered(self, *args) | {"00000020": ["begun.json", "unfinished"]}

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "numbered", late)
        state, step = Run(tmp_path, every=10).resume(state_of(0))
        check(state, step)
        assert step == 20
    assert resumed(tmp_path)[1] == 20


# Going back.


def test_a_rollback_is_done_once(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 40, 10)
    run.close()
    run = Run(tmp_path, every=10)
    assert run.rollback(20, newest=40)
    state, step = run.resume(state_of(0))
    check(state, 20)
    train(run, step, 30)
    run.close()
    assert run.steps() == [10, 20, 30]
    again = Run(tmp_path, every=10)  # a program that is started again says it again
    assert not again.rollback(20, newest=40)
    assert again.resume(state_of(0))[1] == 30
    train(again, 30, 40)
    again.close()
    again = Run(tmp_path, every=10)  # also at another step of that number
    assert not again.rollback(20, newest=40)
    assert again.rollback(10, newest=40)  # another rollback
    assert again.resume(state_of(0))[1] == 10
    with pytest.raises(CheckpointNotFoundError, match="has no step 5; it has the steps? 10"):
        again.rollback(5, newest=10)


def test_a_rollback_that_was_undone_by_a_backup_is_done_again(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path / "a")
    train(run, 0, 40, 10)
    run.close()
    shutil.copytree(tmp_path / "a/00000040", tmp_path / "backup")
    run = Run(tmp_path / "a", every=10)
    assert run.rollback(20, newest=40)
    run._keeper.wait(60)
    shutil.copytree(tmp_path / "backup", tmp_path / "a/00000040")
    assert Run(tmp_path / "a", every=10).rollback(20, newest=40)


def test_a_rollback_in_the_middle_needs_a_resume(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 40, 10)
    assert not run.rollback(20, newest=30)
    assert run.save(50, state_of(50))
    assert run.rollback(20, newest=50)
    with pytest.raises(
        ValueError, match=r"after rollback\(\), nothing is saved in .* until run.res"
    ):
        run.save(60, state_of(60))
    assert run.resume(state_of(0))[1] == 20
    assert run.save(30, state_of(31))  # not the step 30 that was saved before
    run.close()
    assert gda.checkpoint.restore(run.path(30))["n"] == 31


def test_a_rollback_does_not_remove_a_step_that_is_held(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 30, 10)
    run.wait()
    run.hold(20)
    with pytest.raises(ValueError, match="would remove step 20, which run.hold keeps; remove held"):
        run.rollback(10, newest=30)
    with pytest.raises(ValueError, match="until run.resume"):
        run.close(31, state_of(31))
    assert run.steps() == [10, 20, 30]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_rollback_frees_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, steps * 10, 10)
    run.close()
    write = FileStore.write

    def full(self: FileStore, name: str, data: Any) -> Any:
        if (tmp_path / "00000020").exists():
            raise OSError(28, "No space left on device", name)
        return write(self, name, data)

    monkeypatch.setattr(FileStore, "write", full)
    assert run.rollback(10, newest=steps * 10)
    assert run.steps() == [10]
    assert run.resume(state_of(0))[1] == 10


# A program that goes on after an error.


@pytest.mark.parametrize("starts", [False, True], ids=["a state that does not fit", "no start"])
def test_a_run_whose_resume_has_failed_saves_nothing(tmp_path: Path, starts: bool) -> None:
    if not starts:
        run, _ = resumed(tmp_path)
        train(run, 0, 40, 10)
        run.close()
    before = Run(tmp_path, every=10).steps()
    run, options = Run(tmp_path, every=10, keep=3), {"start_from": tmp_path / "no"}
    with pytest.raises((ValueError, FileNotFoundError)):
        run.resume({"other": 0}, **(options if starts else {}))
    for call in (
        lambda: run.save(10, state_of(1)),
        lambda: run.save(11, state_of(1), now=True),
        lambda: run.is_due(10),
        lambda: run.close(20, state_of(1)),
    ):
        with pytest.raises(
            ValueError, match=r"after resume\(\), nothing is saved in .* until run.r"
        ):
            call()
    assert run.steps() == before
    _, step = run.resume(state_of(0))
    assert run.save(step + 10, state_of(step + 10))
    run.close()


def test_a_complete_step_is_never_replaced(tmp_path: Path) -> None:
    with Run(tmp_path / "a", every=10) as run:
        train(run, 0, 20, 10)
    with Run(tmp_path / "b", every=10) as run:
        run.resume(state_of(0))
        train(run, 0, 10)
        run.wait()
        shutil.copytree(tmp_path / "a/00000020", tmp_path / "b/00000020")
        with pytest.raises(
            FileExistsError, match="20 is a complete step that this program neither"
        ):
            run.save(20, state_of(21))
        assert run.save(30, state_of(30), now=True)
    assert gda.checkpoint.restore(run.path(20))["n"] == 20


def test_a_save_that_raised_may_be_corrected(tmp_path: Path) -> None:
    with Run(tmp_path, every=2) as run:
        with pytest.raises(TypeError, match="metric 'loss'"):
            run.save(2, state_of(2), metrics={"loss": "x"})
        assert run.is_due(2)
        assert run.save(2, state_of(2), metrics={"loss": 1})
        assert not run.is_due(2)
        with pytest.raises(TypeError, match="cannot be saved"):
            run.save(4, {"f": print})
        assert run.save(5, state_of(5))  # the first after the multiple
    assert run.steps() == [2, 5]


def test_a_step_is_due_if_save_would_save_it(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path, every=1000)
    assert not run.is_due(5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.is_due(5)
    assert run.is_ending
    assert run.save(5, state_of(5))
    assert not run.is_due(5)
    with pytest.raises(ValueError, match="step 4 is below step 5"):
        run.is_due(4)
    run.close()
    with pytest.raises(RuntimeError, match="is closed"):
        run.is_due(6)


def test_a_save_that_failed_leaves_no_folder(
    tmp_path: Path, full_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk("00000020")
    run, _ = resumed(tmp_path, on_error="log")
    train(run, 0, 20, 10)
    assert not run.save(30, {"f": print})
    run.close()
    assert {each.name for each in tmp_path.iterdir()} == {".lock", "run.json", "00000010"}


def test_a_step_that_was_complete_when_its_save_failed_is_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Save.commit

    def fail(self: Save, taken: Taken) -> None:
        commit(self, taken)
        raise TimeoutError("after the commit")

    run, _ = resumed(tmp_path)
    monkeypatch.setattr(Save, "commit", fail)
    train(run, 0, 10)
    with pytest.raises(TimeoutError):
        run.wait()
    assert not run.save(10, state_of(10), now=True)
    run.close()
    assert run.steps() == [10]


# Records under corruption.


def flip_a_bit(file: Path, of: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(of)] ^= 8
    file.write_bytes(data)


def test_damaged_metrics_remove_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"every": 1, "keep": 1, "keep_best": (1, "loss")}
    run, _ = resumed(tmp_path, **options)
    for step, loss in ((1, 0.125), (2, 0.5), (3, 0.75)):
        run.save(step, state_of(step), metrics={"loss": loss})
    run.close()
    assert run.steps() == [1, 3]
    file = tmp_path / "00000001/metrics.json"
    flip_a_bit(file, b"0.125")
    run, _ = resumed(tmp_path, **options)
    run.save(4, state_of(4), metrics={"loss": 0.9})
    run.wait()
    assert run.steps() == [1, 3, 4]
    said = f"{file} is damaged: it does not fit its checksum"
    assert any("were not removed" in each and said in each for each in caplog.messages)
    for call in (run.best, lambda: run.metrics(1), lambda: run.record(1, {"loss": 1})):
        with pytest.raises(
            CorruptionError, match="metrics.json is damaged: it does not fit its ch"
        ):
            call()
    file.unlink()
    run.record(1, {"loss": 0.125})
    assert run.best() == 1
    run.close()


def test_a_damaged_record_of_the_run_is_an_error(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 20, 10)
    run.close()
    shutil.copytree(tmp_path / "00000020", tmp_path / "00000030")
    (tmp_path / "00000030/manifest.json").unlink()
    whole = (tmp_path / "run.json").read_bytes()
    for of in (b"{", b'"ends"', b"null", b"generation", b"crc32c"):
        flip_a_bit(tmp_path / "run.json", of)
        run = Run(tmp_path, every=10)
        for call in (lambda run: run.resume(state_of(0)), Run.steps):
            with pytest.raises(CorruptionError, match="run.json is damaged: it does not fit"):
                call(run)
        (tmp_path / "run.json").write_bytes(whole)
    assert (tmp_path / "00000030").exists()
    flip_a_bit(tmp_path / "00000030/begun.json", b'"run"')
    assert resumed(tmp_path)[1] == 20
    assert (tmp_path / "00000030.damaged-1").exists()


def test_a_step_with_a_damaged_first_file_is_not_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = resumed(tmp_path, every=1, keep=1)
    train(run, 0, 1)
    run.wait()
    flip_a_bit(tmp_path / "00000001/begun.json", b'"run"')
    train(run, 1, 3)
    run.close()
    assert run.steps() == [1, 3]
    assert any("begun.json is damaged" in each for each in caplog.messages)


def test_no_save_tries_to_remove_a_step_that_is_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = resumed(tmp_path, every=1, keep=1)
    train(run, 0, 1)
    run.wait()
    run.hold(1)
    flip_a_bit(tmp_path / "00000001/begun.json", b'"run"')
    train(run, 1, 3)
    run.close()
    assert run.steps() == [1, 3]
    assert "was not removed" not in caplog.text


def test_a_metric_that_never_comes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, every=1, keep=1, keep_best=(1, "val_loss")) as run:
        for step in (1, 2):
            run.save(step, state_of(step), metrics={"loss": 1})
    (warning,) = [each for each in caplog.messages if "val_loss" in each]
    assert warning.startswith(f"step 1 of {tmp_path} has no metric 'val_loss', by which keep_best")
    assert "it has 'loss'" in warning


# Programs at the same time.


def test_metrics_that_are_recorded_at_once_are_all_there(tmp_path: Path) -> None:
    with Run(tmp_path, every=1) as run:
        train(run, 0, 1)
    recorder = RunFolder(tmp_path, 10)

    def record(name: str) -> None:
        for number in range(20):
            recorder.record(1, {f"{name}{number}": number})

    threads = [threading.Thread(target=record, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.metrics(1)) == 60


def test_a_step_that_is_held_during_its_removal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = resumed(tmp_path, every=1, keep=1)
    train(run, 0, 1)
    run.wait()
    kept = Rules.kept

    def late(self: Rules, steps: Any, ranked: Any) -> set[int]:
        run._folder.hold(1)  # of another program, after the steps were listed
        return kept(self, steps, ranked)

    monkeypatch.setattr(Rules, "kept", late)
    train(run, 1, 2)
    run.close()
    assert run.steps() == [1, 2]


def test_close_waits_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def slowly(_: Any, seconds: float) -> None:
        waits.append(seconds)
        time.sleep(0.1)

    run, _ = resumed(tmp_path, grace=5)
    monkeypatch.setattr(keeper, "wait", slowly)  # for on_complete, then for removals
    run.close()
    assert waits[0] == 5
    assert waits[1] <= 4.9


def test_close_in_another_thread(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        run, _ = resumed(tmp_path)
        thread = threading.Thread(target=lambda: run.close(10, state_of(10)))
        thread.start()
        thread.join()
        assert run.steps() == [10]
        os.kill(os.getpid(), signal.SIGTERM)  # as if the run had not been
        assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_step_is_saved_again_when_its_removal_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, may_remove = FileStore.remove, threading.Event()

    def slowly(self: FileStore, name: str) -> None:
        if threading.current_thread().name == "gda-remove":
            may_remove.wait(60)
        remove(self, name)

    monkeypatch.setattr(FileStore, "remove", slowly)
    run, _ = resumed(tmp_path, keep=lambda steps: [10])
    train(run, 0, 30, 10)
    run.wait()  # 20 is being removed
    run.rollback(10, newest=30)
    run.resume(state_of(0))
    threading.Timer(0.5, may_remove.set).start()
    train(run, 10, 20)
    run.close()
    assert run.steps() == [10, 20]
    gda.checkpoint.verify(run.path(20))


@pytest.mark.parametrize("when", ["before the first", "between two", "before the end"])
def test_a_rollback_that_is_killed_has_removed_all_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 40, 10)
    run.close()

    class Killed(BaseException):
        pass

    removed: list[str] = []
    rename = FileStore.rename

    def kill(self: FileStore, name: str, *new: str) -> None:
        if len(removed) == ("before the first", "between two", "before the end").index(when):
            raise Killed
        removed.append(name)
        rename(self, name, *new)

    for method in ("rename", "remove"):  # takes a step out of the listing, and removes its files
        monkeypatch.setattr(FileStore, method, kill)
    run = Run(tmp_path, every=10)
    is_removed = when == "before the end"  # then the kill is in the background
    with contextlib.nullcontext() if is_removed else pytest.raises(Killed):
        assert run.rollback(20, newest=40)
    run._keeper.wait(60)
    monkeypatch.undo()
    assert json.loads((tmp_path / "run.json").read_text())["ends"] == (
        None if when == "before the end" else 20
    )
    reader = Run(tmp_path, every=10)
    assert reader.steps() == [10, 20]
    run, step = resumed(tmp_path)
    assert step == 20
    assert not [*tmp_path.glob("00000040*")]
    train(run, 20, 30)
    run.close()
    assert run.steps() == [10, 20, 30]


# Another program.


def test_a_step_that_the_old_program_completes_before_it_is_told_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = resumed(tmp_path)
    new = Run(tmp_path, every=10)
    claim = RunFolder.claim

    def after_a_save(self: RunFolder, best: Any) -> Any:
        old.save(10, state_of(10))
        old.wait()
        return claim(self, best)

    monkeypatch.setattr(RunFolder, "claim", after_a_save)
    assert new.resume(state_of(0))[1] == 10


def test_a_program_that_was_taken_over_during_a_save_does_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without metrics, which test_keeper.py has."""
    old, _ = resumed(tmp_path, keep=1)
    train(old, 0, 10)
    old.wait()
    claim, write = Run(tmp_path, every=10), FileStore.write_sealed

    def taken_over(self: FileStore, name: str, payload: Any) -> int:
        claim._keeper.own(None, True)
        return write(self, name, payload)

    monkeypatch.setattr(FileStore, "write_sealed", taken_over)
    assert old.save(20, state_of(20))
    with pytest.raises(SaveError, match="took over"):
        old.wait()
    assert claim.steps() == [10]


def test_a_run_writes_nothing_before_it_resumes_or_saves(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", every=10)
    assert run.steps() == []
    assert run.latest() is None
    run.close()
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match=r"best\(\) needs keep_best"):
        run.best()


# Failures in the background.


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets all writes of arrays below a path fail."""
    full: list[str] = []
    write = FileStore.write_sealed

    def refuse(self: FileStore, name: str, payload: Any) -> int:
        if any(part in self.url for part in full):
            raise OSError(28, "No space left on device", self.join(name))
        return write(self, name, payload)

    monkeypatch.setattr(FileStore, "write_sealed", refuse)
    return full.append


@pytest.fixture
def failed(tmp_path: Path, full_disk: Any) -> Run:
    """A run whose save of step 20 has failed, which no call has raised."""
    full_disk("00000020")
    run, _ = resumed(tmp_path)
    train(run, 0, 20)
    while not run._flight.pending.done():
        time.sleep(0.01)
    return run


@pytest.mark.parametrize("step", [20, 21])
def test_a_save_that_failed_is_raised_by_the_next_call(failed: Run, step: int) -> None:
    with pytest.raises(OSError, match="No space left"):
        failed.save(step, state_of(step))  # though it is not due
    assert failed.steps() == [10]
    assert failed.save(31, state_of(31), now=True)
    failed.close()
    assert failed.steps() == [10, 31]


def test_a_step_whose_save_failed_is_saved_again_if_the_program_ends(
    failed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed
    monkeypatch.undo()
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.save(20, state_of(20))
    assert run.steps() == [10, 20]
    run.close()


def test_a_full_disk_is_freed_of_what_a_killed_program_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, write = tmp_path / "00000020", FileStore.write

    def full(self: FileStore, name: str, data: Any) -> Any:
        if left.exists():
            raise OSError(28, "No space left on device", name)
        return write(self, name, data)

    run, _ = resumed(tmp_path)
    train(run, 0, 20)
    run.close()
    note(tmp_path, "00000020")
    (left / "manifest.json").unlink()
    monkeypatch.setattr(FileStore, "write", full)
    assert resumed(tmp_path)[1] == 10
    assert not left.exists()
    left.mkdir()
    (left / "data").touch()  # of another program
    with pytest.raises(OSError, match="No space left"):
        resumed(tmp_path)
    assert left.exists()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_step_whose_save_failed_at_its_first_file_may_be_saved_again(
    tmp_path: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileStore.write

    class Killed(BaseException):
        pass

    def refuse(self: FileStore, name: str, data: Any) -> Any:
        if name.endswith("begun.json"):
            os.makedirs(tmp_path / name.partition("/")[0], exist_ok=True)
            raise Killed if is_killed else OSError(28, "No space left on device", name)
        return write(self, name, data)

    run, _ = resumed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "write", refuse)
        with pytest.raises(Killed if is_killed else OSError):
            train(run, 0, 10)
    assert (tmp_path / "00000010").exists() == is_killed
    run, step = resumed(tmp_path)
    train(run, step, 10)
    run.close()
    assert run.steps() == [10]


def test_a_training_may_go_on_after_a_save_that_failed(
    tmp_path: Path, full_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk("00000020")
    run, _ = resumed(tmp_path, on_error="log")
    train(run, 0, 30)
    run.wait()
    assert run.steps() == [10, 30]
    assert f"step 20 of {tmp_path} was not saved; the training goes on" in caplog.messages
    full_disk("00000031")
    with pytest.raises(OSError, match="No space left"):
        run.close(31, state_of(31))
    assert run.steps() == [10, 30]


def test_a_save_goes_on_after_ctrl_c_in_the_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    run, _ = resumed(tmp_path)
    run.save(10, state_of(10))
    monkeypatch.setattr(Pending, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.save(20, state_of(20))
    monkeypatch.undo()
    assert run.save(20, state_of(20), now=True)  # after step 10, not beside it
    run.close()
    assert run.steps() == [10, 20]


def test_close_saves_the_last_state_before_it_raises(tmp_path: Path, full_disk: Any) -> None:
    full_disk("00000020")
    before = signal.getsignal(signal.SIGTERM)
    run, _ = resumed(tmp_path)
    train(run, 0, 20)
    assert signal.getsignal(signal.SIGTERM) != before
    with pytest.raises(OSError, match="No space left"):
        run.close(25, state_of(25))
    assert run.steps() == [10, 25]
    assert signal.getsignal(signal.SIGTERM) == before  # the program may be ended as before


def test_a_run_whose_resume_failed_saves_nothing_after_close(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    run.close(10, state_of(10))
    with pytest.raises(ValueError, match="damaged must be"):
        run.resume(state_of(0), damaged="no such rule")  # type: ignore[arg-type]
    run.close()
    with pytest.raises(ValueError, match="nothing is saved"):
        run.close(20, state_of(20))
    assert run.steps() == [10]
    run.resume(state_of(0))
    run.close(20, state_of(20))
    assert run.steps() == [10, 20]


def test_a_run_that_is_closed_does_not_save(tmp_path: Path) -> None:
    run, _ = resumed(tmp_path)
    train(run, 0, 10)
    run.close()
    run.close()
    for call in (lambda: run.save(20, state_of(20)), run.check):
        with pytest.raises(RuntimeError, match="newest step 10> is closed; make another gda.check"):
            call()
    assert run.steps() == [10]
    assert repr(gda.checkpoint.Run(tmp_path, every=1)) == f"<run in {tmp_path}, newest step 10>"
    other = tmp_path / "other"
    assert repr(gda.checkpoint.Run(other, every=1)) == f"<run in {other}, no step yet>"
    assert run.resume(state_of(0))[1] == 10
    os.kill(os.getpid(), signal.SIGTERM)  # which it hears again
    assert run.save(11, state_of(11))
    run.close()


def test_an_error_of_the_loop_leaves_the_step_that_is_being_saved(tmp_path: Path) -> None:
    def fail() -> None:
        with run:
            train(run, 0, 10)
            raise ZeroDivisionError

    run, _ = resumed(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail()
    run._flight.pending.result()
    assert resumed(tmp_path)[1] == 10


# Its words.


def test_each_save_and_removal_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gda")
    run, _ = resumed(tmp_path, keep=1)
    train(run, 0, 20)
    run.close()
    first, saved, _, removed = [m for m in caplog.messages if str(tmp_path) in m]
    assert first == f"{tmp_path} has no step yet: the training begins"
    assert saved.startswith(f"saved step 10 of {tmp_path}: the loop waited ")
    assert removed == f"removed step 10 of {tmp_path}"
    caplog.clear()
    resumed(tmp_path)
    (line,) = caplog.messages
    assert line.startswith(f"resumed {tmp_path} at step 20, in ")


def test_a_function_hears_of_complete_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[int, int]] = []

    def hear(step: int, path: Any) -> None:
        heard.append((step, gda.checkpoint.restore(path)["n"]))
        if step == 10:
            raise ConnectionError("no upload")

    with Run(tmp_path, every=10, on_complete=hear) as run:
        train(run, 0, 20)
    assert sorted(heard) == [(10, 10), (20, 20)]
    assert f"on_complete of step 10 of {tmp_path} failed" in caplog.messages


def test_a_step_is_not_removed_while_a_function_uses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    def upload(step: int, path: Any) -> None:
        assert may_end.wait(60)
        gda.checkpoint.verify(path)

    run = Run(tmp_path, every=10, keep=1, on_complete=upload, grace=0.1)
    train(run, 0, 30)
    run.close()
    assert run.steps() == [10, 20, 30]
    running = [each[:26] for each in caplog.messages if "still runs after a wait" in each]
    assert running == [f"on_complete of step {step} of " for step in (10, 20, 30)]
    may_end.set()
    run._grace = 60
    run.close()
    assert run.steps() == [30]
    assert not any("failed" in message for message in caplog.messages)


def test_a_name_with_an_at_is_no_step_of_a_run(tmp_path: Path) -> None:
    for place in (f"{tmp_path}/exp@2024", f"file://{tmp_path}/url@2024"):
        gda.checkpoint.save(place, {"n": 1})
        assert gda.checkpoint.restore(place)["n"] == 1


# Beginning with another run.


def test_a_run_may_start_from_a_step_of_another(tmp_path: Path) -> None:
    with Run(tmp_path / "base", every=10) as base:
        train(base, 0, 20)
    run = Run(tmp_path / "new", every=10)
    state, step = run.resume(state_of(0), start_from=tmp_path / "base@10")
    assert step == 0
    check(state, 10)
    train(run, 0, 10)
    run.close()
    state, step = Run(tmp_path / "new", every=10).resume(
        state_of(0), start_from=tmp_path / "base@20"
    )
    assert step == 10


def test_a_run_resumes_at_the_newest_step_alone(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 40)
    said = r"has later steps than 20: 30, 40; call run.rollback\(20, newest=40\) first"
    with pytest.raises(ValueError, match=said):
        run.resume(state_of(0), step=20)
    with pytest.raises(CheckpointNotFoundError, match="has no step 50; it has the steps 10, 20"):
        run.resume(state_of(0), step=50)
    assert run.resume(state_of(0), step=40)[1] == 40


def test_a_state_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        train(run, 0, 20)
    state, other = state_of(0), state_of(0)["w"]
    for misfit in ({"m": 1}, {"w": other[:4]}, {"w": other.astype(jnp.int32)}, {"n": other}):
        with pytest.raises(ValueError, match="does not (match|fit) like") as error:
            Run(tmp_path, every=10).resume(state | misfit)
        assert not isinstance(error.value, CorruptionError)
    assert run.steps() == [10, 20]
    state, step = Run(tmp_path, every=10).resume({"n": 0}, partial=True)
    assert (state, step) == ({"n": 20}, 20)


@pytest.mark.parametrize("start_from", [False, True])
def test_the_log_names_what_a_resume_kept_and_what_it_omitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start_from: bool
) -> None:
    saved = tmp_path / "a"
    with Run(saved, every=10) as run:
        run.save(10, {"params": {"old": np.ones(2), "same": np.ones(2)}, "n": 10})
    like = {"new": np.zeros(2), "same": np.zeros(2)}
    options: dict[str, Any] = {"at": ["params"], "partial": True, "missing": "keep"}
    if start_from:
        options["start_from"] = f"{saved}@10"
    with caplog.at_level(logging.INFO, logger="gda"):
        state, _ = Run(tmp_path / ("b" if start_from else "a"), every=10).resume(like, **options)
    np.testing.assert_array_equal(state["new"], 0)
    np.testing.assert_array_equal(state["same"], 1)
    (line,) = [each for each in caplog.messages if "in part" in each]
    assert line == (
        f"restored {saved}/00000010 in part: like's own value stays at params/new; "
        "not restored: n; params/old"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="gda"):
        Run(saved, every=10).resume({"params": {"old": np.ones(2), "same": np.ones(2)}, "n": 0})
    assert not any("in part" in each for each in caplog.messages)

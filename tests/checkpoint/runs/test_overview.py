"""The command on a run, beside a training that removes steps, and on a run with damage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import damaged
import pytest
from training import train

import gda
from gda.checkpoint import Run
from gda.checkpoint.runs import overview
from gda.checkpoint.step_folders.folder import RunFolder
from gda.cli import main
from gda.storage.stores.directory import FileStore

Removal = Callable[[Path, pytest.MonkeyPatch], None]


def saved(path: Path) -> Path:
    with Run(path, every=10) as run:
        train(run, 0, 30, 10)
    return path


def before_its_turn(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let step 20 be removed after the steps were listed."""
    complete = RunFolder.complete

    def complete_before(self: RunFolder) -> Any:
        listed = complete(self)
        shutil.rmtree(path / "00000020", ignore_errors=True)
        return listed

    patch.setattr(RunFolder, "complete", complete_before)


def while_it_is_read(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let step 20 be removed when its first chunk is read."""
    read_into = FileStore.read_into

    def removed(self: FileStore, *args: Any) -> Any:
        if self.url.endswith("00000020"):
            shutil.rmtree(path / "00000020", ignore_errors=True)
        return read_into(self, *args)

    patch.setattr(FileStore, "read_into", removed)


def test_a_rollback_that_was_begun_is_told(tmp_path: Path) -> None:
    found = overview.overview_of(saved(tmp_path / "run"), 60)
    assert found is not None
    assert found.owner is not None
    assert "rollback" not in str(found)
    begun = replace(found, owner=replace(found.owner, ends=20))
    assert str(begun).endswith("a rollback to step 20 was begun; the next resume ends it")
    assert begun.to_dict()["owner"]["ends"] == 20


@pytest.mark.parametrize("remove", [before_its_turn, while_it_is_read])
def test_a_step_that_is_removed_meanwhile_is_no_damage(
    tmp_path: Path,
    remove: Removal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path)
    remove(tmp_path, monkeypatch)
    assert main(["verify", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path} is whole: 2 steps, ")
    assert second == "step 20 was removed while it was read"
    assert main(["inspect", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:3]] == ["10", "30"]


@pytest.mark.parametrize("read", [gda.checkpoint.restore, gda.checkpoint.verify])
def test_a_reader_is_told_that_the_step_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    saved(tmp_path)
    while_it_is_read(tmp_path, monkeypatch)
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError, match="removed while it was read"):
        read(f"{tmp_path}@20")


def test_a_damaged_manifest_does_not_hide_other_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = saved(tmp_path) / "00000020/manifest.json"
    manifest.write_bytes(damaged.flip(manifest.read_bytes(), 300))
    assert main(["inspect", str(tmp_path)]) == main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["10", "20", "30"]
    assert "not readable" in out.splitlines()[2]
    assert [line.partition(":")[0] for line in err.splitlines()] == ["step 20"] * 2


def test_a_step_of_a_newer_gda_does_not_hide_other_steps(tmp_path: Path) -> None:
    manifest = saved(tmp_path) / "00000010/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'checkpoint": 1', b'checkpoint": 2', 1))
    found = overview.overview_of(tmp_path, 60)
    assert found is not None
    assert [each.step for each in found.steps] == [10, 20, 30]
    (problem,) = found.problems
    assert "has version 2" in problem

"""Two programs that save into one path without locks, and data that is removed beneath a save."""

import shutil
from pathlib import Path

import kill_program
import pytest
from forks import Forks, check_next_save, generation_at
from kill_program import Arguments, Disk, small_files, tree_of, values_of
from meshes import mesh_of
from trials import Trials, tried

import gda
from gda.checkpoint import SaveError
from gda.storage.stores import directory


@tried("two programs save into one path at once, without locks", sample=4, full=700)
def test_two_programs_without_locks_commit_no_damage(
    tmp_path: Path, forks: Forks, trials: Trials
) -> None:
    path = tmp_path / "run"
    gda.checkpoint.save(path, values_of(1))
    for begin in range(0, trials.most, 50):  # one set of processes has only so much time
        count = min(50, trials.most - begin)
        seed = trials.chance.randrange(2**32)
        forks.start("save_beside_another", 1, path=str(path), rounds=count, seed=seed)
        lines = [line for line in forks.rest() if line[0] == "round"]
        assert len(lines) == count, forks.errors()
        for line in lines:
            _, number, *ended, found, state = line
            assert state == "whole", line
            assert "saved" in ended, line
            both = [2 * int(number) + 2, 2 * int(number) + 3]
            saved = [g for g, end in zip(both, ended, strict=True) if end == "saved"]
            assert int(found) in saved, line
            trials.count("both saved" if len(saved) == 2 else "one was refused")
    check_next_save(path, 1)
    assert len(trials.outcomes) > 1 or trials.most < 100  # some met


def test_a_file_system_without_locks_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kill_program.without_locks(monkeypatch.setattr)
    monkeypatch.setattr(directory, "without_locks", set())
    for number in range(3):
        gda.checkpoint.save(tmp_path / str(number), values_of(number))
    (message,) = caplog.messages
    assert message.startswith(f"the file system of {tmp_path}/0 has no locks")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_without_locks_a_manifest_that_another_is_writing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    gda.checkpoint.save(tmp_path, values_of(1))
    kill_program.without_locks(monkeypatch.setattr)
    other = tmp_path / "manifest.json.new"

    def writes(is_first: bool, name: str, arguments: Arguments) -> None:
        if name == "writev":
            other.write_text("half")

    if when == "before":
        other.write_text("half")
    else:
        Disk(writes).install(monkeypatch.setattr)
    with pytest.raises(SaveError, match=rf"another save into {tmp_path} is committing.*{other}"):
        gda.checkpoint.save(tmp_path, values_of(2), overwrite=True)
    assert other.read_text() == "half"
    assert generation_at(tmp_path) == 1
    other.unlink()
    Disk().install(monkeypatch.setattr)
    check_next_save(tmp_path, 3)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_with_locks_leftover_manifests_are_removed(tmp_path: Path, is_damaged: bool) -> None:
    gda.checkpoint.save(tmp_path, values_of(1))
    (tmp_path / "manifest.json.new").write_text("half")
    if is_damaged:
        (tmp_path / "manifest.json").write_text("half")
    gda.checkpoint.save(tmp_path, values_of(2), overwrite=True)
    assert generation_at(tmp_path) == 2
    assert not (tmp_path / "manifest.json.new").exists()


# Removed beneath a save.


def lose_data(path: Path, kept: set[str]) -> None:
    """Remove the data of a save that is running."""
    for each in path.glob("data-*"):
        if each.name not in kept:
            shutil.rmtree(each, ignore_errors=True)


@tried("the data of a save is removed at a step of it", sample=3)
@pytest.mark.parametrize("is_over", [False, True], ids=["new", "overwrite"])
def test_data_that_is_removed_at_any_step_before_the_commit_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool, trials: Trials
) -> None:
    small_files(monkeypatch.setattr)
    before = 1 if is_over else None
    tree = tree_of(2, mesh_of({"x": 2}))

    def save(path: Path, at: int | None) -> tuple[Disk, OSError | SaveError | None]:
        path.mkdir()
        if is_over:
            gda.checkpoint.save(path, values_of(1))
        kept = {each.name for each in path.glob("data-*")}

        def loses(is_first: bool, name: str, args: Arguments) -> None:
            if is_first and at is not None:
                lose_data(path, kept)

        disk = Disk(loses, at or 0)
        disk.install(monkeypatch.setattr)
        try:
            gda.checkpoint.save(path, tree, overwrite=True, max_workers=1)
        except (OSError, SaveError) as error:
            return disk, error
        finally:
            Disk().install(monkeypatch.setattr)
        return disk, None

    whole = tmp_path / "whole"
    # From the commit on it is the data of a checkpoint that is removed.
    commit = save(whole, None)[0].steps.index(("replace", f"{whole / 'manifest.json'}.new"))
    for at in trials.of(range(commit)):
        path = tmp_path / str(at)
        disk, error = save(path, at)
        found = generation_at(path)
        assert found == (2 if error is None else before), (disk.steps[at], error)
        if error is not None:
            assert "data-" in str(error)
            assert "nothing was committed" in "".join(error.__notes__)
        trials.count("saved" if error is None else "refused")
        check_next_save(path, 3)
    assert trials.most < commit or trials.outcomes["refused"] > 10

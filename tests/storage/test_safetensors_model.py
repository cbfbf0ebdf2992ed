"""The model of a folder while another takes its place: the old or the new, whole, always."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Forks, Killing, count_kill
from kill_program import tensors_of
from trials import Trials, tried

from gda.storage import new_files, open_safetensors, save_safetensors
from gda.storage.safetensors_model import INDEX, MODEL

ONE, SEVERAL = 2**20, 1  # bytes in a file
OTHERS = (
    "config.json",
    "adapter.safetensors",
    "model-1-of-2.safetensors",
    "model-0123456789abcdef",
    "data-0123456789abcdef",
)


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def generation_at(path: Path, most: int) -> int | None:
    """Return which save a reader sees, after comparing every value; ``None`` if it is refused."""
    try:
        tensors = open_safetensors(path)
    except (FileNotFoundError, ValueError):
        return None
    for generation in range(most + 1):
        expected = tensors_of(generation)
        if tensors.keys() == expected.keys() and np.array_equal(
            tensors["weights"][...], expected["weights"]
        ):
            assert all(np.array_equal(tensors[name][...], expected[name]) for name in expected)
            return generation
    raise AssertionError(f"the tensors {sorted(tensors)} are of no save or of several")


def generation_beside(folder: Path, most: int) -> int | None:
    """Return which save a reader sees that takes ``model.safetensors`` before the index."""
    found = [name for name in (MODEL, INDEX) if (folder / name).exists()]
    return generation_at(folder / found[0], most) if found else None


# Models that are there before. Each returns True if the two readers see the same one.


def nothing(folder: Path) -> bool:
    folder.mkdir()
    return True


def one(folder: Path) -> bool:
    save_safetensors(folder, tensors_of(1), max_file_bytes=ONE)
    return True


def several(folder: Path) -> bool:
    save_safetensors(folder, tensors_of(1), max_file_bytes=SEVERAL)
    return True


def several_again(folder: Path) -> bool:
    save_safetensors(folder, tensors_of(0), max_file_bytes=SEVERAL)
    return several(folder)


def without_index(folder: Path) -> bool:
    several(folder)
    (folder / INDEX).unlink()
    return False


def index_of_one(folder: Path) -> bool:
    one(folder)
    files = dict.fromkeys(tensors_of(1), MODEL)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return True


def index_of_one_and_another(folder: Path) -> bool:
    several(folder)
    content = json.loads((folder / INDEX).read_text())
    files = content["weight_map"]
    (folder / files["weights"]).rename(folder / MODEL)
    (folder / INDEX).write_text(json.dumps({"weight_map": files | {"weights": MODEL}}))
    return False


def broken_index(folder: Path) -> bool:
    several(folder)
    (folder / INDEX).write_text("{")
    return True


def index_and_one(folder: Path) -> bool:
    """As a save leaves it that is killed before the last step."""
    several(folder)
    save_safetensors(folder / MODEL, tensors_of(0))
    return False


BEFORE = (
    nothing,
    one,
    several,
    several_again,
    without_index,
    index_of_one,
    index_of_one_and_another,
    broken_index,
    index_and_one,
)


# Killed at a step.


class Dead(BaseException):
    """The file system of a process that has ended: it does nothing more."""


STEPS = ("replace", "unlink", "mkdir", "rmdir", "fsync", "pwrite")


class Steps:
    """The steps of a save; before that of a number comes a fault, and before all that follow it."""

    def __init__(self, fault: Callable[[bool, Sequence[Any]], None] | None = None, at: int = 0):
        self.count, self._fault, self._at = 0, fault, at

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in STEPS:
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(new_files, "open", self._counted(open), raising=False)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            number = self.count
            self.count += 1
            if self._fault is not None and number >= self._at:
                self._fault(number == self._at, args)
            return real(*args, **options)

        return step


def dies(is_first: bool, arguments: Sequence[Any]) -> None:
    raise Dead


def is_full(is_first: bool, arguments: Sequence[Any]) -> None:
    # As the system does: it knows the name of a file that it was called with, not of a handle.
    if is_first:
        names = [each for each in arguments[:1] if isinstance(each, str | os.PathLike)]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *map(os.fspath, names))


def save_with(steps: Steps, folder: Path, max_file_bytes: int) -> Dead | Exception | None:
    with pytest.MonkeyPatch.context() as patch:
        steps.install(patch)
        try:
            save_safetensors(folder, tensors_of(2), max_file_bytes=max_file_bytes)
        except (Dead, Exception) as error:
            return error
    return None


def steps_of(before: Callable[[Path], bool], max_file_bytes: int, folder: Path) -> int:
    before(folder)
    whole = Steps()
    assert save_with(whole, folder, max_file_bytes) is None
    assert generation_at(folder, 2) == 2
    return whole.count


@tried("one process is killed, or the disk is full, at a step of save_safetensors", sample=6)
@pytest.mark.parametrize("fault", [dies, is_full])
def test_a_fault_at_any_step_leaves_the_old_or_the_new(
    fault: Callable[[bool, Sequence[Any]], None], tmp_path: Path, trials: Trials
) -> None:
    cases = [
        (before, most, at)
        for before in BEFORE
        for most in (ONE, SEVERAL)
        for at in range(steps_of(before, most, tmp_path / f"{before.__name__} {most}"))
    ]
    assert len(cases) > 250
    for number, (before, most, at) in enumerate(trials.of(cases)):
        folder = tmp_path / str(number)
        is_seen_beside = before(folder)
        old = generation_at(folder, 2)
        try:
            error = save_with(Steps(fault, at), folder, most)
            found = generation_at(folder, 2)
            assert found in (old, 2)
            assert not is_seen_beside or generation_beside(folder, 2) in (old, 2)
            assert isinstance(error, Dead) == (fault is dies)
            if isinstance(error, OSError):
                assert error.errno == errno.ENOSPC
                assert str(folder) in str(error)
            # The next saves work, and leave nothing of those before them.
            save_safetensors(folder, tensors_of(3), max_file_bytes=SEVERAL)
            assert generation_at(folder, 3) == 3
            save_safetensors(folder, tensors_of(4), max_file_bytes=ONE)
            assert generation_at(folder, 4) == generation_beside(folder, 4) == 4
            if before not in (without_index, broken_index):  # with files that no index names
                assert names_in(folder) == {MODEL}
        except BaseException as raised:
            raised.add_note(f"{before.__name__}, then {most} bytes in a file, step {at}")
            raise
        trials.count("old" if found == old else "new")


# The view of others while the files take their places.


@pytest.mark.parametrize("most", [ONE, SEVERAL])
@pytest.mark.parametrize("before", BEFORE)
def test_readers_see_the_old_or_the_new_at_every_step(
    before: Callable[[Path], bool], most: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    before(folder)
    old, seen = generation_at(folder, 2), []

    def looks(is_first: bool, arguments: Sequence[Any]) -> None:
        seen.append(generation_at(folder, 2))

    assert save_with(Steps(looks), folder, most) is None
    assert seen[0] == old
    assert generation_at(folder, 2) == 2
    assert seen == sorted(seen, key=lambda each: each == 2), "first the old, then the new"
    assert set(seen) <= {old, 2}


@pytest.mark.parametrize("most", [ONE, SEVERAL])
@pytest.mark.parametrize("before", [several, without_index, index_of_one_and_another])
def test_files_of_others_stay(before: Callable[[Path], bool], most: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    before(folder)
    for name in OTHERS:
        (folder / name).write_text("mine")
    kept = {"model-00007-of-00009.safetensors", *OTHERS}
    (folder / "model-00007-of-00009.safetensors").write_text("named by no index")
    (folder / "data-fedcba9876543210").mkdir()
    save_safetensors(folder, tensors_of(2), max_file_bytes=most)
    save_safetensors(folder, tensors_of(3), max_file_bytes=most)
    assert names_in(folder) >= kept | {"data-fedcba9876543210"}
    assert all((folder / name).read_text() == "mine" for name in OTHERS)
    assert generation_at(folder / INDEX if (folder / INDEX).exists() else folder / MODEL, 3) == 3


def test_files_of_a_save_that_runs_stay(tmp_path: Path) -> None:
    save_safetensors(tmp_path, tensors_of(1), max_file_bytes=SEVERAL)
    with new_files.folder_beside(tmp_path, MODEL) as running:
        token = running.name.split(".")[-2]
        name = f"model-{token}-00001-of-00002.safetensors"
        (tmp_path / name).write_text("written by another program")
        save_safetensors(tmp_path, tensors_of(2), max_file_bytes=SEVERAL)
        assert (tmp_path / name).exists()
    save_safetensors(tmp_path, tensors_of(3), max_file_bytes=SEVERAL)
    assert not (tmp_path / name).exists()
    assert generation_at(tmp_path, 3) == 3


# Killed at a random moment.


@tried("one process is killed while it saves safetensors", sample=6, full=300)
def test_a_process_killed_at_any_moment_leaves_the_old_or_the_new_model(
    forks: Forks, tmp_path: Path, trials: Trials
) -> None:
    before, beside = None, None
    killing = Killing(forks, "save_safetensors_until_killed")
    for trial in range(trials.most):
        first = (before or 0) + 1
        begun, ended = killing.kill(trials, first, path=str(tmp_path), seed=trial)
        found, ended = generation_at(tmp_path, begun), ended or before
        assert found in (ended, begun), f"{found} is there; saved {ended}, saving {begun}"
        # A killed save may leave an old file, which the next one removes if it comes so far.
        kept, beside = beside, generation_beside(tmp_path, begun)
        assert beside in (ended, begun, kept)
        count_kill(trials, begun, ended, found)
        before = found
    killing.check(trials)
    last = (before or 0) + 1
    save_safetensors(tmp_path, tensors_of(last), max_file_bytes=SEVERAL)
    save_safetensors(tmp_path, tensors_of(last), max_file_bytes=ONE)
    assert names_in(tmp_path) == {MODEL}

"""Saves that are killed, that fail or meet: the old checkpoint is there, or the new one."""

import contextlib
import errno
import functools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from forks import (
    LIMIT,
    Forks,
    Killing,
    check_clean,
    check_next_save,
    count_kill,
    generation_at,
)
from kill_program import Arguments, Disk, small_files, tree_of, values_of
from leaks import open_files
from meshes import mesh_of
from trials import Trials, tried

import gda
from gda.checkpoint import SaveError
from gda.checkpoint.writing import writer
from gda.storage.stores.directory import FileStore


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no open file is left at the end of a test."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert open_files() == files


# Killed.


def check_kills(
    killing: Killing, trials: Trials, path: Path, is_over: bool, is_async: bool
) -> None:
    before = 1 if is_over else None
    if is_over:
        gda.checkpoint.save(path, values_of(1))
    for trial in range(trials.most):
        place = path if is_over else path / f"{trial}/run"
        first = (before or 0) + 1
        begun, ended = killing.kill(trials, first, path=str(place), is_async=is_async)
        found, ended = generation_at(place), ended or before
        assert found in (ended, begun), f"{found} was restored; saved {ended}, saving {begun}"
        count_kill(trials, begun, ended, found)
        check_next_save(place, begun + 1)
        before = begun + 1 if is_over else None
    killing.check(trials)


@tried("one process is killed while it saves", sample=1, full=200)
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("is_over", [False, True], ids=["new", "overwrite"])
def test_a_process_killed_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path, forks: Forks, is_over: bool, is_async: bool, trials: Trials
) -> None:
    killing = Killing(forks, "save_until_killed")
    check_kills(killing, trials, tmp_path / "run", is_over, is_async)


@tried("four processes are killed while they save", sample=1, full=100)
@pytest.mark.parametrize(
    ("is_over", "is_async", "is_one"),
    [
        pytest.param(False, False, False, id="new", marks=pytest.mark.torture),
        pytest.param(True, False, False, id="overwrite", marks=pytest.mark.torture),
        pytest.param(True, True, False, id="save_async"),
        pytest.param(True, False, True, id="one of them first"),
    ],
)
def test_four_processes_killed_at_any_moment_leave_the_old_or_the_new(
    tmp_path: Path, forks: Forks, is_over: bool, is_async: bool, is_one: bool, trials: Trials
) -> None:
    killing = Killing(forks, "save_until_killed", 4, is_one)
    check_kills(killing, trials, tmp_path / "run", is_over, is_async)


# At every step in turn.


class Dead(BaseException):
    """The file system of a process that has ended: it does nothing more."""


def dies(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    raise Dead


def dies_in_a_write(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    if is_first and name == "writev":
        handle, (first, *_) = arguments
        os.writev(handle, [first[: len(first) // 2]])
    raise Dead


def cannot_be_read_or_written(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    if is_first:
        fail(errno.EIO, arguments)


def is_full(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    makes = name == "open" and arguments[1] & os.O_CREAT
    if makes or name in ("writev", "mkdir"):
        fail(errno.ENOSPC, arguments)


def is_read_only(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    makes = name == "open" and arguments[1] & os.O_CREAT
    if makes or name in ("writev", "mkdir", "unlink", "rmtree", "replace"):
        fail(errno.EROFS, arguments)


def vanishes(is_first: bool, path: Path, name: str, arguments: Arguments) -> None:
    if is_first:
        shutil.rmtree(path, ignore_errors=True)


def fail(number: int, arguments: Arguments) -> None:
    # As the system does: it knows the name of a file that it was called with, not of a handle.
    names = [argument for argument in arguments[:1] if isinstance(argument, str)]
    raise OSError(number, os.strerror(number), *names)


Fault = Callable[[bool, Path, str, Arguments], None]
FAULTS: tuple[Fault, ...] = (
    dies,
    dies_in_a_write,
    cannot_be_read_or_written,
    is_full,
    is_read_only,
    vanishes,
)


def check_names(error: OSError, path: Path) -> None:
    """An error names the cause and the file, in the checkpoint or above it."""
    assert error.errno, error
    assert repr(error.filename) in str(error), error
    place = Path(error.filename)
    assert place.is_relative_to(path) or place in path.parents[:3], error


def check_error(error: Exception | None, path: Path, before: int | None) -> None:
    """An error names path and cause, and if it says that nothing was committed, it is so."""
    found = generation_at(path)
    if error is None:
        assert found == 2
        return
    is_old = "nothing was committed" in "".join(getattr(error, "__notes__", []))
    assert found in ((before,) if is_old else (before, 2))
    assert isinstance(error, OSError)
    check_names(error, path)


@pytest.mark.usefixtures("nothing_left")
@tried("the disk fails at a step of a save", sample=1)
@pytest.mark.parametrize("is_over", [False, True], ids=["new", "overwrite"])
def test_whichever_step_it_comes_at_a_fault_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool, trials: Trials
) -> None:
    small_files(monkeypatch.setattr)
    tree = tree_of(2, mesh_of({"x": 2}))
    before = 1 if is_over else None

    def save(path: Path, disk: Disk) -> Dead | Exception | None:
        Disk().install(monkeypatch.setattr)
        if is_over:
            gda.checkpoint.save(path, values_of(1))
        disk.install(monkeypatch.setattr)
        try:
            gda.checkpoint.save(path, tree, overwrite=True, max_workers=1)
        except (Dead, Exception) as error:
            return error
        finally:
            Disk().install(monkeypatch.setattr)

    whole = Disk()
    assert save(tmp_path / "whole" / "run", whole) is None
    check_clean(tmp_path / "whole" / "run")
    assert len(whole.steps) > 30
    for fault, at in [(fault, at) for fault in FAULTS for at in trials.of(range(len(whole.steps)))]:
        path = tmp_path / fault.__name__ / str(at) / "run"
        disk = Disk(functools.partial(at_path, fault, path), at)
        error = save(path, disk)
        try:
            if isinstance(error, Dead):
                assert generation_at(path) in (before, 2)
            elif fault is vanishes:
                check_vanished(error, path, disk.steps[:at])
            else:
                check_error(error, path, before)
            trials.count({None: "none", 1: "old", 2: "new"}[generation_at(path)])
            check_next_save(path, 3)
        except BaseException as failed:
            notes = getattr(error, "__notes__", "")
            failed.add_note(f"{fault.__name__}, {at}, {disk.steps[at]}: {error!r} {notes}")
            raise


def at_path(fault: Fault, path: Path, is_first: bool, name: str, arguments: Arguments) -> None:
    fault(is_first, path, name, arguments)


def check_vanished(error: Exception | None, path: Path, before: list[tuple[str, str]]) -> None:
    found = generation_at(path)
    if error is None and found is None:
        assert "replace" in [name for name, _ in before]  # it was there, and is gone
    elif error is None:
        assert found == 2
    else:
        assert isinstance(error, FileNotFoundError)
        check_names(error, path)
        assert found is None


@pytest.mark.parametrize(("is_over", "max_workers"), [(False, 4), (True, 1)])
def test_all_is_durable_before_the_manifest_counts_and_that_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool, max_workers: int
) -> None:
    small_files(monkeypatch.setattr)
    path = tmp_path / "made" / "by" / "the save"
    if is_over:
        gda.checkpoint.save(path, values_of(1))
    old = [*path.glob("data-*")]
    disk = Disk()
    disk.install(monkeypatch.setattr)
    tree = tree_of(2, mesh_of({"x": 2}))
    gda.checkpoint.save(path, tree, overwrite=True, max_workers=max_workers)
    steps = disk.steps
    commits = [at for at, (name, _) in enumerate(steps) if name == "replace"]
    assert len(commits) == 1
    before, after = steps[: commits[0]], steps[commits[0] + 1 :]

    new = f"{path / 'manifest.json'}.new"
    assert steps[commits[0]] == ("replace", new)
    files = [str(each) for each in path.glob("data-*/**/*") if each.is_file()]
    assert len(files) == 7  # of an array of two chunks 3, of two packs 2 each
    for file in [*files, new]:
        written = _last(before, "writev", file)
        assert written < _last(before, "fsync", file), file
    made = [directory for name, directory in before if name == "mkdir"]
    assert len(made) == 4 + (0 if is_over else 3)
    for each in [*files, *made]:
        how = "open" if each in files else "mkdir"
        directory = os.path.dirname(each)
        assert before.index((how, each)) < _last(before, "fsync", directory), each

    durable = after.index(("fsync", str(path)))
    removed = [step for step in after[durable:] if step[0] in ("unlink", "rmtree")]
    assert removed == [("rmtree", str(each)) for each in old]
    assert not any(name in ("unlink", "rmtree") for name, _ in after[:durable])


def _last(steps: list[tuple[str, str]], name: str, path: str) -> int:
    return max([at for at, step in enumerate(steps) if step == (name, path)], default=-1)


# Usual faults.


def check_refused(path: Path, error: type[Exception], *words: str, before: int | None) -> None:
    """Saving fails, with these words; nothing changes."""
    with pytest.raises(error) as caught:
        gda.checkpoint.save(path, values_of(2), overwrite=True)
    assert all(word in str(caught.value) for word in words), caught.value
    assert before is None or generation_at(path) == before


def save_in_background(path: Path, tree: Any, **options: Any) -> None:
    gda.checkpoint.save_async(path, tree, **options).result(LIMIT)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """No permissions but those that a file gives to everybody."""
    user = os.geteuid()
    if user == 0:  # whom no permission binds
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that everybody reaches; ``tmp_path`` is only for its owner."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        # A module that is imported at its first use may lie where only the owner may read.
        check_next_save(Path(name) / "first", 1)
        shutil.rmtree(Path(name) / "first")
        yield Path(name)


@pytest.mark.usefixtures("nothing_left")
def test_no_permission(public_directory: Path) -> None:
    path = public_directory / "run"
    gda.checkpoint.save(path, values_of(1))
    modes = {path: 0o555, public_directory: 0o555}
    if os.geteuid() == 0:
        modes = {}  # what root has made is not for others to write
    for place, mode in modes.items():
        os.chmod(place, mode)
    try:
        with unprivileged():
            check_refused(path, PermissionError, str(path), before=1)
            check_refused(public_directory / "new", PermissionError, "/new", before=None)
            check_refused(path / "deep" / "run", PermissionError, "/deep", before=None)
    finally:
        for place in modes:
            os.chmod(place, 0o755)
    check_next_save(path, 3)


@pytest.mark.usefixtures("nothing_left")
def test_a_chunk_that_became_shorter_before_the_manifest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    gda.checkpoint.save(path, values_of(1))
    (old,), flush = path.glob("data-*"), FileStore.flush

    def shortened(store: FileStore) -> None:
        flush(store)
        (new,) = {*path.glob("data-*")} - {old}
        (chunk, *_) = (each for each in new.rglob("c*") if each.is_file())
        os.truncate(chunk, chunk.stat().st_size - 1)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "flush", shortened)
        with pytest.raises(SaveError, match=r"/c.* was changed: it has \d+ bytes, not \d+; save"):
            gda.checkpoint.save(path, values_of(2), overwrite=True)
    assert generation_at(path) == 1
    check_next_save(path, 3)


def test_a_file_and_a_directory_of_somebody_else_are_left_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    file.write_text("mine")
    for path in (file, file / "run"):
        said = f"{path} is a file, or below one; expected is a directory"
        check_refused(path, NotADirectoryError, said, before=None)
    said = (str(tmp_path), "thesis.tex", "directory of its own")
    check_refused(tmp_path, FileExistsError, *said, before=None)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert file.read_text() == "mine"


def test_two_processes_save_at_once_into_one_path(tmp_path: Path, forks: Forks) -> None:
    gda.checkpoint.save(tmp_path, values_of(1))
    (pid,) = forks.start("save_and_stop", 1, path=str(tmp_path))
    assert forks.line() == ["stops"]
    check_refused(tmp_path, SaveError, f"another save into {tmp_path} is running", before=1)
    os.kill(pid, signal.SIGCONT)
    assert forks.line() == ["saved"]
    assert forks.rest() == []
    assert generation_at(tmp_path) == 2
    check_next_save(tmp_path, 3)


def test_a_process_that_was_forked_during_a_save_does_not_keep_the_path(
    tmp_path: Path, forks: Forks
) -> None:
    forks.start("save_and_fork", 1, path=str(tmp_path))
    assert forks.line() == ["saved", "again"], forks.errors()
    assert forks.rest() == []
    assert generation_at(tmp_path) == 2


@tried("Ctrl-C at a step of a save", sample=2)
def test_ctrl_c_at_any_step(tmp_path: Path, forks: Forks, trials: Trials) -> None:
    seed = trials.chance.random()
    forks.start("save_interrupted", 1, path=str(tmp_path / "run"), most=trials.most, seed=seed)
    (_, steps), *lines = forks.rest()
    for _, outcome in lines:
        trials.count(outcome)  # what the notes say is true: see save_interrupted
    assert len(lines) == min(int(steps), trials.most), forks.errors()
    assert int(steps) > 30
    assert set(trials.outcomes) <= {"old", "new"}


# Several processes.


def test_the_other_process_fails_and_names_the_killed_one(tmp_path: Path, forks: Forks) -> None:
    path = tmp_path / "run"
    for where in ["writev", "writing"]:
        forks.start("save_and_die", 2, path=str(path), first=1, victim=1, where=where)
        kind, error, *words = forks.line()
        forks.kill()
        text = " ".join(words)
        assert (kind, error) == ("raised", "LateProcessError")
        assert f"writing the checkpoint {path}: process 1 ended" in text
        assert "nothing was committed" in text
        assert generation_at(path) == 1


def test_the_other_ends_after_the_coordinator_is_killed(tmp_path: Path, forks: Forks) -> None:
    path = tmp_path / "run"
    forks.start("save_and_die", 2, path=str(path), first=1, victim=0, where="replace")
    # JAX ends it, as soon as the connection breaks, or it raises before that.
    lines = forks.rest()
    assert all(line[0] == "raised" for line in lines)
    said = forks.errors() + str(lines)
    assert "coordination service" in said or "UNAVAILABLE" in said
    assert generation_at(path) == 1
    check_next_save(path, 3)


FAILING = {
    "an array that was deleted": (RuntimeError, "GlobalArray(shape="),
    "the copy to the host": (MemoryError, "too much"),
    "a write": (OSError, "[Errno 28] No space left on device: "),
    "the commit": (OSError, "[Errno 28] No space left on device: "),
    "Ctrl-C": (KeyboardInterrupt, "now"),
    "Ctrl-C at the commit": (KeyboardInterrupt, "now"),
}


def fail_in_this_process(what: str, tree: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Let the next save fail in this process."""

    def cannot_copy(*_: object, **__: object) -> None:
        raise MemoryError("too much")

    def fails(is_first: bool, name: str, arguments: Arguments) -> None:
        if name != ("replace" if what.endswith("commit") else "writev"):
            return
        if what.startswith("Ctrl-C"):
            raise KeyboardInterrupt("now")
        fail(errno.ENOSPC, arguments)

    if what == "an array that was deleted":
        tree["weights"].delete()
    if what == "the copy to the host":
        patch.setattr(writer, "kept", cannot_copy)
    Disk(fails).install(patch.setattr)


@pytest.mark.processes(2, devices=4)
@pytest.mark.parametrize(
    ("victim", "what", "is_async"),
    [
        (1, "an array that was deleted", False),
        (0, "the copy to the host", True),
        (1, "a write", True),
        (0, "the commit", False),
        (1, "Ctrl-C", False),
        (0, "Ctrl-C at the commit", False),
    ],
)
def test_failure_in_one_process_fails_in_all(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, what: str, is_async: bool
) -> None:
    small_files(monkeypatch.setattr)
    mesh = mesh_of({"x": 8})
    path, is_here = shared_tmp_path / "run", jax.process_index() == victim
    save = save_in_background if is_async else gda.checkpoint.save
    save(path, tree_of(1, mesh))
    kind, text = FAILING[what]
    tree = tree_of(2, mesh)
    with monkeypatch.context() as patch:
        if is_here:
            fail_in_this_process(what, tree, patch)
        with pytest.raises(kind if is_here else SaveError) as caught:
            save(path, tree, overwrite=True, timeout=50)
    if is_here:
        assert text in str(caught.value)
    else:
        assert f"process {victim} failed: {kind.__name__}: {text}" in str(caught.value)
    assert generation_at(path) == 1
    gda.check_processes_agree(0, name="all have looked")
    save(path, tree_of(3, mesh), overwrite=True)
    assert generation_at(path) == 3
    if jax.process_index() == 0:
        check_clean(path)


@pytest.mark.processes(2, devices=4)
def test_a_process_that_does_not_come_is_named_in_time(shared_tmp_path: Path) -> None:
    path, told = shared_tmp_path / "run", shared_tmp_path / "told"
    mesh = mesh_of({"x": 8})
    gda.checkpoint.save(path, tree_of(1, mesh))
    tree = tree_of(2, mesh)
    if jax.process_index() == 1:
        while not told.exists():  # past its time
            time.sleep(0.01)
    # If all others wait too, as in the checks of constructors, they raise it there.
    with pytest.raises(gda.LateProcessError, match="process 1 did not come within 2 s") as caught:
        gda.checkpoint.save(path, tree, overwrite=True, timeout=2)
    assert "gda.checkpoint.save (test_faults.py:" in str(caught.value)
    assert caught.value.processes == (1,)
    assert caught.value.__notes__ == [
        "gda: every process of the program must call save, not process 0 alone"
    ]
    told.touch()
    assert generation_at(path) == 1
    gda.check_processes_agree(0, name="all have looked")
    gda.checkpoint.save(path, tree_of(3, mesh), overwrite=True)
    assert generation_at(path) == 3

"""Meetings of all processes in a save: their number, and what they compare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import cut, mesh_of

import gda
from gda.checkpoint import Run, restore, save, save_async, saving
from gda.multihost import meeting, shared_folders
from gda.storage.stores.directory import FileStore
from gda.storage.stores.opening import open_store

two_processes = pytest.mark.processes(2, devices=4)


def tree_of(step: int, **more: Any) -> dict[str, Any]:
    data = np.arange(16, dtype=np.float32) + step
    return {"w": cut(data, mesh_of({"x": 8}), P("x")), "n": step, **more}


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call a function, and return the number of meetings of this process meanwhile."""
    held: list[str] = []
    begin = meeting._next_meeting

    def counted(processes: Any, what: str, *more: Any) -> Any:
        held.append(what)
        return begin(processes, what, *more)

    monkeypatch.setattr(meeting, "_next_meeting", counted)

    def count(work: Callable[..., Any], *args: Any, **options: Any) -> int:
        held.clear()
        work(*args, **options)
        return len(held)

    return count


@two_processes
def test_number_of_meetings_of_a_save(shared_tmp_path: Path, meetings: Any) -> None:
    """The numbers are those of docs/cluster.md."""
    folder, tree = shared_tmp_path / "folder", tree_of(1)
    assert meetings(save, folder / "1", tree) == 3  # the folder is new to the program
    assert meetings(save, folder / "2", tree) == 2
    assert meetings(lambda: save_async(folder / "3", tree).result()) == 2
    # Compared when the device has computed it.
    assert meetings(save, folder / "4", {**tree, "count": jnp.zeros(())}) == 3
    assert meetings(save, folder / "5", tree, base=folder / "1") == 2
    large = np.zeros(2**18, np.float32)  # which may be linked
    assert meetings(save, folder / "6", {**tree, "large": large}, base=folder / "1") == 3


@two_processes
def test_number_of_meetings_of_a_save_in_a_run(shared_tmp_path: Path, meetings: Any) -> None:
    """The numbers are those of docs/cluster.md."""
    run, states = Run(shared_tmp_path, every=1), [tree_of(step) for step in range(13)]
    run.resume(states[0])

    def train(*steps: int) -> None:
        for step in steps:
            run.save(step, states[step])
        run.wait()

    assert meetings(train, 1) == 3
    assert meetings(train, 2) == 3
    assert meetings(train, *range(3, 13)) == 10 * 2 + 1
    assert run.steps() == [*range(1, 13)]


@two_processes
def test_number_of_meetings_of_a_resume(shared_tmp_path: Path, meetings: Any) -> None:
    """The numbers are those of docs/cluster.md."""
    run = Run(shared_tmp_path, every=1)
    assert meetings(run.resume, tree_of(0)) == 2
    run.close(1, tree_of(1))
    assert meetings(Run(shared_tmp_path, every=1).resume, tree_of(0)) == 3


@two_processes
@pytest.mark.parametrize("kind", ["a number", "a NumPy array", "an array on a device"])
def test_values_that_differ_are_named_before_anything_is_written(
    shared_tmp_path: Path, kind: str
) -> None:
    path, value = shared_tmp_path / "run", 3 + jax.process_index()
    makes: dict[str, Any] = {
        "a number": int,
        "a NumPy array": np.float32,
        "an array on a device": jnp.float32,
    }
    tree = tree_of(0, here=makes[kind](value))
    with pytest.raises(gda.DisagreementError, match=r"at here, process [01]: value"):
        save(path, tree)
    gda.check_processes_agree()  # process 0 has removed the directory
    assert not [*path.glob("data-*/*")]


@two_processes
def test_folders_that_processes_do_not_share_are_refused(
    shared_tmp_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has a folder of its own at the same path."""
    monkeypatch.setattr(shared_folders, "LATE_SECONDS", 0.1)
    mine = tmp_path if jax.process_index() == 1 else shared_tmp_path

    def opened(path: Any, timeout: float) -> Any:
        store = open_store(path, timeout)
        assert isinstance(store, FileStore)
        store._root = str(mine / "run")
        return store

    path = shared_tmp_path / "of each" / "run"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "open_store", opened)
        for each in (save, save_async):
            with pytest.raises(OSError, match="is not one folder for all processes: process 1"):
                each(path, tree_of(0))
    assert not [*mine.glob("run/data-*")]
    gda.check_processes_agree(0, name="all have looked")
    with pytest.raises(gda.checkpoint.CheckpointNotFoundError) as caught:
        restore(path)
    assert "is not one folder for all" in str(caught.value)


@two_processes
def test_save_that_fails_in_one_process_is_told_at_the_next_one(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save goes on from there, or raises, in all processes."""
    run = Run(shared_tmp_path, every=1, on_error="log")
    run.resume(tree_of(0))
    run.save(1, tree_of(1))
    run.wait()
    with monkeypatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(FileStore, "write_sealed", lambda *_: 1 / 0)
        run.save(2, tree_of(2))
        run._flight.failure()
    run.save(3, tree_of(3))
    run.close()
    assert run.steps() == [1, 3]

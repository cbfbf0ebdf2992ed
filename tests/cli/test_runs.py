"""The commands on the folder of a run."""

from pathlib import Path

import numpy as np
import pytest

import gda
from gda.checkpoint import Run
from gda.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Run(tmp_path, every=10, keep_best=(1, "loss")) as run:
        for step in (10, 20, 30):
            run.save(step, {"w": np.full(4, step)}, metrics={"loss": abs(step - 20)})
    return tmp_path


def test_inspect_lists_the_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hold", str(folder), "10"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    heading, *rows, owner = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "age", "size", "shared", "metrics", "held"]
    assert [row.split()[0] for row in rows] == ["10", "20", "30"]
    assert [row.endswith("yes") for row in rows] == [True, False, False]
    assert "loss 10" in rows[0]
    assert owner.startswith("written by ")


def test_a_step_is_named_by_its_number_or_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in [("@10", 10), ("@latest", 30), ("@best", 20)]:
        assert gda.checkpoint.restore(f"{folder}{name}")["w"][0] == value
        assert main(["inspect", f"{folder}{name}"]) == 0
        assert f"{folder}/000000{value}/data-" in capsys.readouterr().out
    assert main(["diff", f"{folder}@best", f"{folder}@20"]) == 0
    assert main(["diff", f"{folder}@10", f"{folder}@20"]) == 1
    assert main(["verify", f"{folder}@latest"]) == 0
    assert main(["convert", f"{folder}@best", f"{folder}.safetensors"]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{folder}@40"]) == 2
    error = capsys.readouterr().err
    assert error == f"gda: {folder} has no step 40; it has the steps 10, 20, 30\n"
    assert main(["inspect", f"{folder}x@latest"]) == 2
    error = capsys.readouterr().err
    assert error == f"gda: {folder}x@latest: {folder}x has no complete step\n"


def test_verify_reads_all_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder} is whole: 3 steps, 96 B\n"
    for step in (10, 30):
        (chunk,) = (folder / f"000000{step}").glob("data-*/*/c*")
        chunk.write_bytes(chunk.read_bytes()[::-1])
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 10", "step 30"]


def test_verify_says_that_there_is_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(tmp_path, every=10) as run:
        run.resume({"w": np.zeros(4)})
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no complete step\n"


def test_rollback_removes_the_later_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", str(folder), "10"]) == 0
    assert capsys.readouterr().out == "removed 20, 30; the run goes on at step 10\n"
    assert main(["rollback", str(folder), "10"]) == 0
    assert capsys.readouterr().out == "nothing to do: step 10 is the newest\n"
    assert Run(folder, every=10).steps() == [10]
    assert main(["rollback", f"{folder}/none", "5"]) == 2
    assert not (folder / "none").exists()
    assert main(["hold", f"{folder}/none", "5"]) == 2
    assert not (folder / "none").exists()
    assert main(["rollback", str(folder), "5"]) == 2


def test_a_rollback_of_nothing_leaves_the_folder_to_the_training(tmp_path: Path) -> None:
    with Run(tmp_path, every=10) as run:
        run.save(10, {"w": np.zeros(4)})
        run.wait()
        assert main(["rollback", str(tmp_path), "10"]) == 0
        assert run.save(20, {"w": np.zeros(4)})
    assert run.steps() == [10, 20]


def test_a_rollback_is_done_as_often_as_it_is_called(folder: Path) -> None:
    for _ in range(2):
        assert main(["rollback", str(folder), "20"]) == 0
        with Run(folder, every=10) as run:
            assert run.resume({"w": np.zeros(4, int)})[1] == 20
            run.save(30, {"w": np.zeros(4, int)})

"""Local steps of one host: which are used, and which are named instead."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import cut

from gda.checkpoint import PerProcess, Run
from gda.checkpoint.local_steps.local_save import LocalSave
from gda.cli import main

LARGE = np.arange(2**19, dtype=np.float32).reshape(8, -1)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    return {"every": 100, "local": tmp_path / "local", "local_every": 2}


def state_after(step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("x",))
    state = {"w": cut(LARGE + step, mesh, P("x")), "b": cut(LARGE[:, :8] + step, mesh, P())}
    return {**state, "n": step, "own": PerProcess([step])}


def is_after(step: int, state: dict[str, Any]) -> bool:
    expected = state_after(step)
    return (
        all(np.array_equal(state[name].gather(), expected[name].gather()) for name in "wb")
        and state["n"] == step
        and state["own"].value == [step]
    )


def trained(folder: Path, given: dict[str, Any], last: int) -> int:
    """Train to a step, end without a save as a killed program, and return the first step."""
    run = Run(folder / "run", **given)
    state, first = run.resume(state_after(0))
    assert is_after(first, state)
    for step in range(first + 1, last + 1):
        run.save(step, state_after(step))
    run.wait()
    run._end()
    return first


def files(path: Path, pattern: str) -> list[Path]:
    return sorted(path.glob(f"run-*/{pattern}"))


def test_a_killed_training_resumes_at_its_newest_local_step(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    assert trained(tmp_path, given, 7) == 0
    assert len(files(given["local"], "*/manifest.json")) == 2
    assert trained(tmp_path, given, 101) == 6
    assert Run(tmp_path / "run", every=1).steps() == [100]
    assert trained(tmp_path, given, 103) == 100  # of both, this one is on the own disk
    assert trained(tmp_path, given, 103) == 102


def test_after_a_local_save_that_failed_the_steps_before_are_kept(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    run = Run(tmp_path / "run", on_error="log", **given)
    run.resume(state_after(0))
    for step in (2, 4):
        run.save(step, state_after(step))
    run.wait()
    with monkeypatch.context() as patch:
        patch.setattr(LocalSave, "_written", fail)
        assert run.save(6, state_after(6))
        assert run._local is not None
        assert isinstance(run._local._flight.failure(), OSError)
    assert run.save(8, state_after(8))
    run.close()
    kept = [path.parent.name[:8] for path in files(given["local"], "*/manifest.json")]
    assert kept == ["00000004", "00000008"]


@pytest.mark.parametrize("damage", ["a bit", "no file", "no manifest", "manifest"])
def test_a_damaged_local_step_gives_way_to_the_one_before(
    tmp_path: Path, given: dict[str, Any], damage: str
) -> None:
    trained(tmp_path, given, 4)
    manifest = files(given["local"], "00000004.*/manifest.json")[0]
    chunk = files(given["local"], "00000004.*/data-*/*/c.*")[0]
    if damage == "a bit":
        data = bytearray(chunk.read_bytes())
        data[7] ^= 1
        chunk.write_bytes(data)
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-1])
    else:
        (chunk if damage == "no file" else manifest).unlink()
    assert trained(tmp_path, given, 4) == 2
    assert trained(tmp_path, given, 4) == 4


def test_local_steps_of_another_run_are_named(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, given, 4)
    shutil.rmtree(tmp_path / "run")
    assert trained(tmp_path, given, 2) == 0
    assert "is of another run; it is not used" in caplog.text


def test_local_steps_from_before_a_rollback_are_not_used(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    given["every"] = 3
    trained(tmp_path, given, 8)
    assert Run(tmp_path / "run", every=3).rollback(3, newest=6)
    assert trained(tmp_path, given, 3) == 3
    assert "is of a start before a rollback; it is not used" in caplog.text


def test_a_run_that_has_not_resumed_saves_beside_no_local_steps(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    trained(tmp_path, given, 4)
    with pytest.raises(ValueError, match=r"have local steps of .* up to 4, .*: call run.resume"):
        Run(tmp_path / "run", **given).save(6, state_after(6))


def test_resume_at_a_step_below_the_newest_local_one_is_refused(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    given["every"] = 3
    trained(tmp_path, given, 4)
    with pytest.raises(ValueError, match="later local steps than 3: 2, 4"):
        Run(tmp_path / "run", **given).resume(state_after(0), step=3)


def test_inspect_shows_the_local_steps_of_a_host(
    tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, given, 4)
    files(given["local"], "00000004.*/manifest.json")[0].unlink()
    files(given["local"], "00000002.*/data-*/*/c.*")[0].unlink()
    assert main(["inspect", "--local", str(given["local"])]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ *2 +1 +\d s +\d.* MiB +(\d+) of \d+$", text, re.M), text
    assert re.search(r"^ *4 +1 +\d.* MiB +is not complete, or half removed$", text, re.M), text
    assert main(["inspect", "--local", "--json", str(given["local"])]) == 0
    (rows,) = json.loads(capsys.readouterr().out)["runs"].values()
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[0]["num_here"] == rows[0]["num_files"] - 1
    assert main(["inspect", "--local", str(tmp_path)]) == 2
    assert "has no local steps" in capsys.readouterr().err


def test_a_folder_that_is_too_small_is_told_before_the_first_step(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    run = Run(tmp_path / "run", **given)
    with pytest.raises(OSError, match=r"host 0 has room for .*, and 3 local steps of .* need"):
        run.resume(state_after(0))
    with pytest.raises(ValueError, match="nothing is saved"):
        run.save(2, state_after(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"local": "s3://bucket/run"}, "must be a folder on each host's own disk"),
        ({"local_every": None}, "local needs local_every"),
        ({"local": None}, "local_every was given without local"),
        ({"local_every": 0}, "local_every must be"),
        ({"local_keep": 0}, "local_keep must be"),
        ({"local_copies": -1}, "local_copies must be a whole number from 0 on"),
    ],
)
def test_arguments(
    tmp_path: Path, given: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Run(tmp_path / "run", **{**given, **wrong})

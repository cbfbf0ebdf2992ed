"""``gda inspect`` of files of every kind, as text and as JSON."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax_files import write_orbax
from running import Run
from safetensors.numpy import save_file

import gda

W = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_leaves_of_equal_layers_share_a_row(run: Run, tmp_path: Path) -> None:
    layers = [{"w": W + i, "b": W[0]} for i in range(3)]
    gda.checkpoint.save(tmp_path / "run", {"layers": layers, "z": W, "step": 7})
    lines = run.printed("inspect", tmp_path / "run").splitlines()
    assert [line.split() for line in lines[:-2]] == [
        ["layers/0-2/b", "(x3)", "float32[2]", "24", "B", "numpy"],
        ["layers/0-2/w", "(x3)", "float32[4,2]", "96", "B", "numpy"],
        ["step", "int", "7"],
        ["z", "float32[4,2]", "32", "B", "numpy"],
    ]
    assert lines[-2].startswith("8 leaves, 152 B; gda ")
    assert len(gda.checkpoint.inspect(tmp_path / "run").rows) == 8  # each leaf in Python


def test_tied_leaves_count_once(run: Run, tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path / "run", {"embed": W, "head": W})
    total = run.printed("inspect", tmp_path / "run").splitlines()[-2]
    assert total.startswith("2 leaves, 32 B, tied leaves once; gda ")


def test_safetensors_files(run: Run, tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w": W for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert run.printed("inspect", path).splitlines() == [
            "layers.0-1.w (x2)  float32[4,2]  64 B",
            "2 leaves, 64 B; format pt",
            f"safetensors files: {path}",
        ]
    contents = gda.checkpoint.inspect(tmp_path)
    assert (contents.kind, contents.about, contents.data) == ("safetensors", {"format": "pt"}, "")
    assert [leaf.path for leaf in contents.leaves] == [("layers.0.w",), ("layers.1.w",)]


def test_a_run_of_orbax_with_one_tree_and_with_several(run: Run, tmp_path: Path) -> None:
    write_orbax(tmp_path / "one", {("w",): W, ("step",): 7})
    assert run.printed("inspect", tmp_path / "one").splitlines() == [
        *("step  int           7", "w     float32[4,2]  32 B", "2 leaves, 32 B"),
        f"an Orbax run: {tmp_path}/one",
    ]
    write_orbax(tmp_path / "two" / "state", {("w",): W})
    write_orbax(tmp_path / "two" / "ema", {("w",): W})
    (tmp_path / "two" / "_CHECKPOINT_METADATA").write_text("{}")
    lines = run.printed("inspect", tmp_path / "two").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["ema/w", "state/w"]


def test_a_folder_of_steps_of_orbax_and_of_gda(run: Run, tmp_path: Path) -> None:
    for step in (9, 10):
        write_orbax(tmp_path / f"{step}" / "default", {("w",): W + step})
    (tmp_path / "10" / "metrics").mkdir()
    (tmp_path / "10" / "metrics" / "metrics").write_text('{"loss": 0.5, "name": "a"}')
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    heading, *rows, last = run.printed("inspect", tmp_path).splitlines()
    assert heading.split()[:2] == ["step", "age"]
    assert [row.split()[0] for row in rows] == ["9", "10"]
    assert rows[1].endswith("loss 0.5")
    assert last == "steps of Orbax: 9, 10"
    with gda.checkpoint.Run(tmp_path, every=10) as training:
        state, _ = training.resume({"w": W})
        training.save(20, state, metrics={"loss": float("nan")})
    (tmp_path / "00000015.damaged-1").mkdir()
    (tmp_path / "00000030").mkdir()
    lines = run.printed("inspect", tmp_path).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["9", "10", "20"]
    assert lines[4:7] == [
        "steps of Orbax: 9, 10",
        "not complete: 00000030",
        "damaged and set aside: 00000015.damaged-1",
    ]
    found = json.loads(run.printed("inspect", tmp_path, "--json"))
    assert [(each["step"], each["kind"]) for each in found["steps"]] == [
        *((9, "orbax"), (10, "orbax"), (20, "checkpoint"))
    ]
    assert [each["metrics"] for each in found["steps"]] == [{}, {"loss": 0.5}, {"loss": "nan"}]
    assert found["set_aside"] == ["00000015.damaged-1"]
    assert found["unfinished"] == ["00000030"]
    assert found["owner"]["generation"] == 1


def test_one_step_of_a_run_of_orbax_and_of_gda(run: Run, tmp_path: Path) -> None:
    for step in (9, 10):
        write_orbax(tmp_path / f"{step}" / "default", {("w",): W + step})
    row, total, place = run.printed("inspect", f"{tmp_path}@latest").splitlines()
    assert row.split() == ["w", "float32[4,2]", "32", "B"]
    assert (total, place) == ("1 leaf, 32 B", f"an Orbax run: {tmp_path}/10")
    with gda.checkpoint.Run(tmp_path, every=10) as training:
        state, _ = training.resume({"w": W})
        training.save(20, state)
    assert json.loads(run.printed("inspect", f"{tmp_path}@9", "--json"))["kind"] == "orbax"
    assert json.loads(run.printed("inspect", f"{tmp_path}@latest", "--json"))["path"] == (
        f"{tmp_path}/00000020"
    )
    assert "has no step 11; it has the steps 9, 10, 20" in run.refusal("inspect", f"{tmp_path}@11")
    assert np.array_equal(gda.checkpoint.restore(f"{tmp_path}@9", {"w": W})["w"], W + 9)


def test_steps_without_the_file_of_their_run_are_listed(run: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        gda.checkpoint.save(tmp_path / f"{step:08d}", {"w": W})
    lines = run.printed("inspect", tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1", "2"]


def test_json_has_every_leaf(run: Run, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"w": [W], "key": jax.random.key(0), "nan": float("nan"), "raw": b"\0"}
    tree |= {"n": 10**30, "step": 7, "data": gda.checkpoint.PerProcess([5])}
    gda.checkpoint.save(tmp_path / "run", tree)
    found = json.loads(run.printed("inspect", tmp_path / "run", "--json"))
    contents = gda.checkpoint.inspect(tmp_path / "run")
    assert found["version"] == 1
    assert found["kind"] == "checkpoint"
    assert [found[name] for name in ("path", "data", "nbytes", "about")] == [
        *(contents.path, contents.data, contents.nbytes, contents.about)
    ]
    leaves = {tuple(each["path"]): each for each in found["leaves"]}
    assert leaves.keys() == {leaf.path for leaf in contents.leaves}
    w = leaves["w", 0]
    assert (w["kind"], w["shape"], w["dtype"], w["nbytes"]) == ("numpy", [4, 2], "float32", 32)
    assert w["fingerprint"] == gda.fingerprint(W)
    assert leaves[("key",)]["key_impl"] == "threefry2x32"
    values = {name: leaves[(name,)]["value"] for name in ("nan", "raw", "n", "step")}
    assert values == {"nan": "nan", "raw": "b'\\x00'", "n": str(10**30), "step": 7}
    assert (leaves[("data",)]["kind"], leaves[("data",)]["processes"]) == ("PerProcess", 1)


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_json_says_the_kind_of_files(run: Run, tmp_path: Path, kind: str) -> None:
    if kind == "orbax":
        write_orbax(tmp_path, {("w",): W})
    else:
        save_file({"w": W}, tmp_path / "model.safetensors")
    found = json.loads(run.printed("inspect", tmp_path, "--json"))
    assert (found["kind"], found["nbytes"], found["leaves"][0]["shape"]) == (kind, 32, [4, 2])


def test_files_of_two_kinds_are_an_error(run: Run, tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "model.safetensors")
    write_orbax(tmp_path, {("w",): W})
    said = "has safetensors files and an Orbax run side by side; move each into"
    assert said in run.refusal("inspect", tmp_path)

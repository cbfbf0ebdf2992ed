"""``gda plan`` of trees of every kind, over meshes that need not exist."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from orbax_files import write_orbax
from running import Run
from safetensors.numpy import save_file

import gda
from gda.compiled.devices.device_kinds import KINDS

W, B = np.zeros((64, 32), np.float16), np.zeros(32, np.float32)

MODEL = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

def shapes():
    w = jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.bfloat16)
    return {"layers": [{"w": w}, {"w": w}], "b": jax.ShapeDtypeStruct((6,), jnp.int32)}

def rule(path, leaf):
    return P(None, "data") if path.endswith("w") else P()

def needs_a_mesh(mesh):
    return {}

nothing = dict
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    return "model.py"


def test_shapes_of_a_function_with_an_optimizer(run: Run, model: str) -> None:
    command = "plan", f"{model}:shapes", "--mesh", "data=4,model=2", "--optimizer", "adamw"
    out = run.printed(*command)
    w = jax.ShapeDtypeStruct((1 << 16, 1 << 16), np.dtype("bfloat16"))
    shapes = {"layers": [{"w": w}, {"w": w}], "b": jax.ShapeDtypeStruct((6,), np.int32)}
    mesh = AbstractMesh((4, 2), ("data", "model"))
    # By default each array is sharded over the axes that divide it.
    specs = {"layers": P("data", "model"), "b": P("model")}
    assert out.startswith(f"{gda.layouts(gda.abstract(shapes, mesh, specs))}\n")
    # 1 GiB of bfloat16 for each layer, and four times as much in float32; the integers have none.
    assert "\n10.0 GiB on each device with adamw, 2 arrays in float32 for each\n" in out
    fits, small = (" ".join(out.split()).partition(" too small ")[n] for n in (0, 2))
    assert fits.endswith("b300 5.0%, gb300 4.8%")
    assert "fits v3 64.6%" in fits
    assert small.startswith("v2 gradients, activations and the program take memory too")
    found = json.loads(run.printed(*command, "--json"))
    assert found["optimizer_bytes_per_device"] == 8 << 30
    assert found["all_bytes_per_device"] == (10 << 30) + 12
    assert found["share_of_memory"].keys() == {kind.name for kind in KINDS}
    assert {each["path"]: each["spec"] for each in found["arrays"]} == {
        **{f"layers/{n}/w": ["data", "model"] for n in (0, 1)},
        "b": ["model"],
    }


def test_specs_and_rules_by_name(run: Run, model: str) -> None:
    def specs(*words: str) -> list[list[str | None]]:
        command = "plan", f"{model}:shapes", "--mesh", "data=2,model=3", "--json"
        arrays = {
            each["path"]: each for each in json.loads(run.printed(*command, *words))["arrays"]
        }
        return [arrays[path]["spec"] for path in ("layers/0/w", "layers/1/w", "b")]

    first = "--spec", "*/0/w=_,data"
    assert specs(*first) == [[None, "data"], [], []]
    assert specs("--spec", "data", *first, "--spec", "layers/*=auto") == [
        *([None, "data"], ["data"], ["data"])
    ]
    assert specs("--rules", f"{model}:rule") == [[None, "data"], [None, "data"], []]


@pytest.mark.parametrize("kind", ["checkpoint", "a step of a run", "safetensors", "orbax"])
def test_files_of_every_kind(run: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "files"
    tree = {"w": W, "b": B}
    if kind == "checkpoint":
        gda.checkpoint.save(path, {**tree, "name": "x"})
    elif kind == "safetensors":
        path.mkdir()
        save_file(tree, path / "model.safetensors")
    elif kind == "orbax":
        write_orbax(path, {(name,): value for name, value in tree.items()})
    else:
        with gda.checkpoint.Run(path, every=1) as training:
            state, _ = training.resume(tree)
            training.save(1, state)
    at = f"{path}@latest" if kind == "a step of a run" else path
    out = run.printed("plan", at, "--mesh", "x=2")
    assert [line.split()[:3] for line in out.splitlines()[3:5]] == [
        *(["w", "float16[64,32]", "P('x')"], ["b", "float32[32]", "P('x')"])
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.py:shapes", "--spec", "q=data"], "no array has a path like 'q', of --spec"),
        (["model.py:shapes", "--spec", "*/w=dat"], "; did you mean 'data'?"),
        (["model.py:shapes", "--spec", "a b"], "--spec: the name of a mesh axis was expected"),
        (["model.py:shapes", "--rules", "model.py:none"], "model.py has no function 'none'"),
        (["model.py:shapes", "--rules", "model.py:rule", "--spec", "auto"], "give one of them"),
        (["model.py:needs_a_mesh"], "model.py:needs_a_mesh failed; it is called without argument"),
        (["model.py:nothing"], "model.py:nothing has no arrays"),
        (["nothing"], "there is no checkpoint at nothing"),
    ],
)
def test_mistakes(run: Run, model: str, words: list[str], message: str) -> None:
    assert message in run.refusal("plan", *words, "--mesh", "data=2")

"""``gda plan --tree --device``: the memory of one device."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from commands import Run
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda.planning.device_kinds import kind_named
from gda.planning.memory import ModelMemory
from gda.planning.model import plan_model
from gda.planning.notation.model_file import ModelText

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"
GIB = 2**30
V5E = kind_named("v5e").capacity_bytes


def memory_of(document: Any, device: str, optimizer: str | None = None) -> dict[str, Any]:
    """Return the document of the memory of a model."""
    model = plan_model(ModelText("model.json", json.dumps(document)), None, None, pad=False)
    return ModelMemory(model, kind_named(device), optimizer, pad=False).document()


def test_a_model_that_fits(run: Run) -> None:
    code, out, err = run("plan", "--tree", LLAMA, "--device", "v5e", "--optimizer", "adam")
    assert (code, err) == (0, "")
    assert (
        "\n"
        "device        v5e: 15.8 GiB for programs\n"
        "needed        604.0 MiB: parameters 201.3 MiB, adam 402.6 MiB\n"
        "fits          yes: 15.2 GiB left for gradients and activations\n"
        "\n"
    ) in out


def test_a_larger_mesh_is_suggested(run: Run) -> None:
    options = ("--mesh", "data=1,model=2", "--optimizer", "adam")
    _, out, _ = run("plan", "--tree", LLAMA, "--device", "v5e", *options)
    assert (
        "fits          no: 3.1 GiB too much; without replicas it needs at least 3 devices\n"
        "suggestion    --mesh data=2,model=2: 4 devices; leaves 6.3 GiB for gradients and\n"
        "              activations\n"
    ) in out


REPLICATED = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "f32",
    "parameters": {
        "up": {"shape": [2**16, 2**16], "spec": "model"},
        "down": {"shape": [2**16, 2**15], "spec": "_,data"},
        "norm": {"shape": [2**16]},
    },
}


def test_the_specs_of_a_few_parameters_are_suggested_before_a_larger_mesh(
    run: Run, write: Callable[..., Path]
) -> None:
    assert memory_of(REPLICATED, "v5e")["suggestion"] is None
    memory = memory_of(REPLICATED, "v5e", "adam")
    assert memory["nbytes_parameters"] == 8 * GIB + 2 * GIB + 2**18
    assert memory["nbytes_optimizer"] == 2 * memory["nbytes_parameters"] + 4
    assert memory["suggestion"] == {
        "mesh": {"data": 4, "model": 2},
        "num_devices": 8,
        "specs": {"up": ["model", "data"]},
        "nbytes_left": V5E - 3 * (4 * GIB + 2**18) - 4,
    }
    assert memory["least_devices"] == math.ceil(3 * (24 * GIB + 2**18) / (V5E - 4))
    _, out, _ = run("plan", "--tree", write(REPLICATED), "--device", "v5e", "--optimizer", "adam")
    assert "suggestion    P('model', 'data') for up; leaves 3.7 GiB for gradients and" in out


def test_no_suggestion_is_found(run: Run, write: Callable[..., Path]) -> None:
    document = {"mesh": {"x": 2}, "parameters": {"w": {"shape": [3**24], "dtype": "f32"}}}
    assert memory_of(document, "a100-40")["suggestion"] is None
    _, out, _ = run("plan", "--tree", write(document), "--device", "a100-40")
    assert "suggestion    none found with one axis of the mesh larger\n" in out
    assert "note          JAX takes this part of the memory; XLA_CLIENT_MEM_FRACTION sets\n" in out


def test_adam_has_the_state_of_optax() -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    parameters = {"w": np.ones((8, 4), ml_dtypes.bfloat16), "b": np.ones(8, np.float32)}
    state = jax.tree.leaves(jax.eval_shape(optax.adam(1e-3).init, parameters))
    document = {
        "mesh": {"x": 1},
        "parameters": {
            name: {"shape": [*array.shape], "dtype": array.dtype.name}
            for name, array in parameters.items()
        },
    }
    memory = memory_of(document, "v5e", "adam")
    assert memory["nbytes_optimizer"] == sum(leaf.size * leaf.dtype.itemsize for leaf in state)


SIZES = st.integers(8, 20).map(lambda power: 2**power)
SPECS = st.sampled_from([[], ["x"], [None, "x"], ["y", "x"], [["x", "y"]]])
ARRAYS = st.builds(
    lambda rows, columns, spec: {"shape": [rows, columns], "spec": spec}, SIZES, SIZES, SPECS
)


@rarely(2)
@given(
    st.dictionaries(st.sampled_from(["a.0", "a.1", "b", "c"]), ARRAYS, min_size=1),
    st.sampled_from(["v2", "h200"]),
    st.sampled_from([None, "adam"]),
)
def test_a_suggestion_that_is_followed_fits(
    parameters: dict[str, Any], device: str, optimizer: str | None
) -> None:
    document = {"mesh": {"x": 2, "y": 4}, "dtype": "f32", "parameters": parameters}
    before = memory_of(document, device, optimizer)
    needed = before["nbytes_parameters"] + before["nbytes_optimizer"]
    assert before["nbytes_left"] == kind_named(device).capacity_bytes - needed
    assert before["fits"] == (before["nbytes_left"] >= 0)
    suggestion = before["suggestion"]
    if suggestion is None:
        return
    assert not before["fits"]
    assert suggestion["num_devices"] >= before["least_devices"]
    followed = {name: dict(array) for name, array in parameters.items()}
    for name, spec in suggestion["specs"].items():
        for each in followed if name in followed else ("a.0", "a.1"):
            if name in (each, "a.0-1"):
                followed[each]["spec"] = spec
    document = {**document, "mesh": suggestion["mesh"], "parameters": followed}
    after = memory_of(document, device, optimizer)
    assert after["fits"]
    assert after["nbytes_left"] == suggestion["nbytes_left"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tree", LLAMA, "--device", "v5"], "gda: --device: no kind of device has the name 'v5'"),
        (
            ["--tree", LLAMA, "--optimizer", "adam"],
            "--optimizer counts its state in the memory",
        ),
        (["--tree", LLAMA, "--device", "v5e", "--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--shape", "8", "--device", "v5e"], "--device and --optimizer are for a model; give"),
    ],
)
def test_mistakes(run: Run, options: list[Any], said: str) -> None:
    code, out, err = run("plan", *options)
    assert (code, out) == (2, "")
    assert said in err

"""A model in the memory of a device."""

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gda.planning.device_kinds import kind_named
from gda.planning.memory import ModelMemory
from gda.planning.model import plan_model
from gda.planning.notation.model_file import ModelText

GIB = 2**30
V5E = kind_named("v5e").capacity_bytes


def memory_of(document: Any, optimizer: str | None = None) -> dict[str, Any]:
    """Return the document of the memory of a model on a v5e."""
    model = plan_model(ModelText("model.json", json.dumps(document)), None, None, pad=False)
    return ModelMemory(model, kind_named("v5e"), optimizer).document()


def test_memory_is_counted_with_the_state_of_the_optimizer() -> None:
    document = {
        "mesh": {"data": 4, "model": 2},
        "dtype": "f32",
        "parameters": {
            "up": {"shape": [2**16, 2**16], "spec": "model"},
            "down": {"shape": [2**16, 2**15], "spec": "_,data"},
            "norm": {"shape": [2**16]},
        },
    }
    parameters = 8 * GIB + 2 * GIB + 2**18
    plain, adam = memory_of(document), memory_of(document, "adam")
    assert plain["nbytes_parameters"] == adam["nbytes_parameters"] == parameters
    assert (plain["nbytes_optimizer"], adam["nbytes_optimizer"]) == (0, 2 * parameters + 4)
    assert plain["nbytes_left"] == V5E - parameters
    assert adam["nbytes_left"] == V5E - 3 * parameters - 4
    assert (plain["fits"], adam["fits"]) == (True, False)
    assert adam["least_devices"] == math.ceil(3 * (24 * GIB + 2**18) / (V5E - 4))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_has_the_state_of_optax(optimizer: str) -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    parameters = {"w": np.ones((8, 4), ml_dtypes.bfloat16), "b": np.ones(8, np.float32)}
    state = jax.tree.leaves(jax.eval_shape(getattr(optax, optimizer)(1e-3).init, parameters))
    document = {
        "mesh": {"x": 1},
        "parameters": {
            name: {"shape": [*array.shape], "dtype": array.dtype.name}
            for name, array in parameters.items()
        },
    }
    memory = memory_of(document, optimizer)
    assert memory["nbytes_optimizer"] == sum(leaf.size * leaf.dtype.itemsize for leaf in state)

"""``examples/rehearse_equinox.py`` with a small model, on CPUs."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import gda

EXAMPLE = Path(__file__).parents[2] / "examples" / "rehearse_equinox.py"


def test_step_of_an_equinox_model() -> None:
    pytest.importorskip("equinox")
    example = runpy.run_path(str(EXAMPLE))
    step_on = example["step"]
    step_on.__globals__.update(WIDTH=64, HIDDEN=128, DEPTH=2, ROWS=32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    step, args = step_on(mesh)
    found = gda.rehearse(step, *args)
    matrices = 64 * 128 + 128 * 128 + 128 * 64
    biases = 128 + 128 + 64
    state = 3 * 4 * (matrices // 8 + biases) + 4
    rows = 2 * 32 // 4 * 64 * 4
    assert found.argument_bytes == state + rows
    assert found.aliased_bytes == state
    assert found.undonated_bytes == 0
    assert {each.axes for each in found.traffic} <= {("data",), ("model",), ("data", "model")}
    # Its activation functions are leaves that are no arrays; in the arguments they are None.
    assert len(found.arguments) == 3 * 6 + 1 + 2

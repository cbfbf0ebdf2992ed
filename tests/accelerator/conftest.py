"""An accelerator, or a CPU device in its place, meshes beside it, and the figures of a run.

With the variable ``GDA_FIGURES``, the path of a file, every figure becomes a line of JSON in it.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from on_accelerator import Measured, is_stand_in

# Two processes share the accelerator in some tests, and by default one would take most of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and keep them in one process: there is one accelerator."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.accelerator)
            item.add_marker(pytest.mark.xdist_group("accelerator"))


@pytest.fixture(scope="session")
def card() -> Any:
    """The accelerator, or a CPU device as its stand-in."""
    if is_stand_in():
        return jax.devices("cpu")[0]
    device = jax.devices()[0]
    if device.platform == "cpu":
        pytest.skip("needs an accelerator; GDA_ACCELERATOR=cpu takes CPU devices in its place")
    return device


@pytest.fixture(scope="session")
def on_card(card: Any) -> bool:
    """True on an accelerator, for what only such a device can show."""
    return card.platform != "cpu"


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def card_mesh(request: pytest.FixtureRequest, card: Any) -> Mesh:
    """A mesh of two axes over the accelerator alone, with Auto or with Explicit axes."""
    return Mesh(np.array([[card]]), ("x", "y"), axis_types=(request.param,) * 2)


@pytest.fixture
def one_mesh(card: Any) -> Mesh:
    """As ``card_mesh``, with Auto axes."""
    return Mesh(np.array([[card]]), ("x", "y"))


@pytest.fixture
def cpu_mesh() -> Mesh:
    """A mesh over 4 CPU devices, none of which stands for the accelerator."""
    return Mesh(np.array(jax.devices("cpu")[4:8]).reshape(2, 2), ("x", "y"))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Record a figure by its name, so that a test that fails later still leaves it."""

    def record(name: str, value: Any) -> None:
        print(f"measured {name}: {value}")
        if path := os.environ.get("GDA_FIGURES"):
            line = json.dumps({"test": request.node.name, "figure": name, "value": value})
            with open(path, "a") as file:
                file.write(f"{line}\n")

    return record

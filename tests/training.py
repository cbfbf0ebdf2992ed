"""A small training, whose state says how many steps it has done."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from meshes import cut, is_right, mesh_of

from gda.checkpoint import Run

DATA = np.arange(64, dtype=np.float32).reshape(8, 8)


def state_of(steps: int) -> Any:
    """Return the state after so many steps."""
    return {"w": _weights(steps), "n": steps}


@functools.cache
def _weights(steps: int) -> Any:
    return cut(DATA + steps, mesh_of({"x": jax.device_count()}), P("x"))


def check(state: Any, steps: int) -> None:
    """The state is that after so many steps."""
    assert state["n"] == steps
    assert is_right(state["w"], DATA + steps)


def train(run: Run, first: int, last: int, stride: int = 1, **options: Any) -> None:
    """Do the steps after the first, up to the last."""
    for step in range(first + stride, last + 1, stride):
        run.save(step, state_of(step), **options)

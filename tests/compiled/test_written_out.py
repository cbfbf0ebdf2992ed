"""Equal layers that a loop of Python writes out, in traces of models."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gda
from gda.compiled.written_out import layers_written_out


def trained(apply: Callable[..., Any], num_layers: int) -> Any:
    """Return the trace of a training step of a model with a loop of Python over its layers."""

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = apply(x, layer)
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    params = [{"up": w, "down": w} for _ in range(num_layers)]
    return jax.jit(step).trace(params, jax.ShapeDtypeStruct((8, 16), jnp.float32)).jaxpr


def mlp(x: Any, layer: Any) -> Any:
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


@pytest.mark.parametrize("apply", [mlp, jax.checkpoint(mlp), jax.jit(mlp)])
def test_layers_of_a_training_step(apply: Callable[..., Any]) -> None:
    # The gradient of the first layer lacks the product for its input.
    assert layers_written_out(trained(apply, 24)) in (23, 24)


def test_few_layers_or_scanned_ones_are_not_reported() -> None:
    assert layers_written_out(trained(mlp, 3)) == 0

    def scanned(x: Any, layers: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (mlp(x, layer), None), x, layers)[0].sum()

    w = jax.ShapeDtypeStruct((24, 16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    step = jax.jit(jax.grad(scanned))
    assert layers_written_out(step.trace(x, {"up": w, "down": w}).jaxpr) == 0


def test_layers_inside_a_function_are_found() -> None:
    inner = jax.jit(lambda x, ws: [x := jnp.tanh(x @ w) for w in ws][-1])
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    traced = jax.jit(lambda x, ws: inner(x + 1, ws) * 2).trace(w, [w] * 12)
    assert layers_written_out(traced.jaxpr) == 12


def test_a_rehearsal_logs_its_phases(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ x)
        return x

    with caplog.at_level(logging.INFO, logger="gda"):
        gda.rehearse(step, jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert [record.getMessage() for record in caplog.records if record.name == "gda.rehearse"] == [
        "tracing step",
        "lowering step",
        "compiling step; 8 equal layers are written out; "
        "jax.lax.scan over them compiles in about half the time",
    ]

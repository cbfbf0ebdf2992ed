"""Equal layers of traced programs, which a scan would have once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import gda
from gda.compiled.unrolled import UnrolledLayers, unrolled_in

X = jax.ShapeDtypeStruct((4, 8), np.float32)
W = jax.ShapeDtypeStruct((8, 8), np.float32)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ w.T


def loss(x: jax.Array, ws: list[jax.Array], apply: Any = layer) -> jax.Array:
    for w in ws:
        x = apply(x, w)
    return (x**2).sum()


def scanned(x: jax.Array, ws: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)
    return (x**2).sum()


def found(fun: Any, *args: Any) -> UnrolledLayers | None:
    return unrolled_in(jax.jit(fun).trace(*args).jaxpr)


def test_layers_of_a_loop_of_python() -> None:
    assert found(loss, X, [W] * 12) == (12, 12 * 5 + 2, 5 + 2)


def test_layers_in_an_inner_function() -> None:
    assert found(lambda *args: jax.jit(loss)(*args), X, [W] * 12) == (12, 12 * 5 + 3, 5 + 3)


@pytest.mark.parametrize(
    "apply",
    [layer, jax.jit(layer), jax.checkpoint(layer)],  # pyright: ignore
    ids=["plain", "jit", "checkpoint"],
)
def test_the_backward_pass_counts(apply: Any) -> None:
    of_12, of_24 = (
        found(jax.grad(lambda x, ws: loss(x, ws, apply), 1), X, [W] * count) for count in (12, 24)
    )
    assert of_12 is not None
    assert of_24 is not None
    assert (of_12.num_layers, of_24.num_layers) == (12, 24)
    assert of_24.num_operations > 1.8 * of_12.num_operations
    assert of_24.num_operations_scanned == of_12.num_operations_scanned


def test_names_do_not_tell_layers_apart() -> None:
    def named(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for number, w in enumerate(ws):
            x = checkpoint_name(layer(x, w), f"layer {number}")
        return x

    assert found(named, X, [W] * 12) == (12, 12 * 6, 6)


def test_no_layers() -> None:
    stacked = jax.ShapeDtypeStruct((12, 8, 8), np.float32)
    assert found(jax.grad(scanned, 1), X, stacked) is None
    assert found(loss, X, [W] * 3) is None
    assert found(lambda x: x, X) is None


def test_layers_of_different_shapes() -> None:
    shapes = [jax.ShapeDtypeStruct((8 + n, 9 + n), np.float32) for n in range(12)]

    def narrowing(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = x @ w
        return x

    assert found(narrowing, X, shapes) is None


def test_many_layers_are_noted() -> None:
    rehearsal = gda.rehearse(jax.jit(loss), X, [W] * 4)
    assert "unrolled" not in str(rehearsal)
    many = UnrolledLayers(24, 7260, 406)
    text = str(gda.Rehearsal(**{**vars(rehearsal), "unrolled": many}))
    assert (
        "\n24 equal layers are unrolled: jax.lax.scan over stacked parameters would leave 406 of "
        "7,260 operations, and compile sooner\n"
    ) in text

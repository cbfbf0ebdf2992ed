"""A training step of a transformer of 1.2 billion parameters, its layers scanned or unrolled.

    gda rehearse benchmarks/compiled/layered_step.py:scanned --topology v5e:4x8 \
        --mesh data,model --search
    gda rehearse benchmarks/compiled/layered_step.py:unrolled --topology v5e:4x8 \
        --mesh data=8,model=4
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

LAYERS, WIDTH, HEADS, MLP, VOCABULARY = 24, 2048, 16, 8192, 32_000
SEQUENCES, TOKENS = 128, 2048

_SHAPES = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, MLP),
    "down": (MLP, WIDTH),
}


def _apply(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    layer = jax.tree.map(lambda parameter: parameter.astype(x.dtype), layer)
    by_head = *x.shape[:2], HEADS, WIDTH // HEADS
    y = _normalized(x)
    query, key, value = ((y @ layer[name]).reshape(by_head) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(_normalized(x) @ layer["up"]) @ layer["down"], None


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


def _loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embedding"].astype(jnp.bfloat16)[tokens]
    apply = jax.checkpoint(_apply)
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x, _ = apply(x, layer)
    else:
        x, _ = jax.lax.scan(apply, x, params["layers"])
    logits = (_normalized(x) @ params["embedding"].T.astype(x.dtype)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: Any, tokens: jax.Array) -> Any:
    params, mean = state
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, jax.grad(_loss)(params, tokens))
    return jax.tree.map(lambda p, m: p - 3e-4 * jnp.sign(m), params, mean), mean


def _arguments(mesh: Mesh, layers: Any, leading: tuple[None, ...]) -> tuple[Any, Any]:
    def spec(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        across = path.endswith(("out", "down", "embedding"))
        return P(*leading[: leaf.ndim - 2], *(("model", "data") if across else ("data", "model")))

    params = {"embedding": _shape(VOCABULARY, WIDTH), "layers": layers}
    params = gda.abstract(params, mesh, spec)
    tokens = jax.ShapeDtypeStruct((SEQUENCES, TOKENS), jnp.int32)
    return (params, params), gda.abstract(tokens, mesh, P("data"))


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def scanned(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return the step and its arguments, with stacked layers."""
    layers = {name: _shape(LAYERS, *shape) for name, shape in _SHAPES.items()}
    return _step, _arguments(mesh, layers, (None,))


def unrolled(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return the step and its arguments, with a list of layers."""
    layer = {name: _shape(*shape) for name, shape in _SHAPES.items()}
    return _step, _arguments(mesh, [layer] * LAYERS, ())

"""Rehearse a training step of a 7-billion-parameter transformer on devices that are not here.

    python examples/rehearse_transformer.py
    python examples/rehearse_transformer.py --topology v5e:16x16 --mesh data=32,model=8
    gda rehearse examples/rehearse_transformer.py:step --topology h100:4x8 \
        --mesh data=8,model=4

The shapes are those of Llama 2 7B. Parameters and the state of Adam are float32; the layers compute
in bfloat16, and compute again what the backward pass needs. Each matrix is sharded over 'data'
(fully sharded training) and over 'model' (tensor parallelism). The script needs a compiler, and no
TPU or GPU: the extra ``rehearse`` for TPUs, ``rehearse-gpu`` for GPUs. A topology takes about a
minute.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

LAYERS, WIDTH, HEADS, MLP, VOCABULARY = 32, 4096, 32, 11_008, 32_000
HEAD = WIDTH // HEADS
SEQUENCES, TOKENS = 256, 4096  # of a batch, on all devices together

LAYER_SHAPES = {
    "attention_norm": (WIDTH,),
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "mlp_norm": (WIDTH,),
    "gate": (WIDTH, MLP),
    "up": (WIDTH, MLP),
    "down": (MLP, WIDTH),
}
LAYER_SPECS = {
    "attention_norm": P(),
    "query": P("data", "model"),
    "key": P("data", "model"),
    "value": P("data", "model"),
    "out": P("model", "data"),
    "mlp_norm": P(),
    "gate": P("data", "model"),
    "up": P("data", "model"),
    "down": P("model", "data"),
}
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "layers": {name: (LAYERS, *shape) for name, shape in LAYER_SHAPES.items()},
    "norm": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}
SPECS = {
    "embedding": P("model", "data"),
    "layers": {name: P(None, *spec) for name, spec in LAYER_SPECS.items()},
    "norm": P(),
    "head": P("data", "model"),
}


# The model. Activations have the dimensions (sequence, token, width).


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Return queries or keys with the position of each token, as angles."""
    frequencies = 1e4 ** -(jnp.arange(0, HEAD, 2) / HEAD)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    by_head = *x.shape[:2], HEADS, HEAD
    query, key, value = [(x @ layer[name]).reshape(by_head) for name in ("query", "key", "value")]
    mixed = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
    return mixed.reshape(x.shape) @ layer["out"]


def mlp(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss_of(params: Any, tokens: jax.Array, targets: jax.Array, mesh: Mesh) -> jax.Array:
    def constrained(x: jax.Array, *axes: str) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def apply(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        layer = jax.tree.map(lambda parameter: parameter.astype(x.dtype), layer)
        x = x + attention(normalized(x, layer["attention_norm"]), layer)
        return x + mlp(normalized(x, layer["mlp_norm"]), layer), None

    # Without these two XLA shards x by its width, so that each device computes all sequences.
    table = constrained(params["embedding"].astype(jnp.bfloat16), "model")
    x = constrained(table[tokens], "data")
    x, _ = jax.lax.scan(jax.checkpoint(apply), x, params["layers"])
    x = normalized(x, params["norm"].astype(x.dtype))
    logits = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def adam(state: Any, gradients: Any) -> Any:
    step = state["step"] + 1
    rate = 3e-4 * jnp.sqrt(1 - 0.95**step) / (1 - 0.9**step)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g**2, state["square"], gradients)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "step": step}


# The rehearsal.


def step(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted step and its arguments, which need no memory."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens, targets, mesh)
        return adam(state, gradients), loss

    shapes = jax.tree.map(shaped, SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))
    params = gda.abstract(shapes, mesh, SPECS)
    number = gda.abstract(shaped((), jnp.int32), mesh, P())
    tokens = gda.abstract(shaped((SEQUENCES, TOKENS), jnp.int32), mesh, P("data"))
    state = {"params": params, "mean": params, "square": params, "step": number}
    return train_step, (state, tokens, tokens)


def shaped(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description="rehearse a training step of a transformer")
    parser.add_argument("--topology", help="such as h100:4x8; default: three, one too small")
    parser.add_argument("--mesh", default="data=64,model=4", help="default: %(default)s")
    args = parser.parse_args()
    rehearsals = {"v5e:16x16": "data=64,model=4", "v5p:4x4x8": "data=32,model=4"}
    rehearsals["v5e:4x4"] = "data=4,model=4"  # it does not fit
    if args.topology:
        rehearsals = {args.topology: args.mesh}
    for topology, axes in rehearsals.items():
        sizes = dict(axis.split("=") for axis in axes.split(","))
        mesh = gda.rehearsal_mesh(topology, {name: int(size) for name, size in sizes.items()})
        program, arguments = step(mesh)
        print(f"{topology}: {gda.rehearse(program, *arguments)}\n", flush=True)


if __name__ == "__main__":
    main()

"""Llama as MaxText trains it, for the published steps that rehearsals are compared with.

The layers are scanned, and computed again in the backward pass as the run did. A kernel stands for
flash attention: it reads and writes the same arrays, and states the operations of causal attention.
The state is that of AdamW, sharded over ``fsdp`` and ``tensor``; the batch also over ``data``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

BF16, F32 = jnp.bfloat16, jnp.float32
Tree = Any
BATCH = ("data", "fsdp")
ROWS = P(BATCH, None, "tensor")
HEADS = P(BATCH, None, "tensor", None)
# The rows of the matrix units of a TPU that has larger ones than 128 x 128:
# docs.cloud.google.com/tpu/docs/v6e, and jax._src.tpu_info of JAX for tpu7x.
MATRIX_UNIT = {"TPU v6 lite": 256, "TPU7x": 256}


class Model(NamedTuple):
    """The sizes of a model; one without ``is_gated`` has an MLP of two matrices, as GPT-3."""

    layers: int
    width: int
    heads: int
    groups: int
    mlp: int
    vocabulary: int
    size: int = 128
    is_gated: bool = True


class Training(NamedTuple):
    """A batch and what the forward pass keeps for the backward pass.

    Attributes:
      batch: sequences for each device; of a sequence that devices share, a part.
      tokens: of a sequence.
      keeps: names of the arrays that are kept beside the input of each layer.
      is_offloaded: those are kept in the memory of the host.
      weights: the dtype of the parameters and of the optimizer.
    """

    batch: float
    tokens: int
    keeps: tuple[str, ...] = ()
    is_offloaded: bool = False
    weights: Any = F32


def operations(model: Model, training: Training) -> float:
    """Return the operations of a step for each device, as MaxText counts them.

    Three times those of the forward pass: 2 for each parameter and token, and attention in full.
    """
    parameters = sum(math.prod(shape) for shape, _ in _layer_shapes(model).values())
    attention = 2 * model.heads * model.size * training.tokens
    per_token = model.layers * (parameters + attention) + model.vocabulary * model.width
    return 6.0 * per_token * training.tokens * training.batch


def _layer_shapes(model: Model) -> dict[str, tuple[tuple[int, ...], P]]:
    width, mlp = model.width, model.mlp
    up, down = P("fsdp", "tensor"), P("tensor", "fsdp")
    shapes = {
        "query": ((width, model.heads * model.size), up),
        "key": ((width, model.groups * model.size), up),
        "value": ((width, model.groups * model.size), up),
        "out": ((model.heads * model.size, width), down),
        "up": ((width, mlp), up),
        "down": ((mlp, width), down),
    }
    return shapes | ({"gate": ((width, mlp), up)} if model.is_gated else {})


def step(mesh: Mesh, model: Model, training: Training) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step and its arguments."""

    def shaped(shape: tuple[int, ...], spec: P, dtype: Any = training.weights) -> Any:
        return gda.abstract(jax.ShapeDtypeStruct(shape, dtype), mesh, spec)

    params = {
        "layers": {
            name: shaped((model.layers, *shape), P(None, *spec))
            for name, (shape, spec) in _layer_shapes(model).items()
        },
        "norms": shaped((model.layers, 2, model.width), P()),
        "embedding": shaped((model.vocabulary, model.width), P("tensor", "fsdp")),
        "head": shaped((model.width, model.vocabulary), P("fsdp", "tensor")),
    }
    sequences = round(training.batch * mesh.size)
    words = shaped((sequences, training.tokens), P(BATCH), jnp.int32)
    loss = functools.partial(_loss, mesh, model, training)

    @functools.partial(jax.jit, donate_argnums=0)
    def adamw(state: Tree, words: jax.Array) -> Any:
        params, first, second = state
        slopes = jax.grad(loss)(params, words)
        first = jax.tree.map(lambda m, g: (0.9 * m + 0.1 * g).astype(m.dtype), first, slopes)
        second = jax.tree.map(
            lambda v, g: (0.95 * v + 0.05 * g * g).astype(v.dtype), second, slopes
        )

        def new(p: Any, m: Any, v: Any) -> Any:
            return (p - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)).astype(p.dtype)

        return jax.tree.map(new, params, first, second), first, second

    return adamw, ((params, params, params), words)


def _loss(mesh: Mesh, model: Model, training: Training, params: Tree, words: jax.Array) -> Any:
    sharded = functools.partial(_sharded, mesh)
    attention = _attention(mesh)

    def layer(x: jax.Array, each: Tree) -> tuple[jax.Array, None]:
        w, norms = jax.tree.map(lambda w: w.astype(BF16), each)
        x = checkpoint_name(sharded(x, ROWS), "input")
        y = _normalized(x, norms[0])
        query, key, value = (
            checkpoint_name(
                sharded((y @ w[name]).reshape(*y.shape[:2], -1, model.size), HEADS), name
            )
            for name in ("query", "key", "value")
        )
        mixed = attention(_rotated(query), _rotated(key), value)
        mixed = checkpoint_name(mixed.reshape(*y.shape[:2], -1), "context")
        x = sharded(x + checkpoint_name(mixed @ w["out"], "out"), ROWS)
        y = _normalized(x, norms[1])
        inner = checkpoint_name(y @ w["up"], "up")
        if model.is_gated:
            inner = jax.nn.silu(checkpoint_name(y @ w["gate"], "gate")) * inner
        else:
            inner = jax.nn.gelu(inner)
        return sharded(x + sharded(inner, ROWS) @ w["down"], ROWS), None

    # The embedding is a product with ones and zeros, as MaxText's use_iota_embed has it.
    hot = sharded(jax.nn.one_hot(words, model.vocabulary, dtype=BF16), ROWS)
    x = sharded(hot @ params["embedding"].astype(BF16), ROWS)
    layer = jax.checkpoint(layer, policy=_policy(training), prevent_cse=False)
    x, _ = lax.scan(layer, x, (params["layers"], params["norms"]))
    logits = sharded(_normalized(x, BF16(1)) @ params["head"].astype(BF16), ROWS).astype(F32)
    chosen = jnp.sum(logits * jax.nn.one_hot(words, model.vocabulary, dtype=F32), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _policy(training: Training) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    if training.is_offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(training.keeps),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*training.keeps)


def _sharded(mesh: Mesh, x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(F32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(BF16) * scale


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    rates = 5e5 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    low, high = jnp.split(x.astype(F32), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1).astype(
        BF16
    )


# Flash attention.


def _attention(mesh: Mesh) -> Callable[..., jax.Array]:
    """Return causal attention, by a kernel on each device: on GPUs by that of cuDNN."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
    side = MATRIX_UNIT.get(device.device_kind, 128)
    _stand_in = functools.partial(_kernel, side)

    @jax.custom_vjp
    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return _stand_in(2, (query, key, value), (query,))[0]

    def forward(*arrays: jax.Array) -> Any:
        mixed = checkpoint_name(attention(*arrays), "context")
        return mixed, (*arrays, mixed)

    def backward(arrays: Any, slope: jax.Array) -> Any:
        return _stand_in(5, (*arrays, slope), arrays[:3])

    attention.defvjp(forward, backward)
    return jax.shard_map(attention, mesh=mesh, in_specs=HEADS, out_specs=HEADS, check_vma=False)


def _kernel(side: int, products: int, arrays: Any, results: Any) -> Any:
    """Return the results of a kernel that reads and writes the arrays of flash attention.

    It states the operations of so many products of all queries and keys, less the masked half. A
    matrix unit computes heads that are smaller than itself as if they were as large.
    """
    batch, tokens, heads, size = arrays[0].shape
    arrays = [each.swapaxes(1, 2) for each in arrays]
    results = [jax.ShapeDtypeStruct((batch, each.shape[2], tokens, size), BF16) for each in results]
    operations = products * 2 * batch * heads * tokens**2 * max(size, side) // 2

    def kernel(*refs: Any) -> None:
        # A tile is enough: the compiler would write out operations on more.
        total = sum((ref[:16] for ref in refs[1 : len(arrays)]), start=refs[0][:16])
        for ref in refs[len(arrays) :]:
            ref[:16] = total

    def block(array: Any) -> pl.BlockSpec:
        shared = heads // array.shape[1]
        return pl.BlockSpec((None, None, tokens, size), lambda b, h: (b, h // shared, 0, 0))

    done = pl.pallas_call(
        kernel,
        out_shape=results,
        grid=(batch, heads),
        in_specs=[*map(block, arrays)],
        out_specs=[*map(block, results)],
        cost_estimate=pl.CostEstimate(
            flops=operations,
            transcendentals=batch * heads * tokens**2 // 2,
            bytes_accessed=sum(2 * math.prod(each.shape) for each in (*arrays, *results)),
        ),
        name="flash_attention",
    )(*arrays)
    return tuple(each.swapaxes(1, 2) for each in done)

"""Times of programs on one accelerator: ``python -m benchmarks.compiled.steps >FILE``.

Each line that it prints is the JSON of one program: seconds of a step (the median, the least and
the most of some samples), seconds of its compilation, and the bytes of its peak.
``steps_on_h100.jsonl`` has those of one H100, beside which estimates can be put. ``--quick`` takes
small shapes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BF16, F32 = jnp.bfloat16, jnp.float32
Tree = Any


class Program(NamedTuple):
    """A step, its arguments, and those that its first results take the place of."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: int = 0


def _normal(shape: tuple[int, ...], dtype: Any = BF16) -> jax.Array:
    return (jax.random.normal(jax.random.key(len(shape)), shape) * 0.02).astype(dtype)


def _training(loss: Callable[[Tree, Any], jax.Array], params: Tree, batch: Any) -> Program:
    """Return a step of AdamW."""

    def step(params: Tree, first: Tree, second: Tree, batch: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slopes)

        def new(p: Any, m: Any, v: Any) -> Any:
            return p - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p)

        return jax.tree.map(new, params, first, second), first, second, value

    zeros = jax.tree.map(jnp.zeros_like, params)
    return Program(step, (params, zeros, jax.tree.map(jnp.copy, zeros), batch), donated=3)


def _descent(loss: Callable[[Tree, Any], jax.Array], params: Tree, batch: Any) -> Program:
    """Return a step of gradient descent."""

    def step(params: Tree, batch: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: (p - 1e-4 * g).astype(p.dtype), params, slopes), value

    return Program(step, (params, batch), donated=1)


def mlp(width: int, rows: int) -> Program:
    """Return a training step of four products, with parameters of 32 bits."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.nn.relu(x @ w.astype(BF16))
        return (x.astype(F32) ** 2).mean()

    return _training(loss, [_normal((width, width), F32) for _ in range(4)], _normal((rows, width)))


class Sizes(NamedTuple):
    width: int = 2048
    layers: int = 12
    heads: int = 16
    tokens: int = 2048
    batch: int = 4
    vocabulary: int = 32768


def transformer(sizes: Sizes, attention: Any = "xla") -> Program:
    """Return a training step of a transformer whose layers are scanned and made again."""
    width, layers, heads, tokens, batch, vocabulary = sizes
    size = width // heads

    def of_layers(*shape: int) -> jax.Array:
        return _normal((layers, *shape), F32)

    params = {
        "embedding": _normal((vocabulary, width), F32),
        "qkv": of_layers(width, 3, heads, size),
        "out": of_layers(heads, size, width),
        "up": of_layers(width, 4 * width),
        "down": of_layers(4 * width, width),
        "norm1": jnp.ones((layers, width)),
        "norm2": jnp.ones((layers, width)),
    }
    words = jax.random.randint(jax.random.key(0), (batch, tokens), 0, vocabulary)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(F32)
        return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(BF16)

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        y = norm(x, w["norm1"])
        q, k, v = jnp.einsum("bsd,dthk->tbshk", y, w["qkv"].astype(BF16))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, w["out"].astype(BF16))
        y = norm(x, w["norm2"])
        return x + jax.nn.gelu(y @ w["up"].astype(BF16)) @ w["down"].astype(BF16), None

    def loss(params: Tree, words: jax.Array) -> jax.Array:
        x = params["embedding"].astype(BF16)[words]
        x, _ = lax.scan(layer, x, {key: w for key, w in params.items() if key != "embedding"})
        logits = (x[:, :-1] @ params["embedding"].astype(BF16).T).astype(F32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], -1)
        return -chosen.mean()

    return _training(loss, params, words)


def experts(width: int, hidden: int, count: int, tokens: int) -> Program:
    """Return a step of a layer of experts, two for each token, up to their capacity."""
    params = {
        "router": _normal((width, count), F32),
        "up": _normal((count, width, hidden)),
        "down": _normal((count, hidden, width)),
    }
    capacity = tokens * 2 // count

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        gates, chosen = lax.top_k(jax.nn.softmax(x.astype(F32) @ params["router"]), 2)
        hot = jax.nn.one_hot(chosen, count)
        order = (jnp.cumsum(hot.reshape(-1, count), 0) - 1).reshape(hot.shape)
        slot = jnp.where(hot > 0, order, -1).max(-1).astype(jnp.int32)
        place = jnp.where(slot < capacity, chosen * capacity + slot, count * capacity).reshape(-1)
        sent = jnp.zeros((count * capacity + 1, width), BF16).at[place].set(jnp.repeat(x, 2, 0))
        sent = sent[:-1].reshape(count, capacity, width)
        inner = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, params["up"]))
        done = jnp.einsum("ecf,efd->ecd", inner, params["down"]).reshape(-1, width)
        back = jnp.concatenate([done, jnp.zeros((1, width), BF16)])[place]
        mixed = back.reshape(tokens, 2, width) * gates[..., None].astype(BF16)
        return (mixed.sum(1).astype(F32) ** 2).mean()

    return _descent(loss, params, _normal((tokens, width)))


def token(
    width: int, hidden: int, layers: int, heads: int, groups: int, tokens: int, batch: int
) -> Program:
    """Return the next token of some sequences, over a cache of their keys and values."""
    size = width // heads
    params = {
        "q": _normal((layers, width, width)),
        "kv": _normal((layers, width, 2 * groups * size)),
        "o": _normal((layers, width, width)),
        "up": _normal((layers, width, hidden)),
        "gate": _normal((layers, width, hidden)),
        "down": _normal((layers, hidden, width)),
    }
    cache = _normal((layers, 2, batch, groups, tokens, size))

    def step(cache: jax.Array, params: Tree, x: jax.Array, at: jax.Array) -> Any:
        def layer(x: jax.Array, each: Any) -> Any:
            w, held = each
            q = (x @ w["q"]).reshape(batch, groups, heads // groups, size)
            new = (x @ w["kv"]).reshape(batch, 2, groups, size).transpose(1, 0, 2, 3)
            held = lax.dynamic_update_slice(held, new[:, :, :, None], (0, 0, 0, at, 0))
            scores = jnp.einsum("bkgh,bksh->bkgs", q, held[0]).astype(F32) * size**-0.5
            mixed = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores).astype(BF16), held[1])
            x = x + mixed.reshape(batch, width) @ w["o"]
            return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], held

        x, cache = lax.scan(layer, x, (params, cache))
        return cache, x

    return Program(step, (cache, params, _normal((batch, width)), jnp.int32(7)), donated=1)


def convolutions(images: int, side: int, channels: int) -> Program:
    """Return a step of four convolutions of 3 x 3."""
    kernels = [_normal((3, 3, channels, channels), F32) for _ in range(4)]

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params:
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, w.astype(BF16), (1, 1), "SAME", dimension_numbers=dimensions
                )
            )
        return (x.astype(F32) ** 2).mean()

    return _descent(loss, kernels, _normal((images, side, side, channels)))


def product(side: int, dtype: Any, result: Any) -> Program:
    matrices = [_normal((side, side), F32).astype(dtype) for _ in range(2)]
    return Program(lambda a, b: lax.dot(a, b.T, preferred_element_type=result), tuple(matrices))


def programs(quick: bool = False) -> dict[str, Callable[[], Program]]:
    """Return what makes each program; if ``quick``, with small shapes."""
    sizes, n = (Sizes(64, 2, 4, 64, 2, 128), 64) if quick else (Sizes(), 8192)
    fp8 = jnp.float8_e4m3fn
    return {
        "mlp": partial(mlp, n // 2, n),
        "transformer": partial(transformer, sizes),
        "transformer_cudnn": partial(transformer, sizes, "cudnn"),
        "moe": partial(experts, n // 4, n // 2, 8, n),
        "decode": partial(token, *((64, 64, 2, 4, 4, 64, 2) if quick else _TOKEN)),
        "conv": partial(convolutions, *((2, 8, 64) if quick else (64, 56, 256))),
        "product_bf16": partial(product, n, BF16, BF16),
        "product_f32": partial(product, n, F32, F32),
        "product_fp8": partial(product, n, fp8, BF16),
        "product_int8": partial(product, n, jnp.int8, jnp.int32),
        "elementwise": lambda: Program(lambda x: (x * 2 + 1,), (_normal((n**2 * 4,), F32),), 1),
        "reduction": lambda: Program(lambda x: x.sum(1), (_normal((2 * n, 2 * n), F32),)),
    }


_TOKEN = (4096, 14336, 16, 32, 8, 4096, 16)


def measured(program: Program, samples: int, steps: int = 10) -> dict[str, float]:
    """Run a program, and return its figures."""
    donated = tuple(range(program.donated))
    begun = time.perf_counter()
    compiled = jax.jit(program.step, donate_argnums=donated).lower(*program.arguments).compile()
    compiling = time.perf_counter() - begun
    arguments: list[Any] = [*program.arguments]
    seconds = []
    for _ in range(samples + 2):
        begun = time.perf_counter()
        results: Any = ()
        for _ in range(steps):
            results = compiled(*arguments)
            arguments[: program.donated] = results[: program.donated] if donated else []
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - begun) / steps)
    memory: Any = compiled.memory_analysis()
    return {
        "seconds": statistics.median(seconds[2:]),
        "low": min(seconds[2:]),
        "high": max(seconds[2:]),
        "compile": compiling,
        "peak": memory.peak_memory_in_bytes,
    }


def main() -> None:
    quick = "--quick" in sys.argv
    for name, make in programs(quick).items():
        try:
            figures = measured(make(), 1 if quick else 6)
        except Exception as error:  # a card may lack a kernel, and the others are still measured
            figures = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"name": name, **figures}), flush=True)


if __name__ == "__main__":
    main()

"""Five programs that are rehearsed for GPUs, with their arguments and communication by hand.

As a program it writes the table of ``docs/rehearsing.md``: all five in full size, on five kinds of
GPUs and on virtual CPU devices.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from page_blocks import table

import gda
from gda.compiled.hlo import format_axes, format_size

Sent = Counter[tuple[str, tuple[str, ...], int]]

EXAMPLE = Path(__file__).parents[1] / "examples" / "rehearse_transformer.py"


class Rehearsed(NamedTuple):
    """A program over the axes ``data`` and ``model``, and what is known about it.

    Attributes:
      step, args: the jitted program and its arguments.
      forward, forward_args: its forward pass.
      argument_bytes: the arguments of the forward pass on one device.
      sent: the arrays that the forward pass sends: their number by kind, axes and bytes.
    """

    step: Any
    args: tuple[Any, ...]
    forward: Any
    forward_args: tuple[Any, ...]
    argument_bytes: int
    sent: Sent


def sent_by(found: gda.Rehearsal) -> Sent:
    """Return the arrays that a program sends. XLA may send several in one collective."""
    assert found.collectives is not None
    sent: Sent = Counter()
    for each in found.collectives:
        assert each.axes is not None
        assert each.count is not None
        sizes = [
            math.prod(shape) * jnp.dtype(dtype).itemsize
            for shape, dtype in zip(each.operand_shapes, each.operand_dtypes, strict=True)
        ]
        if each.kind == "all-to-all":  # on CPUs it has an array for each peer
            sizes = [sum(sizes)]
        for nbytes in sizes:
            sent[each.kind, each.axes, nbytes] += each.count
    return sent


def sent_itemsize(mesh: Mesh) -> int:
    """Return the bytes of a bfloat16 that devices send; CPUs send it as a float32."""
    return 4 if mesh.devices.flat[0].platform == "cpu" else 2


def shaped(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return gda.abstract(jax.ShapeDtypeStruct(shape, dtype), mesh, spec)


def trained(loss_of: Callable[..., jax.Array], params: Any, *batch: Any) -> tuple[Any, ...]:
    """Return a step of gradient descent, and the forward pass, each with its arguments."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params: Any, *batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, gradients), loss

    args = (params, *batch)
    return step, args, jax.jit(loss_of), args


# A transformer that learns, as in the example: sharded over both axes.


def example(model: str = "32, 4096, 32, 11_008, 32_000", batch: str = "256, 4096") -> Any:
    """Return the module with these sizes of the model and of a batch."""
    source = EXAMPLE.read_text()
    for names, sizes in {
        "LAYERS, WIDTH, HEADS, MLP, VOCABULARY": model,
        "SEQUENCES, TOKENS": batch,
    }.items():
        source, found = re.subn(f"^{names} = .*", f"{names} = {sizes}", source, flags=re.MULTILINE)
        assert found == 1
    module = ModuleType("example")
    exec(compile(source, EXAMPLE, "exec"), module.__dict__)
    return module


def sharded_elements(model: Any) -> int:
    """Return the number of elements of all matrices."""
    layer = 4 * model.WIDTH**2 + 3 * model.WIDTH * model.MLP
    return model.LAYERS * layer + 2 * model.VOCABULARY * model.WIDTH


def replicated_elements(model: Any) -> int:
    """Return the number of elements of the scales of all norms."""
    return (2 * model.LAYERS + 1) * model.WIDTH


def sent_forward(model: Any, mesh: Mesh) -> Sent:
    """Return the arrays that the forward pass sends.

    Fully sharded training gathers each matrix before its use. Tensor parallelism sums the results
    of attention and MLP, since each device has a part of the heads and of the MLP's width.
    """
    itemsize = sent_itemsize(mesh)
    rows = model.SEQUENCES // mesh.shape["data"] * model.TOKENS
    square = model.WIDTH**2 // mesh.size * itemsize
    of_mlp = model.WIDTH * model.MLP // mesh.size * itemsize
    of_words = model.VOCABULARY * model.WIDTH // mesh.size * itemsize
    sent: Sent = Counter()
    sent["all-gather", ("data",), square] += 4 * model.LAYERS
    sent["all-gather", ("data",), of_mlp] += 3 * model.LAYERS
    sent["all-gather", ("data",), of_words] += 2  # the embedding, and the head
    sent["all-reduce", ("model",), rows * model.WIDTH * itemsize] += 2 * model.LAYERS + 1
    # Each device has the logits of a part of the vocabulary: the greatest logit, the sum of
    # exponentials and the logit of the target. Then the mean over all sequences. The compiler for
    # GPUs computes the first in float32, and concatenates the others.
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    sent["all-reduce", ("model",), rows * (4 if is_gpu else itemsize)] += 1
    sent["all-reduce", ("model",), rows * (8 if is_gpu else 4)] += 1 if is_gpu else 2
    sent["all-reduce", ("data",), 4] += 1
    return sent


def transformer(mesh: Mesh, model: Any = None) -> Rehearsed:
    model = model or example()
    step, args = model.step(mesh)
    state, *batch = args
    forward = jax.jit(functools.partial(model.loss_of, mesh=mesh))
    elements = sharded_elements(model) // mesh.size + replicated_elements(model)
    of_batch = 2 * model.SEQUENCES // mesh.shape["data"] * model.TOKENS * 4
    return Rehearsed(
        *(step, args, forward, (state["params"], *batch)),
        argument_bytes=4 * elements + of_batch,
        sent=sent_forward(model, mesh),
    )


# A sampler: the next token of each sequence. Weights are sharded over 'model'.


def sampler(
    mesh: Mesh,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    mlp: int = 11_008,
    vocabulary: int = 32_000,
    sequences: int = 1024,
    tokens: int = 4096,
) -> Rehearsed:
    data, parts, itemsize = mesh.shape["data"], mesh.shape["model"], sent_itemsize(mesh)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(params: Any, cache: jax.Array, words: jax.Array, position: jax.Array) -> Any:
        def apply(carry: Any, layer: Any) -> tuple[Any, None]:
            x, cache = carry
            *qkv, out, up, down, number = layer
            query, *now = [(x @ matrix).reshape(-1, heads, width // heads) for matrix in qkv]
            at = (number, 0, 0, position, 0, 0)
            cache = lax.dynamic_update_slice(cache, jnp.stack(now)[None, :, :, None], at)
            keys, values = cache[number]
            mixed = jax.nn.dot_product_attention(query[:, None], keys, values)
            x = x + mixed.reshape(x.shape) @ out
            return (x + jax.nn.silu(x @ up) @ down, cache), None

        x = lax.with_sharding_constraint(params["embedding"][words], NamedSharding(mesh, P("data")))
        (x, cache), _ = lax.scan(apply, (x, cache), (*params["layers"], jnp.arange(layers)))
        return cache, (x @ params["embedding"].T).argmax(axis=-1)

    columns, rows = P(None, None, "model"), P(None, "model")
    shapes = {
        "layers": [
            *[shaped(mesh, columns, layers, width, width)] * 3,
            shaped(mesh, rows, layers, width, width),
            shaped(mesh, columns, layers, width, mlp),
            shaped(mesh, rows, layers, mlp, width),
        ],
        "embedding": shaped(mesh, P("model"), vocabulary, width),
    }
    cache_spec = P(None, None, "data", None, "model")
    cache_shape = layers, 2, sequences, tokens, heads, width // heads
    args = (
        shapes,
        shaped(mesh, cache_spec, *cache_shape),
        shaped(mesh, P("data"), sequences, dtype=jnp.int32),
        shaped(mesh, P(), dtype=jnp.int32),
    )
    weights = (layers * (4 * width**2 + 2 * width * mlp) + vocabulary * width) // parts
    cached = math.prod(cache_shape) // mesh.size
    own = sequences // data
    sent: Sent = Counter()
    sent["all-reduce", ("model",), own * width * itemsize] += 2 * layers + 1
    # The likeliest word of each part of the vocabulary, and its logit.
    sent["all-gather", ("model",), own * 4] += 1
    sent["all-gather", ("model",), own * itemsize] += 1
    return Rehearsed(
        *(step, args, step, args),
        argument_bytes=2 * (weights + cached) + 4 * own + 4,
        sent=sent,
    )


# A mixture of experts: one on each position of 'data', whose width is sharded over 'model'.


def experts(
    mesh: Mesh, layers: int = 32, width: int = 4096, mlp: int = 14_336, rows: int = 131_072
) -> Rehearsed:
    data, parts, itemsize = mesh.shape["data"], mesh.shape["model"], sent_itemsize(mesh)
    capacity = rows // data * 2 // data * 5 // 4  # each row goes to 2 experts

    def apply(x: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        router, up, down = layer
        weights, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
        # The place of each row among those of its expert; those beyond the capacity are dropped.
        taken = jax.nn.one_hot(chosen.reshape(-1), data, dtype=jnp.int32)
        place = ((jnp.cumsum(taken, axis=0) - 1) * taken).sum(axis=-1).reshape(chosen.shape)
        boxes = jnp.zeros((data, capacity, width), x.dtype)
        boxes = boxes.at[chosen, place].set(x[:, None], mode="drop")
        boxes = lax.all_to_all(boxes, "data", 0, 0)
        results = lax.psum(jax.nn.silu(boxes @ up[0]) @ down[0], "model")
        results = lax.all_to_all(results, "data", 0, 0)
        results = results.at[chosen, place].get(mode="fill", fill_value=0)
        return x + (results * weights[..., None]).sum(axis=1), None

    def loss_on_each(params: Any, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(apply), x, params)
        return lax.pmean(jnp.mean(jnp.square(x.astype(jnp.float32))), "data")

    specs = P(), P(None, "data", None, "model"), P(None, "data", "model")
    params = (
        shaped(mesh, specs[0], layers, width, data),
        shaped(mesh, specs[1], layers, data, width, mlp),
        shaped(mesh, specs[2], layers, data, mlp, width),
    )
    loss_of = jax.shard_map(loss_on_each, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())
    boxes = data * capacity * width * itemsize
    of_params = layers * (width * data + 2 * width * mlp // parts)
    sent: Sent = Counter()
    sent["all-to-all", ("data",), boxes] += 2 * layers
    sent["all-reduce", ("model",), boxes] += layers
    sent["all-reduce", ("data",), 4] += 1
    return Rehearsed(
        *trained(loss_of, params, shaped(mesh, P("data"), rows, width)),
        argument_bytes=2 * (of_params + rows // data * width),
        sent=sent,
    )


# A convolutional network of residual blocks: each device has its own images.


def convolutions(
    mesh: Mesh,
    channels: tuple[int, ...] = (256, 512, 1024, 2048),
    blocks: int = 3,
    images: int = 8192,
    pixels: int = 224,
    classes: int = 1000,
) -> Rehearsed:
    def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        kernel = kernel.astype(x.dtype)
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=names)

    def normalized(x: jax.Array) -> jax.Array:
        """Return the images with mean 0 and variance 1 of each channel in the whole batch."""
        in_full = x.astype(jnp.float32)
        mean = in_full.mean(axis=(0, 1, 2))
        variance = jnp.square(in_full - mean).mean(axis=(0, 1, 2))
        return ((in_full - mean) * lax.rsqrt(variance + 1e-5)).astype(x.dtype)

    def loss_of(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for first, *others in params["stages"]:
            x = jax.nn.relu(normalized(convolved(x, first, 4 if x.shape[-1] == 3 else 2)))
            for kernel in others:
                x = x + jax.nn.relu(normalized(convolved(x, kernel)))
        logits = x.mean(axis=(1, 2)).astype(jnp.float32) @ params["head"]
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    full = functools.partial(shaped, mesh, P(), dtype=jnp.float32)
    stages = [
        [full(3, 3, before, own), *[full(3, 3, own, own)] * blocks]
        for before, own in zip((3, *channels), channels, strict=False)
    ]
    params = {"stages": stages, "head": full(channels[-1], classes)}
    over = P(("data", "model"))
    x = shaped(mesh, over, images, pixels, pixels, 3)
    labels = shaped(mesh, over, images, dtype=jnp.int32)
    of_params = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    own = images // mesh.size
    sent: Sent = Counter()
    for size in channels:  # the mean and the variance of each norm
        sent["all-reduce", ("data", "model"), 4 * size] += 2 * (1 + blocks)
    sent["all-reduce", ("data", "model"), 4] += 1
    return Rehearsed(
        *trained(loss_of, params, x, labels),
        argument_bytes=of_params + own * (pixels**2 * 3 * 2 + 4),
        sent=sent,
    )


# Ring attention over a long sequence: tokens over both axes, heads over 'model'.


def ring(
    mesh: Mesh,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    mlp: int = 16_384,
    tokens: int = 131_072,
) -> Rehearsed:
    data, parts, itemsize = mesh.shape["data"], mesh.shape["model"], sent_itemsize(mesh)
    neighbours = [(i, (i + 1) % data) for i in range(data)]

    def part_of(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        """Return the greatest score, the sum of exponentials, and the mixed values so far."""
        scores = (
            jnp.einsum("qhd,khd->hqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
        )
        greatest = scores.max(axis=-1)
        exponentials = jnp.exp(scores - greatest[..., None])
        mixed = jnp.einsum("hqk,khd->hqd", exponentials.astype(value.dtype), value)
        return greatest, exponentials.sum(axis=-1), mixed.astype(jnp.float32)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def turn(carry: Any, _: None) -> tuple[Any, None]:
            *block, greatest, total, mixed = carry
            block = [lax.ppermute(each, "data", neighbours) for each in block]
            other, other_total, other_mixed = part_of(query, *block)
            new = jnp.maximum(greatest, other)
            old_share, other_share = jnp.exp(greatest - new), jnp.exp(other - new)
            total = total * old_share + other_total * other_share
            mixed = mixed * old_share[..., None] + other_mixed * other_share[..., None]
            return (*block, new, total, mixed), None

        carry = (key, value, *part_of(query, key, value))
        (*_, total, mixed), _ = lax.scan(jax.checkpoint(turn), carry, length=data - 1)
        return (mixed / total[..., None]).astype(query.dtype).swapaxes(0, 1)

    def apply(x: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        *qkv, out, up, down = layer
        rows = lax.all_gather(x, "model", tiled=True)
        by_head = len(rows), heads // parts, width // heads
        mixed = attention(*[(rows @ matrix).reshape(by_head) for matrix in qkv])
        x = x + lax.psum_scatter(mixed.reshape(len(rows), -1) @ out, "model", tiled=True)
        rows = lax.all_gather(x, "model", tiled=True)
        return x + lax.psum_scatter(jax.nn.silu(rows @ up) @ down, "model", tiled=True), None

    def loss_on_each(params: Any, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(apply), x, params)
        return lax.pmean(jnp.mean(jnp.square(x.astype(jnp.float32))), ("data", "model"))

    columns, by_rows, over = P(None, None, "model"), P(None, "model"), P(("data", "model"))
    sizes = [*[(columns, width, width)] * 3, (by_rows, width, width)]
    sizes += [(columns, width, mlp), (by_rows, mlp, width)]
    specs = tuple(spec for spec, *_ in sizes)
    params = tuple(shaped(mesh, spec, layers, *shape) for spec, *shape in sizes)
    loss_of = jax.shard_map(loss_on_each, mesh=mesh, in_specs=(specs, over), out_specs=P())
    of_params = layers * (4 * width**2 + 2 * width * mlp) // parts
    own = tokens // mesh.size * width
    sent: Sent = Counter()
    sent["all-gather", ("model",), own * itemsize] += 2 * layers
    sent["reduce-scatter", ("model",), parts * own * itemsize] += 2 * layers
    sent["collective-permute", ("data",), own * itemsize] += 2 * (data - 1) * layers
    sent["all-reduce", ("data", "model"), 4] += 1
    return Rehearsed(
        *trained(loss_of, params, shaped(mesh, over, tokens, width)),
        argument_bytes=2 * (of_params + own),
        sent=sent,
    )


# The page.

PAGE = Path(__file__).parents[1] / "docs" / "rehearsing.md"
TABLES = re.compile(r"(?<=<!-- programs -->\n).*(?=<!-- end of programs -->)", re.DOTALL)
SHAPE = {"data": 8, "model": 4}
KINDS = ("a100", "h100", "h200", "b200", "gb200")
PROGRAMS = {
    "training step of a transformer": transformer,
    "a token of a sampler": sampler,
    "training step of a mixture of experts": experts,
    "training step of a convolutional network": convolutions,
    "training step with ring attention": ring,
}


def tables() -> str:
    """Return two tables of the page: the peaks, and the communication."""
    meshes = [gda.rehearsal_mesh(f"{kind}:4x8", SHAPE) for kind in KINDS]
    meshes.append(Mesh(np.array(jax.devices()).reshape(*SHAPE.values()), tuple(SHAPE)))
    peaks, sent = [], []
    capacities: list[str] = []
    for name, program in PROGRAMS.items():
        found = [rehearsed(program(mesh)) for mesh in meshes]
        capacities = [format_size(each.capacity_bytes) for each in found[:-1]]
        peaks.append([name, *map(peak_of, found)])
        for totals in zip(*[by_axes(each) for each in found], strict=True):
            *of_gpus, on_cpus = totals
            nbytes = by_kind([each.nbytes for each in of_gpus])
            slow = by_kind([each.nbytes_slow for each in of_gpus])
            row = [format_axes(on_cpus.axes), nbytes, slow, format_size(on_cpus.nbytes)]
            sent.append([name, *row])
            name = ""
    peaks.insert(0, ["memory for programs", *capacities, ""])
    head = ["", *map("`{}`".format, KINDS), "CPUs"]
    communication = ["", "over", "GPUs", "slow links", "CPUs"]
    return f"{table(head, peaks)}\nThe bytes that it sends:\n\n{table(communication, sent)}"


def rehearsed(program: Rehearsed) -> gda.Rehearsal:
    found = gda.rehearse(program.step, *program.args)
    print(found, flush=True)
    return found


def peak_of(found: gda.Rehearsal) -> str:
    return f"{format_size(found.peak_bytes)}{', does not fit' * (found.fits is False)}"


def by_axes(found: gda.Rehearsal) -> list[gda.AxisTraffic]:
    return sorted(found.traffic, key=lambda each: each.axes or ())


def by_kind(sizes: list[int | None]) -> str:
    """Return one size for all kinds of GPUs, or each with its kinds."""
    kinds: dict[str, list[str]] = {}
    for kind, size in zip(KINDS, sizes, strict=True):
        kinds.setdefault(format_size(size), []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{size} ({', '.join(names)})" for size, names in kinds.items())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", math.prod(SHAPE.values()))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLES.sub(lambda _: tables(), text), encoding="utf-8")

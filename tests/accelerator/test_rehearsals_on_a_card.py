"""A program rehearsed for the kind of an accelerator, and compiled and run on it."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from on_accelerator import Measured

import gda
from gda.compiled.devices.device_kinds import KINDS

# XLA measures kernels on an accelerator, so its temporaries may be other ones: docs/rehearsing.md.
LEAST, MOST = 0.95, 1.5

Tree = dict[str, jax.Array]


class Program(NamedTuple):
    """A training step, the shapes of its parameters and of a batch, and its operations.

    ``flops`` are those of the products of one step.
    """

    loss: Callable[[Tree, jax.Array], jax.Array]
    params: dict[str, tuple[int, ...]]
    batch: tuple[int, ...]
    flops: int

    def step(self, params: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        loss, slopes = jax.value_and_grad(self.loss)(params, batch)
        new = jax.tree.map(lambda p, slope: p - jnp.bfloat16(0.01) * slope, params, slopes)
        return new, loss


def mlp(rows: int, width: int, hidden: int) -> Program:
    """Two products and a nonlinearity; the gradient takes three more."""

    def loss(params: Tree, batch: jax.Array) -> jax.Array:
        return ((jax.nn.relu(batch @ params["up"]) @ params["down"]) ** 2).mean()

    shapes = {"up": (width, hidden), "down": (hidden, width)}
    return Program(loss, shapes, (rows, width), 5 * 2 * rows * width * hidden)


def attention(layers: int, batch: int, tokens: int, heads: int, size: int) -> Program:
    """Layers of attention in a loop, whose scores are kept for the gradient."""
    width = heads * size

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        q, k, v = ((x @ w[name]).reshape(batch, tokens, heads, size) for name in ("q", "k", "v"))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * size**-0.5
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return x + mixed.reshape(x.shape) @ w["o"], None

    def loss(params: Tree, batch: jax.Array) -> jax.Array:
        return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()

    of_layer = 4 * 2 * batch * tokens * width**2 + 2 * 2 * batch * tokens**2 * width
    shapes = dict.fromkeys(("q", "k", "v", "o"), (layers, width, width))
    return Program(loss, shapes, (batch, tokens, width), 3 * layers * of_layer)


# The allocator's peak only rises, so the program with the larger one comes last.
PROGRAMS = {
    "attention": (attention(4, 8, 2048, 16, 128), attention(2, 2, 32, 2, 32)),
    "mlp": (mlp(131072, 4096, 16384), mlp(64, 64, 256)),
}
"""Each as large as an accelerator takes, and as small as a stand-in should have it."""


def kind_of(card: Any) -> str | None:
    """Return the name of the kind of an accelerator in topologies."""
    return next((kind.name for kind in KINDS if card.device_kind in kind.device_kinds), None)


def statistics(card: Any) -> dict[str, int]:
    return card.memory_stats() or {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rehearsed_program_takes_what_it_takes_on_the_card(
    name: str, card: Any, on_card: bool, measured: Measured
) -> None:
    program = PROGRAMS[name][0 if on_card else 1]
    own = Mesh(np.array([card]), ("data",))
    kind = kind_of(card)
    measured("kind", kind or card.device_kind)
    absent = own if kind is None else gda.rehearsal_mesh(f"{kind}:1", {"data": 1})
    step = jax.jit(program.step, donate_argnums=0)
    shapes = {key: jax.ShapeDtypeStruct(each, jnp.bfloat16) for key, each in program.params.items()}
    batch = jax.ShapeDtypeStruct(program.batch, jnp.bfloat16)

    def abstract(mesh: Mesh) -> Any:
        return gda.abstract(shapes, mesh, P()), gda.abstract(batch, mesh, P("data"))

    rehearsal = gda.rehearse(step, *abstract(absent))
    compiled = step.lower(*abstract(own)).compile()
    memory: Any = compiled.memory_analysis()
    figures = {
        "argument_bytes": (rehearsal.argument_bytes, memory.argument_size_in_bytes),
        "output_bytes": (rehearsal.output_bytes, memory.output_size_in_bytes),
        "aliased_bytes": (rehearsal.aliased_bytes, memory.alias_size_in_bytes),
        "temporary_bytes": (rehearsal.temporary_bytes, memory.temp_size_in_bytes),
        "code_bytes": (rehearsal.code_bytes, memory.generated_code_size_in_bytes),
        "capacity_bytes": (rehearsal.capacity_bytes, statistics(card).get("bytes_limit")),
        "flops": (rehearsal.flops, (compiled.cost_analysis() or {}).get("flops")),
    }
    for figure, pair in figures.items():
        measured(f"{figure}, rehearsed and on the card", pair)
    largest = [(each.dtype, each.shape, each.nbytes) for each in rehearsal.temporaries[:5]]
    measured("largest temporaries, rehearsed", largest)

    gc.collect()
    before = statistics(card)
    values = (np.random.default_rng(0).standard_normal(2**20) / 64).astype(jnp.bfloat16)
    params, x = jax.tree.map(
        lambda like: jax.device_put(np.resize(values, like.shape), like.sharding), abstract(own)
    )
    seconds, loss = [], np.nan
    for _ in range(6):
        start = time.perf_counter()
        params, loss = jax.block_until_ready(compiled(params, x))
        seconds.append(time.perf_counter() - start)
    after = statistics(card)
    measured("seconds of a step", min(seconds))
    measured("least seconds of computing", rehearsal.seconds.compute)
    assert np.isfinite(float(loss))
    assert rehearsal.flops == program.flops
    for figure in ("argument_bytes", "output_bytes", "aliased_bytes"):
        assert len({*figures[figure]}) == 1, figure
    if not on_card:
        return
    peak = (rehearsal.peak_bytes or 0) - (rehearsal.code_bytes or 0)
    taken = after["peak_bytes_in_use"] - before["bytes_in_use"]
    measured("peak, rehearsed and by the allocator", [peak, taken])
    # Otherwise the peak is that of another test.
    assert after["peak_bytes_in_use"] > before["peak_bytes_in_use"]
    expected, temporary = figures["temporary_bytes"]
    assert LEAST * expected <= temporary <= MOST * expected
    assert LEAST * peak <= taken <= MOST * peak
    if rehearsal.seconds.compute is not None:
        assert min(seconds) >= rehearsal.seconds.compute

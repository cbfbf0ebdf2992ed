"""A transformer that learns, sharded over two axes: its arguments and communication by hand.

As a program it writes the table of ``docs/rehearsing.md``: the transformer in full size, on five
kinds of GPUs and on virtual CPU devices.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
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


# The page.

PAGE = Path(__file__).parents[1] / "docs" / "rehearsing.md"
TABLES = re.compile(r"(?<=<!-- programs -->\n).*(?=<!-- end of programs -->)", re.DOTALL)
SHAPE = {"data": 8, "model": 4}
KINDS = ("a100", "h100", "h200", "b200", "gb200")


def tables() -> str:
    """Return a table of the page: the peak of each kind, and the bytes that it sends."""
    meshes = [gda.rehearsal_mesh(f"{kind}:4x8", SHAPE) for kind in KINDS]
    meshes.append(Mesh(np.array(jax.devices()).reshape(*SHAPE.values()), tuple(SHAPE)))
    programs = [transformer(mesh) for mesh in meshes]
    found = [gda.rehearse(each.step, *each.args) for each in programs]
    rows = [
        ["memory for programs", *(format_size(each.capacity_bytes) for each in found[:-1]), ""],
        ["peak", *map(peak_of, found)],
    ]
    for name in ("nbytes", "nbytes_slow"):
        by_axes = [{each.axes: getattr(each, name) for each in of.traffic} for of in found]
        for axes in sorted(by_axes[0], key=str):
            over = f"sent over {format_axes(axes)}" + ", slow links" * (name == "nbytes_slow")
            rows.append([over, *(format_size(each.get(axes) or 0) for each in by_axes)])
    return table(["", *map("`{}`".format, KINDS), "CPUs"], rows)


def peak_of(found: gda.Rehearsal) -> str:
    return f"{format_size(found.peak_bytes)}{', too much' * (found.fits is False)}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", math.prod(SHAPE.values()))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLES.sub(lambda _: tables(), text), encoding="utf-8")

"""Train a classifier of handwritten digits on 8 devices, save it, and load it onto another mesh.

    python examples/train_digits.py

The example uses gda from end to end: a file on disk, blocks read from a memory map, a sharded
``GlobalArray``, training through ``gda.jit``, a checkpoint, and the same parameters restored onto a
mesh of another shape. With fewer than 8 accelerators it runs on 8 virtual CPU devices.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# JAX reads this once, at its first use. It applies to the CPU only, not to accelerators.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

import gda

Params = dict[str, gda.GlobalArray]

PIXELS, HIDDEN, CLASSES = 64, 128, 10
TRAINING, HELD_OUT = 1437, 360  # rows of the shuffled file; the held-out ones come last

# The hidden units are sharded over 'model'; every device of 'data' holds the same parameters.
SHAPES = {"w1": (PIXELS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}

OPTIMIZER = optax.sgd(learning_rate=0.1, momentum=0.9)


def main() -> None:
    args = parse_args()
    with contextlib.ExitStack() as stack:
        directory = args.data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_digits(directory, args.seed)
        digits = np.load(directory / "digits.npy", mmap_mode="r")

        mesh = mesh_of(data=4, model=2)
        params = train(new_params(mesh, args.seed), digits[:TRAINING], mesh, args)
        print(f"trained:  w1 is {layout_of(params['w1'])}")
        before = accuracy(params, digits[TRAINING:], mesh)
        print(f"accuracy on {HELD_OUT} held-out digits after training: {before:.2%}")

        gda.checkpoint.save(directory / "params", params)
        other_mesh = mesh_of(data=2, model=4)
        restored = gda.checkpoint.restore(directory / "params", mesh=other_mesh, specs=SPECS)
        print(f"restored: w1 is {layout_of(restored['w1'])}")
        after = accuracy(restored, digits[TRAINING:], other_mesh)
        print(f"accuracy on {HELD_OUT} held-out digits after restoring: {after:.2%}")

    if before != after:
        sys.exit(f"the accuracy changed from {before:.2%} to {after:.2%} on the way through files")
    if after <= 0.95:
        sys.exit(f"the accuracy {after:.2%} is not above 95 %; train with more --steps")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train, save and restore a classifier of digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128, help="digits per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data-dir", type=Path, help="folder for the files; default: a temporary one"
    )
    args = parser.parse_args()
    if not 1 <= args.batch <= TRAINING:
        parser.error(f"--batch must be from 1 to {TRAINING}, the number of training digits")
    return args


def mesh_of(*, data: int, model: int) -> Mesh:
    """Return a mesh of 8 devices: accelerators if there are 8, else virtual CPU devices."""
    devices = jax.devices() if len(jax.devices()) >= 8 else jax.devices("cpu")
    if len(devices) < 8:
        sys.exit(f"8 devices are needed, but there are {len(devices)}; set XLA_FLAGS")
    return Mesh(np.array(devices[:8]).reshape(data, model), ("data", "model"))


def layout_of(g: gda.GlobalArray) -> str:
    axes = ",".join(f"{name}={size}" for name, size in g.mesh.shape.items())
    return f"sharded by {g.spec} over {axes}"


# From a file to batches.


def write_digits(directory: Path, seed: int) -> None:
    """Write ``digits.npy``: a row of bytes per digit, 64 pixels and then the label; shuffled."""
    pixels, labels = load_digits(return_X_y=True)
    rows = np.column_stack([pixels, labels]).astype(np.uint8)
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "digits.npy", np.random.default_rng(seed).permutation(rows))


def batch_of(rows: np.ndarray, mesh: Mesh) -> tuple[gda.GlobalArray, gda.GlobalArray]:
    """Return pixels and labels of some rows of the file, sharded over 'data'.

    ``rows`` is a view of the memory map, so the callback reads only the requested block from the
    file. Each block is read once, although every device of 'model' holds it.
    """
    pixels, labels = rows[:, :PIXELS], rows[:, PIXELS]
    return (
        gda.GlobalArray.from_callback(
            pixels.shape, mesh, P("data"), lambda index: pixels[index], dtype=jnp.float32
        ),
        gda.GlobalArray.from_callback(
            labels.shape, mesh, P("data"), lambda index: labels[index], dtype=jnp.int32
        ),
    )


# The model. These functions see plain arrays: gda.jit unwraps their arguments.


def logits_of(params: Any, pixels: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(pixels / 16 @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_of(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits_of(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# out_specs shards the results; JAX chooses the layout of the optimizer's state.
@functools.partial(gda.jit, out_specs=(SPECS, None, P()), donate_argnums=(0, 1))
def train_step(params: Any, state: Any, pixels: jax.Array, labels: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, pixels, labels)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@gda.jit
def count_correct(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.sum(logits_of(params, pixels).argmax(axis=1) == labels)


def new_params(mesh: Mesh, seed: int) -> Params:
    rng = np.random.default_rng(seed)
    whole = {name: rng.normal(size=shape) / np.sqrt(shape[0]) for name, shape in SHAPES.items()}
    return {
        name: gda.GlobalArray.from_callback(values.shape, mesh, SPECS[name], values.__getitem__)
        for name, values in whole.items()
    }


def train(params: Params, rows: np.ndarray, mesh: Mesh, args: argparse.Namespace) -> Params:
    state = OPTIMIZER.init(params)  # a tree of GlobalArrays, sharded like the parameters
    batches = len(rows) // args.batch
    loss_column = TextColumn("{task.fields[loss]}")
    with Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), loss_column) as bar:
        task = bar.add_task("training", total=args.steps, loss="")
        for step in range(args.steps):
            start = step % batches * args.batch
            batch = batch_of(rows[start : start + args.batch], mesh)
            params, state, loss = train_step(params, state, *batch)
            bar.update(task, advance=1, loss=f"loss {float(loss):.4f}")
    return params


def accuracy(params: Params, rows: np.ndarray, mesh: Mesh) -> float:
    return int(count_correct(params, *batch_of(rows, mesh))) / len(rows)


if __name__ == "__main__":
    main()

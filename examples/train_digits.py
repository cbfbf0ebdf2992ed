"""Train a classifier of handwritten digits on 8 devices, save it, and restore it onto another mesh.

    python examples/train_digits.py

Blocks are read from a file, a step trains under ``gda.jit``, and a checkpoint keeps the parameters.
With fewer than 8 accelerators, the CPU plays 8 devices.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# JAX reads this once, at its first use. It applies to the CPU only, not to accelerators.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import gda

STEPS, BATCH = 300, 128
TRAINING, HELD_OUT = 1437, 360  # rows of the shuffled file; the held-out ones come last

# The hidden units are sharded over 'model'; every device of 'data' holds the same parameters.
SHAPES = {"w1": (64, 128), "b1": (128,), "w2": (128, 10), "b2": (10,)}
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}

OPTIMIZER = optax.sgd(learning_rate=0.1, momentum=0.9)


def mesh_of(data: int, model: int) -> Mesh:
    devices = jax.devices() if len(jax.devices()) >= 8 else jax.devices("cpu")
    return Mesh(np.array(devices[:8]).reshape(data, model), ("data", "model"))


def batch_of(rows: np.ndarray, mesh: Mesh) -> list[gda.GlobalArray]:
    """Return pixels and labels of some rows of the file, sharded over 'data'.

    Each block is read once from the file, although every device of 'model' holds it.
    """
    return [
        gda.GlobalArray.from_callback(part.shape, mesh, P("data"), part.__getitem__, dtype=dtype)
        for part, dtype in ((rows[:, :64], np.float32), (rows[:, 64], np.int32))
    ]


# These functions see plain arrays: gda.jit unwraps their arguments.


def logits_of(params: Any, pixels: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(pixels / 16 @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_of(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits_of(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# out_specs shards the results; JAX chooses the layout of the optimizer's state.
@gda.jit(out_specs=(SPECS, None, P()), donate_argnums=(0, 1))
def train_step(params: Any, state: Any, pixels: jax.Array, labels: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, pixels, labels)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@gda.jit
def count_correct(params: Any, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.sum(logits_of(params, pixels).argmax(axis=1) == labels)


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = load_digits(return_X_y=True)
    np.save(folder / "digits.npy", rng.permutation(np.column_stack([pixels, labels])))
    digits = np.load(folder / "digits.npy", mmap_mode="r")

    mesh = mesh_of(data=4, model=2)
    values = {
        name: rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        for name, shape in SHAPES.items()
    }
    params = gda.load_tree(values, mesh, SPECS)
    state = OPTIMIZER.init(params)  # a tree of GlobalArrays, sharded like the parameters
    for step in range(STEPS):
        start = step * BATCH % (TRAINING - BATCH)
        batch = batch_of(digits[start : start + BATCH], mesh)
        params, state, loss = train_step(params, state, *batch)
        # Beside load, JAX on CPU can stop for good if 32 steps are on their way.
        loss.block_until_ready()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {float(loss):.4f}")
    correct = int(count_correct(params, *batch_of(digits[TRAINING:], mesh)))
    print(f"accuracy on {HELD_OUT} held-out digits after training: {correct / HELD_OUT:.2%}")

    gda.checkpoint.save(folder / "params", params)
    other = mesh_of(data=2, model=4)
    restored = gda.checkpoint.restore(folder / "params", mesh=other, specs=SPECS)
    w1 = restored["w1"]
    axes = ",".join(f"{name}={size}" for name, size in w1.mesh.shape.items())
    print(f"restored: w1 is sharded by {w1.spec} over {axes}")
    correct = int(count_correct(restored, *batch_of(digits[TRAINING:], other)))
    print(f"accuracy on {HELD_OUT} held-out digits after restoring: {correct / HELD_OUT:.2%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(*sys.argv[1:] or [temporary]))

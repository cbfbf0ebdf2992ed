"""An embedding table of 50,257 rows, trained on 8 devices, with padding that no result sees.

python examples/padded_vocabulary.py

50,257 rows do not divide by 8, so the table is a PaddedArray. The same training on one device, with
a table that has no padding, gives the same losses and gradient norms.
"""

import os
from typing import Any

# The CPU plays 8 devices; with accelerators, omit this line.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

VOCABULARY, WIDTH, BATCH, STEPS = 50257, 16, 64, 20

random = np.random.default_rng(0)
initial = random.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
tokens = random.integers(VOCABULARY, size=BATCH)
following = random.permutation(tokens)

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.01))


def loss_of(params: dict[str, gda.PaddedArray]) -> jax.Array:
    """Return the cross entropy of the next token, over the rows of the vocabulary alone."""
    table = params["table"]
    logits = table.array[tokens] @ table.array.T
    logits = jnp.where(table.mask().T, logits, -jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


@jax.jit
def step(params, state):
    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradient)


def train(table: gda.PaddedArray) -> tuple[gda.PaddedArray, np.ndarray]:
    """Return the trained table, and the loss and the gradient norm of every step."""
    params: Any = {"table": table}
    state, history = optimizer.init(params), []
    for _ in range(STEPS):
        params, state, loss, norm = step(params, state)
        history.append((float(loss), float(norm)))
    return params["table"], np.array(history)


devices = jax.devices("cpu")
table = gda.PaddedArray.from_source(initial, Mesh(np.array(devices), ("data",)), P("data"))
padding = table.padded_shape[0] / VOCABULARY - 1
print(f"{table!r}, padded to {table.padded_shape}: {padding:.2%} more memory")
table, history = train(table)
for number in (0, STEPS - 1):
    print(f"step {number + 1}: loss {history[number, 0]:.4f}, norm {history[number, 1]:.4f}")

alone = gda.PaddedArray.from_source(initial, Mesh(np.array(devices[:1]), ("data",)), P("data"))
assert alone.padded_shape == alone.shape
alone, history_alone = train(alone)
np.testing.assert_allclose(history, history_alone, rtol=1e-3)
np.testing.assert_allclose(np.asarray(table), np.asarray(alone), atol=1e-3)
assert not np.asarray(table.array)[VOCABULARY:].any()
print("one device without padding has the same losses, norms and table")

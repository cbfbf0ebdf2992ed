"""A training loses a host and goes on with the others; then its weights go to a sampler.

    python -m gda.launch -n 4 --devices-per-process 2 examples/elastic_hosts.py

The first half of the steps runs on 8 devices in 4 processes, the second on 6 devices in 3 of them.
Weights and optimizer state go from device to device, not through files, and the losses are those of
8 devices. 6 divides neither the batch nor the hidden units, so all arrays are PaddedArrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import gda
import gda.launch

PIXELS, HIDDEN, CLASSES = 64, 128, 10
SHAPES = {"w1": (PIXELS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
SPECS = {"w1": P(None, "data"), "b1": P("data"), "w2": P("data"), "b2": P()}
OPTIMIZER = optax.sgd(learning_rate=0.1, momentum=0.9)
BATCH, STEPS = 128, 24


def spec_of(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Return the spec of a weight, or of the optimizer's means of it; the rest is replicated."""
    return SPECS.get(path.rpartition("/")[2], P())


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


def logits_of(weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    """Return the logits of digits; padding of the weights is 0, so it changes none of them."""
    hidden = jax.nn.relu(rows[:, :PIXELS] / 16 @ weights["w1"] + weights["b1"])
    return hidden @ weights["w2"] + weights["b2"]


def loss_of(params: dict[str, gda.PaddedArray], batch: gda.PaddedArray) -> jax.Array:
    """Return the mean loss of the digits of a batch, without its padding."""
    logits = logits_of({name: weight.array for name, weight in params.items()}, batch.array)
    labels = batch.array[:, PIXELS].astype(int)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(batch.mask()[:, 0], losses, 0).sum() / batch.shape[0]


@jax.jit
def train_step(params: Any, state: Any, batch: gda.PaddedArray) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(params: Any, state: Any, mesh: Mesh, steps: range) -> tuple[Any, Any, list[float]]:
    """Return weights, optimizer state and the loss of every step."""
    losses = []
    for step in steps:
        start = step * BATCH % (len(digits) - BATCH)
        batch = gda.PaddedArray.from_source(digits[start : start + BATCH], mesh, P("data"))
        params, state, loss = train_step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


gda.launch.initialize()
process, devices = jax.process_index(), jax.devices()
random = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
digits = random.permutation(np.column_stack([pixels, labels])).astype(np.float32)
initial = {name: random.normal(size=shape) / np.sqrt(shape[0]) for name, shape in SHAPES.items()}
everywhere, fewer = mesh_of(devices), mesh_of(devices[:6])
params: Any = {
    name: gda.PaddedArray.from_source(value, everywhere, SPECS[name])
    for name, value in initial.items()
}
state = OPTIMIZER.init(params)
uninterrupted, _, expected = train(params, state, everywhere, range(STEPS))

# All four processes move the arrays. Then the last one has no part of them, and trains no more.
params, state, losses = train(params, state, everywhere, range(STEPS // 2))
params, state = gda.reshard_tree((params, state), fewer, spec_of, donate=True)
if process < 3:
    params, state, more_losses = train(params, state, fewer, range(STEPS // 2, STEPS))
    losses += more_losses
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
if process == 0:
    print(f"w1 is {params['w1']!r}, padded to {params['w1'].padded_shape}")
    for step in range(3, STEPS, 4):
        print(f"step {step + 1:2}: loss {losses[step]:.4f}, uninterrupted {expected[step]:.4f}")

# Trainer to sampler: from 4 devices of processes 0 and 1 to 2 devices of process 2. A process that
# never had the weights gives their layout in their place.
trainers, sampler = mesh_of(devices[:4]), mesh_of(devices[4:6])
weights: Any = gda.reshard_tree(uninterrupted, trainers, spec_of)
fingerprints = {name: weight.fingerprint() for name, weight in weights.items()}
if process == 2:
    weights = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(trainers, SPECS[name]))
        for name, shape in SHAPES.items()
    }
if process < 3:
    weights = gda.reshard_tree(weights, sampler, P())
if process == 2:
    arrived = {name: gda.fingerprint(weight) for name, weight in weights.items()}
    assert arrived == fingerprints, (arrived, fingerprints)
    found = logits_of(weights, jnp.asarray(digits)).argmax(axis=1)
    accuracy = np.mean(np.asarray(found) == digits[:, PIXELS])
    print(f"the sampler has the weights of the trainers: accuracy {accuracy:.2%}")

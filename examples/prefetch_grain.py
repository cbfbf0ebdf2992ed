"""A training loop over Grain whose batches are on the devices before the step needs them.

python examples/prefetch_grain.py /tmp/checkpoint
python -m gda.launch -n 2 --devices-per-process 4 examples/prefetch_grain.py /tmp/checkpoint

Each process loads its own records. The checkpoint after step 3 has the state of the loader of each
process: that of the batches which were trained on, although more had been fetched. So training
again from there gives the same losses.
"""

import os
import sys

# The CPU plays 8 devices; with accelerators, omit this line.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

RECORDS, WIDTH, BATCH, SAVED_AT = 1024, 16, 128, 3

if "JAX_NUM_PROCESSES" in os.environ:
    gda.launch.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))

random = np.random.default_rng(0)
weights = random.normal(size=WIDTH).astype(np.float32)
inputs = random.normal(size=(RECORDS, WIDTH)).astype(np.float32)
records = [{"x": x, "y": x @ weights} for x in inputs]


def load() -> grain.IterDataset:
    """Return the batches of this process: its part of every global batch."""
    here = slice(jax.process_index(), None, jax.process_count())
    dataset = grain.MapDataset.source(records)[here].shuffle(seed=1)
    return dataset.batch(BATCH // jax.process_count()).to_iter_dataset()


@jax.jit
def step(w, batch):
    def loss_of(w):
        return jnp.mean((batch["x"].array @ w - batch["y"].array) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(w)
    return w - 0.2 * gradient, loss


w = jnp.zeros(WIDTH)
folder, losses = sys.argv[1], []
with gda.prefetch(load(), mesh, P("data")) as batches:
    for number, batch in enumerate(batches, start=1):
        w, loss = step(w, batch)
        losses.append(float(loss))
        if number == 1:
            print(repr(batch["x"]))
        if number == SAVED_AT:
            data = gda.checkpoint.PerProcess(batches.get_state())
            gda.checkpoint.save(folder, {"w": w, "data": data}, overwrite=True)
print(f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.5f}")

state = gda.checkpoint.restore(folder, {"w": w, "data": gda.checkpoint.PerProcess(None)})
w = state["w"]
with gda.prefetch(load(), mesh, P("data")) as batches:
    batches.set_state(state["data"].value)  # before the first batch
    again = []
    for batch in batches:
        w, loss = step(w, batch)
        again.append(float(loss))
assert again == losses[SAVED_AT:], (again, losses)
print(f"continued after step {SAVED_AT}: the same {len(again)} losses")

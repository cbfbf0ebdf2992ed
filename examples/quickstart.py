"""A tour of the constructors, on 8 virtual CPU devices: the quickstart of the README as a program.

python examples/quickstart.py
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y"))
data = np.arange(16, dtype=np.float32).reshape(8, 2)

# One read for each distinct block. Here two devices hold each block.
reads = []


def read(index):
    reads.append(index)
    return data[index]


g = gda.GlobalArray.from_callback((8, 2), mesh, P("x"), read)
print(repr(g))
print(len(g.local_shards), "shards from", len(reads), "reads")

# A sharding stands for mesh and spec.
sharding = jax.sharding.NamedSharding(mesh, P("x"))
print(repr(gda.GlobalArray.from_callback((8, 2), sharding, read)))

# One call for all blocks, with the index of every device.
h = gda.GlobalArray.from_batched_callback(
    (8, 2), mesh, P("x", "y"), lambda indices: [data[i] for i in indices]
)
print(repr(h))


# One call that also places the blocks on the devices.
def place(request):
    return [jax.device_put(data[i], device) for i, devices in request for device in devices]


print(repr(gda.GlobalArray.from_batched_callback_with_devices((8, 2), mesh, P(None, "y"), place)))

# Around arrays that are on the devices already, and around one jax.Array.
print(repr(gda.GlobalArray((8, 2), mesh, P("x"), [g.local_data(i) for i in range(8)])))
print(repr(gda.GlobalArray.from_array(g + h)))

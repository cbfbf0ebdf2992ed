"""The two examples of the README as a program, on 8 virtual CPU devices.

python examples/quickstart.py
"""

import os

# The CPU plays 8 devices; with accelerators, omit this line.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import tempfile

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

devices = np.array(jax.devices("cpu"))
mesh = Mesh(devices.reshape(4, 2), ("x", "y"))
data = np.arange(64, dtype=np.float32).reshape(8, 8)

# One call of the callback for each distinct block: 'y' holds replicas.
g = gda.GlobalArray.from_callback((8, 8), mesh, P("x"), lambda index: data[index])
print(repr(g))
shard = g.local_shards[3]
print((shard.index, shard.replica_id, shard.data.shape))

# A plain tree, saved and restored onto another mesh.
params = {"w": jax.device_put(data, NamedSharding(mesh, P("x", "y")))}
path = tempfile.mkdtemp() + "/step-1"
gda.checkpoint.save(path, params)
other = Mesh(devices[:2], ("z",))
like = gda.abstract(params, other, P("z"))
restored = gda.checkpoint.restore(path, like=like)
w = restored["w"]
print((isinstance(w, jax.Array), w.sharding.mesh == other))
print(gda.checkpoint.diff(path, restored).are_equal)


def step(params, x):
    return jax.grad(lambda p: ((x @ p["w"]) ** 2).sum())(params)


# The memory and the communication of a step that does not run.
x = gda.abstract(jax.ShapeDtypeStruct((64, 8), np.float32), other, P("z"))
rehearsal = gda.rehearse(step, like, x)
collectives = rehearsal.collectives or ()  # None only if the step does not fit
print((rehearsal.argument_bytes, [each.kind for each in collectives]))

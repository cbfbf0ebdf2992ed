"""The quickstart of the README as a program, on 8 virtual CPU devices.

python examples/quickstart.py
"""

import os

# The CPU plays 8 devices; with accelerators, omit this line.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y"))
data = np.arange(128, dtype=np.float32).reshape(8, 16)

# An array in memory: dimension 0 is sharded over 'x', and 'y' holds replicas.
g = gda.GlobalArray.from_source(data, mesh, P("x"))
print(repr(g))

# A tree of arrays, and the same as NumPy arrays.
params = {"w": data, "b": np.zeros(3, np.float32)}
tree = gda.load_tree(params, mesh, {"w": P("x", "y"), "b": P()})
print(repr(tree["w"]))
print(repr(gda.to_numpy(tree)["b"]))

# One call of the callback for each distinct block.
h = gda.GlobalArray.from_callback((8, 16), mesh, P(None, "y"), lambda index: data[index])
print((len(h.local_shards), h.local_shards[1].index))

# Computing gives an ordinary jax.Array.
print(repr((g + h).sum()))

"""Linear regression over many hosts, each with its own part of the data.

On a laptop: python -m gda.launch -n 4 --devices-per-process 2 examples/many_hosts.py
On a cluster: the same program, started once on every host, for instance by srun.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import gda
import gda.launch

gda.launch.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
rows = gda.local_rows(mesh, P("data"), 512)  # those of this process
rng = np.random.default_rng(seed=rows.start)
inputs = rng.normal(size=(rows.stop - rows.start, 3)).astype(np.float32)
x = gda.GlobalArray.from_process_local(inputs, mesh, P("data"))
y = gda.GlobalArray.from_process_local(inputs @ np.array([1, 2, 3], np.float32), mesh, P("data"))
w = gda.GlobalArray.from_callback((3,), mesh, P(), lambda index: np.zeros(3, np.float32))
gda.check_processes_agree({"x": x, "y": y, "w": w}, name="before the first step")


@gda.jit
def step(w, x, y):
    return w - 0.1 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)


for _ in range(100):
    w = step(w, x, y)
learned = w.gather().round(3)
print(f"process {jax.process_index()} of {jax.process_count()}: {x.shape[0]} rows, w = {learned}")

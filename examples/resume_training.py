"""A training that is killed, goes on with fewer devices, is told to end, and goes on to its end.

A scheduler would send the signals. Here each program sends one to itself, after a step of its own.
"""

import os
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gda


def train(folder: str, at: int, sent: str, steps: int = 100) -> int:
    mesh = Mesh(jax.devices(), ("data",))
    x = jax.device_put(jnp.linspace(-3, 3, 256), NamedSharding(mesh, PartitionSpec("data")))
    first = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec()))
    train_step = jax.value_and_grad(lambda w: ((w[0] * x + w[1] - jnp.sin(x)) ** 2).mean())
    run = gda.checkpoint.Run(folder, every=10, keep=3, keep_best=(1, "loss"))
    w, step = run.resume(first)
    print(f"devices: {jax.device_count()}, from step {step}", end=", ", flush=True)
    while step < steps and not run.is_ending:
        loss, gradient = train_step(w)
        w, step = w - 0.01 * gradient, step + 1
        if step == at:
            os.kill(os.getpid(), signal.Signals[sent])
        run.save(step, w, metrics={"loss": loss})
    run.close(step, w)
    print(f"ended after step {step}, loss {train_step(w)[0]:.5f}", flush=True)
    return 75 if step < steps else 0


if __name__ == "__main__" and len(sys.argv) > 1:
    sys.exit(train(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        for words in ("4 whole 0 -", "4 killed 37 SIGKILL", "2 killed 68 SIGTERM", "1 killed 0 -"):
            devices, run, *signaled = words.split()
            os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
            code = subprocess.call([sys.executable, __file__, f"{top}/{run}", *signaled])
            print(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}")

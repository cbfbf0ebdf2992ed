"""A training that is killed, goes on with fewer devices, is told to end, and goes on to its end.

    python examples/resume_training.py

A scheduler would send the signals. Here each program sends one to itself, after a step of its own.
"""

import os
import signal
import subprocess
import sys
import tempfile

STEPS = 100


def train(folder: str, devices: str, sent: str, at: str) -> int:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import gda

    sharding = NamedSharding(Mesh(np.array(jax.devices("cpu")), ("data",)), P("data"))
    angles = jax.device_put(jnp.linspace(-3, 3, 256), sharding)

    def loss_of(w):
        waves = jnp.sin(angles[:, None] * jnp.arange(1, 17))
        return ((waves @ w - jnp.sign(angles)) ** 2).mean()

    @jax.jit
    def train_step(w, momentum):
        loss, gradient = jax.value_and_grad(loss_of)(w)
        momentum = 0.9 * momentum + gradient
        return (w - 0.05 * momentum, momentum), loss

    run = gda.checkpoint.Run(folder, every=10, keep=3, keep_best=(1, "loss"))
    state, step = run.resume(jax.device_put((jnp.zeros(16), jnp.zeros(16)), sharding))
    print(f"devices: {devices}, from step {step}", end=", ", flush=True)
    while step < STEPS:
        state, loss = train_step(*state)
        step += 1
        if step == int(at):
            os.kill(os.getpid(), signal.Signals[sent])
        run.save(step, state, metrics={"loss": loss})
        if run.is_ending:
            break
    run.close(step, state)
    print(f"ended after step {step}, loss {float(train_step(*state)[1]):.5f}", flush=True)
    return 75 if step < STEPS else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(train(*sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        for run, *words in [
            ("whole", "4", "", "0"),
            ("killed", "4", "SIGKILL", "37"),
            ("killed", "2", "SIGTERM", "68"),
            ("killed", "1", "", "0"),
        ]:
            code = subprocess.call([sys.executable, __file__, f"{folder}/{run}", *words])
            print(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}")

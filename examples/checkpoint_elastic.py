"""Train on 8 devices until a kill at a random step, and resume on 4 with the same final loss.

    python examples/checkpoint_elastic.py

Three programs run one after another, each a process with its own devices. One trains without a
pause on 8 devices. One does the same, saves in the background every few steps, and is killed with
SIGKILL. One restores the last complete checkpoint onto 4 devices and trains to the end. The
checkpoint does not depend on the number of devices, and a kill during a save leaves the previous
one intact.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, SAVE_EVERY, BATCH = 30, 5, 256
PIXELS, HIDDEN, CLASSES = 64, 128, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="train, be killed, and resume on fewer devices")
    parser.add_argument("--kill-at", type=int, help=f"step, from 1 to {STEPS - 1}; default: random")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.devices)
        return
    kill_at = args.kill_at or random.randint(1, STEPS - 1)
    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder) / "whole", devices=8)
        print(f"8 devices, without a pause: loss {whole:.6f} after {STEPS} steps")
        run(Path(folder) / "cut", devices=8, kill_at=kill_at)
        print(f"8 devices, killed after step {kill_at}")
        resumed = run(Path(folder) / "cut", devices=4)
        print(f"4 devices, resumed: loss {resumed:.6f} after {STEPS} steps")
    # Sums are taken in another order on 4 devices, so the last digits may differ.
    if not math.isclose(whole, resumed, rel_tol=1e-3):
        sys.exit(f"the loss is {resumed}, and without a pause it is {whole}")


def run(checkpoint: Path, devices: int, kill_at: int | None = None) -> float:
    """Train in a new process, and return the last loss; kill the process at a step."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, __file__, "--train", str(checkpoint), "--devices", str(devices)]
    loss = math.nan
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}"},
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            word, *rest = line.split()
            if word == "step":
                loss = float(rest[2])
                if int(rest[0]) == kill_at:
                    child.send_signal(signal.SIGKILL)
                    return loss
            else:
                print(line, end="")
    if child.returncode:
        sys.exit(f"training ended with exit code {child.returncode}")
    return loss


def train(checkpoint: Path, devices: int) -> None:
    """Train from the checkpoint, if there is one, to the last step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P
    from sklearn.datasets import load_digits

    import gda

    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",))
    pixels, labels = load_digits(return_X_y=True)
    optimizer = optax.adam(3e-3)
    # Sharded over the devices, as in FSDP: each holds a part of every parameter.
    specs = {"w1": P("data"), "w2": P("data")}

    def fresh() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        shapes = {"w1": (PIXELS, HIDDEN), "w2": (HIDDEN, CLASSES)}
        params = {
            name: gda.GlobalArray.from_callback(
                shape, mesh, specs[name], rng.normal(size=shape).astype(np.float32).__getitem__
            )
            for name, shape in shapes.items()
        }
        return {
            "params": params,
            "optimizer": optimizer.init(params),  # pyright: ignore[reportArgumentType]
            "key": jax.random.key(0),
            "step": 0,
        }

    def batch_of(key: jax.Array) -> tuple[gda.GlobalArray, gda.GlobalArray]:
        rows = np.asarray(jax.random.choice(key, len(pixels), (BATCH,)))
        x, y = (pixels[rows] / 16).astype(np.float32), labels[rows].astype(np.int32)
        return (
            gda.GlobalArray.from_callback(x.shape, mesh, P("data"), x.__getitem__),
            gda.GlobalArray.from_callback(y.shape, mesh, P("data"), y.__getitem__),
        )

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jnp.tanh(x @ params["w1"] / 8) @ params["w2"] / 8
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @gda.jit
    def step_of(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    run = fresh()
    if (checkpoint / "manifest.json").exists():
        run = gda.checkpoint.restore(checkpoint, like=run, check_fingerprint=True)
        print(f"resuming after step {run['step']}", flush=True)
    pending = None
    while run["step"] < STEPS:
        key, batch_key = jax.random.split(run["key"])
        params, state, loss = step_of(run["params"], run["optimizer"], *batch_of(batch_key))
        run = {"params": params, "optimizer": state, "key": key, "step": run["step"] + 1}
        print(f"step {run['step']} loss {float(loss):.9g}", flush=True)
        if run["step"] % SAVE_EVERY == 0:
            if pending is not None:
                pending.result()
            pending = gda.checkpoint.save_async(checkpoint, run, overwrite=True)
    if pending is not None:
        pending.result()


if __name__ == "__main__":
    main()

"""A trainer of four processes and a sampler of two; after every step the weights go across.

    python examples/train_and_sample.py

starts both programs, on CPU devices of this machine. The trainer learns a matrix on 8 devices, in
rows; its step donates the weights. The sampler pulls them onto 4 devices, in columns and in
bfloat16, and uses them.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import gda
import gda.launch

STEPS = 20
SIZE = 64


def main() -> int:
    """Start both programs, and wait for them; if one fails, end the other."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "gda.launch", "--devices-per-process", "2"]
        programs = [
            subprocess.Popen([*launch, "-n", processes, "--timeout", "200", __file__, role, folder])
            for role, processes in [("trainer", "4"), ("sampler", "2")]
        ]
        while None in (codes := [program.poll() for program in programs]):
            if any(codes):
                for program in programs:
                    program.terminate()
            time.sleep(0.1)
        return int(any(codes))


@jax.jit
def loss_of(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((x @ weights - y) ** 2).mean()


def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return weights - 20 * jax.grad(loss_of)(weights, x, y)


def train(folder: Path) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = np.random.default_rng(jax.process_index()).normal(size=(64, SIZE)).astype(np.float32)
    x = gda.GlobalArray.from_process_local(rows, mesh, P("data"))
    y = gda.GlobalArray.from_process_local(rows @ np.eye(SIZE, dtype=np.float32), mesh, P("data"))
    weights = gda.GlobalArray.from_callback(
        (SIZE, SIZE), mesh, P("data"), lambda index: np.zeros((SIZE // mesh.size, SIZE), np.float32)
    )
    train_step = gda.jit(step, donate_argnums=0, out_specs=P("data"))
    with gda.offer({"weights": weights, "step": 0}, name="policy") as offer:
        if jax.process_index() == 0:
            (folder / "address.new").write_text(offer.address)
            (folder / "address.new").rename(folder / "address")
        for number in range(1, STEPS + 1):
            weights = train_step(weights, x, y)
            offer.update({"weights": weights, "step": number})
        while not (folder / "sampled").exists():
            time.sleep(0.1)


def sample(folder: Path) -> None:
    while not (folder / "address").exists():
        time.sleep(0.1)
    address = (folder / "address").read_text()
    mesh = jax.make_mesh((jax.device_count(),), ("model",))
    specs = {"weights": P(None, "model"), "step": P()}
    number, error = 0, 1.0
    while number < STEPS:
        tree = gda.pull(
            address,
            mesh,
            specs,
            name="policy",
            dtype="bfloat16",
            min_version=number + 2,  # version 1 has the weights before the first step
        )
        number, weights = tree["step"], tree["weights"]
        error = float(abs(weights.gather() - np.eye(SIZE)).max())
        if jax.process_index() == 0:
            print(f"step {number}: {weights.dtype}, {weights.spec}, error {error:.3f}")
    assert error < 0.02, error
    if jax.process_index() == 0:
        (folder / "sampled").touch()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit(main())
    gda.launch.initialize()
    {"trainer": train, "sampler": sample}[sys.argv[1]](Path(sys.argv[2]))

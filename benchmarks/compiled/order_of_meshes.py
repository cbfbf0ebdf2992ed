"""The order of twelve meshes by estimate and by measured steps, on eight virtual CPU devices.

All devices share the cores of one machine, so its speeds are measured first, with all of them at
work: of products, of memory, and of a copy between devices. The step is that of an MLP whose layers
are scanned. Rounds are interleaved, and the median of each mesh counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda
from gda.compiled.collective_times import Interconnect
from gda.compiled.devices.device_kinds import DeviceKind
from gda.compiled.devices.device_speeds import DeviceSpeeds, Fit, Measured
from gda.compiled.hlo import ProgramMesh, modules_of, read_schedule
from gda.compiled.seconds import StepSeconds, seconds_of

AXES = ("data", "fsdp", "tensor", "idle")
# All meshes over three axes, and two whose devices repeat each other's work.
MESHES = [
    *((a, b, 8 // (a * b), 1) for a, b in itertools.product((1, 2, 4, 8), repeat=2) if a * b <= 8),
    (4, 1, 1, 2),
    (1, 1, 2, 4),
]
LAYERS, WIDTH, INNER, ROWS = 4, 256, 1024, 1024


class Row(NamedTuple):
    mesh: str
    estimate: float
    measured: float


def step(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step and shapes of its arguments."""

    def sharded(x: jax.Array, *spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    rows = ("data", "fsdp")

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        inner = sharded(jax.nn.relu(x @ w["up"]), rows, "tensor")
        return sharded(x + inner @ w["down"], rows), None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (lax.scan(layer, x, params)[0] ** 2).mean()

    def descent(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, x))

    shapes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    specs = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    args = (gda.abstract(params, mesh, specs), gda.abstract(x, mesh, P(rows)))
    return jax.jit(descent, donate_argnums=0), args


def order(rounds: int = 15) -> tuple[list[Row], float]:
    """Return the meshes, the fastest by estimate first, and Spearman's rank correlation."""
    speeds = measured_speeds()
    estimates, runs = [], []
    for sizes in MESHES:
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), AXES)
        fun, args = step(mesh)
        compiled = fun.lower(*args).compile()
        estimates.append(estimate_of(compiled.as_text() or "", mesh, speeds).estimate or 0.0)
        runs.append(_run(compiled, args))
    seconds = [list[float]() for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, seconds, strict=True):
            found.append(run())
    medians = [*map(statistics.median, seconds)]
    names = (
        ",".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True) if size > 1)
        for sizes in MESHES
    )
    rows = [*map(Row, names, estimates, medians)]
    return sorted(rows, key=lambda row: row.estimate), spearman(estimates, medians)


def _run(compiled: Any, args: Any) -> Callable[[], float]:
    def placed(shape: Any) -> jax.Array:
        return jax.device_put(np.full(shape.shape, 0.01, np.float32), shape.sharding)

    params, x = jax.tree.map(placed, args)
    params = jax.block_until_ready(compiled(params, x))

    def run() -> float:
        nonlocal params
        begun = time.perf_counter()
        params = jax.block_until_ready(compiled(params, x))
        return time.perf_counter() - begun

    return run


def spearman(left: list[float], right: list[float]) -> float:
    """Return the correlation of the ranks of two lists without equal numbers."""
    first, second = (np.argsort(np.argsort(each)) for each in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


def estimate_of(text: str, mesh: Mesh, kind: DeviceKind) -> StepSeconds:
    """Return the time of a program on the CPU devices of this machine."""
    assert kind.speeds is not None
    links = Interconnect(kind.speeds, hosts=(0,) * mesh.size)
    return seconds_of(read_schedule(modules_of(text, ProgramMesh(mesh.shape))), kind, links, 1.0)


def measured_speeds() -> DeviceKind:
    """Return the speeds of a virtual device while all eight work."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))

    def on_each(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
        placed = [
            jax.device_put(np.ones((8, *shape), np.float32), NamedSharding(mesh, P("x")))
            for shape in shapes
        ]
        mapped = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        jax.block_until_ready(mapped(*placed))
        seconds = []
        for _ in range(9):
            begun = time.perf_counter()
            jax.block_until_ready(mapped(*placed))
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    side, count = 512, 2**22
    products = 2 * side**3 / on_each(jnp.matmul, (side, side), (side, side))
    memory = 2 * 4 * count / on_each(lambda x: x + 1, (count,))
    fits = {}
    for name, collective, sent in (
        ("any", lambda x: lax.all_gather(x, "x"), 7 / 8),
        ("all-reduce", lambda x: lax.psum(x, "x"), 2 * 7 / 8),
    ):

        def first(x: jax.Array, of: Callable[[jax.Array], jax.Array] = collective) -> jax.Array:
            return lax.optimization_barrier(of(x)).reshape(-1)[:1]

        small = on_each(first, (64,))
        large = on_each(first, (count // 8 if name == "any" else count,))
        fits[name] = (small, sent * 4 * count / max(large - small, 1e-9))
    link = max(rate for _, rate in fits.values())
    collectives = {name: (Fit(2, start, rate / link),) for name, (start, rate) in fits.items()}
    speeds = DeviceSpeeds(
        {"bf16": products, "f32": products},
        link=link,
        slow_link=link,
        measured=Measured(1.0, 1.0, 1.0, collectives),
    )
    return DeviceKind("cpu", ("cpu",), 0, int(memory), speeds)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    rows, correlation = order()
    for row in rows:
        print(f"{row.mesh:24} {row.estimate * 1e3:8.1f} {row.measured * 1e3:8.1f}")
    print(f"{correlation:.2f}")


if __name__ == "__main__":
    main()

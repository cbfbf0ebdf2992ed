"""Rehearsals compared with runs, on eight CPU devices.

The profiler of JAX names each operation that a device executes, so the collectives are counted in
the run itself. Its names are those of the compiled program, whose text tells their kinds.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

pytestmark = pytest.mark.usefixtures("optimizing_compiler")

Case = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments


def placed(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> jax.Array:
    data = np.random.default_rng(0).normal(size=shape).astype(dtype)
    return jax.device_put(data, NamedSharding(mesh, P(*spec)))


def layers(weights: Any, x: Any) -> Any:
    def layer(x: Any, weight: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ weight["up"]) @ weight["down"], None

    return lax.scan(jax.checkpoint(layer), x, weights)[0]


def weights_of(mesh: Mesh) -> Any:
    up, down = placed(mesh, (3, 16, 32), None, None, "y"), placed(mesh, (3, 32, 16), None, "y")
    return {"up": up, "down": down}


def train_step_with_donation(mesh: Mesh) -> Case:
    adam = optax.adam(1e-3)

    def step(weights: Any, state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (layers(w, x) ** 2).mean())(weights)
        updates, state = adam.update(gradient, state)
        return optax.apply_updates(weights, updates), state, loss

    weights = weights_of(mesh)
    placement = {leaf.shape: leaf.sharding for leaf in weights.values()}
    state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, placement.get(leaf.shape, NamedSharding(mesh, P()))),
        adam.init(weights),
    )
    return jax.jit(step, donate_argnums=(0, 1)), (weights, state, placed(mesh, (8, 16), "x"))


def shard_map_with_permutations(mesh: Mesh) -> Case:
    def part(x: Any) -> Any:
        for _ in range(2):
            x = x + lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])
        return lax.all_gather(lax.psum(x, "y"), "x", axis=0, tiled=True), x.sum(keepdims=True)

    mapped = jax.shard_map(
        part, mesh=mesh, in_specs=P("x", "y"), out_specs=(P(), P("x", "y")), check_vma=False
    )
    return jax.jit(mapped), (placed(mesh, (16, 8), "x", "y"),)


def loop_with_random_numbers(mesh: Mesh) -> Case:
    def walk(seed: Any, unused: Any, x: Any) -> Any:
        def step(carry: Any) -> Any:
            i, key, x = carry
            key, now = jax.random.split(key)
            noise = jax.random.normal(now, x.shape)
            return i + 1, key, (x + noise) / jnp.abs(x).max()

        key = jax.random.key(seed)
        return lax.while_loop(lambda carry: carry[0] < 5, step, (0, key, x))[2]

    seed = jax.device_put(np.uint32(1), NamedSharding(mesh, P()))
    return jax.jit(walk), (seed, placed(mesh, UNUSED), placed(mesh, (16, 8), "x", "y"))


UNUSED = (64, 2)

CASES = (train_step_with_donation, shard_map_with_permutations, loop_with_random_numbers)


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def bytes_on(device: Any, tree: Any) -> int:
    """Return the bytes of the live shards of a tree on a device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def executed(folder: Path, text: str) -> Counter[tuple[str, int]]:
    """Return the kinds of the collectives in a profile, with their executions on all devices."""
    kinds = dict(re.findall(r"%?([\w.\-]+) = .*?\s((?:all|reduce|collective)-[a-z\-]+)\(", text))
    (file,) = folder.rglob("*.xplane.pb")
    runs = Counter(
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name in kinds
    )
    return Counter((kinds[name], times) for name, times in runs.items())


@pytest.mark.parametrize("case", CASES)
def test_rehearsal_agrees_with_the_run(
    case: Callable[[Mesh], Case], auto_mesh: Mesh, tmp_path: Path
) -> None:
    fun, args = case(auto_mesh)
    program = fun.lower(*abstract(args)).compile()
    rehearsal = gda.rehearse(program)
    device = auto_mesh.devices.flat[0]
    used = [leaf for leaf in jax.tree.leaves(args) if leaf.shape != UNUSED]
    assert rehearsal.argument_bytes == bytes_on(device, used)
    assert rehearsal.argument_bytes == sum(each.nbytes for each in rehearsal.arguments)

    with jax.profiler.trace(str(tmp_path)):
        results = jax.block_until_ready(program(*args))
    assert rehearsal.collectives
    expected = [(each.kind, (each.count or 0) * auto_mesh.size) for each in rehearsal.collectives]
    assert executed(tmp_path, program.as_text() or "") == Counter(expected)
    # On a CPU several results have a table with the address of each.
    num_results = len(jax.tree.leaves(results))
    addresses = 8 * num_results if num_results > 1 else 0
    assert rehearsal.output_bytes == bytes_on(device, results) + addresses
    donated = [leaf for leaf in jax.tree.leaves(args) if leaf.is_deleted()]
    of_donated = sum(each.nbytes for each in rehearsal.arguments if each.is_donated)
    assert (of_donated > 0) == bool(donated)
    assert rehearsal.aliased_bytes == of_donated

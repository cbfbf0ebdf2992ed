"""Mistakes that a rehearsal finds: a program with each, and its mend, which is not accused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda

pytestmark = pytest.mark.usefixtures("optimizing_compiler")

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of({"data": 4, "model": 2})


def shaped(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return gda.abstract(jax.ShapeDtypeStruct(shape, dtype), mesh, spec)


def loss(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) ** 2).sum()


def accusations(found: gda.Rehearsal, word: str) -> list[gda.Advice]:
    return [each for each in found.advice if each.text.startswith(word)]


def as_h100(found: gda.Rehearsal, **about: Any) -> gda.Rehearsal:
    """Return the rehearsal as if of GPUs that compute a second, and communicate one over axes."""
    facts: dict[str, Any] = {"device_kind": H100, "fits": True, "capacity_bytes": 2**30}
    facts["traffic"] = tuple(each._replace(least_seconds=1.0) for each in found.traffic)
    facts["seconds"] = gda.StepSeconds(compute=1.0, estimate=2.0)
    return dataclasses.replace(found, **facts | about)


def test_a_batch_that_is_not_sharded(mesh: Mesh) -> None:
    def rehearsed(spec: P) -> gda.Rehearsal:
        w = shaped(mesh, P(None, "model"), 64, 64)
        return gda.rehearse(jax.grad(loss), w, shaped(mesh, spec, 32, 64))

    (advice,) = accusations(as_h100(rehearsed(P())), "shard the batch")
    assert advice.text == (
        "shard the batch over data, or constrain what is computed from it by "
        "jax.lax.with_sharding_constraint: devices repeat work: each product is computed "
        "4 times on average; saves 750.0 ms"
    )
    assert advice.saves_seconds == pytest.approx(3 / 4)
    assert accusations(rehearsed(P("data")), "shard the batch") == []


def test_gradients_that_are_reduced_for_every_microbatch(mesh: Mesh) -> None:
    def summed(gradient: Any, w: Any, xs: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradient(w, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), xs)[0]

    def step(w: Any, xs: Any) -> Any:
        return summed(jax.grad(loss), w, xs)

    def once(w: Any, xs: Any) -> Any:
        def of_device(w: Any, xs: Any) -> Any:
            w = jax.lax.pcast(w, "data", to="varying")
            return jax.lax.psum(summed(jax.grad(loss), w, xs), "data")

        return jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(P(), P(None, "data")),
            out_specs=P(),
            axis_names={"data"},
        )(w, xs)

    args = shaped(mesh, P(), 64, 64), shaped(mesh, P(None, "data"), 8, 32, 64)
    found = gda.rehearse(jax.jit(step), *args)
    assert found.collectives is not None
    (reduce,) = found.collectives
    assert (reduce.kind, reduce.count, reduce.is_needed_once) == ("all-reduce", 8, True)
    (advice,) = accusations(as_h100(found), "add up in the loop, and all-reduce once after it: ")
    assert "all-reduce over data of sums that only grow 8 times, 128.0 KiB sent" in advice.text
    assert advice.saves_seconds == pytest.approx(7 / 8)
    mended = gda.rehearse(jax.jit(once), *args)
    assert mended.collectives is not None
    assert [each.count for each in mended.collectives] == [1]
    assert accusations(mended, "add up") == []


def test_sums_of_tensor_parallel_layers_are_needed_in_each(mesh: Mesh) -> None:
    def step(layers: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            up, down = w
            return x + jnp.tanh(x @ up) @ down, None

        return jax.lax.scan(layer, x, layers)[0]

    up, down = (
        shaped(mesh, P(None, None, "model"), 6, 64, 64),
        shaped(mesh, P(None, "model"), 6, 64, 64),
    )
    found = gda.rehearse(step, (up, down), shaped(mesh, P("data"), 32, 64))
    assert found.collectives is not None
    assert [(each.count, each.is_needed_once) for each in found.collectives] == [(6, False)]


def test_the_same_array_gathered_in_each_trip_of_a_loop(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())

    def step(w: Any, x: Any) -> Any:
        def turn(x: Any, _: Any) -> Any:
            here, x = jax.lax.optimization_barrier((w, x))  # or XLA gathers before the loop
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(here, whole)), None

        return jax.lax.scan(turn, x, length=6)[0]

    def once(w: Any, x: Any) -> Any:
        return step(jax.lax.with_sharding_constraint(w, whole), x)

    args = shaped(mesh, P("data"), 64, 64), shaped(mesh, P("data"), 8, 64)
    found = gda.rehearse(step, *args)
    (advice,) = accusations(as_h100(found), "gather once before the loop: all-gather over data")
    assert (advice.saves_bytes, advice.saves_seconds) == (-64 * 64 * 4, pytest.approx(5 / 6))
    assert advice.text.endswith("; saves 833.3 ms, and takes 16.0 KiB")
    assert found.peak_bytes is not None
    assert accusations(as_h100(found, capacity_bytes=found.peak_bytes + 2**13), "gather") == []
    assert accusations(gda.rehearse(once, *args), "gather") == []


def test_layers_that_are_gathered_one_by_one_are_not_accused(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())

    def step(layers: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(layer, x, layers)[0]

    layers = abstract((6, 64, 64), mesh, None, "data", "model")
    found = gda.rehearse(step, layers, abstract((8, 64), mesh, "data"))
    assert found.collectives is not None
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    assert gathers
    assert not any(each.is_needed_once for each in found.collectives)


def test_a_replicated_embedding(mesh: Mesh) -> None:
    table, ids = shaped(mesh, P(), 1024, 64), shaped(mesh, P("data"), 32, dtype=jnp.int32)
    found = gda.rehearse(lambda table, ids: table[ids].sum(), table, ids)
    found = as_h100(found, capacity_bytes=2**20)
    (advice,) = accusations(found, "shard table float32[1024,64] by P(('data', 'model'))")
    assert advice.saves_bytes == 1024 * 64 * 4 * 7 // 8
    assert advice.costs_seconds == advice.saves_bytes / 450e9
    whole = tuple(each._replace(spec=(("data", "model"),)) for each in found.arguments)
    assert accusations(dataclasses.replace(found, arguments=whole), "shard table") == []


def test_advice_that_a_planner_followed_to_a_slower_step_is_not_given() -> None:
    mesh = mesh_of({"data": 8})

    def step(params: Any, x: Any) -> Any:
        def of(params: Any) -> Any:
            return ((x + jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(of)(params))

    layer = {"up": shaped(mesh, P(), 256, 1024), "down": shaped(mesh, P(), 1024, 256)}
    found = gda.rehearse(jax.jit(step, donate_argnums=0), layer, shaped(mesh, P("data"), 256, 256))
    assert found.peak_bytes is not None
    quick = gda.StepSeconds(compute=3e-6, communication=0.46e-6, estimate=4e-6)
    # The peak is 0.3 % of the memory, and then half of it: to gather takes longer than the step.
    for times in (333, 2):
        planned = as_h100(found, capacity_bytes=found.peak_bytes * times, seconds=quick)
        assert planned.advice == ()
    assert accusations(as_h100(found, fits=False, seconds=quick), "shard ") != []

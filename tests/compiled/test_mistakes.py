"""Mistakes that a rehearsal finds: a program with each, and its mend, which is not accused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

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
    """Return the rehearsal as if of GPUs that compute for a second."""
    facts: dict[str, Any] = {"device_kind": H100, "fits": True, "capacity_bytes": 2**30}
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

"""Advice on rehearsed programs, each number against a rehearsal that follows it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda


@pytest.fixture(scope="module")
def mesh_4x2() -> Mesh:
    return mesh_of({"data": 4, "model": 2})


def test_an_argument_sharded_as_advised_takes_what_was_promised(mesh_4x2: Mesh) -> None:
    def step(w: Any, x: Any) -> Any:
        return (x @ w).sum()

    def rehearsed(spec: Any) -> gda.Rehearsal:
        return gda.rehearse(step, abstract((64, 32), mesh_4x2, *spec), abstract((8, 64), mesh_4x2))

    whole = rehearsed(P())
    first, second, *_ = whole.advice
    assert first == (
        "shard w float32[64,32] by P('data', 'model') in place of P(): saves 7.0 KiB",
        64 * 32 * 4 * 7 // 8,
        None,
    )
    assert second.text.startswith(
        "shard x float32[8,64] by P(None, ('data', 'model')) in place of P(): "
    )
    sharded = rehearsed(P("data", "model"))
    assert whole.argument_bytes - sharded.argument_bytes == first.saves_bytes
    assert not any(each.text.startswith("shard w") for each in sharded.advice)
    assert (
        rehearsed(P("data"))
        .advice[1]
        .text.startswith(
            "shard w float32[64,32] by P('data', 'model') in place of P('data'): saves 1.0 KiB"
        )
    )


def test_arguments_donated_as_advised_take_what_was_promised(mesh_4x2: Mesh) -> None:
    params = {name: abstract((256, 64), mesh_4x2, "data", "model") for name in "abc"}

    def step(params: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, params)

    before = gda.rehearse(step, params)
    (advice,) = before.advice
    assert advice.saves_bytes == before.undonated_bytes == 3 * 256 * 64 * 4 // 8
    assert advice.text == (
        "donate params['a'] (8.0 KiB), params['b'] (8.0 KiB) and 1 more by "
        "jax.jit(…, donate_argnums=…), since results have the same shapes: saves 24.0 KiB"
    )
    after = gda.rehearse(jax.jit(step, donate_argnums=0), params)
    assert before.peak_bytes is not None
    assert after.peak_bytes == before.peak_bytes - advice.saves_bytes
    assert after.advice == ()


def test_a_result_of_other_blocks_takes_no_argument(mesh_4x2: Mesh) -> None:
    x = abstract((64, 32), mesh_4x2, "data", "model")
    whole = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh_4x2, P()))
    assert gda.rehearse(whole, x).undonated_bytes == 0


def test_equal_advice_for_many_arguments_is_one(mesh_4x2: Mesh) -> None:
    layers = {f"w{n}": abstract((16, 32), mesh_4x2, "model") for n in range(12)}
    layers["small"] = abstract((4,), mesh_4x2)
    found = gda.rehearse(lambda layers: sum(x.sum() for x in layers.values()), layers)
    (advice,) = found.advice
    assert advice[:2] == (
        "shard 12 arguments such as layers['w0'] float32[16,32] by P('model', 'data') in place of "
        "P('model'): saves 9.0 KiB",
        12 * 8 * 32 * 4 * 3 // 4,
    )


def test_axes_that_do_not_divide_an_argument_are_not_advised(mesh_4x2: Mesh) -> None:
    w, v = abstract((63, 31), mesh_4x2), abstract((6, 2), mesh_4x2, "model")
    found = gda.rehearse(lambda w, v: w.sum() + v.sum(), w, v)
    assert found.advice == ()


def test_gathers_in_loops_are_listed_by_line(mesh_4x2: Mesh) -> None:
    whole = NamedSharding(mesh_4x2, P())

    def step(layers: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(layer, x, layers)[0]

    layers = abstract((6, 64, 64), mesh_4x2, None, "data", "model")
    found = gda.rehearse(step, layers, abstract((8, 64), mesh_4x2, "data"))
    (over_data,) = (each for each in found.advice if " over data" in each.text)
    assert over_data.saves_bytes is None
    assert "test_advice.py:" in over_data.text
    assert "in a loop, 6 times, " in over_data.text
    assert "free" not in over_data.text  # the capacity of a CPU is unknown
    assert found.advice[-1].saves_bytes is None  # what saves memory comes first
    assert found.peak_bytes is not None
    roomy = dataclasses.replace(found, capacity_bytes=found.peak_bytes + 2**20, fits=True)
    assert any("of the 1.0 MiB that are free" in each.text for each in roomy.advice)


def test_advice_is_shown_for_a_program_that_does_not_fit(mesh_4x2: Mesh) -> None:
    x = abstract((64, 32), mesh_4x2)
    found = gda.rehearse(lambda x: x.sum(), x)
    assert "rehearsal.advice has 1 change that would save memory, the first 7.0 KiB" in str(found)
    too_large = dataclasses.replace(found, fits=False, capacity_bytes=1)
    assert str(too_large).endswith(f"\nto save memory or communication:\n- {found.advice[0].text}")
    assert "rehearsal.advice" not in str(too_large)
    many = dataclasses.replace(
        too_large, arguments=tuple(found.arguments[0]._replace(dtype=f"f{n}") for n in range(10))
    )
    assert str(many).endswith("\n… 2 more in rehearsal.advice")


def test_advice_is_shown_for_a_program_that_communicates_longer_than_it_computes(
    mesh_4x2: Mesh,
) -> None:
    x = abstract((64, 32), mesh_4x2, "data")
    w = abstract((32, 64), mesh_4x2)
    found = gda.rehearse(lambda x, w: (x @ w).sum(0), x, w)
    (traffic,) = found.traffic
    assert found.least_compute_seconds is found.least_communication_seconds is None
    h100 = dataclasses.replace(
        found,
        fits=True,
        device_kind="NVIDIA H100 80GB HBM3",
        flops=989.4e12 * 0.25,
        traffic=(traffic._replace(least_seconds=0.5),),
    )
    message = "computes at least 250.0 ms, communicates at least 500.0 ms, at the vendor's figures"
    assert message in str(h100)
    assert "\nto save memory or communication:\n- shard w " in str(h100)
    assert "500.0 ms" in h100._repr_html_()
    quick = dataclasses.replace(h100, traffic=(traffic._replace(least_seconds=2e-6),))
    assert "communicates at least 2.0 µs" in str(quick)
    assert "to save memory or communication" not in str(quick)


def test_advice_that_costs_more_than_it_gains_is_not_shown(mesh_4x2: Mesh) -> None:
    x, w = abstract((64, 32), mesh_4x2, ("data", "model")), abstract((32, 64), mesh_4x2)
    found = gda.rehearse(lambda x, w: (x @ w).sum(0), x, w)
    (traffic,) = found.traffic
    traffic = (traffic._replace(least_seconds=1.0),)
    about = {"fits": True, "device_kind": "NVIDIA H100 80GB HBM3", "traffic": traffic}
    h100 = dataclasses.replace(found, **about, capacity_bytes=2**20)
    saved = 32 * 64 * 4 * 7 // 8
    assert h100.advice[0].text.endswith(
        "saves 7.0 KiB; to gather it takes 0.0 µs or more, each time"
    )
    assert (h100.advice[0].saves_bytes, h100.advice[0].costs_seconds) == (saved, saved / 450e9)
    # Nothing is repeated, so that it gains memory alone, and that is less than 1 %.
    assert "shard w" not in str(h100)
    assert "shard w" not in str(dataclasses.replace(h100, capacity_bytes=100 * saved))
    assert "shard w" in str(dataclasses.replace(h100, fits=False))
    assert found.flops is not None
    repeated = dataclasses.replace(h100, flops=found.flops * 8e6, flops_total=found.flops * 8e6)
    assert "shard w" not in str(repeated)
    assert "shard w" in str(dataclasses.replace(repeated, capacity_bytes=100 * saved))


def test_temporaries_that_are_too_large_are_named_first() -> None:
    large = gda.Temporary("float32", (64, 64), 2**14, "", None, None)
    fits = gda.rehearse(lambda w, x: w @ x, np.zeros((8, 8)), np.zeros((8, 8)))
    sizes = {"argument_bytes": 1024, "output_bytes": 0, "aliased_bytes": 0, "code_bytes": 0}
    too_large = dataclasses.replace(
        fits, **sizes, temporary_bytes=2**14, peak_bytes=2**14 + 1024, temporaries=(large,)
    )
    text = too_large_for(too_large, 2**14).advice[0].text
    assert text.startswith("hold 1.0 KiB less of temporaries, by smaller batches on a device or")
    assert text.endswith("the largest is float32[64,64] of 16.0 KiB")
    for capacity in (2**15, 1000):  # it fits, or the arguments alone do not
        advice = too_large_for(too_large, capacity).advice
        assert not any("temporaries" in each.text for each in advice)


def too_large_for(rehearsal: gda.Rehearsal, capacity: int) -> gda.Rehearsal:
    fits = (rehearsal.peak_bytes or 0) <= capacity
    return dataclasses.replace(rehearsal, capacity_bytes=capacity, fits=fits)

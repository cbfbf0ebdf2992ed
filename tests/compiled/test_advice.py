"""Advice on rehearsed programs, each number against a rehearsal that follows it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda


@pytest.fixture(scope="module")
def mesh_4x2() -> Mesh:
    return mesh_of({"data": 4, "model": 2})


def too_large(found: gda.Rehearsal) -> gda.Rehearsal:
    """Return the rehearsal as if the program did not fit, so that every byte counts."""
    return dataclasses.replace(found, fits=False, capacity_bytes=1)


def shardings(found: gda.Rehearsal) -> list[gda.Advice]:
    shard = [each for each in found.advice if each.text.startswith("shard ")]
    return [each for each in shard if not each.text.startswith("shard the batch")]


def test_an_argument_sharded_as_advised_takes_what_was_promised(mesh_4x2: Mesh) -> None:
    def step(w: Any, x: Any) -> Any:
        return (x @ w).sum()

    def rehearsed(spec: Any) -> gda.Rehearsal:
        args = abstract((64, 32), mesh_4x2, *spec), abstract((8, 64), mesh_4x2)
        return too_large(gda.rehearse(step, *args))

    whole = rehearsed(P())
    first, second, *_ = shardings(whole)
    text, saved, *_ = first
    assert text.startswith(
        "shard w float32[64,32] by P('data', 'model') in place of P(): saves 7.0 KiB"
    )
    assert saved == 64 * 32 * 4 * 7 // 8
    assert second.text.startswith(
        "shard x float32[8,64] by P(None, ('data', 'model')) in place of P(): "
    )
    sharded = rehearsed(P("data", "model"))
    assert whole.argument_bytes - sharded.argument_bytes == saved
    assert not any(each.text.startswith("shard w") for each in sharded.advice)
    of_rows = "shard w float32[64,32] by P('data', 'model') in place of P('data'): saves 1.0 KiB"
    assert any(each.text.startswith(of_rows) for each in rehearsed(P("data")).advice)


def test_arguments_donated_as_advised_take_what_was_promised(mesh_4x2: Mesh) -> None:
    params = {name: abstract((256, 64), mesh_4x2, "data", "model") for name in "abc"}

    def step(params: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, params)

    before = gda.rehearse(step, params)
    (advice,) = before.advice
    assert advice.saves_bytes == before.undonated_bytes == 3 * 256 * 64 * 4 // 8
    assert advice.text == (
        "donate params/a (8.0 KiB), params/b (8.0 KiB) and 1 more by "
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
    (advice,) = shardings(too_large(found))
    assert advice.saves_bytes == 12 * 8 * 32 * 4 * 3 // 4
    assert advice.text.startswith(
        "shard 12 arguments such as layers/w0 float32[16,32] by P('model', 'data') in place of "
        "P('model'): saves 9.0 KiB"
    )


def test_axes_that_do_not_divide_an_argument_are_not_advised(mesh_4x2: Mesh) -> None:
    w, v = abstract((63, 31), mesh_4x2), abstract((6, 2), mesh_4x2, "model")
    found = gda.rehearse(lambda w, v: w.sum() + v.sum(), w, v)
    assert too_large(found).advice == ()


def test_advice_is_shown_by_print(mesh_4x2: Mesh) -> None:
    x = abstract((64, 32), mesh_4x2)
    found = gda.rehearse(lambda x: x.sum(), x)
    assert found.advice == ()  # its price is unknown, or more than the step
    short = too_large(found)
    (advice,) = short.advice
    assert f"\nto save time or memory:\n- {advice.text}\n\nall of this together" in str(short)
    many = dataclasses.replace(
        short, arguments=tuple(found.arguments[0]._replace(dtype=f"f{n}") for n in range(10))
    )
    assert str(many).endswith("\n… 2 more in rehearsal.advice")


def test_sharding_is_advised_where_gathering_takes_little_of_the_time(mesh_4x2: Mesh) -> None:
    x, w = abstract((64, 32), mesh_4x2, ("data", "model")), abstract((32, 64), mesh_4x2)
    found = gda.rehearse(lambda x, w: (x @ w).sum(0), x, w)
    about = {"fits": True, "device_kind": "NVIDIA H100 80GB HBM3"}
    saved = 32 * 64 * 4 * 7 // 8
    quick, long = gda.StepSeconds(estimate=1e-6), gda.StepSeconds(estimate=1e-3)
    h100 = dataclasses.replace(found, **about, capacity_bytes=100 * saved, seconds=quick)
    assert shardings(h100) == []  # 16 ns of 1 µs
    (advice,) = shardings(dataclasses.replace(h100, seconds=long))
    assert advice.text.endswith("saves 7.0 KiB; to gather it takes 0.0 µs or more, each time")
    assert advice[1:3] == (saved, saved / 450e9)
    assert shardings(dataclasses.replace(h100, seconds=long, capacity_bytes=101 * saved)) == []
    assert shardings(dataclasses.replace(h100, fits=False)) != []


def test_batch_that_is_not_sharded(mesh_4x2: Mesh) -> None:
    def rehearsed(*spec: Any, after: float | None = None) -> list[gda.Advice]:
        args = abstract((64, 64), mesh_4x2, None, "model"), abstract((32, 64), mesh_4x2, *spec)
        found = gda.rehearse(jax.grad(lambda w, x: (jax.numpy.tanh(x @ w) ** 2).sum()), *args)
        seconds = {"seconds": gda.StepSeconds(compute=1.0, estimate=2.0), "seconds_advised": after}
        found = dataclasses.replace(found, **seconds)
        return [each for each in found.advice if each.text.startswith("shard the batch")]

    (advice,) = rehearsed()
    assert advice.text == (
        "shard the batch over data, or constrain what is computed from it by "
        "jax.lax.with_sharding_constraint: devices repeat work: each product is computed "
        "4 times on average"
    )
    assert advice.saves_seconds is None  # what it then sends is unknown
    (priced,) = rehearsed(after=1.5)
    assert priced.text == (
        f"{advice.text}; with the batch sharded over data a call takes 1.5 s, which saves 500.0 ms"
    )
    assert priced.saves_seconds == 0.5
    assert rehearsed(after=2.5) == []
    assert rehearsed("data") == []


@pytest.mark.topology
def test_the_price_of_an_advice_is_that_of_the_step_after_it() -> None:
    mesh = gda.rehearsal_mesh("v5e:2x2", {"data": 4})

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (jax.numpy.tanh(x @ w) ** 2).mean())(w)

    def rehearsed(rows: int, *spec: Any) -> gda.Rehearsal:
        w, x = (jax.ShapeDtypeStruct((n, 1024), jax.numpy.bfloat16) for n in (1024, rows))
        arguments = gda.abstract(w, mesh, P()), gda.abstract(x, mesh, P(*spec))
        return gda.rehearse(jax.jit(step, donate_argnums=0), *arguments)

    few, many = rehearsed(64), rehearsed(2**15)
    for before, rows in ((few, 64), (many, 2**15)):
        assert before.repetitions == 4
        assert before.seconds_advised == rehearsed(rows, "data").seconds.estimate
    assert few.advice == ()  # the sum of the gradients takes longer than all products
    (advice,) = many.advice
    assert None not in (many.seconds.estimate, many.seconds_advised)
    assert advice.saves_seconds == many.seconds.estimate - many.seconds_advised > 0


def test_work_that_is_repeated_a_little_is_told(mesh_4x2: Mesh) -> None:
    x, w = abstract((64, 64), mesh_4x2, "data"), abstract((64, 64), mesh_4x2, None, "model")
    found = gda.rehearse(lambda x, w: x @ w, x, w)
    assert found.flops is not None
    for times, words in ((1.01, ""), (1.24, "computed 1.24 times on average: devices repeat")):
        little = dataclasses.replace(found, flops=found.flops * times)
        assert words in str(little)
        assert ("times on average" in str(little)) == bool(words)


def test_a_program_that_no_advice_makes_fit_needs_more_devices(mesh_4x2: Mesh) -> None:
    x, w = abstract((64, 64), mesh_4x2, ("data", "model")), abstract((64, 64), mesh_4x2)
    found = gda.rehearse(lambda x, w: (x @ w).sum(0), x, w)  # 16 KiB each
    sizes = {"peak_bytes": 20 * 2**10, "argument_bytes": 18 * 2**10, "temporary_bytes": 2**11}
    found = dataclasses.replace(found, **sizes, fits=False)
    for capacity, words in (
        (2**13, ""),  # with w sharded it takes 6 KiB
        (5 * 2**10, "with all of this it takes 6.0 KiB of 5.0 KiB: its temporaries must also be"),
        (
            2**10,
            "all of this together does not make it fit: it takes 6.0 KiB of 1.0 KiB; the arguments "
            "alone need 32 devices of this kind, and all of it about 48, if they share it",
        ),
    ):
        short = dataclasses.replace(found, capacity_bytes=capacity)
        assert any(each.text.startswith("shard w") for each in short.advice)
        assert words in str(short)
        assert ("it takes 6.0 KiB" in str(short)) == bool(words)
    assert short.to_dict()["least_devices"] == short.least_devices == 32


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

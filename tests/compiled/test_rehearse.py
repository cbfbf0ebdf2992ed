"""Rehearsals on eight CPU devices, and on TPUs that are not here."""

import dataclasses
import functools
import json
import pickle
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import abstract, cut, mesh_of

import gda
from gda.compiled import rehearse
from gda.compiled.hlo.instructions import Computation
from gda.compiled.rehearse import _the_more_exact


def arguments(rehearsal: gda.Rehearsal) -> dict[str, int]:
    return {each.name: each.nbytes for each in rehearsal.arguments}


# Numbers.


def test_a_step_in_numbers(mesh: Mesh) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (x @ w).sum())(w)

    w, x = abstract((64, 32), mesh, None, "y"), abstract((16, 64), mesh, "x")
    rehearsal = gda.rehearse(jax.jit(step, donate_argnums=0), w, x)
    block, batch = 64 * 16 * 4, 4 * 64 * 4
    assert (rehearsal.name, rehearsal.device_kind, rehearsal.num_devices) == ("step", "cpu", 8)
    assert rehearsal.mesh_shape == {"x": 4, "y": 2}
    assert (rehearsal.fits, rehearsal.capacity_bytes) == (None, None)
    assert rehearsal.argument_bytes == block + batch
    assert (rehearsal.output_bytes, rehearsal.aliased_bytes) == (block, block)
    assert rehearsal.temporary_bytes is not None
    assert rehearsal.peak_bytes == block + batch + rehearsal.temporary_bytes
    assert rehearsal.flops == 2 * 16 * 64 * 32 / 8  # of the gradient; the loss is not computed
    assert rehearsal.undonated_bytes == 0
    (donated, other) = rehearsal.arguments
    assert donated == ("w", (64, 32), "float32", block, True, False, (None, "y"), False, None)
    assert (other.name, other.is_donated, other.spec) == ("x", False, ("x",))
    (traffic,) = rehearsal.traffic
    assert (traffic.axes, traffic.executions, traffic.nbytes_slow) == (("x",), 1, None)
    assert rehearsal.collectives is not None
    assert traffic.nbytes == rehearsal.collectives.nbytes_total
    assert len(gda.rehearse(lambda x: x + 1, x).traffic) == 0


def test_arguments_that_could_be_donated_are_counted(mesh: Mesh) -> None:
    w = abstract((64, 32), mesh, "x")
    state = {"a": w, "b": w, "step": abstract((), mesh)}

    def step(state: Any, x: Any) -> Any:
        return {"a": state["a"] * x, "b": state["b"] + state["step"], "step": state["step"] + 1}

    block = 16 * 32 * 4
    # Of the three arrays of the same shape, two have a result.
    assert gda.rehearse(step, state, w).undonated_bytes == 2 * block + 4
    assert gda.rehearse(jax.jit(step, donate_argnums=1), state, w).undonated_bytes == block + 4


# Arguments.


def test_arguments_have_the_names_of_the_signature(mesh: Mesh) -> None:
    @functools.partial(jax.jit, static_argnums=1, static_argnames="mode")
    def step(params: Any, n: int, lr: Any, *rest: Any, mode: str, **more: Any) -> Any:
        scale = lr * n * rest[0] + more["scale"]
        return params["layers"][1] * scale + rest[1].sum() + (mode == "train")

    w, scalar = abstract((16, 32), mesh, "x"), abstract((), mesh)
    rehearsal = gda.rehearse(
        *(step, {"layers": [w, w]}, 3, scalar, scalar, abstract((8,), mesh)),
        mode="train",
        scale=2.0,
    )
    assert arguments(rehearsal) == {
        "params/layers/1": 4 * 32 * 4,
        "rest/1": 32,
        "lr": 4,
        "rest/0": 4,
        "more/scale": 4,
    }


def test_containers_and_arrays_are_arguments(mesh: Mesh) -> None:
    g = cut(np.ones((16, 32), np.float32), mesh, P("x", "y"))
    padded = gda.PaddedArray.from_source(np.ones((15, 3), np.float32), mesh, P("x"))
    f = gda.jit(lambda tree, p: (tree["g"].sum(), p), out_specs=(P(), None))
    rehearsal = gda.rehearse(f, {"g": g}, padded)
    assert arguments(rehearsal) == {"tree/g": 4 * 16 * 4, "p": 4 * 3 * 4}
    assert rehearsal.name == "<lambda>"
    assert gda.rehearse(lambda x: x.sum(), g.array).argument_bytes == 4 * 16 * 4


def test_stages_are_rehearsed(mesh: Mesh) -> None:
    f, x = jax.jit(lambda x: x.sum(axis=0) @ x.T), abstract((16, 32), mesh, "x")
    whole = gda.rehearse(f, x)
    for stage in (f.trace(x), f.lower(x), f.lower(x).compile()):
        found = gda.rehearse(stage)
        assert found.argument_bytes == whole.argument_bytes
        assert (found.num_devices, found.mesh_shape) == (8, {"x": 4, "y": 2})
        assert [each[:3] for each in found.traffic] == [each[:3] for each in whole.traffic]
        assert found.flops == whole.flops
        assert (found.flops_total is None) != isinstance(stage, jax.stages.Traced)


def test_arguments_without_a_mesh(auto_mesh: Mesh) -> None:
    x = jax.ShapeDtypeStruct((16, 32), np.float32)
    alone = gda.rehearse(lambda x: x.sum(), x)
    assert (alone.num_devices, alone.mesh_shape, alone.argument_bytes) == (1, {}, 2048)
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=auto_mesh, in_specs=P("x", "y"), out_specs=P(None, "y")
    )
    spread = gda.rehearse(mapped, x)
    assert (spread.num_devices, spread.argument_bytes) == (8, 256)
    assert [each.axes for each in spread.traffic] == [("x",)]
    second = SingleDeviceSharding(jax.devices()[1])
    placed = gda.rehearse(jnp.sin, jax.ShapeDtypeStruct((4,), np.float32, sharding=second))
    assert (placed.device_kind, placed.num_devices, placed.argument_bytes) == ("cpu", 1, 16)


@pytest.mark.processes(2, devices=4)
def test_links_between_hosts_are_slow() -> None:
    mesh = mesh_of({"x": 2, "y": 4})
    across = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 128), mesh, "x"))
    assert across.traffic == ((("x",), 1, 512, 512, None),)
    within = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 128), mesh, "y"))
    assert within.traffic == ((("y",), 1, 512, 0, None),)


# Compilers without enough memory.


@pytest.mark.parametrize(
    ("words", "peak", "capacity"),
    [
        ("HBM: required are (19.50G) exceeds available HBM (15.75G).", 19.5, 15.75),
        ("hbm. Used 1.25T of 15.75G hbm. Exceeded hbm capacity by 1.23T.", 1280, 15.75),
        ("HBM, in other words", None, None),
    ],
)
def test_the_words_of_a_compiler_are_read(
    words: str,
    peak: float | None,
    capacity: float | None,
    auto_mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = "Ran out of memory on"

    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {problem} {words}")

    monkeypatch.setattr(sys.modules["gda.compiled.rehearse"], "compiled", fail)
    g = cut(np.ones((16, 32), np.float32), auto_mesh, P("x"))
    step = jax.jit(lambda n, x, unused: x * n, static_argnums=0)
    found = gda.rehearse(step, 2, g, abstract((8,), auto_mesh, "y"))
    assert found.fits is False
    assert found.peak_bytes == (None if peak is None else peak * 2**30)
    assert found.capacity_bytes == (None if capacity is None else capacity * 2**30)
    # All arguments, since the compiler does not tell the ones that it uses.
    assert arguments(found) == {"x": 4 * 32 * 4, "unused": 16}
    assert found.argument_bytes == 4 * 32 * 4 + 16
    assert words in repr(found)
    shown = [" ".join(line.split()) for line in repr(found).splitlines()]
    assert any(line.startswith("x float32[16,32] P('x') 512 B") for line in shown)
    problem, words = "the disk is full", ""
    with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is full"):
        gda.rehearse(step, 2, g, abstract((8,), auto_mesh, "y"))


def test_the_compiler_may_ask_for_more_than_the_buffers() -> None:
    # "scoped 2.93G" for collectives, beside the buffers.
    assert _the_more_exact(14 * 2**30, 17 * 2**30) == 17 * 2**30
    assert _the_more_exact(18_794_780_160, int(17.5 * 2**30)) == 18_794_780_160
    assert _the_more_exact(None, 17) == 17
    assert _the_more_exact(14, None) == 14


# Errors.


def test_a_bound_on_the_peak(auto_mesh: Mesh) -> None:
    x = abstract((64, 32), auto_mesh, "x", "y")
    found = gda.rehearse(jnp.sin, x)
    assert found.peak_bytes is not None
    gda.assert_fits(jnp.sin, x, max_peak_bytes=found.peak_bytes)
    with pytest.raises(AssertionError) as caught:
        gda.assert_fits(jnp.sin, x, max_peak_bytes=found.peak_bytes - 1)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "sin takes 2.0 KiB on a device, 2.0 KiB are allowed"
    assert second == "sin on 8 x cpu, mesh x=4,y=2: capacity unknown"
    with pytest.raises(ValueError, match="memory of a device of kind 'cpu' is unknown; give max"):
        gda.assert_fits(jnp.sin, x)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="max_peak_bytes must be a number, 0 or more"):
            gda.assert_fits(jnp.sin, x, max_peak_bytes=wrong)


# Shown.


def test_it_is_shown_as_a_table(auto_mesh: Mesh) -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, w: w + (x.T @ (x @ w)) / w.sum(), w)

    w, x = abstract((64, 32), auto_mesh), abstract((16, 64), auto_mesh, "x")
    # Of a program in JAX's cache, XLA writes no temporaries.
    rehearsal = dataclasses.replace(gda.rehearse(step, w, x), temporaries=())
    shown = re.sub(r"(temporaries|peak) +[\d.]+ K?i?B", r"\1 _", repr(rehearsal))
    assert re.sub(r"compiled in [\d.]+ s", "compiled in _ s", shown).splitlines() == [
        "step on 8 x cpu, mesh x=4,y=2: capacity unknown",
        "",
        "memory       per device",
        "arguments       9.0 KiB",
        "outputs         8.0 KiB",
        "temporaries _",
        "peak _",
        "",
        "9.83e+04 floating-point operations per device in products",
        "devices repeat work: each product is computed 2 times on average",
        "compiled in _ s",
        "",
        "communication over  collectives  per device",
        "x                             3    24.0 KiB",
        "",
        "to save time or memory:",
        "- donate w (8.0 KiB) by jax.jit(…, donate_argnums=…), since results have the same shapes: "
        "saves 8.0 KiB",
        "- shard the batch over y, or constrain what is computed from it by "
        "jax.lax.with_sharding_constraint: devices repeat work: each product is computed 2 times "
        "on average",
    ]


def test_it_goes_through_json_and_a_pickle(mesh: Mesh) -> None:
    rehearsal = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 32), mesh, "x", "y"))
    document = json.loads(json.dumps(rehearsal.to_dict()))
    assert pickle.loads(pickle.dumps(rehearsal)) == rehearsal
    (argument,) = rehearsal.arguments
    assert document["arguments"] == [argument._asdict() | {"shape": [64, 32], "spec": ["x", "y"]}]
    assert document["mesh_shape"] == {"x": 4, "y": 2}
    assert [each["kind"] for each in document["collectives"]] == ["all-reduce"]
    assert document["traffic"] == [rehearsal.traffic[0]._asdict() | {"axes": ["x"]}]
    assert (document["peak_bytes"], document["advice"]) == (rehearsal.peak_bytes, [])


# TPUs that are not here.


@pytest.fixture(scope="module")
def slice_of_four() -> Mesh:
    return gda.rehearsal_mesh("v5e:2x2", {"data": 2, "model": 2})


@pytest.mark.topology
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_program_that_fits(kind: AxisType, slice_of_four: Mesh) -> None:
    mesh = Mesh(slice_of_four.devices, slice_of_four.axis_names, axis_types=(kind, kind))

    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w).astype(np.float32) ** 2).sum()

    w = abstract((256, 512), mesh, None, "model", dtype=jnp.bfloat16)
    x = abstract((64, 256), mesh, "data", dtype=jnp.bfloat16)
    step = jax.jit(jax.grad(loss))
    rehearsal = gda.rehearse(step, w, x)
    assert rehearsal.fits is True
    assert rehearsal.capacity_bytes == 15.75 * 2**30
    assert (rehearsal.device_kind, rehearsal.num_devices) == ("TPU v5 lite", 4)
    assert rehearsal.argument_bytes == 256 * 256 * 2 + 32 * 256 * 2
    assert arguments(rehearsal) == {"w": 256 * 256 * 2, "x": 32 * 256 * 2}
    assert rehearsal.code_bytes
    assert rehearsal.flops == 2 * 2 * 64 * 256 * 512 / 4
    assert {each.axes for each in rehearsal.traffic} == {("data",)}
    assert "fits" in repr(rehearsal).splitlines()[0]
    gda.assert_fits(step, w, x)
    gda.assert_collectives(step, w, x, allow=["all-reduce", "reduce-scatter", "all-gather"])


def test_arguments_below_a_byte_count_as_the_compiler_packs_them(mesh: Mesh) -> None:
    q = abstract((64, 32), mesh, "x", dtype=jnp.int4)
    nbytes = 64 * 32 // 2 // 4
    rehearsal = gda.rehearse(lambda q: q.astype(np.float32), q)
    assert (rehearsal.argument_bytes, arguments(rehearsal)) == (nbytes, {"q": nbytes})


def test_arguments_on_the_host_take_no_memory_of_a_device(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    m, w = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=on_host), abstract((8,), mesh)

    def step(m: Any, w: Any) -> Any:
        return jax.device_put(m, NamedSharding(mesh, P("x"), memory_kind="device")).sum() * w

    rehearsal = gda.rehearse(step, m, w)
    of_m, of_w = rehearsal.arguments
    assert (of_m.is_on_host, of_w.is_on_host) == (True, False)

    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: hbm")

    monkeypatch.setattr(rehearse, "compiled", fail)
    assert gda.rehearse(step, m, w).argument_bytes == 32


@pytest.mark.topology
def test_a_program_that_does_not_fit_is_an_answer(slice_of_four: Mesh) -> None:
    def product(w: Any, n: int, x: Any) -> Any:
        return (x @ w) @ w.T * n

    w = abstract((2**16, 2**16), slice_of_four, dtype=jnp.bfloat16)
    x = abstract((2**17, 2**16), slice_of_four, "data", dtype=jnp.bfloat16)
    step = jax.jit(product, static_argnums=1)
    rehearsal = gda.rehearse(step, w, 2, x)
    assert rehearsal.fits is False
    assert rehearsal.capacity_bytes == 15.75 * 2**30
    assert rehearsal.peak_bytes is not None
    assert rehearsal.peak_bytes > rehearsal.capacity_bytes
    assert rehearsal.argument_bytes == 2 * 2**33
    assert arguments(rehearsal) == {"w": 2**33, "x": 2**33}
    assert rehearsal.collectives is not None
    largest = rehearsal.temporaries[0]
    assert (largest.dtype, largest.shape) == ("bfloat16", (2**16, 2**16)), "a shard"
    assert largest.source_file == __file__
    assert "largest temporaries" in repr(rehearsal)
    assert "does not fit" in repr(rehearsal).splitlines()[0]
    assert "bfloat16[131072,65536]  P('data')     8.0 GiB" in repr(rehearsal)
    assert "Ran out of memory" in rehearsal.message
    json.dumps(rehearsal.to_dict())
    with pytest.raises(AssertionError, match=r"product takes \d+\.\d GiB on a device, 15\.8 GiB"):
        gda.assert_fits(step, w, 2, x)
    # A stage does not tell its devices before it is compiled.
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        gda.rehearse(step.trace(w, 2, x))
    assert caught.value.__notes__ == [
        "gda.rehearse: for an answer, pass arguments that are on a mesh"
    ]


@pytest.mark.topology
@pytest.mark.parametrize("order", [("data", "model"), ("model", "data")])
def test_collectives_between_slices_use_slow_links(order: tuple[str, str]) -> None:
    slices = gda.rehearsal_mesh("v5e:2x2", {"data": 2, "model": 4}, num_slices=2)
    devices = slices.devices if order == slices.axis_names else slices.devices.T
    mesh = Mesh(devices, order)
    within = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 128), mesh, "model"))
    assert [each[:4] for each in within.traffic] == [(("model",), 1, 512, 0)]
    across = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 128), mesh, "data"))
    assert [each[:4] for each in across.traffic] == [(("data",), 1, 512, 512)]
    (traffic,) = across.traffic
    assert traffic.least_seconds == across.seconds.communication
    assert traffic.least_seconds == 512 / (25e9 / 8)
    both = gda.rehearse(lambda x: x.sum(axis=0), abstract((64, 128), mesh, ("data", "model")))
    assert sorted(each[:4] for each in both.traffic) == [
        (("data",), 1, 512, 512),
        (("model",), 1, 512, 0),
    ]
    assert "slow links" in repr(both)


@pytest.mark.topology
def test_one_device_that_is_not_here(slice_of_four: Mesh) -> None:
    alone = SingleDeviceSharding(slice_of_four.devices.flat[0])
    x = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=alone)
    rehearsal = gda.rehearse(jnp.sin, x)
    assert (rehearsal.device_kind, rehearsal.num_devices) == ("TPU v5 lite", 1)
    assert (rehearsal.fits, rehearsal.traffic) == (True, ())


def test_the_text_of_a_program_is_parsed_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(Computation, "check", lambda self, _: checked.append(self.name))
    w, x = abstract((64, 64), mesh, "y"), abstract((64, 64), mesh, "x")
    new = time.time()  # JAX's cache has programs without their temporaries
    found = gda.rehearse(lambda w, x: jnp.tanh(x @ w) @ w + new, w, x)
    assert found.collectives
    assert found.flops
    assert found.temporaries
    assert len(checked) == len({*checked}) > 0

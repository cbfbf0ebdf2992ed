"""The seconds of small programs, against figures by hand."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from meshes import abstract

import gda
from gda.compiled.collective_times import Interconnect, collective_seconds
from gda.compiled.devices.device_kinds import kind_named
from gda.compiled.hlo import ProgramMesh, modules_of, read_collectives, read_schedule
from gda.compiled.seconds import StepSeconds, seconds_of

H100, V5E = kind_named("h100"), kind_named("v5e")
BANDWIDTH = 3_352_320_000_000
CACHE = 50 * 2**20
MESH = ProgramMesh({"data": 4})
LAUNCH = 2e-6  # of a kernel on a GPU
W = 8192 * 8192 * 2  # bytes of a matrix of bfloat16


def module(*entry: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    return (
        f"HloModule m, is_scheduled=true, num_partitions=4\n\n{before}ENTRY %main {{\n{lines}\n}}\n"
    )


def on_h100(text: str, links: Interconnect | None = None) -> StepSeconds:
    return seconds_of(read_schedule(modules_of(text, MESH)), H100, links, 1)


def product(dtype: str = "bf16", more: str = "") -> str:
    return module(
        f"%a = {dtype}[8192,8192]{{1,0}} parameter(0)",
        f"%b = {dtype}[8192,8192]{{1,0}} parameter(1)",
        "ROOT %r = bf16[8192,8192]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
        f"rhs_contracting_dims={{0}}{more}",
    )


@pytest.mark.parametrize(
    ("dtype", "more", "peak"),
    [
        ("bf16", "", 989.4e12),
        ("f8e4m3fn", "", 1979e12),
        ("s8", "", 1979e12),
        ("f32", "", 494.7e12),
        ("f32", ", operand_precision={highest,highest}", 66.9e12),
        ("f32", ", algorithm=dot_bf16_bf16_f32", 989.4e12),
        ("f32", ", algorithm=dot_bf16_bf16_f32_x3", 494.7e12),
        ("f32", ", algorithm=dot_f32_f32_f32", 66.9e12),
    ],
)
def test_a_product_takes_its_operations_at_the_peak_of_its_type(
    dtype: str, more: str, peak: float
) -> None:
    found = on_h100(product(dtype, more))
    assert found.compute == found.bound == 2 * 8192**3 / peak
    assert found.bounded_by == "compute"
    assert found.estimate == pytest.approx(2 * 8192**3 / (0.7 * peak) + LAUNCH)
    assert found.hfu == pytest.approx(found.compute / found.estimate)
    assert found.mfu is None  # it is unknown how often the program does the work of the model
    twice = seconds_of(read_schedule(modules_of(product(dtype, more), MESH)), H100, None, 1, 2)
    assert twice.hfu == found.hfu == 2 * (twice.mfu or 0)
    width = {"bf16": 2, "f32": 4}.get(dtype, 1)
    accessed = 2 * width * 8192**2, 2 * 8192**2  # operands and result
    assert sum(read_schedule(modules_of(product(dtype, more))).steps[-1].arrays) == sum(accessed)


FUSION = """\
%body_of_fusion (p0: bf16[10,8192,8192]) -> bf16[8,8192] {
  %p0 = bf16[10,8192,8192]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[8,8192]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %s = bf16[1,8192,8192]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero)
  %w = bf16[8192,8192]{1,0} bitcast(%s)
  ROOT %d = bf16[8,8192]{1,0} dot(%p2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (carried: (s32[], bf16[8,8192])) -> (s32[], bf16[8,8192]) {
  %carried = (s32[], bf16[8,8192]{1,0}, bf16[10,8192,8192]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carried), index=0
  %x = bf16[8,8192]{1,0} get-tuple-element(%carried), index=1
  %ws = bf16[10,8192,8192]{2,1,0} get-tuple-element(%carried), index=2
  %y = bf16[8,8192]{1,0} fusion(%ws, %n, %x), kind=kCustom, calls=%body_of_fusion
  ROOT %t = (s32[], bf16[8,8192]{1,0}, bf16[10,8192,8192]{2,1,0}) tuple(%n, %y, %ws)
}

%test (carried.1: (s32[], bf16[8,8192], bf16[10,8192,8192])) -> pred[] {
  %carried.1 = (s32[], bf16[8,8192]{1,0}, bf16[10,8192,8192]{2,1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

"""


def decode(known: str = ', backend_config={"known_trip_count":{"n":"10"}}') -> str:
    whole = "(s32[], bf16[8,8192]{1,0}, bf16[10,8192,8192]{2,1,0})"
    return module(
        "%i = s32[] constant(0)",
        "%x0 = bf16[8,8192]{1,0} parameter(0)",
        "%stack = bf16[10,8192,8192]{2,1,0} parameter(1)",
        f"%t0 = {whole} tuple(%i, %x0, %stack)",
        f"ROOT %loop = {whole} while(%t0), condition=%test, body=%body{known}",
        before=FUSION,
    )


def test_decoding_takes_the_time_to_read_each_layer_once() -> None:
    schedule = read_schedule(modules_of(decode()))
    x = 8 * 8192 * 2
    assert schedule.argument_bytes == 10 * W + x
    found = on_h100(decode())
    assert found.bounded_by == "memory"
    # The cache may have a part of it since the call before.
    assert found.memory == pytest.approx((10 * W + x - CACHE) / BANDWIDTH)
    one = (W + 2 * x) / BANDWIDTH / 0.93 + LAUNCH
    assert found.estimate == pytest.approx(10 * one)
    (place,) = found.places
    assert (place.nbytes, place.flops) == (10 * (W + 2 * x + 4), 10 * 2 * 8 * 8192**2)


def test_a_loop_of_unknown_length_is_named_and_counts_once() -> None:
    found = on_h100(decode(known=""))
    assert found.not_counted == ("all but one trip of a loop of unknown length",)
    assert found.is_bound
    assert found.hfu is None
    assert found.compute == 0.0
    assert found.estimate == pytest.approx((W + 4 * 8 * 8192) / BANDWIDTH / 0.93 + LAUNCH)


def test_an_update_in_place_counts_as_the_update() -> None:
    text = module(
        "%cache = bf16[64,8192,8192]{2,1,0} parameter(0)",
        "%new = bf16[1,8192,8192]{2,1,0} parameter(1)",
        "%at = s32[] constant(3)",
        "ROOT %r = bf16[64,8192,8192]{2,1,0} dynamic-update-slice(%cache, %new, %at, %at, %at)",
    )
    (step,) = read_schedule(modules_of(text)).steps
    assert step.arrays == (W, W)


def test_memory_on_the_chip_does_not_count() -> None:
    text = module(
        "%a = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)",
        "%b = bf16[8192,8192]{1,0:T(8,128)(2,1)S(1)} copy(%a)",
        "ROOT %r = bf16[8192,8192]{1,0:T(8,128)(2,1)S(1)} tanh(%b)",
    )
    copy, tanh = read_schedule(modules_of(text)).steps
    assert (copy.arrays, tanh.arrays) == ((W,), ())


def test_an_asynchronous_copy_reads_and_writes_its_array_once() -> None:
    of, on_chip = "bf16[8192,8192]{1,0:T(8,128)(2,1)}", "bf16[8192,8192]{1,0:T(8,128)(2,1)S(1)}"
    text = module(
        f"%a = {of} parameter(0)",
        f"%s = ({on_chip}, {of}, u32[]{{:S(2)}}) copy-start(%a)",
        f"%b = {on_chip} copy-done(%s)",
        f"%t = ({of}, {on_chip}, u32[]{{:S(2)}}) copy-start(%b)",
        f"ROOT %r = {of} copy-done(%t)",
    )
    inward, _, outward, _ = read_schedule(modules_of(text)).steps
    assert (inward.arrays, outward.arrays) == ((W,), (W,))


def test_an_array_without_its_values_is_neither_read_nor_written() -> None:
    of = "bf16[8192,8192]{1,0:T(8,128)(2,1)}"
    text = module(
        f'%a = {of} custom-call(), custom_call_target="AllocateBuffer"',
        f'%b = {of} custom-call(), custom_call_target="AllocateBuffer"',
        "ROOT %r = bf16[16384,8192]{1,0:T(8,128)(2,1)} custom-call(%a, %b), "
        'custom_call_target="ConcatBitcast"',
    )
    assert read_schedule(modules_of(text)).steps == ()


def test_communication_in_the_test_of_a_loop_takes_time_before_each_trip() -> None:
    sent = "%flag = s32[] all-reduce(%one), replica_groups={{0,1,2,3}}, to_apply=%add\n"
    add = (
        "%add (a.9: s32[], b.9: s32[]) -> s32[] {\n  %a.9 = s32[] parameter(0)\n"
        "  %b.9 = s32[] parameter(1)\n  ROOT %s.9 = s32[] add(%a.9, %b.9)\n}\n\n"
    )
    test = f"  %one = s32[] constant(1)\n  {sent}  ROOT %c = pred[]"
    text = add + FUSION.replace("  ROOT %c = pred[]", test)
    modules = modules_of(decode().replace(FUSION, text), MESH)
    assert [each.count for each in read_collectives(modules)] == [11]
    assert H100.speeds is not None
    links = Interconnect(H100.speeds, hosts=(0,) * 4)
    with_test = seconds_of(read_schedule(modules), H100, links, 1)
    alone = collective_seconds(read_collectives(modules)[0], links).estimate
    without = on_h100(decode(), links).estimate
    assert without is not None
    assert with_test.estimate == pytest.approx(without + 11 * alone)


def branches() -> str:
    before = (
        "%one (x: bf16[8192,8192]) -> bf16[8192,8192] {\n"
        "  %x = bf16[8192,8192]{1,0} parameter(0)\n"
        "  ROOT %d = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n}\n\n"
        "%none (x.1: bf16[8192,8192]) -> bf16[8192,8192] {\n"
        "  ROOT %x.1 = bf16[8192,8192]{1,0} parameter(0)\n}\n\n"
    )
    return module(
        "%p = pred[] parameter(0)",
        "%a = bf16[8192,8192]{1,0} parameter(1)",
        "ROOT %r = bf16[8192,8192]{1,0} conditional(%p, %a, %a), true_computation=%one, "
        "false_computation=%none",
        before=before,
    )


def test_the_bound_takes_the_cheapest_branch_and_the_estimate_the_dearest() -> None:
    found = on_h100(branches())
    assert (found.bound, found.bounded_by, found.hfu, found.mfu) == (0, None, None, None)
    assert found.estimate == pytest.approx(2 * 8192**3 / (0.7 * 989.4e12) + LAUNCH)


def gathered(is_asynchronous: bool) -> str:
    group = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
    product = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    small, whole = "bf16[2048,8192]{1,0}", "bf16[8192,8192]{1,0}"
    lines = [
        f"%g = {whole} all-gather(%b), {group}",
        f"%m = {whole} {product}",
    ]
    if is_asynchronous:
        lines = [
            f"%s = (({small}), {whole}) all-gather-start(%b), {group}",
            f"%m = {whole} {product}",
            f"%g = {whole} all-gather-done(%s)",
        ]
    return module(
        "%a = bf16[8192,8192]{1,0} parameter(0)",
        "%b = bf16[2048,8192]{1,0} parameter(1)",
        *lines,
        "ROOT %r = (bf16[8192,8192]{1,0}, bf16[8192,8192]{1,0}) tuple(%m, %g)",
    )


def test_an_asynchronous_gather_hides_behind_a_product() -> None:
    assert H100.speeds is not None
    links = Interconnect(H100.speeds, hosts=(0,) * 4)
    (gather,) = read_collectives(modules_of(gathered(False), MESH))
    alone = collective_seconds(gather, links)
    assert 0.5 < H100.speeds.measured.on_several < 1
    computes = 2 * 8192**3 / (0.7 * H100.speeds.measured.on_several * 989.4e12) + LAUNCH
    assert alone.estimate < computes
    serial, hidden = (on_h100(gathered(each), links) for each in (False, True))
    assert serial.estimate == pytest.approx(computes + alone.estimate)
    assert hidden.estimate == pytest.approx(computes)
    assert serial.communication == hidden.communication == 3 / 4 * W / 450e9


def test_a_gather_that_begins_before_a_loop_hides_behind_its_turns() -> None:
    times = []
    for turns in (1, 50):
        loop = (
            f"%l = bf16[8192,8192]{{1,0}} while(%a), condition=%c, body=%b, "
            f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
        )
        before = (
            "%b (p: bf16[8192,8192]) -> bf16[8192,8192] {\n"
            "  %p = bf16[8192,8192]{1,0} parameter(0)\n"
            "  ROOT %d = bf16[8192,8192]{1,0} dot(%p, %p), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={0}\n}\n\n"
            "%c (q: bf16[8192,8192]) -> pred[] {\n"
            "  %q = bf16[8192,8192]{1,0} parameter(0)\n"
            "  ROOT %t = pred[] constant(true)\n}\n\n"
        )
        text = module(
            "%a = bf16[8192,8192]{1,0} parameter(0)",
            "%s = (bf16[8192,8192]{1,0}, bf16[32768,8192]{1,0}) all-gather-start(%a), "
            "channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true",
            loop,
            "ROOT %e = bf16[32768,8192]{1,0} all-gather-done(%s)",
            before=before,
        )
        assert H100.speeds is not None
        links = Interconnect(H100.speeds, hosts=(0,) * 4)
        found = on_h100(text, links).estimate
        assert found is not None
        times.append(found)
    parts = H100.speeds.measured
    turn = 2 * 8192**3 / 989.4e12 / parts.products / parts.on_several + LAUNCH
    assert times[0] < 50 * turn  # the gather
    assert times[1] == pytest.approx(50 * turn)


def test_the_cycles_of_a_tpu_compiler_are_those_of_its_products() -> None:
    config = (
        ', backend_config={"window_config":{"estimated_cycles":"1500000","iteration_bounds":["1"],'
        '"cost_model_type":"COST_MODEL_TYPE_%s","ml_estimated_microseconds":0}}'
    )
    classic, invalid = (
        seconds_of(read_schedule(modules_of(product(more=config % each))), V5E, None, 1)
        for each in ("CLASSIC", "INVALID")
    )
    least = 2 * 8192**3 / 197e12
    assert classic.compute == invalid.compute == least
    assert classic.estimate == pytest.approx(max(1e-3, least) + 1.5e-6)
    assert invalid.estimate == pytest.approx(least / 0.9 + 1.5e-6)


@pytest.mark.parametrize("estimate", ["", "flops"])
def test_a_kernel_that_is_not_known_is_named(estimate: str) -> None:
    given = ', backend_config={"cost_estimate":{"flops":4000000000}}' if estimate else ""
    text = module(
        "%a = bf16[8192,8192]{1,0} parameter(0)",
        "ROOT %r = bf16[8192,8192]{1,0} custom-call(%a), "
        f'custom_call_target="__gpu$xla.gpu.triton"{given}',
    )
    found = on_h100(text)
    assert read_schedule(modules_of(text)).flops == (4e9 if estimate else None)
    named = "the products of the kernel __gpu$xla.gpu.triton"
    assert found.not_counted == (() if estimate else (named,))
    assert (found.hfu is None) == (not estimate) == found.is_bound
    assert str(found).startswith("≥ ") == (not estimate)
    assert found.to_dict()["text"] == str(found)
    assert found.to_dict()["is_bound"] == found.is_bound
    assert [each.is_bound for each in found.places] == [found.is_bound]
    assert found.estimate is not None
    # It may read a part of its array, as attention over the pages of a cache does.
    assert found.memory == 0
    assert found.estimate > 2 * W / BANDWIDTH


def test_kernels_of_cudnn_by_their_shapes() -> None:
    labels = 'dim_labels=b01f_o01i->b01f, window={size=3x3 pad=1_1x1_1}, custom_call_target="%s"'
    images, kernel = "bf16[128,32,32,256]{3,2,1,0}", "bf16[256,3,3,256]{3,2,1,0}"
    taps = (3 * 32 - 2) ** 2  # pairs of outputs and taps that are no padding
    for target, operands, result in (
        ("__cudnn$convForward", (images, kernel), images),
        ("__cudnn$convBackwardInput", (images, kernel), images),
        ("__cudnn$convBackwardFilter", (images, images), kernel),
    ):
        text = module(
            f"%a = {operands[0]} parameter(0)",
            f"%b = {operands[1]} parameter(1)",
            f"ROOT %r = ({result}, u8[0]{{0}}) custom-call(%a, %b), {labels % target}",
        )
        assert read_schedule(modules_of(text)).flops == 2 * 128 * taps * 256 * 256
    shape = '{"element_type":"BF16","dimensions":["4","8","512","1024"]}'
    for target, products in (("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)):
        for mask, part in (("NO_MASK", 1), ("CAUSAL", 0.5)):
            text = module(
                "%q = bf16[4,512,8,64]{3,2,1,0} parameter(0)",
                "%k = bf16[4,1024,8,64]{3,2,1,0} parameter(1)",
                "ROOT %r = (bf16[4,512,8,64]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), "
                f'custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config":'
                f'{{"intermediate_tensor_shape":{shape},"mask_type":"{mask}"}}}}',
            )
            one = 2 * 4 * 8 * 512 * 1024 * 64
            assert read_schedule(modules_of(text)).flops == products * one * part


def test_attention_of_cudnn_is_slower_than_a_product_and_products_beside_others_than_alone() -> (
    None
):
    shape = '{"element_type":"BF16","dimensions":["4","32","8192","8192"]}'
    text = module(
        "%q = bf16[4,8192,32,128]{3,2,1,0} parameter(0)",
        "ROOT %r = (bf16[4,8192,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), "
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
        f'{{"intermediate_tensor_shape":{shape},"mask_type":"NO_MASK"}}}}',
    )
    found = on_h100(text)
    assert found.compute is not None
    assert H100.speeds is not None
    parts = H100.speeds.measured
    assert parts.kernels < parts.products
    assert found.estimate == pytest.approx(found.compute / parts.kernels + LAUNCH)
    several = on_h100(text, Interconnect(H100.speeds, hosts=(0,) * 8))
    assert several.compute == found.compute
    least = found.compute / parts.kernels / parts.on_several
    assert several.estimate == pytest.approx(least + LAUNCH)


def test_the_report_tells_bounds_and_recomputation() -> None:
    found = gda.rehearse(lambda x: x @ x, np.zeros((8, 8), np.float32), examples=8, price=3600)

    def report(**parts: Any) -> str:
        seconds = StepSeconds(compute=1e-3, memory=0.0, communication=0.0, estimate=2e-3, **parts)
        return str(dataclasses.replace(found, seconds=seconds))

    begin = "takes about 2.0 ms, at least 1.0 ms, bounded by compute"
    assert f"{begin}; MFU 38%, HFU 50%\n" in report(hfu=0.5, mfu=0.375)
    assert f"{begin}; MFU 50%\n" in report(hfu=0.5, mfu=0.5)
    assert f"{begin}; HFU 50%\n" in report(hfu=0.5)
    bound = report(not_counted=("the products of the kernel f",))
    for line in (
        "takes ≥ 2.0 ms, at least 1.0 ms, bounded by compute",
        "not counted: the products of the kernel f",
        "at most 4,000 examples a second",
        "a call costs ≥ 0.002, 1,000 examples ≥ 0.25, at 3600 per device and hour",
    ):
        assert f"\n{line}\n" in bound


@pytest.mark.topology
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_recomputation_counts_in_hfu_alone(topology: str) -> None:
    mesh = gda.rehearsal_mesh(topology, {"data": 4})

    def loss(ws: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return (lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2).mean()

    args = (
        abstract((4, 1024, 1024), mesh, dtype=jnp.bfloat16),
        abstract((8192, 1024), mesh, "data", dtype=jnp.bfloat16),
    )
    found = gda.rehearse(jax.grad(loss), *args)
    forward = 4 * 2 * 8192 * 1024**2
    assert found.flops_model is not None
    assert found.flops_total == found.flops_model + forward
    assert found.seconds.hfu is not None
    assert found.seconds.mfu is not None
    share = found.seconds.mfu / found.seconds.hfu
    assert share == pytest.approx(found.flops_model / found.flops_total)


def test_devices_without_speeds_have_no_seconds() -> None:
    found = gda.rehearse(lambda x: x @ x, np.zeros((8, 8), np.float32))
    assert found.seconds == StepSeconds(not_counted=("the speeds of these devices are unknown",))
    assert (found.seconds.bound, found.seconds.bounded_by) == (None, None)
    assert (found.examples_per_second, found.cost) == (None, None)
    for wrong in ({"examples": 0}, {"price": float("inf")}):
        with pytest.raises(ValueError, match="must be a number above 0"):
            gda.rehearse(lambda x: x @ x, np.zeros((8, 8), np.float32), **wrong)


@pytest.mark.parametrize("kind", ["h100", "v5e", "b300", "l4"])
@pytest.mark.parametrize(
    "text", [product(), decode(), decode(known=""), branches(), gathered(True), gathered(False)]
)
def test_the_estimate_is_never_below_the_bound(kind: str, text: str) -> None:
    named = kind_named(kind)
    assert named.speeds is not None
    links = Interconnect(named.speeds, hosts=(0,) * 4)
    found = seconds_of(read_schedule(modules_of(text, MESH)), named, links, 1)
    assert found.bound is not None
    assert found.estimate is not None
    assert 0 <= found.bound <= found.estimate


# Compiled programs.


def test_a_scan_of_ten_layers_counts_each_layer(mesh: Mesh) -> None:
    def layers(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    args = abstract((10, 512, 512), mesh), abstract((512, 512), mesh)
    text = jax.jit(layers).lower(*args).compile().as_text() or ""
    schedule = read_schedule(modules_of(text, ProgramMesh(mesh.shape)))
    assert schedule.flops == 10 * 2 * 512**3
    assert schedule.argument_bytes == 11 * 4 * 512**2
    found = seconds_of(schedule, H100, None, 1)
    assert found.compute == 10 * 2 * 512**3 / 494.7e12
    accessed = sum(place.nbytes for place in found.places)
    one = 4 * 512**2
    # A layer reads its matrix and its input, and writes its output: once, or each fusion again.
    assert 10 * 3 * one <= accessed <= 10 * 8 * one


@pytest.mark.topology
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:4"])
def test_gathers_in_a_loop_on_accelerators(topology: str) -> None:
    mesh = gda.rehearsal_mesh(topology, {"data": 4})

    def layers(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    args = (
        abstract((10, 2048, 2048), mesh, None, "data", dtype=jnp.bfloat16),
        abstract((8192, 2048), mesh, "data", dtype=jnp.bfloat16),
    )
    found = gda.rehearse(layers, *args, examples=8192, price=2.0)
    kind = kind_named(topology.partition(":")[0])
    assert kind.speeds is not None
    seconds, flops = found.seconds, 10 * 2 * 2048 * 2048 * 2048
    assert found.flops == flops
    assert seconds.compute == flops / kind.speeds.flops
    assert seconds.bound is not None
    assert seconds.estimate is not None
    assert seconds.bound <= seconds.estimate < 5 * seconds.bound
    assert found.traffic[0].least_seconds == seconds.communication
    assert found.examples_per_second == 8192 / seconds.estimate
    assert found.cost == pytest.approx(2.0 * 4 * seconds.estimate / 3600)
    assert re.search(
        r"takes about [\d.]+ .s, at least [\d.]+ .s, bounded by \w+; MFU \d+%\n"
        r"\(an estimate .*: no device ran it\)\n\(.*measured step.*\)\n"
        r"about [\d.e+]+ examples a second\n"
        r"a call costs about [\d.e-]+, 1,000 examples [\d.e-]+, at 2 per device and hour\n",
        str(found),
    )
    assert found.to_dict()["seconds"]["bounded_by"] == seconds.bounded_by

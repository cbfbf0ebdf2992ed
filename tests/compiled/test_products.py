"""The operations of one device, read from partitioned programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from meshes import abstract

import gda
from gda.compiled.hlo import modules_of, read_schedule

ONE = 2 * 64 * 64 * 64


def layers(ws: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()


def test_work_that_devices_repeat_counts_on_each(mesh: Mesh) -> None:
    ws, step, total = abstract((5, 64, 64), mesh), jax.jit(layers), 5 * ONE
    for spec, parts in (((), 1), (("x",), 4)):
        rehearsal = gda.rehearse(step, ws, abstract((64, 64), mesh, *spec))
        assert (rehearsal.flops, rehearsal.flops_total) == (total / parts, total)
        assert rehearsal.repetitions == 8 / parts
        says = str(rehearsal)
        assert ("all 8 devices compute the same batch" in says) == (parts == 1)
        assert ("each product is computed 2 times" in says) == (parts == 4)


def test_of_branches_the_most_expensive_counts(mesh: Mesh) -> None:
    def step(x: Any, n: Any) -> Any:
        return lax.switch(n, [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x], x)

    rehearsal = gda.rehearse(step, abstract((64, 64), mesh), abstract((), mesh, dtype=np.int32))
    assert rehearsal.flops == 2 * ONE


def test_a_product_in_a_loop_of_unknown_length_is_unknown(mesh: Mesh) -> None:
    def step(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)

    assert gda.rehearse(step, abstract((64, 64), mesh)).flops is None


def test_a_complex_product_is_three_real_ones_here_and_in_the_trace(mesh: Mesh) -> None:
    x = abstract((64, 64), mesh, "x", dtype=np.complex64)
    rehearsal = gda.rehearse(lambda x: x @ x, x)
    assert (rehearsal.flops, rehearsal.flops_total) == (3 * ONE / 4, 3 * ONE)


CUBLAS = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}'
)
BATCHED = 2 * 8 * 128 * 32 * 64
LINES = {
    "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}": BATCHED,
    f'custom-call(%a, %b), custom_call_target="__cublas$gemm", {CUBLAS}': BATCHED,
    f'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", {CUBLAS}': BATCHED,
    # As TPUs have it: a batch is a spatial dimension that the kernel shifts.
    "convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf": (
        BATCHED
    ),
    'custom-call(%a), custom_call_target="tpu_custom_call"': None,
    'custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax"': None,
    'custom-call(%a), custom_call_target="Sharding"': 0,
}


@pytest.mark.parametrize("line", LINES)
def test_an_instruction(line: str) -> None:
    result = "(bf16[8,128,32]{2,1,0}, s8[16]{0})" if "cublas" in line else "bf16[8,128,32]{2,1,0}"
    text = (
        "HloModule m\n\nENTRY %main {\n"
        "  %a = bf16[8,128,64]{2,1,0} parameter(0)\n"
        "  %b = bf16[8,64,32]{2,1,0} parameter(1)\n"
        f"  ROOT %r = {result} {line}\n}}\n"
    )
    assert read_schedule(modules_of(text)).flops == LINES[line]


@pytest.mark.parametrize(
    ("stride", "padding", "base", "window"),
    [
        (1, "SAME", 1, 1),
        (2, "VALID", 1, 1),
        (1, [(2, 0), (1, 3)], 1, 2),
        (2, [(1, 1), (3, 0)], 2, 1),
    ],
)
def test_multiplications_with_padding_do_not_count(
    stride: int, padding: Any, base: int, window: int
) -> None:
    def convolution(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(
            *(x, k, (stride, stride), padding, (base, base), (window, window)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    images, kernel = np.ones((2, 6, 5, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)
    program = jax.jit(convolution).lower(images, kernel).compile()
    # The sum over ones is the number of multiplications that are not with padding.
    assert read_schedule(modules_of(program.as_text() or "")).flops == 2 * float(
        np.sum(program(images, kernel))
    )

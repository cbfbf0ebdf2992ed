"""The floating-point operations of the products in a program, on one device, loops counted.

The program is the partitioned one, so that work which several devices repeat counts on each.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from gda.compiled.hlo.instructions import Computation, Instruction, Shape, leaves
from gda.compiled.hlo.listing import summed
from gda.compiled.hlo.program import calls_of, modules_of

_PRODUCT = re.compile(r"\s(dot|convolution|custom-call|ragged-dot)\(")
_OF_CUBLAS = re.compile(r'"__cublas\$(gemm|lt\$matmul(\$f8)?)"')
_OF_CUDNN = re.compile(r'"__cudnn\$conv(Forward|BiasActivationForward)"')
# Kernels that may have products, which their calls do not tell.
_UNKNOWN = re.compile(r"(?i)matmul|gemm|dot|cublas|cudnn|conv|triton|mosaic|pallas|tpu_custom_call")


def read_flops(text: str) -> float | None:
    """Return the operations of the products and convolutions of a program, on one device.

    A product of [m, k] and [k, n] has 2 m k n. Loops count with their trips, and of branches the
    most expensive one does. None if products are in a kernel that is not known, or in a loop of
    unknown length.
    """
    total = 0.0
    for computations, entry in modules_of(text):
        flops = _flops_of(computations, entry)
        if flops is None:
            return None
        total += flops
    return total


def _flops_of(computations: Mapping[str, Computation], entry: str) -> float | None:
    @functools.cache
    def of(name: str) -> float | None:
        computation = computations[name]
        found = [_of_line(computation, each) for each in computation.lines]
        for instruction in computation.of_interest.values():
            calls = calls_of(instruction, computation, computations)
            inner = [_repeated(call.times, of(call.callee)) for call in calls]
            if instruction.opcode == "conditional" and None not in inner:
                inner = [max(filter(None, inner), default=0.0)]
            found += inner
        return summed(found)

    return of(entry)


def _repeated(times: int | None, flops: float | None) -> float | None:
    return flops and (None if times is None else times * flops)


def _of_line(computation: Computation, name: str) -> float | None:
    """Return the operations of an instruction by itself; None if they are unknown."""
    text = computation.lines[name]
    if (product := _PRODUCT.search(text)) is None:
        return 0.0
    if product[1] == "ragged-dot":
        return None
    if product[1] == "custom-call":
        target = re.search(r'custom_call_target=("[^"]*")', text)
        target = "" if target is None else target[1]
        if not (_OF_CUBLAS.fullmatch(target) or _OF_CUDNN.fullmatch(target)):
            return None if _UNKNOWN.search(target) else 0.0
    instruction = computation.instruction(name)
    operands = instruction.operand_names[:2] if instruction else []
    types = [each.type for each in map(computation.instruction, operands) if each is not None]
    if instruction is None or len(types) < 2:
        return None
    left, right, result = (leaves(each)[0].shape for each in (*types, instruction.type))
    if "dim_labels" in instruction.attributes:
        return _of_convolution(instruction, left, right, result)
    config = instruction.attributes.get("backend_config", "")
    contracting = instruction.attributes.get("lhs_contracting_dims")
    if contracting is None:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
        contracting = "" if found is None else found[1]
    return (
        2.0 * math.prod(result) * math.prod(left[int(d)] for d in re.findall(r"\d+", contracting))
    )


def _of_convolution(
    instruction: Instruction, inputs: Shape, kernel: Shape, result: Shape
) -> float | None:
    """Return the operations of a convolution; a product on TPUs is one.

    Multiplications with padding do not count.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    if labels is None:
        return None
    of_input, of_kernel, of_result = labels.groups()
    window = dict(re.findall(r"(\w+)=([\w\-x]+)", instruction.attributes.get("window", "")))
    groups = int(instruction.attributes.get("batch_group_count", 1))
    terms = 1.0
    for axis, name in enumerate(sorted(set(of_result) - {"b", "f"})):
        size, taps, outputs = (
            shape[of.index(name)]
            for shape, of in ((inputs, of_input), (kernel, of_kernel), (result, of_result))
        )
        step, base, dilation = (
            int(window[key].split("x")[axis]) if key in window else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        starts = np.arange(outputs) * step - low
        places = (starts + tap * dilation for tap in range(taps))
        last = (size - 1) * base
        terms *= sum(int(((at >= 0) & (at <= last) & (at % base == 0)).sum()) for at in places)
    features = result[of_result.index("f")] * kernel[of_kernel.index("i")]
    return 2.0 * result[of_result.index("b")] * features * terms / groups

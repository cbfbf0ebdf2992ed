"""The products of one instruction: matrix products and convolutions, fused or in known kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gda.compiled.hlo.instructions import Computation, Instruction, Shape, leaves

_PRODUCT = re.compile(r"\s(dot|convolution|custom-call|ragged-dot)\(")
_OF_CUBLAS = re.compile(r"__cublas\$(gemm|lt\$matmul(\$f8)?)")
_OF_CUDNN = re.compile(r"__cudnn\$conv\w*")
_OF_ATTENTION = re.compile(r"__cudnn\$f(?:mha|lash)\w*?(Backward)?")
# cuBLAS has both in its configuration. An algorithm of several passes is no faster than float32.
_PRECISION = re.compile(r"(?i)operand_precision[^}\]]*?\b(high(?:est)?)\b")
_ALGORITHM = re.compile(r"(?i)algorithm\W+(?:alg_)?dot_(bf16|f16|f32)_\1_(?:bf16|f16|f32)\b")
# Kernels that may have products, which their calls do not tell.
UNKNOWN_KERNEL = re.compile(
    r"(?i)matmul|gemm|dot|cublas|cudnn|conv|triton|mosaic|pallas|tpu_custom_call"
)


Place = tuple[str | None, int | None]  # file and line

COMPLEX_FLOPS = 6.0  # a complex product by three real ones, which is the fewest


class Product(NamedTuple):
    """Operations of one type.

    Attributes:
      dtype: of the wider operand, as XLA names it, or the one that it is rounded to.
      precision: ``"default"``, ``"high"`` or ``"highest"``.
      flops: a multiplication and an addition for each term; None for a kernel that is not known.
      kernel: the name of a kernel that is not known; else empty.
      is_attention: it is attention by cuDNN.
    """

    dtype: str
    precision: str
    flops: float | None
    kernel: str = ""
    is_attention: bool = False


class KernelCosts(NamedTuple):
    """The operations of kernels on one device, if their calls do not tell them.

    Attributes:
      given: by the target of the call or the name of the kernel, as the user gave them.
      traced: names and operations of the kernels of each line, as their authors gave them.
    """

    given: Mapping[str, float] = {}
    traced: Mapping[Place, frozenset[tuple[str, float]]] = {}

    def product_of(
        self, known: Product | None, target: str, op_name: str, place: Place
    ) -> Product | None:
        """Return the product of a custom call, whose text gives ``known``."""
        names = {target, *op_name.split("/")}
        choices = [{self.given[name] for name in names & {*self.given}}]
        if known is not None and known.flops is None:
            traced = self.traced.get(place, frozenset())
            choices += [{flops for name, flops in traced if name in names}]
            choices += [{flops for _, flops in traced}]
        found = next((some for some in choices if len(some) == 1), None)
        return known if found is None else Product("bf16", "default", found.pop(), target)


def product_of(computation: Computation, name: str) -> Product | None:
    """Return the product that an instruction is by itself; None if it is none.

    A product of [m, k] and [k, n] has 2 m k n operations, and a complex one three of these.
    """
    text = computation.lines[name]
    if (found := _PRODUCT.search(text)) is None:
        return None
    instruction = computation.instruction(name)
    if instruction is None:
        return Product("", "", None, found[1])
    target = instruction.target
    if found[1] == "custom-call" and not _is_known(target):
        # Pallas writes the figure of the kernel's author.
        given = re.search(r"cost_estimate[^}]*?\Wflops\W+(\d+)", text)
        if given is None and not UNKNOWN_KERNEL.search(target):
            return None
        return Product("bf16", "default", float(given[1]) if given else None, target)
    operands = map(computation.instruction, instruction.operand_names[:2])
    types = [each.type for each in operands if each is not None]
    if found[1] == "ragged-dot" or len(types) < 2:
        return Product("", "", None, target or found[1])
    found_precision = _PRECISION.search(text)
    precision = found_precision[1].lower() if found_precision else "default"
    dtype = max((re.findall(r"\w+", each)[0] for each in types), key=_bits)
    if dtype == "f32" and (algorithm := _ALGORITHM.search(text)):
        dtype = algorithm[1].lower()
        precision = "highest" if dtype == "f32" else "default"
    is_attention = _OF_ATTENTION.fullmatch(target) is not None
    return Product(dtype, precision, _flops(instruction, types), is_attention=is_attention)


def _is_known(target: str) -> bool:
    return any(form.fullmatch(target) for form in (_OF_CUBLAS, _OF_CUDNN, _OF_ATTENTION))


def _bits(dtype: str) -> int:
    return int("".join(re.findall(r"\d+", dtype)[:1]) or 1)


def _flops(instruction: Instruction, types: list[str]) -> float | None:
    left, right, result = (leaves(each)[0].shape for each in (*types, instruction.type))
    config = instruction.attributes.get("backend_config", "")
    target = instruction.target
    if _OF_ATTENTION.fullmatch(target):
        return flops_of_attention(target, config, left[-1])
    if "dim_labels" in instruction.attributes:
        # The backward kernels have the labels of the forward pass.
        if target == "__cudnn$convBackwardFilter":
            right, result = result, right
        elif target == "__cudnn$convBackwardInput":
            left, result = result, left
        return _flops_of_convolution(instruction, left, right, result)
    contracting = instruction.attributes.get("lhs_contracting_dims")
    if contracting is None:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
        contracting = "" if found is None else found[1]
    terms = math.prod(left[int(d)] for d in re.findall(r"\d+", contracting))
    of_one = COMPLEX_FLOPS if types[0].startswith("c") else 2.0
    return of_one * math.prod(result) * terms


def flops_of_attention(target: str, config: str, width: int) -> float | None:
    """Return the operations of attention by cuDNN: two products forward, five backward.

    A causal mask omits half. None if it is no attention, or has no shape.
    """
    kernel = _OF_ATTENTION.fullmatch(target)
    scores = re.search(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', config)
    if kernel is None or scores is None:
        return None
    size = math.prod(map(int, re.findall(r"\d+", scores[1])))
    products = 5 if kernel[1] else 2
    return 2.0 * products * size * width * (0.5 if "CAUSAL" in config else 1)


def _flops_of_convolution(
    instruction: Instruction, inputs: Shape, kernel: Shape, result: Shape
) -> float | None:
    """Return the operations of a convolution, as a product on TPUs is, without its padding."""
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

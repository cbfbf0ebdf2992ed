"""The floating-point operations of a traced function, with each iteration of its loops.

XLA's own count, ``cost_analysis``, counts the body of a loop once: one layer of a model that scans
over its layers. A trace knows the lengths of its loops.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from gda.compiled.hlo.products import (
    COMPLEX_FLOPS,
    UNKNOWN_KERNEL,
    KernelCosts,
    Place,
    flops_of_attention,
)
from gda.compiled.hlo.source_lines import line_of_equation

_NO_COSTS: Mapping[str, float] = {}
_AGAIN = "rematted_computation"  # JAX's scope for what jax.checkpoint computes again


def flops_of(
    jaxpr: Any, *, again: bool = True, costs: Mapping[str, float] = _NO_COSTS
) -> float | None:
    """Return the operations of the matrix products and convolutions of a trace, on all devices.

    A product of [m, k] and [k, n] has 2 m k n: a multiplication and an addition for each term. One
    of complex numbers is three of real numbers. A convolution has twice its output times the inputs
    of one output element. Of branches, the most expensive counts. The rest of a program, element by
    element, is not counted. A kernel has the operations that ``costs`` gives by its name or target,
    or those of its author. None if there is a ``ragged_dot``, or if a loop of unknown length or
    another kernel has such operations. Without ``again``, the products that ``jax.checkpoint``
    computes a second time are omitted.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        flops = _flops_of_equation(equation, again, costs)
        if flops is None:
            return None
        total += flops
    return total


def _flops_of_equation(equation: Any, again: bool, costs: Mapping[str, float]) -> float | None:
    """Return the operations of an equation and of its inner functions; None as ``flops_of``."""
    name, params = equation.primitive.name, equation.params
    if not again and _AGAIN in str(equation.source_info.name_stack):
        return 0.0
    # The groups of the first have sizes that only the program knows; JAX has the second on cards.
    if name.startswith(("ragged_dot", "dot_product_attention_")):
        return None
    if (flops := _flops_of_kernel(equation, costs)) is not None:
        return flops
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        terms = math.prod(left[dimension] for dimension in contracting)
        return _flops_of_one(equation) * math.prod(equation.outvars[0].aval.shape) * terms
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        terms = math.prod(kernel) / outputs
        return _flops_of_one(equation) * math.prod(equation.outvars[0].aval.shape) * terms
    inner = [flops_of(each, again=again, costs=costs) for each in inner_of(equation)]
    if name == "cond":
        return None if None in inner else max(inner, default=0.0)  # pyright: ignore
    total = 0.0
    for flops in inner:
        # A kernel of Pallas runs its body once for each point of a grid.
        if flops is None or (flops and name in ("while", "pallas_call", "mpmd_map")):
            return None
        total += flops
    if name == "ffi_call" and UNKNOWN_KERNEL.search(equation.params["target_name"]):
        return None
    return total * _executions_of(equation)


def costs_of(jaxpr: Any, given: Mapping[str, float]) -> KernelCosts:
    """Return the operations of kernels, as given and as their authors estimated them."""
    traced: defaultdict[Place, set[tuple[str, float]]] = defaultdict(set)
    for equation, *around in _equations_of(jaxpr):
        if equation.params.get("cost_estimate") and (flops := _flops_of_kernel(equation, given)):
            # Without a line of its own, it has that of the function that calls it.
            lines = map(line_of_equation, (equation, *around))
            file, line = next((each for each in lines if each[0]), (None, None))
            traced[file, line].add((_name_of(equation), flops))
    return KernelCosts(given, {place: frozenset(some) for place, some in traced.items()})


def _equations_of(jaxpr: Any, *around: Any) -> Iterator[tuple[Any, ...]]:
    """Yield each equation with those around it, the innermost first."""
    for equation in jaxpr.eqns:
        yield equation, *around
        for inner in inner_of(equation):
            yield from _equations_of(inner, equation, *around)


def _name_of(equation: Any) -> str:
    """Return the target of a custom call, or the name of a kernel; empty if it has none."""
    params = equation.params
    named = getattr(params.get("name_and_src_info"), "name", params.get("name"))  # of JAX 0.8
    return str(params.get("target_name") or named or "")


def _flops_of_kernel(equation: Any, given: Mapping[str, float]) -> float | None:
    """Return the operations of one execution of a kernel; None if they are unknown."""
    params, name = equation.params, _name_of(equation)
    if name in given:
        return given[name]
    if (estimate := params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    config = params.get("legacy_backend_config")
    return flops_of_attention(name, config, equation.invars[0].aval.shape[-1]) if config else None


def _flops_of_one(equation: Any) -> float:
    """Return the operations of one term: a multiplication and an addition of its type."""
    is_complex = str(equation.invars[0].aval.dtype).startswith("complex")
    return COMPLEX_FLOPS if is_complex else 2.0


def _executions_of(equation: Any) -> int:
    """Return the executions of the functions inside an equation, on all devices."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # its body is the part of one device along the manual axes
        # JAX 0.8 has another name for these axes.
        axes = params.get("newly_manual_axes", params.get("manual_axes"))
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    return 1


def inner_of(equation: Any) -> list[Jaxpr]:
    """Return the functions inside an equation: the body of a loop, branches, a jitted function."""
    params = [*equation.params.values()]
    leaves = jax.tree.leaves(params, is_leaf=lambda x: not isinstance(x, list | tuple))
    functions = (each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in leaves)
    return [each for each in functions if isinstance(each, Jaxpr)]

"""The floating-point operations of a traced function, loops counted.

XLA's own count, ``cost_analysis``, has the body of a loop once, so that a model that scans over its
layers has one of them. A trace knows the lengths of its loops.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from gda.compiled.hlo.products import COMPLEX_FLOPS

_AGAIN = "rematted_computation"  # JAX's scope for what jax.checkpoint computes again


def flops_of(jaxpr: Any, *, again: bool = True) -> float | None:
    """Return the operations of the matrix products and convolutions of a trace, on all devices.

    A product of [m, k] and [k, n] has 2 m k n: a multiplication and an addition for each term. One
    of complex numbers is three of real numbers. A convolution has twice its output times the inputs
    of one output element. Of branches, the most expensive counts. The rest of a program, element by
    element, is not counted. None if there is a ``ragged_dot``, or if a loop of unknown length or a
    kernel of Pallas has such operations. Without ``again``, the products that ``jax.checkpoint``
    computes a second time are omitted.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        flops = _flops_of_equation(equation, again)
        if flops is None:
            return None
        total += flops
    return total


def _flops_of_equation(equation: Any, again: bool) -> float | None:
    """Return the operations of an equation and of the functions inside; None as ``flops_of``."""
    name, params = equation.primitive.name, equation.params
    if not again and _AGAIN in str(equation.source_info.name_stack):
        return 0.0
    if name.startswith("ragged_dot"):
        return None  # its groups have sizes that only the program knows
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
    inner = [flops_of(each, again=again) for each in inner_of(equation)]
    if name == "cond":
        return None if None in inner else max(inner, default=0.0)  # pyright: ignore
    total = 0.0
    for flops in inner:
        # A kernel of Pallas runs its body once for each point of a grid.
        if flops is None or (flops and name in ("while", "pallas_call")):
            return None
        total += flops
    return total * _executions_of(equation)


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

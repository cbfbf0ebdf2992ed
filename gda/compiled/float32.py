"""Products in float32 of values that came from narrower types, in a traced function.

An operand in float32, such as a parameter that was not cast, makes a product of bfloat16 one of
float32, and all that follows.

A line with products of narrow types alone is right. Their gradients, as of attention that adds up
in float32, have products of both types, which JAX makes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gda.compiled.flops import executions_of, flops_of_equation, inner_of
from gda.compiled.hlo.source_lines import line_of_equation

_NARROW = ("bfloat16", "float16")


def float32_products(jaxpr: Any) -> tuple[tuple[str, int, float], ...]:
    """Return file, line and operations on all devices of such products, the most first."""
    found: Counter[tuple[str, int]] = Counter()
    right: set[tuple[str, int]] = set()
    _walk(jaxpr.jaxpr, [False] * len(jaxpr.jaxpr.invars), 1, found, right)
    return tuple((*line, flops) for line, flops in found.most_common() if line not in right)


def _walk(
    jaxpr: Any, came: list[bool], times: float, found: Counter[Any], right: set[tuple[str, int]]
) -> list[bool]:
    """Return for each result if it came from a narrower type; add the products to ``found``."""
    narrow = {id(var) for var, of in zip(jaxpr.invars, came, strict=True) if of}
    for equation in jaxpr.eqns:
        inputs = [id(var) in narrow for var in equation.invars]
        dtypes = [str(getattr(var.aval, "dtype", "")) for var in equation.invars]
        name = equation.primitive.name
        is_narrow = [dtype in _NARROW for dtype in dtypes]
        is_widened = name == "convert_element_type" and is_narrow[0]
        if name in ("dot_general", "conv_general_dilated"):
            if all(is_narrow):
                right.add(line_of_equation(equation))
            elif "float32" in dtypes and any(inputs + is_narrow):
                is_widened = True
                found[line_of_equation(equation)] += times * (flops_of_equation(equation) or 0)  # pyright: ignore
        results = [any(inputs) or is_widened] * len(equation.outvars)
        for each in inner_of(equation):
            results = _of_inner(equation, each, inputs, times, found, right)
        for var, of in zip(equation.outvars, results, strict=True):
            if of and str(getattr(var.aval, "dtype", "")) == "float32":
                narrow.add(id(var))
    return [id(var) in narrow for var in jaxpr.outvars]


def _of_inner(
    equation: Any,
    inner: Any,
    inputs: list[bool],
    times: float,
    found: Counter[Any],
    right: set[tuple[str, int]],
) -> list[bool]:
    # The operands of a function come last: a branch has the index before them.
    given = inputs[len(inputs) - len(inner.invars) :]
    if len(given) != len(inner.invars) or len(inner.outvars) != len(equation.outvars):
        return [any(inputs)] * len(equation.outvars)  # a kernel, or the condition of a loop
    if equation.primitive.name == "scan":
        # Slices and stacked results have a dimension more outside. Names of parameters differ
        # between versions of JAX.
        carried = _num_alike(equation.outvars, inner.outvars)
        first = _num_alike(equation.invars, inner.invars) - carried
        after = _walk(inner, given, 0, Counter(), set())
        for at in range(carried):
            given[first + at] |= after[at]
    return _walk(inner, given, times * executions_of(equation), found, right)


def _num_alike(outside: Any, inside: Any) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(one.aval.shape) == len(other.aval.shape) for one, other in pairs)

"""The arguments that a scan takes apart, updates and puts together again, such as caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from gda.compiled.hlo.source_lines import line_of_equation
from gda.compiled.traces.flops import inner_of

_UPDATES = ("dynamic_update_slice", "scatter")
_KEEPS = ("sharding_constraint", "copy", "reshape", "squeeze")


class _Value(NamedTuple):
    """The argument that a value of the trace is a part of, and the equation that updated it."""

    argument: int
    update: Any = None


def scanned_caches(jaxpr: Any) -> dict[int, tuple[str, int]]:
    """Return file and line of the update of each argument that a scan takes apart, by position.

    It is among the ``xs`` of the scan and, updated, among the ``ys``. Each step reads its
    part from one array and writes it to another, unless XLA finds that one can be both.
    """
    found: dict[int, tuple[str, int]] = {}
    _follow(jaxpr.jaxpr, [_Value(at) for at in range(len(jaxpr.jaxpr.invars))], found)
    return found


def _follow(
    jaxpr: Any, given: Sequence[_Value | None], found: dict[int, tuple[str, int]]
) -> list[_Value | None]:
    """Return the argument that each result of a function is, from the ``given`` ones."""
    values = dict(zip(jaxpr.invars, given, strict=True))

    def value(var: Any) -> _Value | None:
        return None if isinstance(var, Literal) else values.get(var)

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [*map(value, equation.invars)]
        if name in _UPDATES and (updated := inputs[0]):
            values[equation.outvars[0]] = updated._replace(update=equation)
        elif name in _KEEPS:
            values[equation.outvars[0]] = inputs[0]
        for inner in inner_of(equation):
            if len(inner.invars) != len(inputs):
                continue
            # In its body xs and ys have a dimension less.
            pairs = zip(inner.invars, equation.invars, inputs, strict=True)
            if name == "scan":
                inputs = [each if _is_part(of, whole) else None for of, whole, each in pairs]
            results = _follow(inner, inputs, found)
            for result, of, whole in zip(results, inner.outvars, equation.outvars, strict=True):
                if name != "scan":
                    values[whole] = result
                elif result and result.update and _is_part(of, whole):
                    found[result.argument] = line_of_equation(result.update)
    return [*map(value, jaxpr.outvars)]


def _is_part(var: Any, whole: Any) -> bool:
    return getattr(var.aval, "ndim", 0) < getattr(whole.aval, "ndim", 0)

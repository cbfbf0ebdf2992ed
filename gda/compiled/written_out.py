"""Equal layers that a traced program has one after another, where a scan would have one of them."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from gda.compiled.flops import inner_of

_LEAST_LAYERS = 4
_PERIODS_TRIED = 16


def layers_written_out(jaxpr: Any) -> int:
    """Return the number of equal layers that are a large part of a trace; 0 if there are none.

    Layers are equal if they have the same operations on the same shapes. XLA compiles each of them,
    and only one for ``jax.lax.scan`` over their stacked parameters.
    """
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    sizes = [*map(_size, equations)]
    kinds = [
        (str(of.primitive), size, *(str(var.aval) for var in (*of.invars, *of.outvars)))
        for of, size in zip(equations, sizes, strict=True)
    ]
    last: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for at, kind in enumerate(kinds):
        if kind in last:
            distances[at - last[kind]] += sizes[at]
        last[kind] = at
    # Most operations of a layer come once in it, so that their distance is its length.
    runs = []
    for period, _ in distances.most_common(_PERIODS_TRIED):
        repeats = [at >= period and kinds[at] == kinds[at - period] for at in range(len(kinds))]
        for is_run, run in groupby(range(len(kinds)), key=repeats.__getitem__):
            places = [*run] if is_run else []
            layers = len(places) // period + 1
            if layers >= _LEAST_LAYERS:
                runs.append((sum(sizes[at] for at in places), layers))
    # The backward pass may have one layer less than the forward pass, and is longer.
    if most := max((layers for size, layers in runs if 4 * size >= sum(sizes)), default=0):
        return most
    largest = max(zip(sizes, range(len(sizes)), strict=True), default=(0, 0))
    if 2 * largest[0] <= sum(sizes):
        return 0
    return max(map(layers_written_out, inner_of(equations[largest[1]])), default=0)


def _size(equation: Any) -> int:
    """Return the number of operations of an equation, those of inner functions included."""
    return 1 + sum(_size(each) for jaxpr in inner_of(equation) for each in jaxpr.eqns)

"""The whole shapes of temporaries, from the equations of the same source line.

A partitioned program has only the shape on one device. The trace has whole shapes, and both have
the lines of the source.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gda.compiled.hlo.allocations import Temporary
from gda.compiled.hlo.source_lines import line_of_equation
from gda.compiled.traces.flops import inner_of
from gda.layout.spec import Shape

_PRODUCTS = ("dot_general", "conv_general_dilated")
_OF_BLOCKS = ("shard_map", "pallas_call")  # their bodies have shapes on one device


def with_whole_shapes(
    temporaries: Sequence[Temporary], jaxpr: Any, mesh_shape: Mapping[str, int]
) -> tuple[Temporary, ...]:
    """Return the temporaries with the whole shapes of their arrays.

    A product is a result of the products of its line, if one fits. Any other temporary may be of
    any operand or result. If not exactly one of their shapes fits, the whole shape stays unknown.
    """
    sizes = mesh_shape.values()
    parts = [itertools.combinations(sizes, n) for n in range(len(sizes) + 1)]
    possible = {*map(math.prod, itertools.chain.from_iterable(parts))}

    @functools.cache
    def is_of(shape: Shape, block: Shape) -> bool:
        if not math.prod(block):  # as the workspace of a library
            return False
        num_blocks, rest = divmod(math.prod(shape), math.prod(block))
        return not rest and num_blocks in possible and _divides(block, shape)

    blocks = {each.shape for each in temporaries if each.source_file is not None}
    found: defaultdict[Any, set[Shape | None]] = defaultdict(set)
    products: defaultdict[Any, set[Shape | None]] = defaultdict(set)

    def walk(equations: Iterable[Any], is_whole: bool) -> None:
        for equation in equations:
            shapes = {_shape_of(var) for var in (*equation.invars, *equation.outvars)}
            fitting = [each for each in shapes if any(is_of(each, block) for block in blocks)]
            if fitting:  # a line takes longer to find
                line = line_of_equation(equation)
                found[line].update(fitting if is_whole else [None])
                if equation.primitive.name in _PRODUCTS:
                    products[line].update(found[line] & {None, _shape_of(equation.outvars[0])})
            for inner in inner_of(equation):
                walk(inner.eqns, is_whole and equation.primitive.name not in _OF_BLOCKS)

    def whole_shape(of: Temporary) -> Shape | None:
        is_product = of.opcode in ("dot", "convolution") and of.op_name.endswith(_PRODUCTS)
        for some in [products, found] if is_product else [found]:  # XLA may reshape a product
            shapes = some[of.source_file, of.source_line]
            fitting = [each for each in shapes if each is None or is_of(each, of.shape)]
            if fitting:
                return fitting[0] if len(fitting) == 1 else None
        return None

    walk(jaxpr.jaxpr.eqns, True)
    return tuple(each._replace(whole_shape=whole_shape(each)) for each in temporaries)


def _divides(block: Shape, shape: Shape) -> bool:
    """Return True if each dimension of a block divides neighbours of the shape, merged by XLA."""
    if not block:
        return not shape
    return any(
        math.prod(shape[:n]) % block[0] == 0 and _divides(block[1:], shape[n:])
        for n in range(block[0] > 1, len(shape) + 1)
    )


def _shape_of(var: Any) -> Shape:
    """Return the shape without dimensions of 1, in which the arrays of a line may differ."""
    return tuple(size for size in getattr(var.aval, "shape", ()) if size != 1)  # of a token none

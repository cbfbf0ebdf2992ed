"""The operations of traced functions, compared with formulas."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gda.compiled.traces.flops import flops_of


def flops(fun: Any, *shapes: tuple[int, ...]) -> float | None:
    shaped = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    return flops_of(jax.jit(fun).trace(*shaped).jaxpr)


@given(st.data())
def test_a_contraction_has_two_operations_for_each_product(data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(1, 5), label=name) for name in "bmnk"}
    left, right = (data.draw(st.permutations(names)) for names in ("bmk", "bkn"))
    output = "".join(data.draw(st.permutations("bmn")))
    subscripts = f"{''.join(left)},{''.join(right)}->{output}"
    found = flops(
        lambda a, b: jnp.einsum(subscripts, a, b),
        tuple(sizes[name] for name in left),
        tuple(sizes[name] for name in right),
    )
    assert found == 2 * math.prod(sizes.values())


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution(groups: int) -> None:
    def convolution(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", feature_group_count=groups)

    out, inputs = 6, 4
    found = flops(convolution, (2, inputs, 9, 8), (out, inputs // groups, 3, 3))
    assert found == 2 * (2 * out * 7 * 6) * (inputs // groups * 3 * 3)


ONE = 2 * 8 * 8 * 8


@pytest.mark.parametrize("layers", [1, 3])
def test_products_that_checkpoint_computes_again_are_told_apart(layers: int) -> None:
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss(ws: Any, x: Any, wrap: Any) -> Any:
        return lax.scan(lambda x, w: (wrap(layer)(x, w), None), x, ws)[0].sum()

    def found(wrap: Any, again: bool) -> float | None:
        step = jax.jit(jax.grad(lambda ws, x: loss(ws, x, wrap), argnums=(0, 1)))
        return flops_of(step.trace(np.ones((layers, 8, 8)), np.ones((8, 8))).jaxpr, again=again)

    forward = layers * ONE
    assert found(lambda layer: layer, True) == found(lambda layer: layer, False) == 3 * forward
    assert found(jax.checkpoint, True) == 4 * forward
    assert found(jax.checkpoint, False) == 3 * forward


def product(x: Any) -> Any:
    return x @ x


def over(n: int) -> Any:
    return lambda x: lax.scan(lambda carry, _: (product(carry), None), x, length=n)[0]


by_hand = jax.custom_vjp(product)
by_hand.defvjp(lambda x: (product(x), x), lambda x, g: (g @ x.T + x.T @ g,))

LOOPS = {
    "a scan": (over(7), 7 * ONE),
    "a scan in a scan": (lambda x: lax.fori_loop(0, 3, lambda _, y: over(5)(y), x), 15 * ONE),
    "no step": (over(0), 0),
    "remat, which the gradient computes again": (
        jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(product(jnp.sin(y))))(x).sum()),
        4 * ONE,
    ),
    "the larger branch": (
        lambda x: lax.cond(x[0, 0] > 0, product, lambda y: product(product(y)), x),
        2 * ONE,
    ),
    "vmap": (lambda x: jax.vmap(product)(jnp.stack([x, x])), 2 * ONE),
    "no product": (lambda x: x * 2, 0),
    "a gradient": (jax.grad(lambda x: jnp.tanh(product(x)).sum()), 3 * ONE),
    "a derivative by hand": (jax.grad(lambda x: by_hand(x).sum()), 3 * ONE),
}


@pytest.mark.parametrize(("fun", "expected"), LOOPS.values(), ids=LOOPS)
def test_repeated_operations_count_as_often(fun: Any, expected: float) -> None:
    assert flops(fun, (8, 8)) == expected


def test_a_loop_of_unknown_length_is_unknown_if_it_has_products() -> None:
    def until(body: Any) -> Any:
        return lambda x: lax.while_loop(lambda y: y.sum() < 100, body, product(x))

    assert flops(until(product), (8, 8)) is None
    assert flops(until(lambda y: y * 2), (8, 8)) == ONE
    assert flops(lambda x: lax.cond(x[0, 0] > 0, until(product), product, x), (8, 8)) is None


@pytest.mark.parametrize("axes", [{"x"}, {"x", "y"}])
def test_a_shard_map_counts_the_parts_of_all_devices(axes: set[str], auto_mesh: Mesh) -> None:
    def part(a: Any, b: Any) -> Any:
        return lax.psum(a @ b, "x")

    mapped = jax.shard_map(
        part, mesh=auto_mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(), axis_names=axes
    )
    # Along y all devices compute the same, and each computation counts.
    assert flops(mapped, (8, 16), (16, 4)) == 2 * 8 * 16 * 4 * (2 if "y" in axes else 1)


def test_a_kernel_of_pallas_with_products_is_unknown() -> None:
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] @ x[...]

    shape = jax.ShapeDtypeStruct((8, 8), np.float32)
    assert flops(lambda x: pallas.pallas_call(kernel, shape)(x), (8, 8)) is None


def test_the_sizes_of_ragged_groups_are_unknown() -> None:
    groups = jax.ShapeDtypeStruct((4,), np.int32)
    shaped = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 2), (4, 2, 3))]
    assert flops_of(jax.jit(lax.ragged_dot).trace(*shaped, groups).jaxpr) is None

"""The whole shapes of temporaries, against the types of arrays over explicit axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda
from gda.compiled.traces.flops import inner_of
from gda.compiled.traces.whole_shapes import with_whole_shapes
from gda.layout.spec import Shape


def shapes_of(
    place: Callable[..., Any], traced: Any, *blocks: Shape, opcode: str = ""
) -> list[Shape | None]:
    """Return the whole shapes of blocks from the second line of a function."""
    about = "dot_general", __file__, place.__code__.co_firstlineno + 1, None, opcode
    some = [gda.Temporary("float32", block, 4, *about) for block in blocks]
    found = with_whole_shapes(some, traced.jaxpr, {"x": 4, "y": 2})
    return [each.whole_shape for each in found]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_block_is_of_the_only_array_of_its_line_that_fits(auto_mesh: Mesh) -> None:
    def product(x: Any, w: Any) -> Any:
        return x @ w

    traced = jax.jit(product).trace(shape(16, 7), shape(7, 32))
    blocks = (16, 32), (4, 16), (2, 32), (64,), (4, 16, 1), (1, 2, 32)
    assert shapes_of(product, traced, *blocks, (4, 7)) == [(16, 32)] * 6 + [(16, 7)]
    # These divide no array, are too small for eight devices, have more dimensions, or are empty.
    assert shapes_of(product, traced, (3, 32), (1, 32), (2, 2, 16), (0, 32)) == [None] * 4
    assert shapes_of(shape, traced, (4, 16)) == [None], "of another line"
    square = jax.jit(product).trace(shape(16, 64), shape(64, 32))
    assert shapes_of(product, square, (16, 16)) == [None], "of the result a half, of x a quarter"
    assert shapes_of(product, square, (16, 16), (4, 64), opcode="dot") == [(16, 32), (16, 64)]

    def body(x: Any, w: Any) -> Any:
        return x @ w, None

    stacked = shape(16, 7), shape(3, 7, 7)
    scanned = jax.jit(lambda x, w: jax.lax.scan(body, x, w)).trace(*stacked)
    assert shapes_of(body, scanned, (4, 7)) == [(16, 7)]
    specs = P("x"), P()
    of_each = jax.shard_map(body, mesh=auto_mesh, in_specs=specs, out_specs=(P("x"), None))
    both = jax.jit(lambda x, w: (of_each(x, w), body(x, w))).trace(shape(16, 7), shape(7, 7))
    assert shapes_of(body, both, (4, 7)) == [None], "shard_map has blocks of the same line"


def test_types_over_explicit_axes_agree() -> None:
    mesh = mesh_of({"x": 4, "y": 2}, AxisType.Explicit)
    number = np.random.default_rng().random()  # JAX's cache does not have this program

    def loss(w: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ w + number)
        scores = jax.nn.softmax(jnp.einsum("bsf,btf->bst", hidden, hidden))
        return (jnp.einsum("bst,btf->bsf", scores, hidden) ** 2).mean()

    args = abstract((64, 128), mesh), abstract((16, 32, 64), mesh, "x")
    traced = jax.jit(jax.grad(loss)).trace(*args)
    types, todo = {}, [traced.jaxpr.jaxpr]
    for jaxpr in todo:
        for equation in jaxpr.eqns:
            todo += inner_of(equation)
            for aval in (var.aval for var in equation.outvars):
                block = aval.sharding.shard_shape(aval.shape)
                types[aval.shape] = np.prod(aval.shape) // np.prod(block)
    known = [each for each in gda.rehearse(traced).temporaries if each.whole_shape]
    assert {each.num_blocks for each in known} == {4}
    assert all(types[each.whole_shape] == each.num_blocks for each in known)


def test_a_missing_constraint_is_shown(auto_mesh: Mesh) -> None:
    number = np.random.default_rng().random()  # JAX's cache does not have this program
    axes = ("x", "y")

    def step(w: Any, tokens: Any, spec: P) -> Any:
        sharding = NamedSharding(auto_mesh, spec)
        hidden = jax.lax.with_sharding_constraint(w[tokens] * number, sharding)
        return jax.nn.logsumexp(hidden @ w.T, axis=-1).mean()

    w = abstract((2048, 64), auto_mesh, None, axes)
    tokens = abstract((64, 16), auto_mesh, axes, dtype=jnp.int32)
    for spec, over in [(P(None, None, axes), "none"), (P(axes), "8")]:
        rehearsal = gda.rehearse(jax.jit(step, static_argnums=2), w, tokens, spec)
        assert rehearsal.to_dict()["temporaries"][0]["whole_shape"] == (64, 16, 2048)
        lines = [line for line in repr(rehearsal).splitlines() if "[64,16,2048]" in line]
        assert f" {over} of 8 " in lines[0]


def test_the_least_sharded_of_large_activations_counts() -> None:
    def array(nbytes: int, *whole: int, num_blocks: int = 1) -> gda.Temporary:
        block = (whole[0] // num_blocks, *whole[1:])
        return gda.Temporary("float32", block, nbytes, "", None, None, whole)

    w = gda.ArgumentBytes("w", (1, 12, 64, 32), "float32", 98_304, is_donated=False)
    gathered, small = array(1000, 64, 32), array(99, 8, 9)
    rehearsal = gda.rehearse(lambda x: x + 1, np.zeros(8, np.float32))
    for temporaries, blocks in (
        ([gathered, small, array(500, 16, 8, num_blocks=4), array(400, 16, 8, num_blocks=8)], 4),
        ([gathered, array(100, 8, 9)], 1),
        ([gathered, small, gda.Temporary("float32", (64,), 900, "", None, None)], None),
        ([], None),
    ):
        about = {"temporaries": tuple(temporaries), "arguments": (w,)}
        assert dataclasses.replace(rehearsal, **about).activation_blocks == blocks

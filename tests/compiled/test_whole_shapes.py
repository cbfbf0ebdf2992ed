"""The whole shapes of temporaries, against the types of arrays over explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import abstract, mesh_of

import gda
from gda.compiled.whole_shapes import with_whole_shapes
from gda.layout.spec import Shape


def shapes_of(fun: Callable[..., Any], args: Any, *blocks: Shape) -> list[Shape | None]:
    """Return the whole shapes of blocks from the second line of a function."""
    line = fun.__code__.co_firstlineno + 1
    some = [gda.Temporary("float32", block, 4, "", __file__, line) for block in blocks]
    jaxpr = jax.jit(fun).trace(*args).jaxpr
    return [each.whole_shape for each in with_whole_shapes(some, jaxpr, {"x": 4, "y": 2})]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_block_is_of_an_operand_or_a_result_of_its_line() -> None:
    def product(x: Any, w: Any) -> Any:
        return x @ w

    args = shape(16, 7), shape(7, 32)
    whole, parts, merged = (16, 32), [(4, 16), (2, 32)], (64,)
    found = shapes_of(product, args, whole, *parts, merged, (4, 7))
    assert found == [whole] * 4 + [(16, 7)]
    assert shapes_of(product, args, (4, 16, 1), (1, 2, 32)) == [whole] * 2
    # These divide no array, are too small for eight devices, or have more dimensions.
    assert shapes_of(product, args, (3, 32), (1, 32), (2, 2, 16)) == [None] * 3
    args = shape(16, 64), shape(64, 32)
    assert shapes_of(product, args, (16, 16)) == [None], "of the result a half, of others less"
    assert shapes_of(lambda x, w: product(x, w), args, (2, 32)) == [None], "another line"


def test_a_block_of_merged_dimensions_does_not_tell_them_apart() -> None:
    def heads(x: Any) -> Any:
        return x.reshape(16, 8, 32)

    assert shapes_of(heads, [shape(128, 32)], (4, 4, 32), (16, 32)) == [(16, 8, 32), None]


def test_the_bodies_of_loops_have_whole_shapes_and_those_of_shard_map_blocks(
    auto_mesh: Mesh,
) -> None:
    def body(x: Any, w: Any) -> Any:
        return x @ w, None

    args = shape(16, 64), shape(3, 64, 64)
    jaxpr_of = jax.jit(lambda x, w: jax.lax.scan(body, x, w)[0])
    line = body.__code__.co_firstlineno + 1
    some = [gda.Temporary("float32", (4, 64), 4, "", __file__, line)]

    def mapped(x: Any, w: Any) -> Any:
        specs = P("x", None), P(None, None)
        of_each = jax.shard_map(body, mesh=auto_mesh, in_specs=specs, out_specs=(P("x"), None))
        return of_each(x, w)[0] + body(x, w)[0]

    for fun, others, expected in [
        (jaxpr_of, args, (16, 64)),
        (jax.jit(mapped), (args[0], shape(64, 64)), None),
    ]:
        jaxpr = fun.trace(*others).jaxpr
        (found,) = with_whole_shapes(some, jaxpr, auto_mesh.shape)
        assert found.whole_shape == expected


def test_types_over_explicit_axes_agree() -> None:
    mesh = mesh_of({"x": 4, "y": 2}, AxisType.Explicit)
    number = np.random.default_rng().random()  # JAX's cache does not have this program

    def loss(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params["up"] + number)
        scores = jax.nn.softmax(jnp.einsum("bsf,btf->bst", hidden, hidden))
        return (jnp.einsum("bst,btf->bsf", scores, hidden) ** 2).mean()

    params = {"up": abstract((64, 128), mesh)}
    traced = jax.jit(jax.grad(loss)).trace(params, abstract((16, 32, 64), mesh, "x"))
    types = {}

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for var in equation.outvars:
                block = var.aval.sharding.shard_shape(var.aval.shape)
                types[var.aval.shape] = np.prod(var.aval.shape) // np.prod(block)
            for each in equation.params.values():
                if hasattr(each, "jaxpr"):
                    walk(each.jaxpr)

    walk(traced.jaxpr.jaxpr)
    found = gda.rehearse(traced).temporaries
    known = [each for each in found if each.whole_shape is not None]
    assert {each.num_blocks for each in known} == {4}
    for each in known:
        assert types[each.whole_shape] == each.num_blocks, each


def test_a_missing_constraint_is_seen(auto_mesh: Mesh) -> None:
    number = np.random.default_rng().random()  # JAX's cache does not have this program

    def step(w: Any, tokens: Any, constrain: bool) -> Any:
        hidden = w[tokens] * number
        if constrain:
            hidden = jax.lax.with_sharding_constraint(
                hidden, jax.NamedSharding(auto_mesh, P(("x", "y")))
            )
        return jax.nn.logsumexp(hidden @ w.T, axis=-1).mean()

    w = abstract((2048, 64), auto_mesh, None, ("x", "y"))
    tokens = abstract((64, 16), auto_mesh, ("x", "y"), dtype=jnp.int32)
    found = {}
    for constrain in (False, True):
        rehearsal = gda.rehearse(jax.jit(step, static_argnums=2), w, tokens, constrain)
        found[constrain] = rehearsal.temporaries[0]
        assert rehearsal.to_dict()["temporaries"][0]["whole_shape"] == (64, 16, 2048)
        (line, *_) = [line for line in repr(rehearsal).splitlines() if "[64,16,2048]" in line]
        assert f" {'8' if constrain else 'none'} of 8 " in line
    assert (found[False].num_blocks, found[True].num_blocks) == (1, 8)
    assert found[False].nbytes == 8 * found[True].nbytes

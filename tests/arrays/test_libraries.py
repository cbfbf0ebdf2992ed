"""GlobalArrays in the hands of other libraries: flax, einops, equinox."""

import inspect
import warnings
from typing import Any

import einops
import einops.array_api
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, plain

import gda

with warnings.catch_warnings():
    # flax asks an old JAX for names that are deprecated there.
    warnings.filterwarnings("ignore", "jax.array_ref|jax.ArrayRef")
    import flax.linen as nn
    from flax import nnx, serialization


def wrapped(tree: Any, mesh: Mesh) -> Any:
    """Return the tree with a container for every array."""
    return jax.tree.map(lambda leaf: cut(np.asarray(leaf), mesh, P()), tree)


def assert_close(tree: Any, wanted: Any) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5),
        plain(tree),
        plain(wanted),
    )


def test_flax_takes_the_plain_arrays_and_they_come_back(mesh: Mesh) -> None:
    tree = {"w": cut(batch(8, 8), mesh, P("x", "y")), "step": cut(np.int32(3), mesh, P())}
    encoded = serialization.to_bytes(gda.to_jax(tree))
    restored = gda.load_tree(
        serialization.msgpack_restore(encoded), mesh, {"w": P("y"), "step": P()}
    )
    assert restored["w"].spec == P("y")
    jax.tree.map(np.testing.assert_array_equal, plain(restored), plain(tree))


# einops.


def test_einops_by_its_array_api(auto_mesh: Mesh) -> None:
    g = cut(batch(8, 4), auto_mesh, P("x", "y"))
    api, data = einops.array_api, batch(8, 4)

    def use(g: Any) -> list[Any]:
        return [
            api.rearrange(g, "(a b) c -> a (b c)", a=2),
            api.reduce(g, "a b -> b", "sum"),
            api.repeat(g, "a b -> a b c", c=2),
            api.pack([g, g], "a *")[0],
            api.unpack(g, [(1,), (3,)], "a *")[1],
        ]

    wanted = [data.reshape(2, 16), data.sum(0), np.repeat(data[..., None], 2, 2)]
    wanted += [np.concatenate([data] * 2, 1), data[:, 1:]]
    for ours, theirs in zip(jax.jit(use)(g), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    step = gda.jit(lambda x: einops.rearrange(x, "a b -> b a"))
    np.testing.assert_array_equal(np.asarray(step(g)), batch(8, 4).T)


# flax nnx.


class Dense(nnx.Module):
    """A layer of which the parameters come from somewhere else."""

    def __init__(self, w: Any, b: Any) -> None:
        self.w = nnx.Param(w)
        self.b = nnx.Param(b)

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


@nnx.jit
def nnx_step(module: Dense, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda module: (module(x) ** 2).mean())(module)
    optimizer.update(module, gradients)
    return loss


def test_nnx_trains_as_documented(auto_mesh: Mesh) -> None:
    w, b = cut(batch(4, 4), auto_mesh, P("x")), cut(batch(4), auto_mesh, P())
    module = Dense(w.array, b.array)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(nnx_step(module, optimizer, jnp.ones((8, 4)))) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    held = Dense(w, b)  # the containers themselves
    out = nnx.jit(lambda module, x: module(x))(held, jnp.ones((8, 4)))
    np.testing.assert_allclose(out, np.ones((8, 4)) @ batch(4, 4) + batch(4))
    again = gda.GlobalArray.from_array(module.w[...])
    assert again.grid == w.grid
    assert again.mesh == w.mesh


_no_graph = pytest.mark.skipif(
    "graph" not in inspect.signature(nnx.jit).parameters,
    reason="nnx.jit has no graph= in flax 0.12.0, which is the newest flax for JAX 0.8.0",
)


@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, pytest.param({"graph": False}, marks=_no_graph)]
)
def test_step_under_nnx_jit_is_rehearsed(auto_mesh: Mesh, options: dict[str, Any]) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(4, 4), (4,), (8, 4)]]
    w, b, x = gda.abstract(shapes, auto_mesh, [P(), P(), P("x")])

    def loss_of(module: Dense, x: Any) -> Any:
        return (module(x) ** 2).mean()

    def step(module: Dense, x: Any) -> None:
        gradients = nnx.grad(loss_of)(module, x)
        module.w[...] -= gradients.w[...]
        module.b[...] -= gradients.b[...]

    found = gda.rehearse(nnx.jit(step, **options), Dense(w, b), x)
    assert found.argument_bytes == 4 * (16 + 4 + 2 * 4)
    assert found.undonated_bytes == (0 if "donate_argnums" in options else 4 * (16 + 4))
    assert [each.axes for each in found.traffic] == [("x",)]


# Layers, their parameters and inputs in containers: the same programs, which need not be compiled.


def assert_same_program(function: Any, *given: Any) -> None:
    ours, theirs = (jax.make_jaxpr(function)(*each) for each in (given, plain(given)))
    assert str(ours) == str(theirs)


def test_layers_of_linen(auto_mesh: Mesh) -> None:
    x = cut(batch(8, 4), auto_mesh, P("x"))
    for layer in (
        *(nn.LayerNorm(), nn.RMSNorm(), nn.GroupNorm(num_groups=2)),
        *(nn.BatchNorm(use_running_average=is_at_rest) for is_at_rest in (False, True)),
    ):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x.array)
        variables = wrapped(jax.tree.map(lambda leaf: batch(*leaf.shape), shapes), auto_mesh)

        def apply(variables: Any, x: Any, layer: Any = layer) -> Any:
            return layer.apply(variables, x, mutable=["batch_stats"])

        assert_same_program(apply, variables, x)
    variables = wrapped({"params": {"scale": batch(4), "bias": batch(4)}}, auto_mesh)
    centred = batch(8, 4) - batch(8, 4).mean(1, keepdims=True)
    wanted = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-6) * batch(4) + batch(4)
    # Outside jit, where every operation is a program.
    assert_close(nn.LayerNorm().apply(variables, x), jnp.asarray(wanted))

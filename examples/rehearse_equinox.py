"""Rehearse a training step of an equinox model on 16 TPUs that are not here.

python examples/rehearse_equinox.py
gda rehearse examples/rehearse_equinox.py:step --topology v5e:4x4 --mesh data=8,model=2
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda

WIDTH, HIDDEN, DEPTH, ROWS = 4096, 16_384, 8, 8192
OPTIMIZER = optax.adam(1e-3)


def spec_of(path: str, leaf: Any) -> P:
    """Return the spec of a parameter, and of what the optimizer holds for it."""
    return P("model", "data") if leaf.ndim == 2 else P()


def step(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    model = eqx.filter_eval_shape(
        lambda: eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, DEPTH, key=jax.random.key(0))
    )
    shapes, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    params = gda.abstract(shapes, mesh, spec_of)
    state = gda.abstract(jax.eval_shape(OPTIMIZER.init, shapes), mesh, spec_of)
    rows = gda.abstract(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), mesh, P("data"))

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    # New parameters have the sharding of the old ones, so that they take their memory.
    same = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*same, None))
    def train_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step, (params, state, rows, rows)


if __name__ == "__main__":
    program, args = step(gda.rehearsal_mesh("v5e:4x4", {"data": 8, "model": 2}))
    print(gda.rehearse(program, *args))

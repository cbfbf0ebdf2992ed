"""The functions of the table in docs/works.md, applied to a container in six ways.

After a change of the table or of the results, run ``python tests/test_works.py`` to write it again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn  # noqa: F401  (the table names both)
from jax.sharding import PartitionSpec as P
from meshes import cut, mesh_of
from page_blocks import table, write

import gda

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[1] / "docs" / "works.md"
DATA = np.eye(4, dtype=np.float32) * 3 + np.arange(16, dtype=np.float32).reshape(4, 4) / 16

Function = Callable[[Any], Any]

# By the module that they are of, each as it is called on the matrix x of shape (4, 4).
TABLE: dict[str, list[str]] = {
    "methods": [
        "x + 1", "x @ x", "x[0]", "x.sum()", "x.mean(axis=0)", "x.reshape(2, 8)", "x.T",
        "x.astype(jnp.bfloat16)", "x.at[0].set(1.0)", "x.argmax()",
    ],
    "jax.numpy": [
        "jnp.sin(x)", "jnp.add(x, x)", "jnp.matmul(x, x)", "jnp.dot(x, x)",
        "jnp.einsum('ij,jk', x, x)", "jnp.sum(x)", "jnp.mean(x, axis=1)", "jnp.max(x)",
        "jnp.var(x)", "jnp.argmax(x)", "jnp.cumsum(x, axis=0)", "jnp.sort(x)",
        "jnp.where(x > 1, x, 0)", "jnp.clip(x, 0, 1)", "jnp.reshape(x, -1)", "jnp.transpose(x)",
        "jnp.concatenate([x, x])", "jnp.stack([x, x])", "jnp.split(x, 2)", "jnp.pad(x, 1)",
        "jnp.take(x, jnp.array([2, 0]), axis=0)", "jnp.repeat(x, 2)", "jnp.tril(x)",
        "jnp.roll(x, 1)", "jnp.zeros_like(x)", "jnp.full_like(x, 2)", "jnp.median(x)",
        "jnp.asarray(x)", "jnp.vectorize(jnp.sin)(x)",
    ],
    "jax.numpy.linalg": [
        "jnp.linalg.norm(x)", "jnp.linalg.inv(x)", "jnp.linalg.det(x)", "jnp.linalg.qr(x)[1]",
        "jnp.linalg.svd(x, compute_uv=False)", "jnp.linalg.solve(x, x)",
        "jnp.linalg.cholesky(x @ x.T)", "jnp.linalg.matrix_power(x, 3)",
    ],
    "jax.nn": [
        "nn.relu(x)", "nn.relu6(x)", "nn.silu(x)", "nn.gelu(x)", "nn.elu(x)", "nn.leaky_relu(x)",
        "nn.sigmoid(x)", "nn.softplus(x)", "nn.softmax(x)", "nn.log_softmax(x)",
        "nn.logsumexp(x)", "nn.glu(x)", "nn.standardize(x)",
    ],
    "jax.lax": [
        "lax.exp(x)", "lax.rsqrt(x)", "lax.add(x, x)", "lax.dot(x, x)", "lax.reshape(x, (16,))",
        "lax.transpose(x, (1, 0))", "lax.slice(x, (0, 0), (2, 4))",
        "lax.dynamic_slice(x, (0, 0), (2, 4))", "lax.select(x > 1, x, -x)", "lax.top_k(x, 2)[0]",
        "lax.full_like(x, 2)", "lax.stop_gradient(x)", "lax.convert_element_type(x, jnp.bfloat16)",
        "lax.cumsum(x)", "lax.cond(True, jnp.sin, jnp.cos, x)",
    ],
}  # fmt: skip


def function_of(text: str) -> Function:
    return eval(f"lambda x: {text}", globals())


def total(result: Any) -> Any:
    return sum(jnp.sum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(result))


# All but the first are traced and not run: a container is refused in the trace or not at all.
WAYS: dict[str, Callable[[Function, Any], Any]] = {
    "as it is": lambda f, x: f(x),
    "`jax.jit`": lambda f, x: jax.eval_shape(jax.jit(f), x),
    "`jax.grad`": lambda f, x: jax.eval_shape(jax.grad(lambda x: total(f(x))), x),
    "`jax.vmap`": lambda f, x: jax.eval_shape(jax.vmap(f), stacked(x)),
    "`lax.scan`": lambda f, x: jax.eval_shape(
        lambda xs: lax.scan(lambda carry, x: (carry, f(x)), 0, xs), stacked(x)
    ),
    "`gda.jit`": lambda f, x: jax.eval_shape(gda.jit(f), x),
}


HEAD = r"""# Functions that work on a `GlobalArray`

This page is for code that was written for `jax.Array` and now gets a `GlobalArray`. It lists
{count} functions, each called in six ways, by what to write. A function that works returns the same
values as for a `jax.Array`. Under `gda.jit`, every function that works for a `jax.Array` works.

- `yes`: pass the `GlobalArray` `x`.
- `x.array`: JAX does not take the container. Write `x.array` instead of `x`.
- `no`: JAX does not take the array either: it has no gradient of an integer.

In three cases JAX raises "Triggering `__jax_array__()` during abstractification is no longer
supported":

- Most functions of `jax.lax`, because they take only arrays and numbers. Some have another name,
  such as `jax.nn.sigmoid`.
- The gradients of `jax.nn.relu` and `jax.nn.relu6`, which call `jax.lax` with the container. Other
  functions with `jax.custom_jvp` or `jax.custom_vjp` work, unless their rules call `jax.lax`.
- `jax.grad(gda.jit(loss))`, because the loss is a container. Write `gda.jit(jax.grad(loss))`, or
  `jax.grad(lambda x: gda.jit(loss)(x).array)`.

`python tests/test_works.py` writes this page, for a mesh with Auto axes. A test checks it on every
supported version of JAX.
"""


def page() -> str:
    """Return the page, made of the answers that are found now."""
    found = answers()
    alike: dict[tuple[str, ...], list[str]] = {}
    for text, cells in found.items():
        alike.setdefault(tuple(cells), []).append(f"`{text}`")
    rows = [
        [", ".join(alike[cells]), *cells] for cells in sorted(alike, key=lambda x: len(alike[x]))
    ]
    return "\n".join([HEAD.format(count=len(found)), table(["functions", *WAYS], rows)])


def answers() -> dict[str, list[str]]:
    """Return the cells of each row: what to write for a function in each of the ways."""
    mesh = mesh_of({"x": 4, "y": 2})
    g = cut(DATA, mesh, P("x", "y"))
    return {
        text: [answer(function_of(text), way, g) for way in WAYS.values()]
        for texts in TABLE.values()
        for text in texts
    }


def answer(function: Function, way: Callable[[Function, Any], Any], g: gda.GlobalArray) -> str:
    def of_array(x: gda.GlobalArray) -> Any:
        return function(x.array)

    try:
        found = way(function, g)
    except (TypeError, ValueError):
        try:
            way(of_array, g)
        except TypeError:
            return "no"
        return "`x.array`"
    if way is WAYS["as it is"]:
        leaves = jax.tree.leaves(found), jax.tree.leaves(way(of_array, g))
        for ours, theirs in zip(*leaves, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    return "yes"


def stacked(x: gda.GlobalArray) -> gda.GlobalArray:
    return gda.GlobalArray(array=jnp.stack([x.array, x.array]))


def test_page_is_up_to_date() -> None:
    text = page()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(row.endswith("| yes |") for row in rows), "not under gda.jit"
    assert text == PAGE.read_text(encoding="utf-8"), "write it again: python tests/test_works.py"


if __name__ == "__main__":
    write(PAGE, page)

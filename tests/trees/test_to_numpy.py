"""Trees of arrays to trees of NumPy arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of

import gda

DATA = batch(8, 2)


def test_every_array_becomes_numpy_and_the_rest_stays(mesh: Mesh) -> None:
    other = object()
    tree = {"w": [cut(DATA, mesh, P("x", "y"))], "a": jnp.asarray(DATA), "n": DATA, "o": (other, 3)}
    values = gda.to_numpy(tree)
    assert jax.tree.structure(values) == jax.tree.structure({**tree, "w": [DATA]})
    assert values["n"] is DATA
    assert values["o"] == (other, 3)
    for value in (values["w"][0], values["a"]):
        assert type(value) is np.ndarray
        np.testing.assert_array_equal(value, DATA)


@pytest.mark.processes(4, devices=2)
def test_process_gives_arrays_it_holds_whole() -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    whole, part = cut(DATA, mesh, P(None, "y")), cut(DATA, mesh, P("x"))
    values = gda.to_numpy({"w": whole, "a": whole.array})
    assert all(np.array_equal(value, DATA) for value in values.values())
    for leaf in (part, part.array):
        message = "this process does not hold every block of Global"
        with pytest.raises(RuntimeError, match=message) as caught:
            gda.to_numpy({"w": whole, "p": leaf})
        assert caught.value.__notes__ == ["gda: at p of the tree"]


def test_deleted_arrays_and_shapes_are_named(mesh: Mesh) -> None:
    deleted = cut(DATA, mesh, P("x"))
    deleted.delete()
    none = jax.eval_shape(lambda x: x, cut(DATA, mesh, P("x")))
    keys = gda.load_tree(jax.random.split(jax.random.key(0), 3), mesh, P("x"), pad=True)
    for leaf, error, message in [
        (deleted, RuntimeError, "was deleted, by delete()"),
        (none, TypeError, "use gda.to_numpy(tree)"),
        (keys, TypeError, "jax.random.key_data"),
    ]:
        with pytest.raises(error) as caught:
            gda.to_numpy([DATA, leaf])
        assert message in str(caught.value)
        assert caught.value.__notes__ == ["gda: at 1 of the tree"]
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda g: gda.to_numpy([g]))(cut(DATA, mesh, P("x")))

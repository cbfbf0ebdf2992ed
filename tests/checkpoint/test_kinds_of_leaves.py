"""Leaves come back as they were: dtype, weak type, committed or not, memory, number or array.

One walk over all functions that give trees back. A jitted step that is called with their result is
the program that it was before: it is not traced again, and its results have the same dtypes.
"""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of

import gda

ARRAYS = ("w", "rate", "table", "moment", "keys")
SPECS = {"w": P("x"), "rate": P(), "table": P("x"), "moment": P("y"), "keys": P("x")}


@functools.cache
def made_over(mesh: Mesh) -> Callable[[], dict[str, jax.Array]]:
    """Outputs that are made of Python numbers have weak types."""
    over = {name: NamedSharding(mesh, SPECS[name]) for name in ("rate", "table")}
    return jax.jit(
        lambda: {"rate": 0.1, "table": jnp.broadcast_to(0.5, (8, 6)), "count": 3},
        out_shardings={**over, "count": None},
    )


def state_of(mesh: Mesh) -> dict[str, Any]:
    """A state of a training as a jitted step makes it."""

    def over(spec: P, kind: str | None = None) -> NamedSharding:
        return NamedSharding(mesh, spec, memory_kind=kind)

    made = made_over(mesh)()
    assert all(array.weak_type for array in made.values())
    return {
        "w": jax.device_put(batch(8, 6).astype(jnp.bfloat16), over(P("x"))),
        "rate": made["rate"],
        "table": made["table"],
        "moment": jax.device_put(batch(8, 2), over(SPECS["moment"], "pinned_host")),
        "keys": jax.device_put(jax.random.split(jax.random.key(7), 8), over(P("x"))),
        "count": jnp.asarray(3),
        "number": 5,
        "scale": 0.25,
        "name": "run",
    }


def kind_of(leaf: Any) -> Any:
    array = leaf.array if isinstance(leaf, gda.GlobalArray) else leaf
    if not isinstance(array, jax.Array):
        return type(array), array
    is_weak = getattr(array, "weak_type", False)
    return array.dtype, is_weak, array.committed, array.sharding.memory_kind


def structs(tree: Any) -> Any:
    def struct(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return leaf
        is_weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak
        )

    return jax.tree.map(struct, tree)


def restored_like(state: Any, mesh: Mesh, path: Path) -> Any:
    gda.checkpoint.save(path, state)
    return gda.checkpoint.restore(path, state)


def restored_like_shapes(state: Any, mesh: Mesh, path: Path) -> Any:
    gda.checkpoint.save(path, state)
    return gda.checkpoint.restore(path, structs(state))


def restored_from_numbers(state: Any, mesh: Mesh, path: Path) -> Any:
    """A first step makes arrays of Python numbers; a checkpoint of before has the numbers."""
    gda.checkpoint.save(path, {**state, "rate": float(state["rate"]), "count": 3})
    return gda.checkpoint.restore(path, state)


def pulled_like(state: Any, mesh: Mesh, path: Path) -> Any:
    with gda.offer(state) as offer:
        return gda.pull(offer.address, like=state)


def unpickled(state: Any, mesh: Mesh, path: Path) -> Any:
    contained = {name: gda.GlobalArray.from_array(state[name]) for name in ARRAYS}
    return {**state, **gda.to_jax(pickle.loads(pickle.dumps(contained)))}


def contained_and_plain(state: Any, mesh: Mesh, path: Path) -> Any:
    contained = {name: gda.GlobalArray.from_array(state[name]) for name in ARRAYS}
    return {**state, **gda.to_jax(contained)}


SAME = [
    restored_like,
    restored_like_shapes,
    restored_from_numbers,
    pulled_like,
    unpickled,
    contained_and_plain,
]


def restored_onto_new_layouts(arrays: Any, mesh: Mesh, path: Path) -> Any:
    gda.checkpoint.save(path, arrays)
    return gda.checkpoint.restore(path, arrays, mesh=mesh, specs=SPECS)


def restored_by_specs(arrays: Any, mesh: Mesh, path: Path) -> Any:
    gda.checkpoint.save(path, arrays)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    shardings["moment"] = shardings["moment"].with_memory_kind("pinned_host")
    return gda.checkpoint.restore(path, mesh=shardings, plain=True)


def pulled_by_specs(arrays: Any, mesh: Mesh, path: Path) -> Any:
    del arrays["moment"]
    specs = {name: SPECS[name] for name in arrays}
    with gda.offer(arrays) as offer:
        return gda.pull(offer.address, mesh, specs, plain=True)


def loaded(arrays: Any, mesh: Mesh, path: Path) -> Any:
    return gda.load_tree(arrays, mesh, SPECS, plain=True)


def prefetched(arrays: Any, mesh: Mesh, path: Path) -> Any:
    with gda.prefetch([arrays], mesh, SPECS, plain=True) as batches:
        return next(batches)


def resharded_tree(arrays: Any, mesh: Mesh, path: Path) -> Any:
    few = mesh_of({"z": 2})
    there = gda.reshard_tree(arrays, few, P())
    assert {name: kind_of(there[name]) for name in ARRAYS} == {
        name: kind_of(arrays[name]) for name in ARRAYS
    }
    return gda.reshard_tree(there, mesh, SPECS)


def donated(arrays: Any, mesh: Mesh, path: Path) -> Any:
    return gda.reshard_tree(arrays, mesh, SPECS, donate=True)


def resharded(arrays: Any, mesh: Mesh, path: Path) -> Any:
    wrapped = {name: gda.GlobalArray.from_array(array) for name, array in arrays.items()}
    return {name: g.reshard(mesh, P()).reshard(SPECS[name]).array for name, g in wrapped.items()}


def constrained(arrays: Any, mesh: Mesh, path: Path) -> Any:
    del arrays["moment"]
    with jax.set_mesh(mesh):
        return {name: gda.constrain(array, SPECS[name]) for name, array in arrays.items()}


def host_local(arrays: Any, mesh: Mesh, path: Path) -> Any:
    del arrays["moment"]
    specs = {name: SPECS[name] for name in arrays}
    built = gda.compat.host_local_array_to_global_array(arrays, mesh, specs)
    return gda.to_jax(gda.compat.global_array_to_host_local_array(built, mesh, specs))


MOVED = [
    restored_onto_new_layouts,
    restored_by_specs,
    pulled_by_specs,
    loaded,
    prefetched,
    resharded_tree,
    donated,
    resharded,
    constrained,
    host_local,
]


class Step:
    """A training step that counts how often it is traced."""

    def __init__(self) -> None:
        self.traces = 0

        def step(state: dict[str, Any]) -> Any:
            self.traces += 1
            w, table = state["w"] * (1 - state["rate"]), state["w"] * state["table"]
            return w, table, jax.random.key_data(state["keys"])

        self._step = jax.jit(step)

    def __call__(self, state: Any) -> list[Any]:
        arrays = {name: state[name] for name in ("w", "rate", "table", "keys")}
        return [each.dtype for each in self._step(arrays)]


step = Step()  # of all tests, which compile it once


@pytest.mark.parametrize("again", [*SAME, *MOVED], ids=lambda function: function.__name__)
def test_every_leaf_comes_back_as_it_was(
    again: Callable[..., Any], mesh: Mesh, tmp_path: Path
) -> None:
    """Those of ``MOVED`` change the layout alone."""
    state = state_of(mesh)
    if again in MOVED:
        state = {name: state[name] for name in ARRAYS}
    dtypes = step(state)
    traces = step.traces
    assert dtypes[0] == dtypes[1] == jnp.bfloat16
    wanted = {name: kind_of(leaf) for name, leaf in state.items()}
    shardings = {name: state[name].sharding for name in ARRAYS}
    found = again(state, mesh, tmp_path)
    assert {name: kind_of(leaf) for name, leaf in found.items()} == {
        name: wanted[name] for name in found
    }
    if again in SAME:
        assert found.keys() == wanted.keys()
        assert {name: found[name].sharding for name in ARRAYS} == shardings
    assert found["table"].tolist() == np.full((8, 6), 0.5).tolist()
    assert step(found) == dtypes
    assert step.traces == traces


@pytest.mark.parametrize("again", [restored_like, pulled_like, unpickled], ids=lambda f: f.__name__)
def test_the_mesh_that_is_set_changes_nothing(
    again: Callable[..., Any], mesh: Mesh, tmp_path: Path
) -> None:
    state = state_of(mesh)
    wanted = {name: kind_of(leaf) for name, leaf in state.items()}
    for other in (mesh_of({"z": 2}), mesh):
        with jax.set_mesh(other):
            found = again(state, mesh, tmp_path / str(other.size))
        assert {name: kind_of(leaf) for name, leaf in found.items()} == wanted
        assert found["table"].sharding == state["table"].sharding


@pytest.mark.processes(2, devices=4)
def test_weak_types_over_many_processes(shared_tmp_path: Path) -> None:
    mesh = mesh_of({"x": 4, "y": 2})
    half = mesh_of({"z": 4})  # one process has no device of it
    sharding = NamedSharding(mesh, P("x"))
    state = jax.jit(
        lambda: {"rate": 0.1, "table": jnp.broadcast_to(0.5, (8, 2))},
        out_shardings={"rate": NamedSharding(mesh, P()), "table": sharding},
    )()
    path = shared_tmp_path / "c"
    gda.checkpoint.save(path, state)
    with gda.offer(state) as offer:
        trees = [
            gda.checkpoint.restore(path, state),
            gda.checkpoint.restore(path, state, read_once=True),
            gda.checkpoint.restore(path, mesh=mesh, specs=P(), plain=True),
            gda.pull(offer.address, like=state),
        ]
    there = gda.reshard_tree(state, half, P())
    trees += [there, gda.reshard_tree(there, mesh, P())]
    trees.append(gda.reshard_tree(trees.pop(0), half, P(), donate=True))
    trees.append(gda.to_jax(gda.checkpoint.restore(path, mesh=half, specs=P())))
    for tree in trees:
        assert tree["rate"].weak_type
        assert tree["table"].weak_type
        for block in tree["table"].addressable_shards:
            assert (np.asarray(block.data) == 0.5).all()


def test_weak_types_of_padded_arrays(mesh: Mesh, tmp_path: Path) -> None:
    weak = jax.jit(lambda: jnp.broadcast_to(0.5, (7, 2)))()
    trees = [gda.load_tree({"w": weak}, mesh, P("x"), pad=True)]
    trees.append({"w": gda.PaddedArray.from_source(weak, mesh, P("x"))})
    trees.append(pickle.loads(pickle.dumps(trees[0])))
    gda.checkpoint.save(tmp_path, trees[0])
    trees.append(gda.checkpoint.restore(tmp_path, trees[0]))
    trees.append(gda.reshard_tree(trees[0], mesh_of({"z": 4}), P("z")))
    for tree in trees:
        assert isinstance(tree["w"], gda.PaddedArray)
        assert tree["w"].array.weak_type
        np.testing.assert_array_equal(np.asarray(tree["w"]), np.full((7, 2), 0.5))


def test_a_dtype_that_was_asked_for_is_no_weak_type(auto_mesh: Mesh) -> None:
    weak = jnp.broadcast_to(0.5, (8,))
    assert weak.weak_type
    for dtype in ("float32", "bfloat16"):
        loaded = gda.load_tree({"w": weak}, auto_mesh, P("x"), dtype={"w": dtype})["w"]
        assert loaded.dtype == dtype
        assert not loaded.array.weak_type


def test_a_number_beyond_64_bits_does_not_fit_an_array(tmp_path: Path) -> None:
    gda.checkpoint.save(tmp_path, {"step": 2**70})
    with pytest.raises(ValueError, match=r"at step, it has the int 118\d+, which int32 cannot ho"):
        gda.checkpoint.restore(tmp_path, like={"step": jnp.int32(0)})

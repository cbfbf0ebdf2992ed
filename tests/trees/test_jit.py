"""Containers in jit and the other transformations, over Auto and over Explicit axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, holding, mesh_of
from trials import rarely

import gda
from gda.testing.strategies import ShardedCase, sharded_cases

DATA = np.arange(2048, dtype=np.float32).reshape(64, 32) / 2048


def make(mesh: Mesh, spec: P = P("x", "y"), data: np.ndarray = DATA) -> gda.GlobalArray:
    return gda.GlobalArray.from_callback(data.shape, mesh, spec, lambda index: data[index])


# gda.jit.


def test_the_body_sees_plain_arrays_and_everything_comes_out_wrapped(mesh: Mesh) -> None:
    def body(tree: dict[str, Any], scale: jax.Array, *, offset: float) -> dict[str, Any]:
        assert all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
        assert not isinstance(tree["a"], gda.GlobalArray)
        return {"sum": tree["a"] + tree["b"][0] * scale, "more": (tree["a"] + offset, 1.0, None)}

    f = gda.jit(body)
    g = make(mesh)
    result = f({"a": g, "b": [g]}, 2.0, offset=3.0)
    assert type(result["sum"]) is type(result["more"][0]) is type(result["more"][1]) is type(g)
    assert result["more"][2] is None
    np.testing.assert_allclose(result["sum"], DATA * 3, rtol=1e-6)
    assert result["sum"].spec == g.spec


def test_programs_lowered_with_containers_take_containers(mesh: Mesh) -> None:
    f = gda.jit(lambda tree: tree["a"] @ tree["b"].T, out_specs=P("y", "x"))
    assert f.__name__ == "<lambda>"
    tree = {"a": make(mesh), "b": make(mesh)}
    assert f.eval_shape(tree).shape == (64, 64)
    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    contained = f.lower(dict.fromkeys("ab", gda.GlobalArray.from_array(shape))).compile()
    np.testing.assert_allclose(contained(tree), DATA @ DATA.T, rtol=1e-5)
    # Lowered with the shapes themselves it takes arrays, and JAX's message names the container.
    of_arrays = f.lower(dict.fromkeys("ab", shape)).compile()
    with pytest.raises(TypeError, match="seen pytree leaf but now given .*GlobalArray"):
        of_arrays(tree)


def test_out_specs_may_be_a_prefix_with_gaps(mesh: Mesh) -> None:
    f = gda.jit(
        lambda x: {"both": (x + 1, x * 2), "free": x.sum()},
        out_specs={"both": P(None, "x"), "free": None},
    )
    result = f(make(mesh))
    assert [r.spec for r in result["both"]] == [P(None, "x")] * 2
    np.testing.assert_allclose(result["free"], DATA.sum(), rtol=1e-5)


def test_in_specs_reshard_arguments(mesh: Mesh) -> None:
    seen = []

    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append((jax.typeof(x).sharding.spec, jax.typeof(y).sharding.spec))
        return x

    f = gda.jit(body, in_specs=(P("y"), None))
    g = make(mesh)
    result = f(g, g)
    np.testing.assert_array_equal(result, DATA)
    if mesh.axis_types[0] == AxisType.Explicit:
        ((first, second),) = seen
        assert tuple(first)[:1] == ("y",)
        assert second == P("x", "y")
    static = gda.jit(lambda x, n: x.reshape(n, -1), static_argnums=1, in_specs=(P(), None))
    assert static(g, 4).shape == (4, 512)


def test_a_mesh_may_be_given_where_no_argument_has_one(mesh: Mesh) -> None:
    f = gda.jit(lambda x: x + 1, mesh=mesh, out_specs=P("x"))
    result = f(DATA)
    assert (result.mesh, result.spec) == (mesh, P("x"))
    make_it = gda.jit(lambda: jnp.ones((8, 2)), mesh=mesh, out_specs=P("x"))
    assert make_it().spec == P("x")
    with pytest.raises(ValueError, match=r"no mesh for the specs.*Pass mesh="):
        gda.jit(lambda x: x + 1, out_specs=P("x"))(DATA)
    with jax.set_mesh(mesh):
        assert gda.jit(lambda x: x + 1, out_specs=P("x"))(make(mesh)).grid.spec == ("x",)
    # Surplus Nones are dropped only without a mesh.
    assert gda.jit(jnp.sum, out_specs=P(None))(make(mesh)).grid.spec == ()
    with pytest.raises(ValueError, match="outputs .* incompatible with its sharding"):
        gda.jit(jnp.sum, out_specs=P(None), mesh=mesh)(make(mesh))


def test_static_arguments_and_donation_are_options_of_jit(mesh: Mesh) -> None:
    static, seen = ("a", ("b",)), []

    def body(x: jax.Array, options: Any) -> jax.Array:
        seen.append(options)
        return x**2

    f = gda.jit(body, static_argnames="options", donate_argnums=0)
    g = make(mesh)
    np.testing.assert_allclose(f(g, options=static), DATA**2, rtol=1e-6)
    assert seen[0] is static
    assert g.is_deleted()
    with pytest.raises(RuntimeError, match="was deleted, by delete.. or by donating"):
        g.local_data(0)


def test_a_loop_compiles_once(mesh: Mesh) -> None:
    compiled: list[str] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)  # JAX 0.8 cannot take it back
    for spec in (P("x", None), P(None, None), P()):
        step = gda.jit(lambda x: x + 1, mesh=mesh, out_specs=spec)
        x = make(mesh, spec)
        compiled.clear()
        for _ in range(3):
            x = step(x)
            assert x.array.sharding.spec == spec
        assert len(compiled) == 1


def test_axes_of_both_kinds_in_one_mesh_are_refused_and_not_mixed_up() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    g = make(mesh, P("x"))
    with pytest.raises(TypeError, match="has Auto and Explicit axes"):
        gda.jit(lambda x: x, out_specs=P("y"))(g)
    with pytest.raises(TypeError, match="has Auto and Explicit axes"):
        jax.jit(lambda g: gda.constrain(g, P("y")))(g)
    np.testing.assert_array_equal(gda.jit(lambda x: x + 1)(g), DATA + 1)


def test_it_is_a_decorator(mesh: Mesh) -> None:
    @gda.jit
    def double(x: jax.Array) -> jax.Array:
        """Multiply by two."""
        return x * 2

    assert double.eval_shape(make(mesh)).shape == DATA.shape
    assert double.__doc__ == "Multiply by two."


def test_a_layout_is_ambiguous_without_out_specs_for_every_result(explicit_mesh: Mesh) -> None:
    for out_specs in (None, {"a": P("x"), "b": None}):
        f = gda.jit(lambda x: {"a": x @ x.T, "b": x @ x.T}, out_specs=out_specs)
        with pytest.raises(Exception, match="ambiguous"):
            f(make(explicit_mesh))


def test_specs_that_do_not_fit_are_explained(auto_mesh: Mesh) -> None:
    for options, error, message in [
        ({"out_specs": P("z")}, ValueError, "shards dimension 0 by mesh axis 'z'"),
        ({"out_specs": P("x", "y", "x")}, ValueError, "twice|has 3 entries"),
        ({"out_specs": P(("x", "y"), None, "y")}, ValueError, "3 entries"),
        ({"in_specs": (P("z"),)}, ValueError, "shards dimension 0 by mesh axis 'z'"),
        ({"out_specs": "x"}, TypeError, r"out_specs is 'x', not a .* such as PartitionSpec\('x'\)"),
        ({"in_specs": ["x"]}, TypeError, r"in_specs/0 is 'x', not a PartitionSpec"),
    ]:
        with pytest.raises(error, match=message):
            gda.jit(lambda x: x + 1, **options)(make(auto_mesh))
    f = gda.jit(lambda x: {"loss": x[:3], "rest": x}, out_specs={"loss": P("x"), "rest": None})
    with pytest.raises(ValueError, match="dimension 0 of size 3 is sharded 4 ways") as caught:
        f(make(auto_mesh))
    assert "gda: at loss of the tree" in caught.value.__notes__
    assert "gda.jit: while applying out_specs" in caught.value.__notes__


def test_over_explicit_axes_specs_are_explained_before_jax_sees_them(explicit_mesh: Mesh) -> None:
    for out_specs, message in [
        (P("x", None, "y"), "has 3 entries, but global shape"),
        ((P("x"), P("y")), "out_specs must be a prefix of the tree"),
    ]:
        f = gda.jit(lambda x: x @ x.T, out_specs=out_specs)
        with pytest.raises(ValueError, match=message) as caught:
            f(make(explicit_mesh))
        # Nothing of JAX's first try is printed above it.
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    with pytest.raises(ValueError, match="dimension 0 of size 3 is sharded 4 ways"):
        gda.jit(lambda x: (x @ x.T)[:3], out_specs=P("x"))(make(explicit_mesh))


def test_bad_options_are_refused_before_a_call(auto_mesh: Mesh) -> None:
    whole = NamedSharding(auto_mesh, P())
    per_argument = "a tuple with one entry per positional argument, not a"
    for options, error, message in [
        ({"out_specs": P("x"), "out_shardings": whole}, TypeError, "give out_specs or out_shard"),
        (
            {"in_specs": (P("x"),), "in_shardings": whole},
            TypeError,
            "give in_specs or in_shardings",
        ),
        ({"in_specs": [P("x"), P("x")]}, TypeError, per_argument),
        ({"in_specs": {"x": P("x")}}, TypeError, per_argument),
        ({"mesh": 5, "out_specs": P()}, TypeError, r"mesh must be a jax\.sharding\.Mesh, not 5"),
        ({"mesh": auto_mesh, "out_specs": P("z")}, ValueError, "dimension 0 by mesh axis 'z'"),
        ({"fun": 3}, TypeError, "takes a function, not 3"),
    ]:
        with pytest.raises(error, match=message):
            gda.jit(**({"fun": lambda x, y: x} | options))


def test_options_alone_make_a_decorator(mesh: Mesh) -> None:
    @gda.jit(in_specs=P("x"), out_specs=P("y"))
    def double(x: jax.Array) -> jax.Array:
        """Return twice the argument."""
        assert isinstance(x, jax.Array)
        return 2 * x

    g = cut(batch(8), mesh, P())
    assert double.__doc__ == "Return twice the argument."
    assert double(g).spec == P("y")
    np.testing.assert_array_equal(double(g), 2 * batch(8))
    with pytest.raises(TypeError, match="in_specs is a tuple with one entry per positional"):
        gda.jit(in_specs=[P("x")])(lambda x: x)


def test_specs_of_another_structure_are_explained(mesh: Mesh) -> None:
    for options, message in [
        ({"in_specs": (P(), P())}, "the tree has no 1"),
        ({"out_specs": {"a": (P(), {"c": P()})}}, "nothing for a/1, and the tree has no a/1/c"),
    ]:
        f = gda.jit(lambda x: {"a": (x, x)}, **options)
        with pytest.raises(ValueError, match=f"must be a prefix of the tree .*{message}") as caught:
            f(make(mesh))
        assert "PyTreeDef" not in str(caught.value)


@rarely(5)
@given(sharded_cases())
def test_results_have_their_out_specs(case: ShardedCase) -> None:
    shape, mesh = case.global_shape, case.mesh
    spec = P(*tuple(case.spec)[: len(shape)])
    asked = gda.ShardGrid(shape, mesh.shape, spec, process_of=[0] * mesh.size)
    assume(0 not in shape)  # jit itself drops the layout of arrays without elements
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    g = gda.GlobalArray.from_callback(shape, mesh, P(), lambda index: data[index])
    result = gda.jit(lambda x: x + 1, out_specs=spec)(g)
    # JAX may drop axes of size 1 from the spec, but not with mesh=.
    assert result.grid.indices() == asked.indices()
    assert result.grid.replica_ids.tolist() == asked.replica_ids.tolist()
    np.testing.assert_array_equal(result, data + 1)
    assert gda.jit(lambda x: x + 1, mesh=mesh, out_specs=spec).eval_shape(g).grid == asked


def test_axes_of_size_1_beyond_the_dimensions_of_a_result() -> None:
    mesh = mesh_of({"a": 1, "b": 1, "x": 8}, AxisType.Explicit)
    g = make(mesh, P("x"))
    spec = P(("a", "b"))
    loss = gda.jit(jnp.sum, out_specs=spec)(g)
    assert (loss.spec, float(loss.array)) == (P(), float(DATA.sum()))
    # With mesh= a spec comes back as it was written, and JAX does not take this one.
    assert gda.jit(lambda x: x + 1, out_specs=spec, mesh=mesh)(g).spec == spec
    with pytest.raises(ValueError, match="outputs .* incompatible with its sharding"):
        gda.jit(jnp.sum, out_specs=spec, mesh=mesh)(g)


# gda.constrain.


def test_constrain_explains_misfits(mesh: Mesh) -> None:
    deleted = make(mesh)
    deleted.delete()
    for x, options, error, message in [
        (make(mesh), {"spec": P("z")}, ValueError, r"shape \(64, 32\) cannot be sharded|'z'"),
        (jnp.zeros(8), {"spec": P("x")}, ValueError, "over no mesh; pass mesh="),
        (jnp.zeros(8), {"spec": P("x"), "mesh": 5}, TypeError, "mesh must be a jax.*, not 5"),
        (deleted, {"spec": P("x")}, RuntimeError, r"Array\(shape=\(64, 32\), .* was deleted"),
        (DATA, {"spec": P("x")}, TypeError, "not ndarray"),
        (make(mesh), {"spec": NamedSharding(mesh, P()), "mesh": mesh}, TypeError, "has a mesh of"),
    ]:
        with pytest.raises(error, match=message):
            gda.constrain(x, **options)
        with pytest.raises(error, match=message) as caught:
            gda.constrain({"w": x}, **options)
        assert caught.value.__notes__ == ["gda: at w of the tree"]
    with pytest.raises(ValueError, match="spec must be a prefix of the tree"):
        gda.constrain({"w": make(mesh), "b": jnp.zeros(8)}, {"w": P("x")})
    with pytest.raises(TypeError, match=r"spec/0 is 'x', not a PartitionSpec"):
        gda.constrain({"w": make(mesh)}, ["x"])


def test_constrain_shards_every_array_of_a_tree(mesh: Mesh) -> None:
    g = make(mesh)
    tree = {"w": g, "layers": [g.array, (g, None)], "b": g}
    specs = {"w": P("y"), "layers": P(None, "x"), "b": None}

    def check(result: Any) -> None:
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        first, (second, _) = result["layers"]
        arrays = [result["w"].array, result["b"].array, first, second.array]
        wanted = [P("y"), P("x", "y"), P(None, "x"), P(None, "x")]
        for array, spec in zip(arrays, wanted, strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)

    moved = gda.constrain(tree, specs)
    check(moved)
    np.testing.assert_array_equal(moved["w"], DATA)
    assert gda.constrain(g, iter(["y"])).grid.spec == ("y",)
    assert moved["b"] is g
    check(jax.jit(lambda tree: gda.constrain(tree, specs))(tree))
    spread = gda.constrain([jnp.asarray(DATA)], P("x"), mesh=mesh)
    assert spread[0].sharding.spec == P("x")
    assert gda.constrain(g, None) is g
    assert gda.constrain((), P("x")) == ()


# JAX's own transformations.


def test_jit_and_device_put_keep_the_container(mesh: Mesh) -> None:
    g = make(mesh)
    moved = jax.device_put(g, NamedSharding(mesh, P("y")))
    assert (type(moved), moved.spec) == (gda.GlobalArray, P("y"))
    np.testing.assert_array_equal(jax.device_get(moved).array, DATA)
    result = jax.jit(lambda g: jax.tree.map(lambda x: x + 1, g), donate_argnums=0)(g)
    assert (type(result), result.spec, result.mesh) == (gda.GlobalArray, g.spec, mesh)
    assert (g.is_deleted(), result.is_deleted()) == (True, False)
    np.testing.assert_array_equal(result, DATA + 1)


def test_grad_vmap_scan_cond_and_eval_shape(mesh: Mesh) -> None:
    g = make(mesh, P(None, "y"))

    def step(total: jax.Array, row: gda.GlobalArray) -> tuple[jax.Array, gda.GlobalArray]:
        assert type(row) is gda.GlobalArray
        return total + row.sum(), row

    gradient = jax.jit(jax.grad(jax.checkpoint(lambda g: jnp.sin(g).sum())))(g)
    assert (type(gradient), gradient.spec) == (gda.GlobalArray, g.spec)
    np.testing.assert_allclose(gradient, np.cos(DATA), rtol=1e-5)

    @jax.jit
    def f(g: gda.GlobalArray) -> Any:
        means = jax.vmap(lambda row: row.reshape(4, 8).mean(axis=0))(g)
        most = jax.lax.cond(g.sum() > 0, lambda g: g.max(), lambda g: g.min(), g)
        return means, most, jax.lax.scan(step, jnp.float32(0), g)

    means, most, (total, again) = f(g)
    np.testing.assert_allclose(means, DATA.reshape(64, 4, 8).mean(axis=1), rtol=1e-6)
    assert most == DATA.max()
    np.testing.assert_allclose(total, DATA.sum(), rtol=1e-5)
    assert type(again) is type(jax.vmap(lambda g: g)(g)) is gda.GlobalArray
    np.testing.assert_array_equal(again, DATA)
    shape = jax.eval_shape(lambda g: g, g)
    assert (type(shape), shape.shape, shape.dtype) == (gda.GlobalArray, (64, 32), np.float32)


def test_shard_map_sees_blocks(mesh: Mesh) -> None:
    def body(g: gda.GlobalArray) -> gda.GlobalArray:
        assert g.shape == (16, 16)
        with pytest.raises(TypeError, match=r"inside jax\.shard_map an array is the block"):
            g.spec  # noqa: B018
        with pytest.raises(TypeError, match=r"inside jax\.shard_map, .* constrain it outside"):
            gda.constrain(g, P("x"))
        return gda.GlobalArray.from_array(g * 2)

    f = jax.shard_map(body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    result = f(make(mesh))
    assert (type(result), result.spec) == (gda.GlobalArray, P("x", "y"))
    np.testing.assert_array_equal(result, DATA * 2)


def test_a_jitted_constant_is_usable() -> None:
    g = gda.jit(lambda: jnp.arange(3.0))()
    assert (g.spec, len(g.local_shards)) == (P(), 1)
    np.testing.assert_array_equal(g.local_data(0), [0, 1, 2])


# Trees and other people's code.


def test_tree_functions_keep_the_container_and_name_its_leaf(mesh: Mesh) -> None:
    g = make(mesh)
    assert jax.tree.leaves(g) == [g.array]
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path({"w": g})
    assert (jax.tree_util.keystr(path), leaf is g.array) == ("['w'].array", True)
    doubled = jax.tree.map(lambda x: x * 2, {"w": g})
    assert type(doubled["w"]) is gda.GlobalArray
    np.testing.assert_array_equal(doubled["w"], DATA * 2)
    assert jax.tree.structure(g) == jax.tree.structure(holding(object()))


def test_a_masked_state_goes_in_and_out_of_jit(auto_mesh: Mesh) -> None:
    params = {"w": make(auto_mesh), "b": make(auto_mesh, P("y"), DATA[0])}
    params["odd"] = gda.PaddedArray.from_source(DATA[0, :5], auto_mesh, P("x"))
    are_matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    tx = optax.masked(optax.sgd(0.1, momentum=0.9), are_matrices)
    state = tx.init(params)
    structure = jax.tree.structure(state)

    @gda.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
        assert jax.tree.structure(state) == structure
    assert type(state.inner_state[0].trace["b"].array) is optax.MaskedNode
    decay = jax.tree.map(lambda x: 0.5, params)
    decayed = gda.jit(lambda params, decay: jax.tree.map(jnp.multiply, params, decay))
    np.testing.assert_array_equal(decayed(params, decay)["b"], np.asarray(params["b"]) * 0.5)


def test_an_exported_function_takes_and_gives_containers(mesh: Mesh) -> None:
    g = make(mesh)
    exported = jax.export.export(jax.jit(lambda g: jax.tree.map(lambda x: x + 1, g)))(g)
    again = jax.export.deserialize(exported.serialize())
    result = again.call(g)
    assert type(result) is gda.GlobalArray
    np.testing.assert_array_equal(result, DATA + 1)

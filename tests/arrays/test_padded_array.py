"""Arrays whose sizes the mesh does not divide; tests/test_padded_roundtrip.py has all sizes."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, is_right, mesh_of

import gda
from gda import PaddedArray, ShardGrid


def padded(data: np.ndarray, mesh: Mesh, spec: Any, **options: Any) -> PaddedArray:
    def read(index: gda.Index) -> np.ndarray:
        block = data[index]
        assert block.size or not data.size, "the callback was called for padding alone"
        return block

    return PaddedArray.from_callback(data.shape, mesh, spec, read, dtype=data.dtype, **options)


def test_facts_about_padding(mesh: Mesh) -> None:
    data = batch(5, 3)
    p = padded(data, mesh, P("x", "y"), fill=9)
    assert (p.shape, p.padded_shape, p.size, p.nbytes) == ((5, 3), (8, 4), 15, 60)
    assert [shard.replica_id for shard in padded(data, mesh, P("x")).local_shards] == [0, 1] * 4
    assert [shard.index for shard in p.global_shards] == p.grid.indices()
    whole = np.full((8, 4), 9, np.float32)
    whole[:5, :3] = data
    np.testing.assert_array_equal(p.array, whole)
    np.testing.assert_array_equal(p, data)
    assert p.grid == ShardGrid((5, 3), {"x": 4, "y": 2}, P("x", "y"), pad=True, process_of=[0] * 8)
    assert repr(p) == (
        "PaddedArray(shape=(5, 3), dtype=float32, mesh={'x': 4, 'y': 2}, spec=P('x', 'y'))"
    )


def test_a_shape_that_divides_has_no_padding(mesh: Mesh) -> None:
    p = padded(batch(8, 2), mesh, P("x", "y"))
    assert p.shape == p.padded_shape
    assert p.mask().shape == (1, 1)
    assert p.mask().all()


# Options of the constructors.


def test_buffers_are_filled_without_padding_under_any_mesh(mesh: Mesh) -> None:
    data = batch(5, 3)

    def fill(index: gda.Index, out: np.ndarray) -> None:
        assert out.shape == data[index].shape
        np.copyto(out, data[index])

    with jax.set_mesh(mesh):
        for options in ({}, {"max_workers": 3, "max_bytes": 1}):
            p = PaddedArray.from_callback(
                (5, 3), mesh, P("x", "y"), fill, into=True, dtype=np.float32, **options
            )
            assert is_right(p, data)
            assert p.fingerprint() == gda.fingerprint(data)


def test_blocks_of_jax_are_padded_on_their_device(mesh: Mesh) -> None:
    data = batch(5, 3)
    read = lambda index: jax.device_put(data[index])  # noqa: E731
    p = PaddedArray.from_callback((5, 3), mesh, P("x", "y"), read, fill=2)
    np.testing.assert_array_equal(p, data)
    assert set(np.asarray(p.array)[5:].ravel()) == {2}


def test_keys(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    numbers = np.asarray(jax.random.key_data(keys))
    p = PaddedArray.from_callback(
        (5,), mesh, P("x"), lambda index: jax.random.wrap_key_data(numbers[index])
    )
    assert p.padded_shape == (8,)
    assert p.fingerprint() == gda.fingerprint(keys)
    (last,) = jax.random.key_data(p.local_shards[5].data)
    np.testing.assert_array_equal(last, numbers[4])


def test_a_dtype_of_no_data_and_of_narrow_data(mesh: Mesh) -> None:
    p = PaddedArray.from_callback((0,), mesh, P("x"), lambda index: np.zeros(0, np.int8))
    assert (p.dtype, p.padded_shape) == (np.int8, (0,))
    p = PaddedArray.from_callback((5,), mesh, P("x"), lambda i: batch(5)[i], dtype=jnp.bfloat16)
    assert p.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(p).astype(np.float32), batch(5))


@pytest.mark.processes(4, devices=2)
def test_processes_that_ask_for_different_arrays_are_named() -> None:
    mesh = mesh_of({"x": 8})
    data, is_me = batch(16), jax.process_index() == 1

    def build(size: int, fill: int = 0) -> PaddedArray:
        return PaddedArray.from_source(data[:size], mesh, P("x"), fill=fill)

    def refused(build: Any, *arguments: Any) -> str:
        with gda.checking_agreement(timeout=50), pytest.raises(gda.DisagreementError) as caught:
            build(*arguments)
        return str(caught.value)

    # Both have the padded shape (16,).
    wanted = "process 1: shape (12,), padded with 0, processes 0, 2, 3: (10,), padded with 0"
    size = 12 if is_me else 10
    assert refused(build, size).endswith(wanted)
    message = refused(padded, data[:size], mesh, P("x"))
    assert message.startswith("PaddedArray.from_callback (test_padded_array.py:")
    assert message.endswith(wanted)
    assert "shape (10,), padded with 1, " in refused(build, 10, int(is_me))
    mine = gda.GlobalArray.from_source if is_me else PaddedArray.from_source
    assert "process 1: shape (16,), processes 0, 2, 3: (16,), padded with 0" in refused(
        mine, data, mesh, P("x")
    )
    with gda.checking_agreement(False):
        p = build(size)
    for use in (p.gather, p.fingerprint):
        assert refused(use).endswith("process 1: shape (12,), processes 0, 2, 3: (10,)")
    np.testing.assert_array_equal(build(10).gather(), data[:10])


# Computing.


def test_padding_stays_out_of_results(mesh: Mesh) -> None:
    data = batch(5, 3) + 1
    p = padded(data, mesh, P("x", "y"), fill=np.nan)

    @jax.jit
    def statistics(p: PaddedArray) -> tuple[jax.Array, ...]:
        return (
            p.filled(0).sum() / p.size,
            p.filled(-jnp.inf).max(),
            jnp.where(p.mask(), p.array, 0).sum(),
        )

    mean, most, total = statistics(p)
    np.testing.assert_allclose(mean, data.mean(), rtol=1e-6)
    assert (most, total) == (data.max(), data.sum())


def test_shards_without_padding_are_constants_in_a_program(mesh: Mesh) -> None:
    data = batch(5, 3) + 1
    p = padded(data, mesh, P("x"))
    total = jax.jit(lambda x: x.sum() + sum(shard.data.sum() for shard in p.local_shards))(p.array)
    assert total == data.sum() * (1 + mesh.shape["y"])


def test_a_mask_is_sharded_as_the_array(mesh: Mesh) -> None:
    p = padded(batch(5, 4), mesh, P("x", "y"))
    assert p.mask().shape == (8, 1)
    assert p.mask().sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P("x")), 2)
    assert padded(batch(5, 3), mesh, P("x", "y")).mask().sharding.spec == P("x", "y")


@pytest.mark.parametrize("size", [2**31 + 3, 2**33 + 3])
def test_a_mask_numbers_more_elements_than_an_int32_can(size: int) -> None:
    shape = (-(-size // 8) * 8,)
    p = PaddedArray(jax.ShapeDtypeStruct(shape, np.int8), (size,))
    for function in (lambda p: p.mask(), lambda p: p.filled(0)):
        assert jax.eval_shape(jax.jit(function), p).shape == shape
    assert f"i64[{shape[0]}] = iota" in str(jax.make_jaxpr(lambda p: p.mask())(p))


def test_tree_functions_keep_it(mesh: Mesh) -> None:
    p = padded(batch(5, 3), mesh, P("x"))
    doubled = jax.tree.map(lambda x: x + x, {"p": p})["p"]
    assert isinstance(doubled, PaddedArray)
    np.testing.assert_array_equal(doubled, batch(5, 3) * 2)
    with jax.set_mesh(mesh):  # over Explicit axes JAX needs it for any gradient
        gradient = jax.jit(jax.grad(lambda p: (p.filled(0) ** 2).sum()))(p)
    np.testing.assert_array_equal(gradient, batch(5, 3) * 2)
    assert not np.asarray(gradient.array)[5:].any()


def test_it_is_exported_with_its_shape(mesh: Mesh) -> None:
    p = padded(batch(5), mesh, P("x"))
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(lambda p: p))(p)
        restored = jax.export.deserialize(exported.serialize()).call(p)
    assert restored.shape == (5,)
    np.testing.assert_array_equal(restored, batch(5))
    of_numpy = PaddedArray(jnp.zeros(8), (np.int64(5),))
    assert jax.export.export(jax.jit(lambda p: p.array.sum()))(of_numpy).serialize()


# As a Python object.


def test_pickles_have_no_padding(mesh: Mesh) -> None:
    p = padded(batch(5, 3), mesh, P("x", "y"), fill=7)
    text = pickle.dumps(p)
    q = pickle.loads(text)
    assert type(q) is PaddedArray
    assert (q.shape, q.sharding, q.dtype) == (p.shape, p.sharding, p.dtype)
    np.testing.assert_array_equal(q, batch(5, 3))
    assert set(np.asarray(q.array)[5:].ravel()) == {0}
    assert batch(5, 3).tobytes() in text


@pytest.mark.parametrize(
    "make", [lambda: jax.random.split(jax.random.key(0), 5), lambda: [1.0] * 5]
)
def test_pickles_of_keys_and_of_padding_alone(mesh: Mesh, make: Any) -> None:
    data = jnp.asarray(make())
    p = PaddedArray.from_callback((5,), mesh, P(("x", "y")), lambda index: data[index])
    q = pickle.loads(pickle.dumps(p))
    assert q.fingerprint() == gda.fingerprint(data)
    empty = padded(np.zeros((5, 0), np.int8), mesh, P("x", "y"))
    assert pickle.loads(pickle.dumps(empty)).dtype == np.int8


def test_it_has_no_operators(mesh: Mesh) -> None:
    p: Any = padded(batch(5), mesh, P("x"))
    for compute in (lambda: p + 1, lambda: jnp.ones(8) @ p, lambda: p < p, lambda: -p):
        with pytest.raises(TypeError, match="PaddedArray"):
            compute()
    with pytest.raises(TypeError, match=r"no operators.*p.array, or p.filled\(value\)"):
        bool(p == p)
    on_host = np.ones(5, np.float32)
    for compute in (lambda: on_host + p, lambda: p + on_host, lambda: not p):
        with pytest.raises(TypeError):
            compute()
    shardings = jax.tree.map(lambda x: x.sharding, p)
    assert shardings == jax.tree.map(lambda x: x.sharding, p)


def test_a_notebook_shows_its_picture(mesh: Mesh) -> None:
    p = padded(batch(5), mesh, P("x"))
    assert "with padding" in (p._repr_html_() or "")
    on_host = jax.device_get(p)
    assert on_host._repr_html_() is None
    np.testing.assert_array_equal(on_host, batch(5))


# Mistakes.


def test_a_part_of_an_array_has_no_mask(mesh: Mesh) -> None:
    def mask(p: PaddedArray) -> jax.Array:
        return p.mask()

    for size in (1, 5):  # the block of size 1 looks as if there was no padding
        p = padded(batch(size, 3), mesh, P("x"))
        for mapped in (
            jax.shard_map(mask, mesh=mesh, in_specs=(P("x"),), out_specs=P("x")),
            jax.vmap(mask),
        ):
            with pytest.raises(ValueError, match=r"pass p.array and p.mask\(\) in its place"):
                mapped(p)


def test_a_container_is_padded_as_its_array(mesh: Mesh) -> None:
    g = gda.GlobalArray.from_source(batch(16), mesh, P("x"))
    np.testing.assert_array_equal(PaddedArray.from_source(g, mesh, P("x")), batch(16))


def test_bad_arrays_fills_and_blocks_are_refused(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match="a list is not a source"):
        PaddedArray.from_source([1, 2], mesh, P("x"))
    with pytest.raises(ValueError, match=r"fill=0.5 is not a value of int32"):
        padded(batch(5, dtype=np.int32), mesh, P("x"), fill=0.5)
    with pytest.raises(TypeError, match="a GlobalArray has no padding; omit fill="):
        gda.GlobalArray.from_source(batch(8), mesh, P("x"), fill=0)
    with pytest.raises(TypeError, match="fill must be a number, not 'zero'"):
        padded(batch(5), mesh, P("x"), fill="zero")
    with pytest.raises(ValueError, match=r"has shape \(2,\); a shard of this array has shape \(1,"):
        PaddedArray.from_callback((5,), mesh, P("x"), lambda index: np.zeros(2))
    p = PaddedArray(padded(batch(5), mesh, P("x")).array, (3,))
    with pytest.raises(ValueError, match=r"has shape \(8,\); \(3,\) sharded by P\('x'\)"):
        p.grid  # noqa: B018


def test_functions_of_numpy_and_jax_do_not_see_padding_by_accident(mesh: Mesh) -> None:
    p = padded(batch(5), mesh, P("x"))
    with pytest.raises(TypeError):
        jnp.sum(p)  # pyright: ignore[reportArgumentType]
    assert np.sum(p) == batch(5).sum()  # pyright: ignore


def test_it_cannot_be_changed(mesh: Mesh) -> None:
    p = padded(batch(5), mesh, P("x"))
    with pytest.raises(AttributeError, match="a PaddedArray is immutable"):
        p.shape = (3,)
    p.delete()
    assert p.is_deleted()
    for use in (p.gather, lambda: p.local_shards[0].data):
        with pytest.raises(RuntimeError, match=r"^PaddedArray\(shape=.* was deleted"):
            use()

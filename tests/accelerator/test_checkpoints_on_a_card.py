"""Checkpoints and files of arrays on an accelerator, restored there and on CPU devices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DTYPES, bits, normal, random_bits

import gda

SHAPE = (64, 96)


def tree_on(mesh: Mesh) -> dict[str, Any]:
    """Return arrays of every dtype with random bits, and keys."""
    sharding = NamedSharding(mesh, P("x"))
    arrays = {str(dtype): random_bits(SHAPE, dtype) for dtype in DTYPES}
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), sharding)
    return {**jax.device_put(arrays, sharding), "keys": keys}


def bits_of(tree: dict[str, Any]) -> dict[str, bytes]:
    """Return the bytes of every array, and those of the numbers of keys."""
    arrays = {**tree, "keys": jax.random.key_data(tree["keys"])}
    return {name: bits(array) for name, array in arrays.items()}


def large(on_card: bool, mesh: Mesh) -> dict[str, jax.Array]:
    """Return 512 MiB on an accelerator; little on a CPU device."""
    side = 8192 if on_card else 128
    return {
        name: jax.device_put(normal((side, side)), NamedSharding(mesh, P("x", "y")))
        for name in ("a", "b")
    }


def test_every_bit_comes_back_on_the_card_and_on_cpu_devices(
    one_mesh: Mesh, cpu_mesh: Mesh, tmp_path: Path
) -> None:
    tree = tree_on(one_mesh)
    expected = bits_of(tree)
    gda.checkpoint.save(tmp_path / "card", tree)
    onto_cpu = gda.checkpoint.restore(tmp_path / "card", mesh=cpu_mesh, specs=P("x"), plain=True)
    gda.checkpoint.save(tmp_path / "cpu", onto_cpu)
    onto_card = gda.checkpoint.restore(tmp_path / "cpu", like=gda.abstract(tree, one_mesh, P("x")))
    for restored, mesh in ((onto_cpu, cpu_mesh), (onto_card, one_mesh)):
        assert bits_of(restored) == expected
        assert restored["int4"].devices() == {*mesh.devices.flat}
    assert gda.checkpoint.diff(tmp_path / "card", tmp_path / "cpu").are_equal
    assert gda.checkpoint.diff(tmp_path / "card", onto_card).are_equal
    gda.checkpoint.verify(tmp_path / "card")


def test_values_are_safe_as_soon_as_save_async_returns(
    one_mesh: Mesh, card: Any, on_card: bool, tmp_path: Path
) -> None:
    tree = large(on_card, one_mesh)
    expected = gda.fingerprint(tree)
    has_pinned = "pinned_host" in [memory.kind for memory in card.addressable_memories()]
    assert has_pinned or not on_card
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    jax.block_until_ready(step(large(on_card, one_mesh)))
    gda.checkpoint.save(tmp_path / "first", tree)  # compiles what fingerprints need
    pending = gda.checkpoint.save_async(tmp_path / "second", tree)
    was_done = pending.done()
    after = step(tree)  # donated
    tree["a"].delete()
    jax.block_until_ready(after)
    pending.result()
    assert not (on_card and was_done)
    assert not on_card or tree["b"].is_deleted()
    like = gda.abstract(after, one_mesh, P("x", "y"))
    assert gda.fingerprint(gda.checkpoint.restore(tmp_path / "second", like=like)) == expected


def test_safetensors_from_the_card_and_onto_it(
    one_mesh: Mesh, cpu_mesh: Mesh, on_card: bool, tmp_path: Path
) -> None:
    tree = large(on_card, one_mesh)
    tree["narrow"] = jax.device_put(
        random_bits(SHAPE, jnp.float8_e4m3fn), NamedSharding(one_mesh, P("x"))
    )
    gda.storage.save_safetensors(tmp_path, tree)
    tensors = gda.storage.open_safetensors(tmp_path)
    for mesh in (one_mesh, cpu_mesh):
        loaded = gda.load_tree(tensors, mesh, P("x"), plain=True)
        assert {key: bits(loaded[key]) for key in tree} == {key: bits(tree[key]) for key in tree}
        assert loaded["narrow"].devices() == {*mesh.devices.flat}


def test_prefetched_batches_arrive_in_order(one_mesh: Mesh, on_card: bool) -> None:
    rows, steps = (65536, 20) if on_card else (64, 4)
    batches = [{"x": np.full((rows, 256), number, np.float32)} for number in range(2)]
    w = jax.device_put(normal((256, 256)), NamedSharding(one_mesh, P()))

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(16):
            w = w + 1e-12 * (x.T @ (x @ w))
        return w, x[0, 0]

    def source() -> Iterator[dict[str, np.ndarray]]:
        for number in range(steps + 1):
            yield batches[number % 2]

    seen = []
    with gda.prefetch(source(), one_mesh, P("x"), plain=True) as ahead:
        for batch in ahead:
            w, first = step(w, batch["x"])
            seen.append(first)
    assert [*map(float, seen)] == [number % 2 for number in range(steps + 1)]


def test_arrays_move_between_the_card_and_cpu_devices(
    one_mesh: Mesh, cpu_mesh: Mesh, on_card: bool
) -> None:
    tree = large(on_card, one_mesh)
    expected = jax.tree.map(bits, tree)
    there = gda.reshard_tree(tree, cpu_mesh, P("y", "x"))
    back = gda.reshard_tree(there, one_mesh, P("x"))
    for moved, mesh in ((there, cpu_mesh), (back, one_mesh)):
        assert jax.tree.map(bits, moved) == expected
        assert moved["a"].devices() == {*mesh.devices.flat}
    g = gda.GlobalArray.from_array(tree["a"]).reshard(cpu_mesh, P("x"))
    assert bits(g) == expected["a"]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.int4])
def test_donated_and_padded_arrays_move_between_the_card_and_cpu_devices(
    one_mesh: Mesh, cpu_mesh: Mesh, dtype: Any
) -> None:
    # Devices of two platforms have the same ids.
    odd, even = random_bits((63, 95), dtype), random_bits(SHAPE, dtype)
    for donate in (False, True):
        tree = {
            "odd": gda.PaddedArray.from_source(odd, one_mesh, P("x")),
            "even": gda.load_tree(even, one_mesh, P("x")),
        }
        there = gda.reshard_tree(tree, cpu_mesh, P("y", "x"), donate=donate)
        assert tree["odd"].is_deleted() == tree["even"].is_deleted() == donate
        back = gda.reshard_tree(there, one_mesh, P("x"), donate=donate)
        assert {name: bits(each) for name, each in back.items()} == {
            "odd": odd.tobytes(),
            "even": even.tobytes(),
        }


def test_arrays_in_every_memory_of_the_card(one_mesh: Mesh, card: Any, tmp_path: Path) -> None:
    data = random_bits(SHAPE, jnp.bfloat16)
    expected = gda.fingerprint(data)
    for kind in [memory.kind for memory in card.addressable_memories()]:
        sharding = NamedSharding(one_mesh, P("x"), memory_kind=kind)
        g = gda.GlobalArray.from_callback(SHAPE, sharding, lambda index: data[index])
        assert g.array.sharding.memory_kind == kind
        assert g.fingerprint() == expected
        assert bits(gda.to_numpy({"w": g})["w"]) == data.tobytes()
        near = g.reshard(NamedSharding(one_mesh, P()))
        assert bits(near) == data.tobytes()
        assert bits(near.reshard(sharding)) == data.tobytes()
        gda.checkpoint.save(tmp_path / kind, {"w": g})
        like = {"w": jax.ShapeDtypeStruct(SHAPE, data.dtype, sharding=sharding)}
        restored = gda.checkpoint.restore(tmp_path / kind, like=like)["w"]
        assert (restored.sharding.memory_kind, bits(restored)) == (kind, data.tobytes())

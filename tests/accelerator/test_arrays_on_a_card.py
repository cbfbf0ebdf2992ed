"""Arrays built on an accelerator, their dtypes, and the rules of who owns memory."""

import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import DTYPES, bits, normal, random_bits

import gda

SHAPE = (64, 96)
SPEC = P("x", "y")


def test_every_constructor_places_the_values(card_mesh: Mesh, card: Any, tmp_path: Path) -> None:
    data = normal(SHAPE)
    np.save(tmp_path / "data.npy", data)
    source = np.load(tmp_path / "data.npy", mmap_mode="r")

    def fill(index: gda.Index, out: np.ndarray) -> None:
        out[...] = data[index]

    make = gda.GlobalArray
    built = [
        make.from_callback(SHAPE, card_mesh, SPEC, lambda index: data[index]),
        make.from_callback(SHAPE, card_mesh, SPEC, fill, dtype=data.dtype, into=True),
        make.from_callback(SHAPE, card_mesh, SPEC, lambda index: data[index], copy=True),
        make.from_batched_callback(
            SHAPE, card_mesh, SPEC, lambda indices: [data[i] for i in indices]
        ),
        make.from_batched_callback_with_devices(
            *(SHAPE, card_mesh, SPEC),
            lambda places: [jax.device_put(data[i], each) for i, (each,) in places],
        ),
        make.from_process_local(data, card_mesh, SPEC),
        make.from_source(source, card_mesh, SPEC),
        make.from_source(source, card_mesh, SPEC, read_once=True),
        make(SHAPE, card_mesh, SPEC, [jax.device_put(data, card)]),
        make.from_array(jax.device_put(data, NamedSharding(card_mesh, SPEC))),
        gda.load_tree({"w": source}, card_mesh, SPEC)["w"],
    ]
    for array in built:
        assert array.array.devices() == {card}
        assert array.spec == SPEC
        assert bits(array) == data.tobytes()
        (shard,) = array.local_shards
        assert (shard.device, shard.replica_id, shard.data.shape) == (card, 0, SHAPE)


def test_many_leaves_go_to_the_card_and_back_within_a_bound(one_mesh: Mesh) -> None:
    sources = {str(number): normal(SHAPE) + number for number in range(12)}
    bounds = {"max_bytes": 2 * sources["0"].nbytes, "max_workers": 4}
    tree = gda.load_tree(sources, one_mesh, SPEC, **bounds)
    targets = {name: np.empty(SHAPE, np.float32) for name in sources}
    gda.store(tree, targets, **bounds)
    for name, source in sources.items():
        assert bits(tree[name]) == bits(targets[name]) == source.tobytes()
        assert bits(tree[name].gather(max_device_bytes=4096)) == source.tobytes()


def test_a_padded_array_has_its_values_and_a_mask(card_mesh: Mesh) -> None:
    data = normal((5, 3))
    padded = gda.PaddedArray.from_source(data, card_mesh, P("x"))
    assert bits(padded.gather()) == data.tobytes()
    total = gda.jit(lambda x: x.filled(0).sum())(padded)
    np.testing.assert_allclose(np.asarray(total), data.sum(), rtol=1e-5)


def test_every_dtype_has_its_bits_on_the_card(one_mesh: Mesh) -> None:
    for dtype in DTYPES:
        data = random_bits(SHAPE, dtype)
        g = gda.GlobalArray.from_callback(SHAPE, one_mesh, SPEC, lambda index, d=data: d[index])
        assert g.dtype == dtype
        assert bits(g) == data.tobytes(), dtype
        assert bits(gda.to_numpy({"w": g})["w"]) == data.tobytes(), dtype
        assert bits(g.gather()) == data.tobytes(), dtype
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), NamedSharding(one_mesh, P("x")))
    moved = gda.to_jax(gda.GlobalArray.from_array(keys))
    assert bits(jax.random.key_data(moved)) == bits(jax.random.key_data(keys))


@pytest.mark.parametrize("rows", [64, 2**16])
def test_memory_that_was_given_is_not_the_array(one_mesh: Mesh, rows: int) -> None:
    shape, make = (rows, 96), gda.GlobalArray
    block = gda.aligned_empty(shape, np.float32)
    for build in (
        lambda: make.from_callback(shape, one_mesh, SPEC, lambda _: block, copy=True),
        lambda: make.from_callback(shape, one_mesh, SPEC, lambda _: block),
        lambda: make.from_callback(shape, one_mesh, SPEC, lambda _: block, max_workers=2),
        lambda: make.from_batched_callback(shape, one_mesh, SPEC, lambda _: [block]),
        lambda: make.from_process_local(block, one_mesh, SPEC),
        lambda: make.from_source(block, one_mesh, SPEC),
        lambda: gda.load_tree([block], one_mesh, SPEC)[0],
    ):
        block[...] = 1
        g = build()
        block[...] = 2
        assert (np.asarray(g) == 1).all()


def test_a_copy_on_the_host_outlives_the_array(one_mesh: Mesh) -> None:
    data = normal(SHAPE)
    g = gda.load_tree({"w": data}, one_mesh, SPEC)["w"]
    on_host = gda.to_numpy({"w": g})["w"]
    # Returned before the deletion: a view of memory that is freed would have other values.
    kept = np.array(on_host)
    again = pickle.loads(pickle.dumps(g))
    assert (again.sharding, bits(again)) == (g.sharding, data.tobytes())
    g.delete()
    assert g.is_deleted()
    assert kept.tobytes() == data.tobytes()
    with pytest.raises(RuntimeError, match="deleted"):
        gda.to_numpy({"w": g})


def test_jitted_functions_take_donate_and_return_containers(card_mesh: Mesh) -> None:
    data = normal(SHAPE)
    g = gda.GlobalArray.from_callback(SHAPE, card_mesh, SPEC, lambda index: data[index])
    twice = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))({"w": g})["w"]
    assert isinstance(twice, gda.GlobalArray)
    np.testing.assert_array_equal(twice, 2 * data)
    slope = jax.grad(lambda x: (x.array**2).sum())(g)
    np.testing.assert_allclose(np.asarray(slope), 2 * data, rtol=1e-6)
    plus = gda.jit(lambda x: x + 1, out_specs=SPEC, donate_argnums=0)(g)
    assert g.is_deleted()
    assert plus.spec == SPEC
    np.testing.assert_array_equal(plus, data + 1)
    assert not gda.collectives(jax.jit(lambda x: x.sum()), plus).found


def test_a_picture_and_the_layouts_name_the_card(one_mesh: Mesh, card: Any) -> None:
    tree = gda.load_tree({"w": normal(SHAPE)}, one_mesh, SPEC)
    assert str(card.id) in gda.show.text(tree["w"])
    (row,) = gda.layouts(tree).arrays
    assert (row.num_devices, row.nbytes_per_device) == (1, tree["w"].nbytes)
    assert row.memory_kind is None  # that of the device itself

"""Do replicas hold the same bits? Every flipped bit is found and named, and nothing else is."""

import pickle
import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from meshes import ORDERS, batch, cut, holding, mesh_of, ordered_mesh
from trials import Trials, tried

import gda
from gda.arrays.fingerprints import replica_sums

P = PartitionSpec
DTYPES = [
    *("bool", "int2", "int4", "uint4", "int8", "uint16", "int32", "uint32", "complex64"),
    *("float16", "bfloat16", "float32", "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn"),
    *("float8_e5m2", "float8_e8m0fnu"),
]
FEW_BITS = {"bool": 1, "int2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def flipped(array: Any, device: int, element: int = 0, bit: int = 0) -> Any:
    """Return an array, or a container of one, with one bit flipped in the block of one device.

    Args:
      device: the id of a device of this process.
      element: place in the block as it lies there, with padding.
      bit: of the element.
    """
    if isinstance(array, gda.PaddedArray):
        return gda.PaddedArray(flipped(array.array, device, element, bit), array.shape)
    array = getattr(array, "array", array)
    blocks = [shard.data for shard in array.addressable_shards]
    (place,) = [i for i, block in enumerate(blocks) if device in {d.id for d in block.devices()}]
    (where,) = blocks[place].devices()
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    data = np.array(jax.random.key_data(blocks[place]) if is_key else blocks[place])
    # `element` counts keys, of two words.
    raw = data.reshape(-1).view(np.uint8).reshape(max(blocks[place].size, 1), -1)
    raw[element, bit // 8] ^= 1 << bit % 8
    changed = jax.device_put(data, where)
    blocks[place] = jax.random.wrap_key_data(changed) if is_key else changed
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, blocks)


def differences(tree: Any) -> dict[tuple[str, Any], tuple[tuple[int, ...], ...]]:
    """Return the groups of devices by path and start of each block that differs."""
    try:
        gda.check_replicas_agree(tree)
    except gda.ReplicaMismatchError as error:
        starts = lambda index: tuple(part.start or 0 for part in index)  # noqa: E731
        return {(each.path, starts(each.index)): each.groups for each in error.mismatches}
    return {}


@pytest.fixture(params=["together", "each by itself"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the ways in which sums are made: those of small blocks and of large ones."""
    if request.param == "each by itself":
        monkeypatch.setattr(replica_sums, "SMALL", 0)
    return request.param


def test_one_device_that_differs(mesh: Mesh) -> None:
    w = cut(batch(8, 8), mesh, P(None, "y"))
    assert gda.check_replicas_agree({"layers": [{"w": w}], "b": w}) is None
    with pytest.raises(gda.ReplicaMismatchError) as raised:
        gda.check_replicas_agree({"layers": [{"w": flipped(w, 3, 17, 30)}], "b": w})
    assert str(raised.value) == (
        "the replicas of 1 of 2 arrays differ: at layers/0/w, block [:, 4:8] of shape (8, 4): "
        "device 3 (process 0) has other bits than devices 1, 5, 7 (process 0), the majority"
    )
    (mismatch,) = raised.value.mismatches
    assert mismatch.minority == (3,)
    assert mismatch.groups == ((3,), (1, 5, 7))
    assert mismatch.processes == ((0,), (0,))
    assert (mismatch.index, mismatch.shape) == ((slice(None), slice(4, 8)), (8, 4))


def test_several_in_the_minority_and_no_majority(auto_mesh: Mesh) -> None:
    w, b = cut(batch(8), auto_mesh, P("x")), cut(batch(4), auto_mesh, P())
    with pytest.raises(gda.ReplicaMismatchError) as raised:
        gda.check_replicas_agree([flipped(w, 5), b])
    assert str(raised.value) == (
        "the replicas of 1 of 2 arrays differ: at 0, block [4:6] of shape (2,): device 4 "
        "(process 0) and device 5 (process 0) have different bits, and there is no majority"
    )
    assert raised.value.mismatches[0].minority == ()
    for other, said in [
        (flipped(flipped(b, 1), 6, bit=5), r"device 1 .* and device 6 .* each have"),
        (flipped(flipped(b, 1), 6), r"devices 1, 6 \(process 0\) have"),
    ]:
        with pytest.raises(gda.ReplicaMismatchError, match=said) as raised:
            gda.check_replicas_agree([w, other])
        assert raised.value.mismatches[0].minority == (1, 6)
    assert raised.value.mismatches[0].groups == ((1, 6), (0, 2, 3, 4, 5, 7))


def test_a_program_that_computes_something_else_on_each_device(auto_mesh: Mesh) -> None:
    own = jax.shard_map(
        lambda: jax.lax.axis_index("x").astype(np.float32)[None],
        mesh=auto_mesh,
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(gda.ReplicaMismatchError, match="and 1 more$") as e:
        gda.check_replicas_agree([jax.jit(own)() for _ in range(9)])
    assert len(e.value.mismatches) == 9
    assert e.value.mismatches[0].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert pickle.loads(pickle.dumps(e.value)).mismatches == e.value.mismatches


def test_replicated_arrays_alone_are_compared(mesh: Mesh) -> None:
    tree = {
        "one device": jnp.ones(3),
        "scalar": cut(np.float32(3), mesh, P()),
        "no elements": cut(np.zeros((0, 8), np.float32), mesh, P("x")),
        "no replicas": cut(batch(8, 8), mesh, P("x", "y")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("y"))),
        "numpy": np.arange(3),
        "step": 7,
        "name": "model",
        "none": None,
    }
    pinned = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    tree["host"] = jax.device_put(batch(8, 8), pinned)
    with jax.set_mesh(mesh), jax.disable_jit(), jax.transfer_guard("disallow"):
        gda.check_replicas_agree(tree)
    changed = tree | {"scalar": flipped(tree["scalar"], 2), "keys": flipped(tree["keys"], 4, 1, 63)}
    assert differences(changed) == {
        ("keys", (0,)): ((4,), (0, 2, 6)),
        ("scalar", ()): ((2,), (0, 1, 3, 4, 5, 6, 7)),
    }


def test_every_bit_of_every_kind_of_number(way: str) -> None:
    """NaNs too, which XLA changes in some moves."""
    mesh, tree = mesh_of({"x": 2, "y": 2}), {}
    for dtype in DTYPES[::2] if way == "together" else ["int4", "bfloat16", "complex64"]:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        bits = FEW_BITS.get(dtype, 8 * kind.itemsize)
        raw = np.arange(1 << min(bits, 10), dtype=np.uint64) << max(bits - 10, 0)
        data = raw.astype(f"u{kind.itemsize}").view(kind)
        tree[dtype] = cut(data.reshape(2, -1), mesh, P("x"))
    assert differences(tree) == {}
    for _ in range(2):
        changed, expected = {}, {}
        for dtype, leaf in tree.items():
            place = random.randrange(leaf.size // 2)
            changed[dtype] = flipped(leaf, 3, place, random.randrange(FEW_BITS.get(dtype, 8)))
            expected[dtype, (1, 0)] = ((2,), (3,))
        assert differences(changed) == expected


def test_numbers_of_64_bits() -> None:
    with jax.enable_x64(True):
        g = cut(np.arange(6) * 2.0**40, mesh_of({"x": 3, "y": 2}), P("x"))
        assert differences({"g": flipped(g, 4, 1, 63)}) == {("g", (4,)): ((4,), (5,))}


def test_many_small_blocks_take_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of({"x": 2})
    tree = [cut(batch(size), mesh, P()) for size in (3, 200, 5000)]
    replica_sums._program.cache_clear()
    gda.check_replicas_agree(tree)
    assert replica_sums._program.cache_info().misses == 1
    monkeypatch.setattr(replica_sums, "_MOST_ROWS", 4)
    for number, at in [(0, 2), (1, 150), (2, 4999)]:
        changed = [flipped(leaf, 1, at) if i == number else leaf for i, leaf in enumerate(tree)]
        assert set(differences(changed)) == {(f"{number}", (0,))}


# Errors.


def test_arrays_without_data(auto_mesh: Mesh) -> None:
    g = cut(batch(8), auto_mesh, P("x"))
    with pytest.raises(
        TypeError, match="is being traced, so it has no data; call this outside"
    ) as e:
        jax.jit(lambda x: gda.check_replicas_agree({"w": x}))(g.array)
    assert "gda: at w of the tree" in e.value.__notes__
    g.delete()
    with pytest.raises(RuntimeError, match="was deleted, by delete") as raised:
        gda.check_replicas_agree({"a": 1, "w": [g]})
    assert raised.value.__notes__ == ["gda: at w/0 of the tree"]
    with pytest.raises(TypeError, match="holds a ndarray and no jax.Array|not ndarray") as raised:
        gda.check_replicas_agree([holding(batch(8))])
    assert raised.value.__notes__ == ["gda: at 0 of the tree"]


# Trials.

SHAPES = [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}, {"a": 4}]


def random_leaf(chance: random.Random) -> Any:
    """Return an array with replicas, of any dtype, over any mesh, sharded in any way."""
    shape = chance.choice(SHAPES)
    order = chance.sample(range(8), int(np.prod([*shape.values()])))
    mesh = ordered_mesh(order, shape, chance.choice([AxisType.Auto, AxisType.Explicit]))
    names = chance.sample(list(shape), chance.randint(0, len(shape) - 1))  # one axis has replicas
    entries: list[Any] = [None, *names]
    chance.shuffle(entries)
    if len(names) > 1 and chance.random() < 0.3:
        entries = [tuple(names), None]
    ways = [int(np.prod([shape[n] for n in np.atleast_1d(e)])) if e else 1 for e in entries]
    sizes = [way * chance.randint(1, 4) for way in ways]
    if chance.random() < 0.1:
        sizes[-1] *= 1 << 15  # a program of its own
    pads = chance.random() < 0.2
    if pads:
        sizes = [max(size - chance.randint(0, 2), 1) for size in sizes]
    name = chance.choice(DTYPES)
    kind = np.dtype(getattr(ml_dtypes, name, name))
    bits = FEW_BITS.get(name, 0)
    raw = np.random.default_rng(chance.randrange(2**32)).bytes(int(np.prod(sizes)) * kind.itemsize)
    data = np.frombuffer(raw, np.uint8) & np.uint8((1 << bits) - 1 if bits else 255)
    data = data.view(kind).reshape(sizes)
    if pads:
        return gda.PaddedArray.from_source(data, mesh, P(*entries))
    g = cut(data, mesh, P(*entries))
    return chance.choice([g, g.array])


def flip_at_random(leaf: Any, chance: random.Random) -> tuple[Any, int, tuple[int, ...]]:
    """Return the leaf with a bit flipped, the device that has it, and the start of its block."""
    padded = isinstance(leaf, gda.PaddedArray)
    g = leaf if padded or isinstance(leaf, gda.GlobalArray) else gda.GlobalArray.from_array(leaf)
    shard = chance.choice([shard for shard in g.local_shards if shard.data.size])
    at = np.unravel_index(chance.randrange(shard.data.size), shard.data.shape)
    held = g.array.sharding.shard_shape(g.array.shape)
    element = int(np.ravel_multi_index(at, held))
    bits = FEW_BITS.get(str(g.dtype), 8 * g.dtype.itemsize)
    changed = flipped(leaf, shard.device.id, element, chance.randrange(bits))
    return changed, shard.device.id, tuple(part.start or 0 for part in shard.index)


@tried("a bit of one replica is flipped", sample=4, full=10_000)
def test_every_flipped_bit_is_found_and_named(trials: Trials) -> None:
    """Half of the leaves of each tree have a flipped bit; these are named, and no others."""
    chance, done = trials.chance, 0
    # Each leaf may compile a program.
    num_leaves, rounds = (12, 40) if trials.most == 10_000 else (2, 4)
    while done < trials.most:
        leaves = [random_leaf(chance) for _ in range(num_leaves)]
        assert differences(leaves) == {}
        for _ in range(rounds):
            changed, expected = list(leaves), {}
            some = chance.sample(range(num_leaves), min(num_leaves // 2, trials.most - done))
            for number in some:
                changed[number], device, start = flip_at_random(leaves[number], chance)
                expected[f"{number}", start] = device
                done += 1
            found = differences(changed)
            assert set(found) == set(expected)
            for place, groups in found.items():
                assert (expected[place],) in groups
                assert len(groups) == 2
                trials.count("found")


# Many processes.


def said_of(tree: Any) -> str:
    with pytest.raises(gda.ReplicaMismatchError) as raised:
        gda.check_replicas_agree(tree)
    return str(raised.value)


def flipped_on(g: gda.GlobalArray, device: int, *place: int) -> Any:
    """Return it with a bit flipped in the process of this device, and unchanged in others."""
    is_here = jax.devices()[device].process_index == jax.process_index()
    return flipped(g, jax.devices()[device].id, *place) if is_here else g


@pytest.mark.processes(4, devices=2)
def test_replicas_in_several_processes() -> None:
    mesh, me = ordered_mesh(ORDERS["shuffled"], {"x": 4, "y": 2}), jax.process_index()
    data = {"a": P(), "b": P("y"), "g": P("x")}
    arrays: Any = {name: cut(batch(16, 4), mesh, spec) for name, spec in data.items()}
    gda.check_replicas_agree(arrays | {"c": [jnp.ones(me), 1]})
    a, b, g = arrays.values()
    said = said_of({"a": flipped_on(a, 3, 40, 31), "b": flipped_on(b, 6), "g": g})
    assert said.startswith("the replicas of 2 of 3 arrays differ: at a, block [:, :]")
    devices = jax.devices()
    for device in (devices[3], devices[6]):
        assert f"device {device.id} (process {device.process_index}) has other bits than" in said
    assert "(processes 0-3), the majority" in said
    # A block on two devices.
    with pytest.raises(gda.ReplicaMismatchError) as raised:
        gda.check_replicas_agree({"a": a, "b": b, "g": flipped_on(g, 7)})
    assert str(raised.value) == (
        "the replicas of 1 of 3 arrays differ: at g, block [4:8, :] of shape (4, 4): device "
        f"{devices[7].id} (process 3) and device {devices[0].id} (process 0) have different bits, "
        "and there is no majority"
    )
    assert raised.value.mismatches[0].processes == ((3,), (0,))


@pytest.mark.processes(4, devices=2)
def test_only_the_processes_of_the_arrays_take_part() -> None:
    g = cut(batch(8), ordered_mesh([2, 3, 6, 7], {"x": 4}), P())
    me = jax.process_index()
    if me in (1, 3):
        assert "device" in said_of({"g": flipped_on(g, 7)})
    elif me == 2:
        gda.check_replicas_agree({"g": g})  # which says nothing, for it holds no part
    alone = cut(batch(8), Mesh(np.array(jax.local_devices()), ("x",)), P())
    gda.check_replicas_agree({"own": alone, "n": [1] * me})
    assert "process" in said_of({"own": flipped(alone, jax.local_devices()[1].id)})
    # An array of process 0 in the trees of all.
    gda.check_replicas_agree({"stage": cut(batch(8), mesh_of({"x": 2}), P())})


@pytest.mark.processes(4, devices=2)
def test_a_failed_comparison_is_no_agreement() -> None:
    mesh, me = ordered_mesh(range(8), {"x": 8}), jax.process_index()
    with gda.checking_agreement(False):
        g, other = cut(batch(8), mesh, P()), cut(batch(16), mesh, P("x"))
        with pytest.raises(gda.DisagreementError, match=r"only in process 2: b"):
            gda.check_replicas_agree({"a": g, "b": g} if me == 2 else {"a": g})
        with pytest.raises(gda.DisagreementError, match=r"at a, process 1: shape"):
            gda.check_replicas_agree({"a": other if me == 1 else g})

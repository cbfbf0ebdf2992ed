"""Moves between any orders of the devices of one process, whose bits and layouts are right.

JAX's own moves end the process for some orders, so the random ones run in a process of their own.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, is_right, ordered_mesh, rare_floats
from running import python
from trials import Trials, tried

import gda
from gda.arrays.construction import from_process_local
from gda.arrays.transport import carrying, moving, staging

DATA = batch(24, 24)
DTYPES = [
    *map(np.dtype, ("float32", "int8", "bool", "complex64", "int64", "float16")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)),
]
SHAPES = {n: [(n,), (1, n), (n, 1)] for n in (1, 2, 3)} | {
    4: [(4,), (2, 2), (1, 4, 1)],
    6: [(6,), (3, 2), (2, 3), (3, 1, 2), (2, 3, 1)],
    8: [(8,), (4, 2), (2, 2, 2), (2, 1, 4)],
}


def random_layout(rng: np.random.Generator, order: Any, names: str) -> NamedSharding:
    """Return a random layout of two dimensions on a random mesh of these devices, in this order."""
    shapes = SHAPES[len(order)]
    shape = shapes[rng.integers(len(shapes))]
    kind = (AxisType.Auto, AxisType.Explicit)[rng.integers(2)]
    mesh = ordered_mesh(order, dict(zip(names, shape, strict=False)), kind)
    entries: list[list[str]] = [[], []]
    for name in rng.permutation(mesh.axis_names):
        if rng.random() < 0.8:
            entries[rng.integers(2)].append(str(name))
    memory = "pinned_host" if rng.random() < 0.2 else None
    spec = P(*[tuple(each) or None for each in entries])
    return NamedSharding(mesh, spec, memory_kind=memory)


def move_at_random(seed: int) -> str:
    """Move an array between two random layouts, check every block, and return the kind of move."""
    rng = np.random.default_rng(seed)
    before = rng.permutation(8)[: rng.choice([*SHAPES])]
    kind = ("the same order", "another order", "other devices")[rng.integers(3)]
    after = before
    if kind == "another order":
        after = rng.permutation(before)
    elif kind == "other devices":
        after = rng.permutation(8)[: rng.choice([*SHAPES])]
    old, new = random_layout(rng, before, "abc"), random_layout(rng, after, "pqr")
    data = rare_floats((24, 24), seed)
    x = gda.load_tree({"x": data}, old)["x"]
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.5:  # as if it were large
            patch.setattr(moving, "_SMALL_BYTES", 0)
        (moved,) = gda.reshard_tree([x], new, donate=bool(rng.random() < 0.2))
    assert moved.sharding == new
    assert moved.sharding.memory_kind == new.memory_kind
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == data[shard.index].tobytes()
    return kind


@tried("an array moves between any two orders of the devices of a process", sample=12, full=600)
def test_any_order_of_devices_becomes_any_other(trials: Trials) -> None:
    seeds = [trials.chance.randrange(2**32) for _ in range(trials.most)]
    done = python(__file__, *seeds, cwd=Path(__file__).parents[2], timeout=3000)
    moved = [line.split(": ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"seed {seeds[len(moved)]}: {done.stderr[-2000:]}"
    assert len(moved) == trials.most
    for _, kind in moved:
        trials.count(kind)


@pytest.mark.parametrize("most", [0, 2**20])
def test_jax_moves_nothing_to_another_order_or_memory(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(moving, "_SMALL_BYTES", most)
    moved_by_jax = []
    move = moving._moved_by_jax
    monkeypatch.setattr(
        moving, "_moved_by_jax", lambda each, name: moved_by_jax.append(each) or move(each, name)
    )
    before = ordered_mesh([0, 4, 2, 3, 5, 1], {"a": 3, "b": 1, "c": 2})
    after = ordered_mesh([0, 3, 2, 1, 4, 5], {"p": 2, "q": 3, "r": 1})
    reordered = ordered_mesh([5, 4, 3, 2, 1, 0], {"a": 6})
    g = cut(DATA, before, P("a", None))
    for new in (
        NamedSharding(after, P(None, ("r", "q", "p"))),
        NamedSharding(reordered, P(None, "a"), memory_kind="pinned_host"),
        NamedSharding(before, P("c"), memory_kind="pinned_host"),
        NamedSharding(ordered_mesh([7, 6], {"x": 2}), P("x")),
    ):
        moved = g.reshard(new)
        assert is_right(moved, DATA)
        assert moved.array.sharding == new
    assert not moved_by_jax
    assert is_right(g.reshard(P(None, "a")), DATA)
    assert not moved_by_jax
    assert is_right(g.reshard(P(("a", "b"))), DATA)
    assert len(moved_by_jax) == 1, "JAX gives an array whose blocks stay its new sharding"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (12,), (12, 4, 6), (11, 5)], ids=str)
def test_a_small_array_moves_on_the_host(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    monkeypatch.setattr(carrying, "_Wave", None)
    monkeypatch.setattr(moving, "_moved_by_jax", None)
    bits = np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype in (np.dtype(bool), np.dtype(ml_dtypes.int4)):
        bits %= 2
    data = bits.view(dtype).reshape(shape)
    before = ordered_mesh([0, 4, 2, 3, 5, 1], {"a": 3, "b": 2})
    after = ordered_mesh([0, 7, 2, 1], {"a": 4}, AxisType.Explicit)
    back = ordered_mesh([1, 5, 3, 2, 4, 0], {"a": 6})
    for old, new in (("a", "a"), ("b", None), (None, "a"), (("b", "a"), "a")):
        layouts = (before, P(*[old][: len(shape)])), (after, P(None, *[new][: len(shape) - 1]))
        with jax.enable_x64(True):
            g = gda.PaddedArray.from_callback(
                shape, *layouts[0], lambda i: data[i], dtype=dtype, fill=1
            )
        for to in (layouts[1], (after, P(*[new][: len(shape)])), (back, P())):
            moved = g.reshard(*to)
            assert is_right(moved, data)
            assert tuple(moved.spec) == tuple(to[1])[: len(shape)]
            beyond = np.asarray(moved.array)[tuple(slice(size, None) for size in shape[:1])]
            assert not shape or not beyond.astype(bool).any(), "new padding is 0"


def test_local_data_goes_to_another_order_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on an accelerator, where the data stays on devices.
    monkeypatch.setattr(from_process_local, "is_on_cpu", lambda _: False)
    put = jax.device_put

    def put_on_one(x: Any, to: Any, **options: Any) -> Any:
        assert not isinstance(to, NamedSharding), "JAX moves the data"
        return put(x, to, **options)

    monkeypatch.setattr(jax, "device_put", put_on_one)
    before, after = ordered_mesh([0, 4, 2], {"a": 3}), ordered_mesh([4, 0, 2], {"b": 3})
    x = jax.make_array_from_callback(DATA.shape, NamedSharding(before, P("a")), DATA.__getitem__)
    assert is_right(gda.GlobalArray.from_process_local(x, after, P("b")), DATA)


def test_devices_of_two_platforms_may_have_the_same_id() -> None:
    class Device:
        def __init__(self, platform: str, number: int) -> None:
            self.platform, self.id = platform, number

    gpu, cpu = Device("cuda", 0), Device("cpu", 0)
    one, other = (Mesh(np.array([device]), "x") for device in (gpu, cpu))
    for pair in ((one, other), (other, one)):
        mesh, numbers = carrying._mesh_of_both(*pair)
        assert [*mesh.devices.flat] == [cpu, gpu]
        assert numbers == {cpu: 0, gpu: 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_copies_by_xla_on_cpu_keep_bits(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    # As if an accelerator had a part in the move.
    monkeypatch.setattr(carrying, "HostStaging", staging.DeviceStaging)
    monkeypatch.setattr(moving, "_SMALL_BYTES", 0)
    data = rare_floats((24, 24), 0).view(dtype)
    before, after = ordered_mesh([2, 0, 1], {"x": 3}), ordered_mesh([0, 3], {"y": 2})
    g = cut(data, before, P("x"))
    assert is_right(g.reshard(after, P(None, "y")), data)
    padded = gda.PaddedArray.from_source(data[:23], before, P("x"))
    assert is_right(padded.reshard(after, P(None, "y"), donate=True), data[:23])


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(f"{seed}: {move_at_random(seed)}", flush=True)

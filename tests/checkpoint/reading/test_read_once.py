"""Restores by all processes together: each chunk is read by one of those that need it."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, is_right, one_folder, ordered_mesh, total
from trials import Trials, tried

import gda
from gda.checkpoint import inspect, restore, save
from gda.checkpoint.reading import checked_files

AXES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]
DTYPES = [
    np.dtype(of)
    for of in (np.float32, bool, np.complex64, np.int16, ml_dtypes.bfloat16, ml_dtypes.int4)
]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The chunks that this process reads."""
    chunks: list[tuple[int, int]] = []
    load = checked_files.Files.load

    def noting(self: Any, where: Any, out: Any) -> None:
        chunks.append(where)
        load(self, where, out)

    monkeypatch.setattr(checked_files.Files, "load", noting)
    return chunks


@pytest.mark.processes(4, devices=2)
def test_each_chunk_of_a_checkpoint_is_read_once(loaded: list[tuple[int, int]]) -> None:
    folder = one_folder()
    tree = {
        "w": batch(64, 24),
        "v": batch(8, 16) * 2,
        "scalar": np.array(3, np.float32),
        "n": np.arange(7, dtype=np.int32),
    }
    rows = ordered_mesh(range(8), {"x": 8})
    saved = gda.load_tree(tree, rows, {"w": P("x"), "v": P(None, "x"), "scalar": P(), "n": P()})
    save(f"{folder}/c", saved | {"step": 3})
    arrays = inspect(f"{folder}/c").arrays
    nbytes = sum(array.nbytes_per_chunk * array.grid.num_chunks for array in arrays)
    mesh = ordered_mesh([5, 0, 3, 6, 1, 2, 7, 4], {"x": 4, "y": 2})
    for spec in (P("y"), P(None, "x")):
        loaded.clear()
        said: list[tuple[int, int]] = []
        restored = restore(
            f"{folder}/c",
            mesh=mesh,
            specs={"w": spec, "v": spec, "scalar": P(), "n": P(), "step": P()},
            read_once=True,
            progress=lambda *each, said=said: said.append(each),
        )
        # Also of what other processes read.
        assert said[-1] == (nbytes, nbytes)
        assert said == sorted(said)
        assert restored["step"] == 3
        for name, data in tree.items():
            assert is_right(restored[name], data)
        counts = np.zeros((8, 16), int)
        for chunk in loaded:
            counts[chunk] += 1
        assert total(counts).max() == 1
    loaded.clear()
    on_hosts = restore(f"{folder}/c", read_once=True)
    jax.tree.map(np.testing.assert_array_equal, on_hosts, tree | {"step": 3})
    assert total(len(loaded)) == total(len(set(loaded)))
    padded = restore(f"{folder}/c", at=["n"], mesh=mesh, specs=P("x"), pad=True, read_once=True)
    np.testing.assert_array_equal(padded.gather(), tree["n"])


@pytest.mark.processes(4, devices=2)
def test_arrays_on_a_device_of_each_process_are_read_by_each() -> None:
    folder = one_folder()
    mesh = ordered_mesh(range(8), {"x": 8})
    local = {name: jax.device_put(batch(5), jax.local_devices()[1]) for name in "ab"}
    tree = {"w": gda.GlobalArray.from_source(batch(8), mesh, P()), "n": np.arange(3), **local}
    save(f"{folder}/c", tree)
    for like in (tree, {"n": tree["n"], **local}):
        restored = restore(f"{folder}/c", like, partial=True, read_once=True)
        for name in "ab":
            assert restored[name].sharding == local[name].sharding
            np.testing.assert_array_equal(restored[name], local[name])
        np.testing.assert_array_equal(restored["n"], np.arange(3))
        assert "w" not in like or is_right(restored["w"], batch(8))


def restore_at_random(seed: int) -> None:
    """Save and restore random arrays between random layouts."""
    chance = np.random.default_rng(seed)
    folder = one_folder()

    def some() -> tuple[Any, P]:
        mesh = ordered_mesh(chance.permutation(8), AXES[chance.integers(len(AXES))])
        names = [None, *chance.permutation(mesh.axis_names)][: chance.integers(1, 4)]
        return mesh, P(*chance.permutation(np.array(names, object))[:2])

    shape = tuple(8 * chance.integers(1, 5, size=2))
    data = [
        chance.integers(0, 2, shape).astype(DTYPES[chance.integers(len(DTYPES))]) for _ in range(5)
    ]
    mesh, spec = some()
    save(f"{folder}/c", gda.load_tree(data, mesh, spec))
    mesh, spec = some()
    restored = restore(f"{folder}/c", mesh=mesh, specs=spec, read_once=True)
    for array, each in zip(restored, data, strict=True):
        assert is_right(array, each), f"{mesh.shape}, {spec}"


@tried("a checkpoint of any layout is restored onto any other by reading once", 2, full=200)
def test_any_layout_is_restored_from_any_other(trials: Trials, process_pool: Any) -> None:
    pool = process_pool(4, devices=2)
    # The sample is the same in every run, because each layout compiles programs of its own.
    for seed in range(trials.most):
        pool.run(restore_at_random, seed if trials.most < 200 else trials.chance.randrange(2**32))
        trials.count("restored")

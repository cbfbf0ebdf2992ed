"""Any size on any mesh: built, computed on, moved, saved and restored, with NumPy's values.

All padding is NaN, so one element of it in a result would show.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import batch, mesh_of
from trials import Trials, rarely, tried

import gda
from gda import PaddedArray
from gda.checkpoint import diff, restore, save, verify
from gda.checkpoint.writing import writer
from gda.testing.strategies import meshes, partition_specs

MESHES = [
    *[{"x": n} for n in range(1, 9)],
    *[{"x": n, "y": m} for n, m in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))],
]
SIZES = range(65)

Layout = tuple[Mesh, P]


def specs_of(shape: dict[str, int]) -> Iterator[P]:
    """Yield every spec of two dimensions over these axes."""
    for used in range(len(shape) + 1):
        for names in itertools.permutations(shape, used):
            for first in range(used + 1):
                yield P(names[:first] or None, names[first:] or None)


LAYOUTS = [(shape, spec) for shape in MESHES for spec in specs_of(shape)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make some arrays files of their own, of several chunks."""
    monkeypatch.setattr(writer, "PACKED_BELOW", 1024)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 512)
    monkeypatch.setattr(writer, "PACK_BYTES", 2048)


def spec_for(data: np.ndarray, spec: P) -> P:
    return P(*tuple(spec)[: data.ndim])


def built(data: np.ndarray, mesh: Mesh, spec: P) -> PaddedArray:
    def read(index: gda.Index) -> np.ndarray:
        block = data[index]
        assert block.size or not data.size, "the callback was called for padding alone"
        return block

    p = PaddedArray.from_callback(
        data.shape, mesh, spec_for(data, spec), read, dtype=data.dtype, fill=np.nan
    )
    more = [(0, n - size) for n, size in zip(p.padded_shape, p.shape, strict=True)]
    is_data = np.pad(np.ones(data.shape, bool), more)
    np.testing.assert_array_equal(np.broadcast_to(p.mask(), p.padded_shape), is_data)
    np.testing.assert_array_equal(np.isnan(np.asarray(p.array)), ~is_data)
    return p


@jax.jit
def computed(tree: dict[str, PaddedArray]) -> Any:
    """Return ``2 * x + 1`` of every array, with NaN for its padding, and all sums."""
    doubled = {
        name: PaddedArray(PaddedArray(2 * p.array + 1, p.shape).filled(jnp.nan), p.shape)
        for name, p in tree.items()
    }
    return doubled, {name: p.filled(0).sum() for name, p in tree.items()}


def moved(p: PaddedArray, mesh: Mesh, spec: P) -> PaddedArray:
    # JAX replicates what it computes of an array without elements, and says that it is sharded.
    if not p.size:
        return PaddedArray.from_source(np.asarray(p), mesh, spec)
    p = p.reshard(mesh, spec)
    return PaddedArray(p.filled(jnp.nan), p.shape)


def check(tree: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    for name, data in expected.items():
        array = tree[name]
        np.testing.assert_array_equal(np.asarray(array), data, err_msg=name)
        assert gda.fingerprint(array) == gda.fingerprint(data)
        for shard in array.local_shards:
            np.testing.assert_array_equal(shard.data, data[shard.index], err_msg=name)


def check_round_trip(
    arrays: dict[str, np.ndarray], first: Layout, second: Layout, third: Layout, path: Path
) -> None:
    """Build over the first layout, compute, move to the second, save, restore onto the third."""
    tree = {name: built(data, *first) for name, data in arrays.items()}
    # Without those without elements: see moved.
    doubled, sums = computed({name: p for name, p in tree.items() if p.size})
    tree |= doubled
    expected = {name: 2 * data + 1 for name, data in arrays.items()}
    check(tree, expected)
    for name in sums:
        assert sums[name] == arrays[name].sum()
    mesh, spec = second
    tree = {name: moved(p, mesh, spec_for(arrays[name], spec)) for name, p in tree.items()}
    check(tree, expected)
    save(path, tree, overwrite=True)
    verify(path)
    assert diff(path, tree).are_equal
    mesh, spec = third
    restored = restore(
        path, mesh=mesh, specs=lambda name, _: spec_for(arrays[name], spec), pad=True
    )
    check(restored, expected)
    for name, data in arrays.items():
        grid = gda.ShardGrid(data.shape, mesh.shape, spec_for(data, spec), pad=True)
        assert type(restored[name]) is (PaddedArray if grid.is_padded else gda.GlobalArray)
    jax.tree.map(np.testing.assert_array_equal, restore(path), expected)


@tried("any size on any mesh: built, computed on, moved, saved and restored", sample=2)
@pytest.mark.usefixtures("small")
def test_every_size_on_every_mesh(trials: Trials, tmp_path: Path) -> None:
    for shape, spec in trials.of(LAYOUTS):
        layouts = [(shape, spec), *trials.chance.choices(LAYOUTS, k=2)]
        arrays: dict[str, np.ndarray] = {}
        for size, other in zip(trials.of(SIZES), trials.chance.sample(SIZES, 65), strict=False):
            arrays[f"{size}"] = batch(size, other) if len(spec) > 1 else batch(size)
        kind = trials.chance.choice((AxisType.Auto, AxisType.Explicit))
        first, second, third = [(mesh_of(shape, kind), spec) for shape, spec in layouts]
        check_round_trip(arrays, first, second, third, tmp_path)
        if trials.most > 2:
            jax.clear_caches()  # each size is another program
        trials.count("held")


layouts = meshes().flatmap(
    lambda mesh: st.tuples(st.just(mesh), partition_specs(mesh, max_entries=3))
)


@rarely(5)
@given(
    st.lists(layouts, min_size=3, max_size=3),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
)
def test_more_dimensions_and_any_order_of_the_devices(
    tmp_path_factory: pytest.TempPathFactory,
    layouts: list[Layout],
    shape: list[int],
) -> None:
    data = batch(*shape) % 100  # whose sum is exact in float32
    check_round_trip({"a": data}, *layouts, path=tmp_path_factory.mktemp("run"))

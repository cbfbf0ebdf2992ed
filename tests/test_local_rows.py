"""The rows of a batch that the loader of each process reads, compared with JAX and with NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, ordered_mesh

import gda

SPECS = [P("x"), P("y"), P(("x", "y")), P(("y", "x")), P(), P(None, "x"), P("y", "x"), P("x", None)]


def expected_rows(sharding: NamedSharding, size: int) -> np.ndarray:
    """The rows that the devices of this process hold, by JAX alone, marked in a column."""
    held = np.zeros(size, bool)
    for index in sharding.addressable_devices_indices_map((size, 8)).values():
        assert index is not None
        held[index[0]] = True
    return held


def check_all_specs(mesh: Mesh, size: int = 16) -> int:
    """Compare all specs over a mesh; return the number of those with contiguous rows here."""
    contiguous = 0
    for spec in SPECS:
        sharding = NamedSharding(mesh, spec)
        held = expected_rows(sharding, size)
        edges = np.flatnonzero(np.diff(held, prepend=False, append=False))
        if len(edges) > 2:
            with pytest.raises(ValueError, match=rf"reads the rows {edges[0]}:{edges[1]}; "):
                gda.local_rows(mesh, spec, size)
            continue
        contiguous += 1
        rows = gda.local_rows(mesh, spec, size)
        np.testing.assert_array_equal(np.flatnonzero(held), np.arange(size)[rows])
        assert (rows.start, rows.stop) == tuple(edges)
        assert gda.local_rows(sharding, None, size) == rows
    return contiguous


def test_one_process_reads_all_rows(mesh: Mesh) -> None:
    assert check_all_specs(mesh) == len(SPECS)


@pytest.mark.processes(4, devices=2)
def test_each_process_reads_the_rows_of_its_devices() -> None:
    chance = np.random.default_rng(0)
    for sizes in ({"x": 4, "y": 2}, {"x": 2, "y": 4}):
        assert check_all_specs(ordered_mesh(range(8), sizes)) > 5
        for _ in range(4):
            check_all_specs(ordered_mesh(chance.permutation(8), sizes))


@pytest.mark.processes(4, devices=2)
def test_a_model_over_two_processes_reads_the_same_rows_in_both() -> None:
    mesh = ordered_mesh(range(8), {"data": 2, "model": 4})
    rows = gda.local_rows(mesh, P("data"), 16)
    process = jax.process_index()
    assert rows == (slice(0, 8) if process < 2 else slice(8, 16))
    batch = np.arange(16.0)
    placed = gda.GlobalArray.from_process_local(batch[rows], mesh, P("data"))
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch[shard.index])
    of_two = Mesh(np.array(jax.devices()[:4]), ("x",))
    of_first = [slice(0, 4), slice(4, 8), slice(0, 0), slice(0, 0)]
    assert gda.local_rows(of_two, P("x"), 8) == of_first[process]
    apart = ordered_mesh([0, 2, 1, 3, 4, 5, 6, 7], {"x": 8})
    if process == 0:
        with pytest.raises(ValueError, match="reads the rows 0:2; 4:6 of 16, .* place the devices"):
            gda.local_rows(apart, P("x"), 16)


def test_what_does_not_fit() -> None:
    mesh = mesh_of({"x": 8})
    with pytest.raises(ValueError, match="7 is not divisible by 8"):
        gda.local_rows(mesh, P("x"), 7)
    assert gda.local_rows(mesh, P("x"), 0) == slice(0, 0)

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from meshes import cut, mesh_of

import gda
from gda.show.subject import Subject, subject_of
from gda.testing.strategies import mesh_shapes, sharded_cases

P = PartitionSpec
XY = {"x": 4, "y": 2}
GRID = gda.ShardGrid((8, 2), XY, ("x",))
DATA = np.zeros((8, 2), np.float32)


def test_a_shape_with_mesh_and_spec() -> None:
    subject = subject_of([8, 2], XY, P("x"), dtype="bfloat16")
    assert (subject.grid, subject.kind, subject.device_names) == (GRID, "plan", None)
    assert (subject.shape, subject.spec, str(subject.dtype)) == ((8, 2), "P('x')", "bfloat16")
    assert subject.block_bytes == 8
    assert subject_of((8, 2), XY, ("x",)).block_bytes is None


def test_a_shape_on_real_devices_has_their_names_and_processes() -> None:
    subject = subject_of((8, 2), mesh_of(XY), P("x"))
    assert subject.device_names == tuple(f"CPU {n}" for n in range(8))
    assert subject.device_name(3) == "CPU 3"
    assert np.array_equal(subject.grid.process_of, np.zeros(8))


def test_a_mesh_without_devices() -> None:
    subject = subject_of((8, 2), AbstractMesh((4, 2), ("x", "y")), P("x"))
    assert (subject.grid, subject.device_names, subject.device_name(3)) == (GRID, None, "3")


def test_arrays() -> None:
    mesh = mesh_of(XY)
    g = cut(DATA, mesh, P("x"))
    abstract = jax.ShapeDtypeStruct((8, 2), "float32", sharding=g.sharding)
    for x, kind in (
        (g, "GlobalArray"),
        (g.array, "jax.Array"),
        (abstract, "ShapeDtypeStruct"),
    ):
        subject = subject_of(x)
        assert subject.grid.global_shape == (8, 2)
        assert (subject.kind, subject.spec, subject.block_bytes) == (kind, "P('x')", 16)
        assert subject.device_name(7) == "CPU 7"


def test_an_array_on_one_device_has_a_mesh_without_axes() -> None:
    device = jax.devices()[3]
    subject = subject_of(jax.device_put(DATA, device))
    assert (subject.grid.mesh_shape, subject.device_names) == ({}, ("CPU 3",))


def test_a_deleted_array_still_has_its_layout() -> None:
    g = cut(DATA, mesh_of(XY), P("x"))
    g.delete()
    assert (subject_of(g).kind, subject_of(g.array).kind) == (
        "GlobalArray (deleted)",
        "jax.Array (deleted)",
    )
    assert subject_of(g).spec == "P('x')"


def test_grids_and_subjects() -> None:
    subject = subject_of(GRID, dtype="int8")
    assert (subject.grid, subject.block_bytes, subject.kind) == (GRID, 4, "ShardGrid")
    assert subject_of(subject) is subject


@given(sharded_cases(mesh_shapes(max_devices=64)))
def test_holders_are_those_of_the_indices(case: Any) -> None:
    owners = np.arange(case.grid.num_devices) // 4
    grid = gda.ShardGrid(case.global_shape, case.mesh, case.spec, process_of=owners)
    subject = Subject(grid)
    blocks, indices = grid.blocks(), grid.indices()
    assert subject.holders.shape == (grid.num_shards, grid.num_replicas)
    for block, (devices, processes) in enumerate(zip(subject.holders, subject.owners, strict=True)):
        assert devices.tolist() == [n for n, index in enumerate(indices) if index == blocks[block]]
        assert processes.tolist() == [n // 4 for n in devices]
    assert not Subject(case.grid).owners.any()


def test_huge_sizes() -> None:
    assert subject_of((2**40, 2**40), {}, (), dtype="int64").block_bytes == 2**83


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((8, 2),), {}, "a shape such as (8, 2) is shown with its mesh and its spec"),
        (((8, 2), XY), {}, "a shape such as (8, 2) is shown with its mesh and its spec"),
        ((GRID, XY, ("x",)), {}, "mesh and spec go with a shape; this ShardGrid has its own"),
        ((jnp.zeros(3),), {"dtype": "int8"}, "dtype goes with a shape or a grid; this ArrayImpl"),
        ((DATA,), {}, "a ShardGrid, or a shape with mesh= and spec=, not of ndarray"),
        (("8x2",), {}, "not of str"),
        ((None,), {}, "not of NoneType"),
        (((8, 2), XY, ("x",)), {"dtype": "float33"}, "dtype='float33' is no type of elements"),
    ],
)
def test_what_cannot_be_shown(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        subject_of(*arguments, **options)


def test_a_sharding_without_mesh_and_spec() -> None:
    class Other:
        shape, dtype, sharding = (8,), np.dtype("int8"), "neither"

    with pytest.raises(TypeError, match="has the sharding 'neither', which names no mesh and spec"):
        subject_of(Other())


def test_a_spec_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="dimension 0 of size 6 is cut 4 ways"):
        subject_of((6,), XY, ("x",))


def test_named_shardings_of_abstract_meshes() -> None:
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x"))
    abstract = jax.ShapeDtypeStruct((8, 2), "float32", sharding=sharding)
    assert subject_of(abstract).device_names is None

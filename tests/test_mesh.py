from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

import gda
from gda.layout.spec import Index
from gda.mesh import mesh_grid, skip_spec_if_sharding
from gda.testing.strategies import ShardedCase, sharded_cases

P = PartitionSpec
WHOLE = slice(None)


def replica_ids(shape: Any, mesh: Mesh, spec: Any) -> list[int]:
    shards = gda.get_shard_indices_replica_ids(shape, mesh, spec)
    return [replica_id for _, replica_id in shards.values()]


def shards_of_jax(
    shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec
) -> dict[Any, tuple[Index, int]]:
    """Return index and replica id of every device, from an array that JAX made."""
    # JAX refuses a spec that is longer than the shape where axes are Explicit.
    sharding = NamedSharding(mesh, P(*tuple(spec)[: len(shape)]))
    array = jax.make_array_from_callback(shape, sharding, np.zeros(shape, np.bool_).__getitem__)
    return {shard.device: (shard.index, shard.replica_id) for shard in array.addressable_shards}


# Facts about the mesh (4, 2) of axes x and y and the shape (8, 2).


def test_lists_are_taken_for_shape_and_spec(mesh: Mesh) -> None:
    assert gda.get_shard_shape([8, 2], mesh, ["x", None]) == (2, 2)
    assert gda.get_shard_indices([8, 2], mesh, [["y", "x"]]) == gda.get_shard_indices(
        (8, 2), mesh, P(("y", "x"))
    )
    assert replica_ids([8, 2], mesh, ["x"]) == [0, 1] * 4


# Properties: JAX is right.


@given(sharded_cases())
def test_shapes_indices_and_replica_ids_are_those_of_jax(case: ShardedCase[Mesh]) -> None:
    shape, mesh, spec = case.global_shape, case.mesh, case.spec
    sharding = NamedSharding(mesh, spec)
    indices = gda.get_shard_indices(shape, mesh, spec)
    shards = gda.get_shard_indices_replica_ids(shape, mesh, spec)
    assert gda.get_shard_shape(shape, mesh, spec) == sharding.shard_shape(shape)
    assert indices == sharding.devices_indices_map(shape)
    assert shards == shards_of_jax(shape, mesh, spec)
    assert list(indices) == list(shards) == list(mesh.devices.flat)
    assert mesh_grid(shape, mesh, spec) == case.grid


@given(sharded_cases(), st.integers(1, 3))
def test_surplus_nones_change_nothing(case: ShardedCase[Mesh], surplus: int) -> None:
    missing = len(case.global_shape) - len(case.spec)
    spec = P(*case.spec, *[None] * (missing + surplus))
    shards = gda.get_shard_indices_replica_ids(case.global_shape, case.mesh, spec)
    assert shards == shards_of_jax(case.global_shape, case.mesh, spec)


# Errors.

FUNCTIONS = [gda.get_shard_shape, gda.get_shard_indices, gda.get_shard_indices_replica_ids]

BAD: list[tuple[Any, Any, type[Exception], str]] = [
    ((6, 2), P("x"), ValueError, "global shape (6, 2) cannot be sharded by P('x') on the mesh {'x"),
    ((8, 2), P("z"), ValueError, "spec P('z') shards dimension 0 by mesh axis 'z', but the mesh"),
    ((8, 2), P("x", ("y", P.UNCONSTRAINED)), ValueError, "leaves dimension 1 UNCONSTRAINED, so it"),
    ((8, 2), "x", TypeError, "spec 'x' is a string; write P('x') or ['x']"),
    (8, P(), TypeError, "global_shape must be a sequence of integers such as (8, 2), not 8"),
]


def test_a_wrong_argument_is_refused(mesh: Mesh) -> None:
    for function in FUNCTIONS:
        for shape, spec, error, message in BAD:
            with pytest.raises(error) as info:
                function(shape, mesh, spec)
            assert message in str(info.value)


def test_other_meshes_are_refused() -> None:
    for mesh in (None, {"x": 4, "y": 2}, np.zeros((4, 2))):
        with pytest.raises(TypeError) as info:
            gda.get_shard_indices((8, 2), mesh, P("x"))  # pyright: ignore[reportArgumentType]
        assert str(info.value) == (
            "mesh must be a jax.sharding.Mesh, or a NamedSharding in place of mesh and spec, not "
            f"{mesh!r}; without devices use gda.ShardGrid"
        )


def test_devices_of_an_abstract_mesh_are_not_there() -> None:
    mesh = AbstractMesh((4, 2), ("x", "y"))
    for function in (gda.get_shard_indices, gda.get_shard_indices_replica_ids):
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, .* not Abstract"):
            function((8, 2), mesh, ["x"])
    assert gda.get_shard_shape((8, 2), mesh, ["x"]) == (2, 2)
    sharding = NamedSharding(mesh, P("x"))
    assert gda.get_shard_shape((8, 2), sharding) == (2, 2)
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, not Abstract"):
        gda.get_shard_indices((8, 2), sharding)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_sharding_stands_in_place_of_mesh_and_spec(
    function: Callable[..., object], mesh: Mesh
) -> None:
    device = jax.devices()[3]
    alone = Mesh(np.array([device]), ("device",))
    assert function((8, 2), NamedSharding(mesh, P("x"))) == function((8, 2), mesh, P("x"))
    assert function((8, 2), SingleDeviceSharding(device)) == function((8, 2), alone, P())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_spec_is_needed_and_not_two(function: Callable[..., object], mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=r"^a mesh was given without a spec; write P\(\)"):
        function((8, 2), mesh)
    with pytest.raises(TypeError, match="was given with NamedSharding.*give the sharding alone"):
        function((8, 2), NamedSharding(mesh, P("x")), P("x"))


def test_arguments_after_an_omitted_spec_move_up(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("x"))
    assert skip_spec_if_sharding(sharding, len, None) == (None, len)
    assert skip_spec_if_sharding(sharding, None, len) == (None, len)
    assert skip_spec_if_sharding(mesh, P("x"), len) == (P("x"), len)
    assert skip_spec_if_sharding(sharding, P("x"), None) == (
        P("x"),
        None,
    )  # an error of `mesh_and_spec`

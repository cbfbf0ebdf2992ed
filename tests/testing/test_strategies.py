import doctest
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from trials import rarely

import gda
from gda.layout.spec import axes_by_dimension
from gda.testing import strategies
from gda.testing.strategies import (
    ShardedCase,
    global_arrays,
    mesh_shapes,
    meshes,
    partition_specs,
    sharded_cases,
)

P = PartitionSpec

# Shrinking is a search that may stop beside the smallest case; here it takes the same way always.
SEARCH = settings(
    database=None, derandomize=True, max_examples=100, phases=[Phase.generate, Phase.shrink]
)


@pytest.fixture
def searches_take_the_same_way() -> Iterator[None]:
    settings.register_profile("before", settings())
    settings.register_profile("search", SEARCH)
    settings.load_profile("search")
    yield
    settings.load_profile("before")


# Usual cases.


@pytest.mark.usefixtures("searches_take_the_same_way")
def test_the_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(strategies).failed == 0


def test_a_failing_property_prints_a_case_that_can_be_read() -> None:
    @SEARCH
    @given(sharded_cases())
    def all_axes_are_auto(case: ShardedCase[Mesh]) -> None:
        assert AxisType.Explicit not in case.mesh.axis_types

    with pytest.raises(AssertionError) as info:
        all_axes_are_auto()
    printed = "\n".join(info.value.__notes__)
    assert "case=ShardedCase((), Mesh({'x': 1}, axis_types=Explicit), P())," in printed


def test_a_failing_global_array_is_printed_with_its_content() -> None:
    @SEARCH
    @given(global_arrays())
    def all_are_bool(g: gda.GlobalArray) -> None:
        assert g.dtype == bool

    with pytest.raises(AssertionError) as info:
        all_are_bool()
    printed = "\n".join(info.value.__notes__)
    content = "with array(0., dtype=float32)"
    assert f"GlobalArray of ShardedCase((), Mesh({{'x': 1}}), P()) {content}" in printed


def test_repr_of_a_case() -> None:
    devices = jax.devices()
    assert repr(ShardedCase((8, 2), {"x": 4, "y": 2}, P(("y", "x"), None))) == (
        "ShardedCase((8, 2), {'x': 4, 'y': 2}, P(('y', 'x'), None))"
    )
    shuffled = Mesh(np.array(devices[2:0:-1]), ("x",), axis_types=(AxisType.Explicit,))
    assert repr(ShardedCase((2,), shuffled, P("x"))) == (
        "ShardedCase((2,), Mesh({'x': 2}, devices=[2, 1], axis_types=Explicit), P('x'))"
    )


# The examples, and those to which they shrink.


def test_cases_shrink_to_readable_ones() -> None:
    found = find(sharded_cases(), lambda case: case.grid.num_replicas > 1, settings=SEARCH)
    # The smallest, or with one axis or entry too many: other versions of hypothesis search in
    # another order.
    smallest = "ShardedCase((), Mesh({'x': 2}), P())"
    assert repr(found) == smallest or len(repr(found)) <= len(smallest) + len(", 'y': 1, None")


# Options.


@given(mesh_shapes(axis_names=("data", "model", "expert"), max_devices=1000))
def test_mesh_shapes_keep_their_limits(shape: dict[str, int]) -> None:
    assert tuple(shape) == ("data", "model", "expert")[: len(shape)]
    assert math.prod(shape.values()) <= 1000


@given(meshes())
def test_meshes_are_over_any_of_the_devices(mesh: Mesh) -> None:
    assert set(mesh.devices.flat) <= set(jax.devices())
    assert len(set(mesh.devices.flat)) == mesh.size
    assert len(set(mesh.axis_types)) == 1


@given(st.data(), mesh_shapes(max_devices=100))
def test_specs_use_every_axis_once_at_most(data: st.DataObject, mesh_shape: dict[str, int]) -> None:
    spec = data.draw(partition_specs(mesh_shape, max_entries=2))
    assert len(spec) <= 2
    axes_by_dimension(tuple(spec), 2, mesh_shape)


def test_specs_of_several_axes_of_none_and_without_entries() -> None:
    several = find(
        partition_specs({"x": 2, "y": 2}), lambda spec: ("y", "x") in spec, settings=SEARCH
    )
    assert several == P(("y", "x"))
    spec = find(partition_specs({}), lambda spec: len(spec) == 2, settings=SEARCH)
    assert tuple(spec) == (None, None)
    assert find(partition_specs({"x": 4}, max_entries=0), lambda spec: True) == P()


@given(sharded_cases())
def test_every_case_is_one_that_jax_takes(case: ShardedCase[Mesh]) -> None:
    block = NamedSharding(case.mesh, case.spec).shard_shape(case.global_shape)
    assert all(side <= 3 for side in block)
    assert len(case.spec) <= len(case.global_shape) <= 3


@given(sharded_cases(mesh_shapes(max_devices=4096), max_dims=2))
def test_cases_without_devices_keep_their_limits(case: ShardedCase[dict[str, int]]) -> None:
    assert isinstance(case.mesh, dict)
    assert len(case.global_shape) <= 2
    assert all(side <= 3 for side in case.grid.shard_shape)


@rarely(2)
@given(global_arrays())
def test_global_arrays_agree_with_their_shards(g: gda.GlobalArray) -> None:
    whole = np.asarray(g)
    assert g.dtype.name in ("float32", "int32", "bool", "complex64", "uint8", "bfloat16")
    for shard in g.local_shards:
        assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()  # NaNs too


# Errors.


def test_a_mesh_has_axes_and_devices() -> None:
    for options in ({"max_devices": 0}, {"axis_names": ()}):
        with pytest.raises(ValueError, match=r"no mesh has the axes \(.*\) and at most . devices"):
            mesh_shapes(**options)  # pyright: ignore[reportArgumentType]

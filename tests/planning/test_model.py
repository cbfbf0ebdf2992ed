"""Plans of models: the rows, the bytes and the savings."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda import ShardGrid
from gda.planning.model import ModelPlan, plan_model
from gda.planning.notation.mistakes import MistakesError

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"
W = {"shape": [8], "dtype": "f32"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "model.json"


def plan(file: Path, document: Any, *, pad: bool = False, **about: Any) -> ModelPlan:
    file.write_text(json.dumps(document))
    return plan_model(file, about.get("mesh"), about.get("devices"), pad=pad)


def test_the_example_is_llama_2_7b() -> None:
    model = plan_model(LLAMA, None, 8, pad=False)
    assert model.num_elements == 6_738_415_616
    assert model.nbytes == 2 * 6_738_415_616
    assert len(model.parameters) == 2 + 32 * 9 + 1
    assert model.mesh == {"data": 16, "model": 4}
    # All matrices are sharded 64 ways, the 65 norms of 4096 not at all.
    norms = 65 * 4096
    assert model.bytes_per_device == 2 * ((6_738_415_616 - norms) // 64 + norms)
    rows = {row.name: row.count for row in model.rows}
    assert rows["model.layers.0-31.mlp.up_proj.weight"] == 32
    assert len(rows) == 12


def test_parameters_on_the_host_take_no_memory_of_a_device(file: Path) -> None:
    on_host = {**W, "memory_kind": "pinned_host", "spec": ["x"]}
    model = plan(file, {"mesh": {"x": 2}, "parameters": {"m": on_host, "w": W}})
    assert (model.bytes_per_device, model.bytes_on_host) == (32, 16)
    assert [row.name for row in model.savings] == ["w"]


def test_mesh_dtype_and_spec_have_defaults(file: Path) -> None:
    parameters = {"w": {"shape": [8, 8], "dtype": "f32", "spec": ["data"]}, "b": {"shape": [8]}}
    document = {"mesh": {"data": 2}, "dtype": "i16", "parameters": parameters, "about": "a test"}
    model = plan(file, document)
    assert (model.mesh, model.devices_per_process) == ({"data": 2}, 2)
    assert [(each.dtype.name, each.grid.spec) for each in model.parameters] == [
        ("float32", ("data",)),
        ("int16", ()),
    ]
    (_, b), mesh = plan(file, document, mesh={"data": 4}).parameters, {"data": 4}
    assert b.grid.mesh_shape == mesh
    # Some editors write a mark before the text.
    file.write_text(json.dumps(document), "utf-8-sig")
    assert plan_model(file, None, None, pad=False) == model


GOOD = {"shape": [8, 6], "dtype": "f32", "spec": []}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", 'an object was expected, not \'{\'; expected is {"mesh": {"data": 16}, "param'),
        ({"mesh": {"x": 2}}, "an object was expected, not None"),
        ({"parameters": {}}, "no sizes of axes are here or in --mesh, such as 16, but None"),
        ({"mesh": {"x": 0}, "parameters": {}}, "such as 16, but {'x': 0}"),
        ({"w": {}}, "'w' is not known; known are about, dtype, mesh, parameters"),
        ({"shapes": 3}, "'shapes' is not known; known are dtype, memory_kind, shape, spec"),
        ({"shape": "8x8"}, "\"shape\": a list of sizes was expected, not '8x8'"),
        ({"shape": [-8]}, '"shape": a list of sizes was expected, not [-8]'),
        ({"shape": [2**62, 6]}, "this array takes 2**63 bytes or more on all devices"),
        ({"dtype": None}, "the name of a dtype was expected"),
        ({"spec": [None, "x"]}, "dimension 1 of size 6 is sharded 4 ways by mesh axis 'x'"),
        ({"spec": [3]}, "entry 0 of the spec is 3; an entry is None, the name of a mesh"),
    ],
)
def test_a_mistake_is_named(file: Path, document: Any, says: str) -> None:
    is_entry = isinstance(document, dict) and document.keys() & {*GOOD, "shapes"}
    if is_entry:
        entry = GOOD | document
        document = {"mesh": {"x": 4, "y": 2}, "parameters": {"fine": W, "w": entry}}
    with pytest.raises(MistakesError, match=re.escape(says)) as caught:
        plan(file, document)
    assert str(caught.value).startswith(f"{file}: w: " if is_entry else f"{file}: ")


def test_processes_divide_the_devices(file: Path) -> None:
    with pytest.raises(MistakesError, match="3 devices per process do not divide the 2 devices"):
        plan(file, {"mesh": {"x": 2}, "parameters": {}}, devices=3)


# Properties.

SPECS = [[], ["x"], ["y"], [None, "x"], ["x", "y"], [["x", "y"]], [None, ["y", "x"]]]


@rarely(2)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 99), st.sampled_from("uv")).map(
            lambda parts: ".".join(map(str, parts))
        ),
        st.tuples(
            st.sampled_from([[8, 8], [16, 8], [8, 24], [7, 9], [3, 8]]), st.sampled_from(SPECS)
        ),
        min_size=1,
    ),
    st.sampled_from([{"x": 4, "y": 2}, {"x": 2, "y": 2}, {"x": 1, "y": 4}]),
)
def test_a_model_is_the_sum_of_its_parameters(
    file: Path,
    model: dict[str, tuple[list[int], list[Any]]],
    mesh: dict[str, int],
) -> None:
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    planned = plan(file, {"mesh": mesh, "dtype": "f16", "parameters": parameters}, pad=True)

    grids = {name: ShardGrid(shape, mesh, spec, pad=True) for name, (shape, spec) in model.items()}
    block = {name: 2 * math.prod(grid.shard_shape) for name, grid in grids.items()}
    devices = math.prod(mesh.values())
    assert planned.bytes_per_device == sum(block.values())
    assert planned.nbytes == 2 * sum(math.prod(shape) for shape, _ in model.values())
    assert planned.padding.nbytes == sum(
        devices * block[name] - 2 * math.prod(grid.global_shape) * grid.num_replicas
        for name, grid in grids.items()
    )

    # Every parameter is in one row, which says what is true of it.
    assert sorted(name for row in planned.rows for name in row.names) == sorted(model)
    sizes = [row.bytes_per_device for row in planned.rows]
    assert sizes == sorted(sizes, reverse=True)
    for row in planned.rows:
        assert row.bytes_per_device == sum(block[name] for name in row.names)
        for name in row.names:
            assert row.parameter.grid == grids[name]

    # The proposed spec saves all bytes that can be saved.
    for row in planned.rows:
        grid = row.parameter.grid
        free = [size for axis, size in mesh.items() if axis not in str(grid.spec)]
        could = any(step % size == 0 for size in free if size > 1 for step in grid.shard_shape)
        assert (row in planned.savings) == could
        better = ShardGrid(grid.global_shape, mesh, row.better_spec, pad=True)
        saved = math.prod(grid.shard_shape) - math.prod(better.shard_shape)
        assert row.bytes_saved_per_device == 2 * saved * row.count

"""Plans of models: the rows, the bytes and the savings."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda import ShardGrid
from gda.planning.model import ModelPlan, plan_model
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"
W = {"shape": [8], "dtype": "f32"}


def plan(
    document: Any, devices_per_process: int | None = None, mesh: Any = None, *, pad: bool = False
) -> ModelPlan:
    file = ModelText("model.json", document if isinstance(document, str) else json.dumps(document))
    return plan_model(file, mesh, devices_per_process, pad=pad)


def test_the_example_is_llama_2_7b() -> None:
    model = plan(LLAMA.read_text(), 8)
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


def test_parameters_on_the_host_take_no_memory_of_a_device() -> None:
    on_host = {**W, "memory_kind": "pinned_host", "spec": "x"}
    model = plan({"mesh": {"x": 2}, "parameters": {"m": on_host, "w": W}})
    assert (model.bytes_per_device, model.bytes_on_host) == (32, 16)
    assert [row.name for row in model.savings] == ["w"]


def test_limits_of_a_plan() -> None:
    with pytest.raises(MistakesError, match="3 devices per process do not divide the 2 devices"):
        plan(W_ALONE, 3, mesh={"x": 2})
    many = {f"w{n}": {"shape": [2**59], "dtype": "f32"} for n in range(4)}
    with pytest.raises(MistakesError, match=r"model\.json has more than 2\*\*63 bytes in all"):
        plan(many, mesh={"x": 1})


W_ALONE = {"w": W}

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
    model: dict[str, tuple[list[int], list[Any]]],
    mesh: dict[str, int],
) -> None:
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    planned = plan({"mesh": mesh, "dtype": "f16", "parameters": parameters}, pad=True)

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

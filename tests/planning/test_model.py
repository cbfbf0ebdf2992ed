"""Plans of models: the rows, the bytes and the savings."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import rarely

from gda import ShardGrid
from gda.planning.model import plan_model
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"
W = {"shape": [8], "dtype": "f32"}


def plan(
    document: Any, devices_per_process: int | None = None, mesh: Any = None, *, pad: bool = False
) -> dict[str, Any]:
    file = ModelText("model.json", document if isinstance(document, str) else json.dumps(document))
    return plan_model(file, mesh, devices_per_process, pad=pad).document()


def test_the_example_is_llama_2_7b() -> None:
    document = plan(LLAMA.read_text(), 8)
    assert document["num_elements"] == 6_738_415_616
    assert document["nbytes"] == 2 * 6_738_415_616
    assert document["num_parameters"] == 2 + 32 * 9 + 1
    assert document["mesh"] == {"data": 16, "model": 4}
    # All matrices are sharded 64 ways, the 65 norms of 4096 not at all.
    norms = 65 * 4096
    per_device = 2 * ((6_738_415_616 - norms) // 64 + norms)
    assert document["nbytes_per_device"] == per_device
    assert document["nbytes_per_process"] == 8 * per_device
    rows = {row["name"]: row["count"] for row in document["parameters"]}
    assert rows["model.layers.0-31.mlp.up_proj.weight"] == 32
    assert len(rows) == 12


def test_parameters_on_the_host_take_no_memory_of_a_device() -> None:
    on_host = {**W, "memory_kind": "pinned_host", "spec": "x"}
    document = plan({"mesh": {"x": 2}, "parameters": {"m": on_host, "w": W}})
    assert (document["nbytes_per_device"], document["nbytes_on_host"]) == (32, 16)
    assert [row["name"] for row in document["savings"]] == ["w"]


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
    st.sampled_from([1, 2, 4]),
)
def test_a_model_is_the_sum_of_its_parameters(
    model: dict[str, tuple[list[int], list[Any]]],
    mesh: dict[str, int],
    per_process: int,
) -> None:
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    file = {"mesh": mesh, "dtype": "f16", "parameters": parameters}
    document = plan(file, per_process, pad=True)

    grids = {name: ShardGrid(shape, mesh, spec, pad=True) for name, (shape, spec) in model.items()}
    block = {name: 2 * math.prod(grid.shard_shape) for name, grid in grids.items()}
    assert document["nbytes_per_device"] == sum(block.values())
    assert document["nbytes"] == 2 * sum(math.prod(shape) for shape, _ in model.values())
    devices = math.prod(mesh.values())
    assert document["nbytes_padding"] == sum(
        devices * block[name] - 2 * math.prod(grid.global_shape) * grid.num_replicas
        for name, grid in grids.items()
    )
    distinct = []
    for first in range(0, devices, per_process):
        nbytes = 0
        for grid in grids.values():
            read = np.zeros(grid.global_shape, bool)
            for device in range(first, first + per_process):
                read[grid.index(device)] = True
            nbytes += 2 * int(read.sum())
        distinct.append(nbytes)
    assert document["nbytes_distinct_per_process"] == [min(distinct), max(distinct)]

    # Every parameter is in one row, which says what is true of it.
    rows = document["parameters"]
    assert sorted(name for row in rows for name in row["names"]) == sorted(model)
    sizes = [row["nbytes_per_device"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    for row in rows:
        assert row["count"] == len(row["names"])
        assert row["nbytes_per_device"] == sum(block[name] for name in row["names"])
        for name in row["names"]:
            assert row["shard_shape"] == list(grids[name].shard_shape)
            assert row["num_replicas"] == grids[name].num_replicas

    # The proposed spec saves all bytes that can be saved.
    savings = {row["name"]: row for row in document["savings"]}
    for row in rows:
        grid = grids[row["names"][0]]
        free = [size for axis, size in mesh.items() if axis not in str(grid.spec)]
        could = any(step % size == 0 for size in free if size > 1 for step in grid.shard_shape)
        assert (row["name"] in savings) == could
        if could:
            saving = savings[row["name"]]
            better = ShardGrid(row["shape"], mesh, saving["better_spec"], pad=True)
            saved = math.prod(grid.shard_shape) - math.prod(better.shard_shape)
            assert saving["nbytes_saved_per_device"] == 2 * saved * row["count"]
            assert grid.spec == ShardGrid(row["shape"], mesh, saving["spec"], pad=True).spec

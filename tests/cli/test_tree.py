"""``gda plan --tree``: the part of a whole model on each device."""

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Run, document_of, exit_code
from trials import rarely

from gda import ShardGrid

pytestmark = pytest.mark.no_jax

LLAMA = Path(__file__).parents[2] / "examples" / "transformer_7b.json"

EXPECTED = 'expected is {"mesh": {...}, "parameters": {NAME: {"shape": [...], ...}, ...}}'

SMALL = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "bfloat16",
    "parameters": {
        "layers.0.up": {"shape": [8, 16], "spec": ["model", "data"]},
        "layers.1.up": {"shape": [8, 16], "spec": "model,data"},
        "layers.0.down": {"shape": [16, 8], "spec": [["data", "model"], None]},
        "layers.1.down": {"shape": [16, 8], "spec": "data+model", "dtype": "f32"},
        "norm": {"shape": [8]},
    },
}


def plan(*args: Any) -> dict[str, Any]:
    return document_of("plan", "--tree", *map(str, args))


def test_a_small_model(run: Run, write: Callable[[Any], Path]) -> None:
    assert run.printed("plan", "--tree", write(SMALL), "--devices-per-process", "4") == (
        "model         5 arrays of 520 elements, 1.3 KiB\n"
        "mesh          data=4,model=2: 8 devices in 2 processes of 4\n"
        "\n"
        "per device    176 B\n"
        "per process   704 B; 656 B of it distinct\n"
        "all devices   1.4 KiB: 1.086 times the model\n"
        "\n"
        "per device  parameter\n"
        "            array           spec                  shard shape  replicas\n"
        "      64 B  layers.0-1.up (x2)\n"
        "            bfloat16[8,16]  P('model', 'data')    (4, 4)              1\n"
        "      64 B  layers.1.down\n"
        "            float32[16,8]   P(('data', 'model'))  (2, 8)              1\n"
        "      32 B  layers.0.down\n"
        "            bfloat16[16,8]  P(('data', 'model'))  (2, 8)              1\n"
        "      16 B  norm\n"
        "            bfloat16[8]     P()                   (8,)                8\n"
        "\n"
        "Replicated, but could be sharded: this would save 14 B per device.\n"
        "\n"
        "per device  parameter  spec  better spec\n"
        "      14 B  norm       P()   P(('data', 'model'))\n"
    )


def test_places_of_mesh_dtype_and_spec(write: Callable[[Any], Path]) -> None:
    parameters = {"w": {"shape": [8, 8], "dtype": "f32"}, "b": {"shape": [8]}}
    parameters["b"] |= {"spec": None, "dtype": None}
    path = write({"dtype": "i16", "spec": "data", "parameters": parameters, "about": "a test"})
    assert {
        row["name"]: (row["dtype"], row["spec"], row["nbytes_per_device"])
        for row in plan(path, "--mesh", "data=2,model=2")["parameters"]
    } == {"w": ("float32", ["data"], 128), "b": ("int16", [], 16)}
    flat = {"w": {"shape": [8, 8], "dtype": "f32", "spec": [None, "data"]}}
    assert plan(write(flat), "--mesh", "data=4")["nbytes_per_device"] == 64
    # --mesh counts more than the file, which may write its own as a text.
    model = {**SMALL, "mesh": "data=1,model=1"}
    assert plan(write(model))["nbytes_per_device"] == 1296
    assert plan(write(SMALL), "--mesh", "data=1,model=1")["nbytes_per_device"] == 1296


VOCABULARY = {
    "mesh": {"data": 4, "model": 2},
    "dtype": "bfloat16",
    "parameters": {
        "embed": {"shape": [50257, 8], "spec": ["data"]},
        "up.0": {"shape": [8, 31], "spec": [None, "model"]},
        "up.1": {"shape": [8, 31], "spec": [None, "model"]},
        "norm": {"shape": [8]},
    },
}


def test_padding(run: Run, write: Callable[[Any], Path]) -> None:
    path = write(VOCABULARY)
    err = run.refusal("plan", "--tree", path)
    assert err.startswith(f"gda: {path} has 3 mistakes:\n  embed: global shape (50257, 8) cannot")
    assert err.count("; or give --pad: padded to (50260, 8), <0.01 % more\n") == 1
    assert err.count("; or give --pad: padded to (8, 32), 3.2 % more\n") == 1

    out = run.printed("plan", "--tree", path, "--pad", "--devices-per-process", "4")
    assert out.split("\n\nRepl")[0].endswith(
        "padding       224 B, 0.014 % more, in 3 parameters\n"
        "\n"
        "per device        padding  parameter\n"
        "            array              spec              shard shape  replicas\n"
        " 196.3 KiB  96 B, <0.01 %  embed\n"
        "            bfloat16[50257,8]  P('data')         (12565, 8)          2\n"
        "     512 B   128 B, 3.2 %  up.0-1 (x2)\n"
        "            bfloat16[8,31]     P(None, 'model')  (8, 16)             4\n"
        "      16 B                 norm\n"
        "            bfloat16[8]        P()               (8,)                8"
    )
    rows = {row["name"]: row for row in plan(path, "--pad")["parameters"]}
    assert (rows["up.0-1"]["padded_shape"], rows["up.0-1"]["nbytes_padding"]) == ([8, 32], 128)


def test_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\N{ZERO WIDTH NO-BREAK SPACE}" + json.dumps(SMALL)  # a mark that some editors write
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    out = run.printed("plan", "--tree", "-")
    assert out.startswith("model         5 arrays of 520 elements")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[]")))
    code, _, err = run("plan", "--tree", "-")
    assert (code, err.splitlines()[0]) == (2, f"gda: stdin is a list; {EXPECTED}")
    monkeypatch.setattr("sys.stdin", None)  # as after <&-
    code, _, err = run("plan", "--tree", "-")
    assert (code, err) == (
        2,
        "gda: --tree: stdin is closed; give the path of a file instead of -\n",
    )


def test_models_of_nothing(run: Run, write: Callable[[Any], Path]) -> None:
    out = run.printed("plan", "--tree", write({"mesh": {"x": 2}, "parameters": {}}))
    assert "0 arrays of 0 elements, 0 B\n" in out
    empty = {"w": {"shape": [0, 4], "dtype": "f32", "spec": "x"}}
    out = run.printed("plan", "--tree", write(empty), "--mesh", "x=2")
    assert "Replicated" not in out


# The example.


def test_the_example_is_llama_2_7b() -> None:
    document = plan(LLAMA, "--devices-per-process", "8")
    assert document["num_elements"] == 6_738_415_616
    assert document["nbytes"] == 2 * 6_738_415_616
    assert document["num_parameters"] == 2 + 32 * 9 + 1
    assert document["mesh"] == {"data": 16, "model": 4}
    # All matrices are cut 64 ways, the 65 norms of 4096 not at all.
    norms = 65 * 4096
    per_device = 2 * ((6_738_415_616 - norms) // 64 + norms)
    assert document["nbytes_per_device"] == per_device
    assert document["nbytes_per_process"] == 8 * per_device
    rows = {row["name"]: row["count"] for row in document["parameters"]}
    assert rows["model.layers.0-31.mlp.up_proj.weight"] == 32
    assert len(rows) == 12


# Properties.

SPECS = [[], ["x"], ["y"], [None, "x"], ["x", "y"], [["x", "y"]], [None, ["y", "x"]]]


@rarely(2)
@given(
    st.dictionaries(
        st.from_regex(r"[ab]\.[0-9]{1,2}\.[uv]", fullmatch=True),
        st.tuples(
            st.sampled_from([[8, 8], [16, 8], [8, 24], [7, 9], [3, 8]]), st.sampled_from(SPECS)
        ),
        min_size=1,
    ),
    st.sampled_from([{"x": 4, "y": 2}, {"x": 2, "y": 2}, {"x": 1, "y": 4}]),
    st.sampled_from([1, 2, 4]),
)
def test_a_model_is_the_sum_of_its_parameters(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, tuple[list[int], list[Any]]],
    mesh: dict[str, int],
    per_process: int,
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.json"
    parameters = {name: {"shape": shape, "spec": spec} for name, (shape, spec) in model.items()}
    path.write_text(json.dumps({"mesh": mesh, "dtype": "f16", "parameters": parameters}))
    document = plan(path, "--devices-per-process", str(per_process), "--pad")

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


# Bad inputs.

W = {"w": {"shape": [8], "dtype": "f32"}}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "cannot be read as JSON: Expecting value: line 1 column 1"),
        (
            "{" + ", ".join(f'"{name:05}": {{}}' for name in [*range(5000)] * 2) + "}",
            "has these names twice: '00000'; '00001'; ",
        ),
        ([1], f"is a list; {EXPECTED}"),
        ({"mesh": {"x": 2}}, '"parameters" is missing; expected is'),
        ({"parameters": W}, "mesh: there is none; give sizes by axis such as"),
        ({"mesh": {"x": 0}, "parameters": W}, "mesh: axis 'x' has the size 0; it must be 1 or m"),
        ({"mesh": {"x": 2}, "dtype": "float33", "parameters": W}, "\"dtype\" 'float33' cannot be"),
        (
            {"mesh": {"x": 2}, "w1": {}, "w2": {}, "parameters": W},
            '"w1" is not known; known are "about", "mesh", "dtype", "spec", "parameters" '
            '(names go into "parameters")\n  "w2" is not known; known are ',
        ),
        ({"mesh": {"x": 2}, "parameters": {"w": {}}}, 'w: there is no "shape"'),
        ({"mesh": {"x": 2}, "parameters": {"w": {"shape": [8]}}}, 'w: there is no "dtype", here'),
        (
            {"mesh": {"x": 2}, "parameters": {"w": {**W["w"], "shapes": 3}}},
            'w: "shapes" is not known; did you mean "shape"?',
        ),
    ],
)
def test_wrong_files(run: Run, write: Callable[[Any], Path], document: Any, said: str) -> None:
    path = write(document)
    err = run.refusal("plan", "--tree", path)
    assert said in err
    assert err.startswith(f"gda: {path} ")


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ({"shape": "8x8"}, "w: \"shape\" must be a list of integers, not '8x8'"),
        ({"shape": [-8]}, 'w: "shape" is [-8]; sizes are from 0 to 2**63 - 1'),
        ({"spec": ["_", "x"]}, 'in a list, a dimension that is not sharded is null, not "_"'),
        ({"spec": [None, "x"]}, "dimension 1 of size 6 is sharded 4 ways by mesh axis 'x'"),
        ({"spec": [3]}, "w: entry 0 of the spec is 3; an entry is None, the name of a mesh axis"),
    ],
)
def test_wrong_parameters(
    run: Run, write: Callable[[Any], Path], parameter: dict[str, Any], said: str
) -> None:
    entry = {"shape": [8, 6], "dtype": "f32", "spec": [], **parameter}
    path = write({"mesh": {"x": 4, "y": 2}, "parameters": {"fine": W["w"], "w": entry}})
    err = run.refusal("plan", "--tree", path)
    assert err.startswith(f"gda: {path} has a mistake:\n  w: ")
    assert said in err
    assert err.count("\n") == 2


def test_all_mistakes_are_said_together(run: Run, write: Callable[[Any], Path]) -> None:
    parameters: dict[str, Any] = {f"h.{i}.w": {"shape": [6], "spec": "x"} for i in range(32)}
    parameters |= {"a": {"shape": [8], "spec": "y"}, "b": {"shape": 8, "dtype": "f33"}}
    path = write({"mesh": {"x": 4}, "dtype": "f32", "parameters": parameters})
    err = run.refusal("plan", "--tree", path, "--json")
    lines = err.splitlines()
    assert lines[0] == f"gda: {path} has 35 mistakes:"
    assert [line.split(": ")[0] for line in lines[1:]] == ["  h.0-31.w", "  a", "  b", "  b"]
    many = {"mesh": {"x": 4}, "parameters": {f"{'a' * i}": {} for i in range(1, 30)}}
    _, _, err = run("plan", "--tree", write(many))
    assert err.splitlines()[0].endswith(" has 58 mistakes:")
    assert err.splitlines()[-1] == "  … and 38 more lines like these"
    assert len(err.splitlines()) == 22


def test_options_that_exclude_each_other(
    run: Run, write: Callable[[Any], Path], tmp_path: Path
) -> None:
    path = write(SMALL)
    for args, said in (
        (("--shape", "8"), "--shape cannot be used with --tree, which plans a model; omit"),
        (
            ("--shape", "8", "--dtype", "f32", "--spec", "x"),
            "--shape, --dtype and --spec cannot be used with --tree",
        ),
        (("--mesh", "x"), "--mesh: the size of axis 'x' was expected"),
        (("--devices-per-process", "3"), "3 devices per process do not divide the 8 devices"),
    ):
        assert said in run.refusal("plan", "--tree", path, *args)
    assert (
        run.refusal("plan", "--tree", tmp_path / "none")
        == f"gda: {tmp_path}/none cannot be read: No such file or directory\n"
    )
    assert (
        run.refusal("plan", "--tree", "")
        == "gda: --tree: the path of a file was expected, or - for stdin\n"
    )


def test_a_mesh_without_an_axis_of_the_model(run: Run) -> None:
    assert run.refusal("plan", "--tree", LLAMA, "--mesh", "data=4") == (
        f"gda: --mesh: data=4 has no axis 'model', which shards 226 parameters of {LLAMA}, such as "
        "model.embed_tokens.weight; the mesh of the file is {'data': 16, 'model': 4}\n"
    )
    err = run.refusal("plan", "--tree", LLAMA, "--mesh", "x=4")
    assert [line.split(" has ")[1][:16] for line in err.splitlines()] == [
        "no axis 'model',",
        "no axis 'data', ",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {}, optional={"shape": st.just([8, 4]) | JSON, "dtype": st.just("f32") | JSON, "spec": JSON}
)


@given(
    st.fixed_dictionaries(
        {"mesh": st.just({"x": 4}) | JSON},
        optional={
            "parameters": st.dictionaries(st.text(max_size=4), ENTRY | JSON) | JSON,
            "dtype": st.just("bf16") | JSON,
            "spec": st.just("x") | JSON,
        },
    )
    | JSON
)
def test_any_document_gives_an_answer_or_a_message(
    tmp_path_factory: pytest.TempPathFactory, document: Any
) -> None:
    path = tmp_path_factory.mktemp("any") / "model.json"
    path.write_text(json.dumps(document))
    assert exit_code("plan", "--tree", path) in (0, 2)

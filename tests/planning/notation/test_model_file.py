"""Files of models: the forms that are read, and mistakes by their texts."""

import io
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.strict_json import check_memory
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelArray, ModelText, read_arrays, read_model, text_of

pytestmark = pytest.mark.no_jax

W = {"shape": [8], "dtype": "f32"}
PARAMETERS = {
    "up": {"shape": [8, 16], "spec": ["model", "data"]},
    "norm": {"shape": [6], "dtype": "f32", "spec": "data"},
}
EXPECTED = 'expected is {"mesh": {...}, "parameters": {NAME: {"shape": [...], ...}, ...}}'


def file(document: object) -> ModelText:
    text = document if isinstance(document, str) else json.dumps(document)
    return text_of("model.json", io.BytesIO(f"\N{ZERO WIDTH NO-BREAK SPACE}{text}".encode()))


def mistakes(document: object) -> tuple[str, ...]:
    with pytest.raises(MistakesError) as caught:
        read_model(file(document), None, pad=False)
    return caught.value.lines


def test_arrays_are_read_without_a_mesh() -> None:
    up, norm = read_arrays(file({"dtype": "f16", "mesh": "no mesh", "parameters": PARAMETERS}))
    assert up == ModelArray("up", (8, 16), np.dtype(np.float16), ("model", "data"))
    assert norm == ModelArray("norm", (6,), np.dtype(np.float32), ("data",))
    with pytest.raises(MistakesError, match=r"model\.json has 4 mistakes:"):
        read_arrays(file({"b": {"shape": [2.5]}, "c": {"shape": [2.5]}}))


def test_a_model_is_read_onto_the_mesh_that_is_given() -> None:
    document = {"dtype": "f16", "mesh": {"data": 64}, "parameters": PARAMETERS}
    mesh, (up, norm) = read_model(file(document), {"data": 2, "model": 4}, pad=False)
    assert mesh == {"data": 2, "model": 4}
    assert up.grid.shard_shape == (2, 8)
    assert (norm.title, norm.grid.shard_shape) == ("float32[6]", (3,))


def test_places_of_mesh_dtype_and_spec() -> None:
    parameters = {"w": {"shape": [8, 8], "dtype": "f32"}, "b": {"shape": [8]}}
    parameters["b"] |= {"spec": None, "dtype": None}
    document = {"mesh": "data=2", "dtype": "i16", "spec": "data", "parameters": parameters}
    mesh, found = read_model(file({**document, "about": "a test"}), None, pad=False)
    assert mesh == {"data": 2}
    assert [(each.dtype.name, each.grid.spec) for each in found] == [
        ("float32", ("data",)),
        ("int16", ()),
    ]
    flat = {"w": {**W, "spec": ["data"], "memory_kind": "pinned_host"}}
    _, (w,) = read_model(file(flat), {"data": 4}, pad=False)
    assert (w.grid.shard_shape, w.memory_kind) == ((2,), "pinned_host")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "model.json cannot be read as JSON: Expecting value: line 1 column 1"),
        (
            "{" + ", ".join(f'"{name:05}": {{}}' for name in [*range(5000)] * 2) + "}",
            "has these names twice: '00000'; '00001'; ",
        ),
        ([1], f"model.json is [1]; {EXPECTED}"),
        ({"mesh": {"x": 2}}, f'"parameters" is null; {EXPECTED}'),
        ({"parameters": {"w": W}}, "  mesh: expected are sizes by axis such as"),
        ({"mesh": {"x": 0}, "w": W}, "  mesh: axis 'x' has the size 0; it must be 1 or more"),
        ({"mesh": {"_": 2}, "w": W}, "  mesh: an axis cannot have the name '_'"),
        ({"mesh": {f"a{i}": 1 for i in range(65)}}, "  mesh: this mesh has 65 dimensions"),
        ({"mesh": "x=1," * 10_000}, "more than 10,000 characters"),
        ({"mesh": {"x": 2**40}}, "  mesh: the mesh x=1099511627776 has about 10**12 devices; a"),
        ({"dtype": "float33", "parameters": {}}, "  \"dtype\": 'float33' cannot be read"),
        (
            {"mesh": "x=1", **{f"k{i}": 1 for i in range(30)}, "parameters": {}},
            '"k7" and 22 more are not known; known are "about", "mesh", "dtype", "spec", '
            '"parameters"',
        ),
    ],
)
def test_wrong_files(document: Any, said: str) -> None:
    assert said in "\n".join(mistakes(document))


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ({"shape": None}, 'there is no "shape"'),
        ({"dtype": None}, 'there is no "dtype"'),
        ({"shapes": 3}, '"shapes" is not known; did you mean "shape"?'),
        ({"shape": "8x8"}, "\"shape\": expected is a list of integers, not '8x8'"),
        ({"shape": [-8]}, '"shape": sizes are from 0 to 2**63 - 1, and not [-8]'),
        ({"shape": [2**62, 6]}, "this array takes about 10**20 bytes on all devices; a plan"),
        ({"dtype": 3}, '"dtype": expected is a name such as "bfloat16", not 3'),
        ({"spec": ["_", "x"]}, 'a dimension that is not sharded is null in a list, and not "_"'),
        ({"spec": [None, "x"]}, "dimension 1 of size 6 is sharded 4 ways by mesh axis 'x'"),
        ({"spec": [3]}, '"spec": entry 0 of the spec is 3; an entry is None, the name of a mesh'),
        ({"spec": "z"}, "'z'"),
    ],
)
def test_wrong_parameters(parameter: dict[str, Any], said: str) -> None:
    entry = {"shape": [8, 6], "dtype": "f32", "spec": [], **parameter}
    first, line = mistakes({"mesh": {"x": 4, "y": 2}, "parameters": {"fine": W, "w": entry}})
    assert first == "model.json has a mistake:"
    assert line.startswith("  w: ")
    assert said in line


def test_all_mistakes_are_said_together() -> None:
    parameters: dict[str, Any] = {f"h.{i}.w": {"shape": [6], "spec": "x"} for i in range(32)}
    parameters |= {"a": {"shape": [8], "spec": "y"}, "b": {"shape": 8, "dtype": "f33"}}
    first, *lines = mistakes({"mesh": {"x": 4}, "dtype": "f32", "parameters": parameters})
    assert first == "model.json has 35 mistakes:"
    assert sorted(line.split(": ")[0] for line in lines) == ["  a", "  b", "  b", "  h.0-31.w"]
    first, *lines = mistakes({"mesh": "x=4", "parameters": {"a" * i: {} for i in range(1, 30)}})
    assert (first, len(lines)) == ("model.json has 58 mistakes:", 21)
    assert lines[-1] == "  … and 38 more lines like these"


def test_what_is_no_text_or_too_long() -> None:
    with pytest.raises(ValueError, match="weights is not a text in UTF-8"):
        text_of("weights", io.BytesIO(b"\xff\x00"))
    with pytest.raises(ValueError, match="has more than 16,777,216 bytes; describe the model in"):
        text_of("weights", io.BytesIO(b" " * (2**24 + 1)))
    name = "model.layers.{}.self_attention.query_projection.kernel"
    entry = json.dumps({"shape": [4096, 4096], "dtype": "bfloat16", "spec": [None, "data"]})
    lines = (f'"{name.format(i)}": {entry}' for i in range(100_000))
    check_memory(file(f"{{{', '.join(lines)}}}").text)


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
def test_any_document_is_read_or_has_mistakes(document: Any) -> None:
    with suppress(MistakesError):
        read_model(file(document), None, pad=False)

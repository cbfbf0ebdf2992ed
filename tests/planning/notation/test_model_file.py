"""Files of models, read from Python; ``tests/cli/test_tree.py`` has their mistakes."""

import io
import json

import numpy as np
import pytest

from gda.layout.strict_json import check_memory
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelArray, ModelText, read_arrays, read_model, text_of

pytestmark = pytest.mark.no_jax

PARAMETERS = {
    "up": {"shape": [8, 16], "spec": ["model", "data"]},
    "norm": {"shape": [6], "dtype": "f32", "spec": "data"},
}


def file(document: object) -> ModelText:
    return text_of("model.json", io.BytesIO(json.dumps(document).encode()))


def test_arrays_are_read_without_a_mesh() -> None:
    up, norm = read_arrays(file({"dtype": "f16", "mesh": "no mesh", "parameters": PARAMETERS}))
    assert up == ModelArray("up", (8, 16), np.dtype(np.float16), ("model", "data"))
    assert norm == ModelArray("norm", (6,), np.dtype(np.float32), ("data",))


def test_a_model_is_read_onto_the_mesh_that_is_given() -> None:
    document = {"dtype": "f16", "mesh": {"data": 64}, "parameters": PARAMETERS}
    mesh, (up, norm) = read_model(file(document), {"data": 2, "model": 4}, pad=False)
    assert mesh == {"data": 2, "model": 4}
    assert up.grid.shard_shape == (2, 8)
    assert (norm.title, norm.grid.shard_shape) == ("float32[6]", (3,))


def test_all_mistakes_of_arrays_without_a_mesh_are_one_error() -> None:
    with pytest.raises(MistakesError, match=r"model\.json has 2 mistakes:"):
        read_arrays(file({"b": {"shape": [2.5]}}))


def test_a_text_that_is_not_utf_8() -> None:
    with pytest.raises(ValueError, match="weights is not a text in UTF-8"):
        text_of("weights", io.BytesIO(b"\xff\x00"))


def test_100_000_parameters_may_be_read() -> None:
    name = "model.layers.{}.self_attention.query_projection.kernel"
    entry = json.dumps({"shape": [4096, 4096], "dtype": "bfloat16", "spec": [None, "data"]})
    lines = (f'"{name.format(i)}": {entry}' for i in range(100_000))
    check_memory(text_of("model.json", io.BytesIO(f"{{{', '.join(lines)}}}".encode())).text)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"mesh": {f"a{i}": 1 for i in range(65)}, "parameters": {}}, "mesh has 65 dimensions"),
        ({"mesh": "x=1," * 10_000, "parameters": {}}, "more than 10,000 characters"),
        ({"mesh": "x=1", **{f"k{i}": 1 for i in range(30)}}, '"k15" and 14 more are not known'),
    ],
)
def test_too_long_files_are_refused(document: dict[str, object], message: str) -> None:
    with pytest.raises(MistakesError) as caught:
        read_model(file({"parameters": {}, **document}), None, pad=False)
    assert message in "\n".join(caught.value.lines)

"""Parsers of shapes, meshes, specs and dtypes."""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gda.cli.notation.mesh_and_spec import parse_mesh, parse_spec
from gda.cli.notation.mistakes import MisreadError
from gda.cli.notation.numbers import parse_dtype, parse_number, parse_shape
from gda.layout.spec import format_spec

PARSERS = [parse_shape, parse_mesh, parse_spec, parse_dtype]
NAMES = st.text("abcdefgxyz_0123456789-.", min_size=1, max_size=6).filter(
    lambda name: name not in ("_", "P")
)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_shape, " 65_536 x 2", (65536, 2)),
        (parse_shape, "()", ()),
        (parse_shape, "9223372036854775807", (2**63 - 1,)),
        (parse_number, " 65_536 ", 65536),
        (parse_mesh, "tp-1=4,y.z=2", {"tp-1": 4, "y.z": 2}),
        (parse_spec, " data, model", ("data", "model")),
        (parse_spec, "data+model,_", (("data", "model"), None)),
        (parse_spec, "", ()),
        (parse_spec, "P()", ()),
        (parse_spec, "PartitionSpec(('data', 'model'), None)", (("data", "model"), None)),
        (parse_spec, "jax.P('data',)", ("data",)),
        (parse_spec, "P(['data'], ())", (["data"], ())),
        (parse_dtype, "f32", np.dtype(np.float32)),
        (parse_dtype, "s64", np.dtype(np.int64)),
        (parse_dtype, "pred", np.dtype(bool)),
        (parse_dtype, "float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
    ],
)
def test_texts_are_read(parse: Callable[[str], Any], text: str, expected: Any) -> None:
    assert parse(text) == expected
    if isinstance(expected, dict):
        assert [*parse(text)] == [*expected]


# Properties.

ENTRIES = st.one_of(
    st.none(), NAMES, st.lists(NAMES, min_size=2, max_size=3, unique=True).map(tuple)
)


@given(st.lists(ENTRIES, max_size=5))
def test_specs_are_read_as_python_and_people_write_them(entries: list[object]) -> None:
    spec = tuple(entries)
    assert parse_spec(format_spec(spec)) == spec
    assert parse_spec(str(PartitionSpec(*spec))) == spec
    words = ["_" if e is None else "+".join(e) if isinstance(e, tuple) else e for e in spec]
    assert parse_spec(",".join(words)) == spec


@given(st.text(), st.sampled_from(["", "P("]), st.sampled_from(PARSERS))
def test_whatever_is_written_is_read_or_misread(text: str, opening: str, parse: Any) -> None:
    text, error = f"{opening}{text}", None
    try:
        parse(text)
    except MisreadError as caught:
        error = caught
    if error is not None:
        assert 0 <= error.position <= len(text)
        first, shown, caret = error.lines("--it")
        assert first.startswith("--it: ")
        assert caret.strip() == "^"
        assert len(caret) <= len(shown) + 1
        assert shown.isprintable()


# Bad inputs: the message, and the place of the caret.

IN_CALL = "in P(...), the names of mesh axes in quotes were expected, or None"
A_NAME = "the name of a mesh axis was expected, or _ for a dimension that is not sharded"
AN_AXIS = "an axis with its size was expected, such as data=64, each once"
A_SIZE = "a size was expected, an integer of 0 or more such as 8192"


@pytest.mark.parametrize(
    ("parse", "text", "message", "at"),
    [
        (parse_shape, "", A_SIZE, 0),
        (parse_shape, "8xx2", A_SIZE, 2),
        (parse_shape, "8x-2", A_SIZE, 2),
        (parse_shape, "2x64k", A_SIZE, 2),
        (parse_shape, f"8x{10**30}", A_SIZE, 2),
        (parse_number, "x", "a number was expected, an integer of 1 or more", 0),
        (parse_mesh, "", AN_AXIS, 0),
        (parse_mesh, "data", AN_AXIS, 0),
        (parse_mesh, "data=64,data=2", AN_AXIS, 8),
        (parse_mesh, "_=4", AN_AXIS, 0),
        (parse_mesh, "x=0", "a size was expected, an integer of 1 or more such as 8192", 2),
        (parse_spec, "(data,model),_", A_NAME, 0),
        (parse_spec, "P(data, None)", IN_CALL, 2),
        (parse_spec, "data,,model", A_NAME, 5),
        (parse_spec, "_+data", A_NAME, 0),
        (parse_dtype, "", "the name of a dtype was expected, such as float32, bfloat16 or int8", 0),
        (parse_dtype, " i8", "the name of a dtype was expected", 1),  # 8 bits in JAX, 64 in NumPy
    ],
)
def test_misread_text_is_pointed_at(
    parse: Callable[[str], Any], text: str, message: str, at: int
) -> None:
    with pytest.raises(MisreadError, match=re.escape(message)) as caught:
        parse(text)
    assert caught.value.position == at


def test_the_caret_is_below_the_place() -> None:
    with pytest.raises(MisreadError) as caught:
        parse_spec("a\x1b,,b")
    assert caught.value.lines("--spec")[1:] == [r"  a\x1b,,b", "        ^"]

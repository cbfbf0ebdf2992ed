"""The contents of a checkpoint as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gda
from gda.checkpoint import save

NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.complex_numbers()


@example({"a": 2**63 - 1, "b": 2**63, "c": -(2**63), "d": -(2**63) - 1})
@example({"a": float("inf"), "b": float("nan"), "c": 1j, "d": b"x", "e": True})
@given(st.dictionaries(st.text("ab", max_size=2), NUMBERS | st.booleans() | st.text(max_size=3)))
def test_values_are_as_they_are_where_json_has_them(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    path = Path(tmp_path_factory.mktemp("values"))
    save(path, tree)
    # In 64 bits, as other readers have numbers.
    text = json.dumps(gda.checkpoint.inspect(path).to_dict(), allow_nan=False)
    found = {leaf["path"][0]: leaf for leaf in json.loads(text)["leaves"]}
    assert found.keys() == tree.keys()
    for name, value in tree.items():
        is_small = isinstance(value, int | float) and -(2**63) <= value < 2**63
        is_known = isinstance(value, bool | str) or is_small
        assert found[name]["kind"] == type(value).__name__
        assert found[name]["value"] == (value if is_known else repr(value))

"""The metadata of an Orbax run: the structure of its tree, also if it is damaged or hostile."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gda.storage.orbax_runs.metadata import parse_key_kinds, parse_strings, parse_tree, tree_of

Keys = list[str | int]


def entry(keys: Keys, kind: str = "jax.Array", **more: Any) -> dict[str, Any]:
    path = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys]
    return {"key_metadata": path, "value_metadata": {"value_type": kind, **more}}


def document(*entries: dict[str, Any], **more: Any) -> bytes:
    by_name = {str(number): each for number, each in enumerate(entries)}
    return json.dumps({"tree_metadata": by_name, **more}).encode()


def tree(*entries: dict[str, Any]) -> Any:
    return tree_of(parse_tree(document(*entries)).leaves, lambda leaf: leaf.name)


def test_a_later_save_of_some_leaves_fills_an_empty_node() -> None:
    empty = entry(["a"], "Dict", skip_deserialize=True)
    assert tree(empty, entry(["a", "w"])) == tree(entry(["a", "w"]), empty) == {"a": {"w": "a.w"}}


_TREES = st.recursive(
    st.none(),
    lambda below: (
        st.lists(below, min_size=1, max_size=3)
        | st.dictionaries(st.text("abc/.", min_size=1, max_size=3), below, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


@given(_TREES)
def test_every_tree_comes_back(given_tree: Any) -> None:
    def paths(node: Any, at: Keys) -> list[Keys]:
        if node is None:
            return [at]
        items = enumerate(node) if isinstance(node, list) else node.items()
        return [path for key, below in items for path in paths(below, [*at, key])]

    leaves = [
        entry(path, "None", skip_deserialize=True)  # its name is not that of a file
        for path in paths(given_tree, [])
    ]
    found = parse_tree(document(*reversed(leaves))).leaves
    assert tree_of(found, lambda leaf: None) == given_tree


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "Expecting property name"),
        (b"[]", r"it is \[\]; expected is a dict"),
        (b"{}", "tree_metadata is None; expected is a dict"),
        (b'{"tree_metadata": {"a": 1}}', "leaf 'a': the entry is 1; expected is a dict"),
        (document(entry(["w"]), use_ocdbt=1), "use_ocdbt is 1; expected is a bool"),
        (document(entry([".."])), "'..', which may lead out of the run"),
        (document(entry(["a/../../b"])), "which may lead out of the run"),
        (document(entry(["a"] * 201)), "201 levels deep; expected are at most 200"),
        (document(entry([-1])), "key '-1' of type 1 is neither in a mapping nor a sequence"),
        (document(entry(["a"]) | {"key_metadata": [{"key": "a"}]}), "key 'a' of type None"),
    ],
)
def test_damage_is_said(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_tree(text)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([entry([0]), entry([2])], "a sequence has the keys 0, 2, which are not 0, 1, 2"),
        ([entry(["a"]), entry(["a"])], "leaf 'a' is in it twice"),
        ([entry(["a"]), entry(["a", "b"])], "leaf 'a' is also a node, above 'a.b'"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(entries: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tree(*entries)


def test_strings_and_kinds_of_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="'a' is 1; expected is a str"):
        parse_strings(b'{"a": 1}')
    array = {"param_name": "key", "ext_metadata": {"random_key_impl": "rbg"}}
    text = json.dumps({"array_metadatas": [{"array_metadata": array}]}).encode()
    assert parse_key_kinds(text) == {"key": "rbg"}
    with pytest.raises(ValueError, match="random_key_impl is 3; expected is a str"):
        parse_key_kinds(text.replace(b'"rbg"', b"3"))

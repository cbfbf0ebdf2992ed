"""The target of each leaf of a tree."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from gda.trees.matching import targets_for


class Moments(NamedTuple):
    mu: Any
    nu: Any


TREE = {"w": [np.zeros(2), np.zeros(3)], "moments": Moments({"w": np.ones(1)}, None)}


PATHS = ["moments/mu/w", "w/0", "w/1"]


def test_targets_in_a_tree_of_the_same_structure() -> None:
    targets = {"w": ("w/0", "w/1"), "moments": Moments({"w": "moments/mu/w"}, None)}
    assert targets_for(TREE, targets) == PATHS
    assert targets_for(np.zeros(2), "alone") == ["alone"]
    assert targets_for([], []) == targets_for({"a": None}, {"a": None}) == []
    assert targets_for({"a": None}, {}) == []


def test_trees_of_targets_that_do_not_match() -> None:
    for targets, message in [
        ({}, r"has nothing for moments/mu/w; w/0; w/1$"),
        (
            {"w": ["a", "b"], "moments": ["c", None]},
            r"nothing for moments/mu/w, and the tree has no moments/0$",
        ),
        (
            {"w": np.zeros((2, 2)), "moments": Moments({"w": "c"}, None)},
            r"nothing for w/0; w/1, and the tree has no w$",
        ),
        (
            {"w": ["a", "b"], "moments": Moments({"w": "c"}, "d")},
            r"the tree has no moments/nu$",
        ),
    ]:
        expected = r"targets must have the structure of the tree.*" + message
        with pytest.raises(ValueError, match=expected):
            targets_for(TREE, targets)


def test_one_target_is_for_one_array() -> None:
    one = np.zeros(2)
    with pytest.raises(ValueError, match="but the tree has no leaf$"):
        targets_for({}, one)
    with pytest.raises(ValueError, match=r"at a and b have the same target, so"):
        targets_for({"a": np.zeros(2), "b": np.zeros(2)}, {"a": one, "b": one})

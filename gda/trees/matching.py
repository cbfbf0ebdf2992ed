"""The target of each leaf of a tree, from a tree or a group of targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr

from gda.layout.text import join_some
from gda.storage.sources import is_group
from gda.trees.specs import is_container, path_of


def targets_for(tree: Any, targets: Any) -> list[Any]:
    """Return the target of each leaf of ``tree``, in order.

    Args:
      targets: a pytree of the same structure, or with mappings in it that JAX does not know.

    Raises:
      ValueError: some are missing or left over, or one is for two leaves.
    """
    match = _Match([], [], [])
    match.descend(tree, targets, ())
    must = "targets must have the structure of the tree, but"
    if match.missing:
        raise ValueError(f"{must} have nothing at {join_some(match.missing)}")
    if match.surplus:
        raise ValueError(f"{must} targets has {join_some(match.surplus)}, and the tree has not")
    first_with: dict[int, int] = {}
    for number, target in enumerate(match.found):
        first = first_with.setdefault(id(target), number)
        if first != number:
            raise ValueError(
                f"the arrays at {path_of(tree, first)} and {path_of(tree, number)} have one "
                "target, in which the second would overwrite the first"
            )
    return match.found


class _Match(NamedTuple):
    """The targets for the leaves of a tree, and the paths of what has no partner."""

    found: list[Any]
    missing: list[str]
    surplus: list[str]

    def descend(self, tree: Any, targets: Any, path: tuple[Any, ...]) -> None:
        children = {} if is_container(tree) else _children(tree)
        if children is None or is_container(tree):
            self.found.append(targets)
            return
        others = _of_group(targets, children) if is_group(targets) else _children(targets)
        if others is None:
            others = {} if children else {(): targets}
        for key, child in children.items():
            if key in others:
                self.descend(child, others[key], (*path, key))
            else:
                self.missing.extend(_paths_below((*path, key), child))
        for key, other in others.items():
            if key not in children:
                self.surplus.extend(_paths_below((*path, key) if key else path, other))


def _children(node: Any) -> dict[Any, Any] | None:
    """Return what is directly below a node, by the key that JAX has for it; None for a leaf."""
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    if len(below) == 1 and not below[0][0]:
        return None
    return {key: child for (key,), child in below}


def _of_group(group: Any, keys: Iterable[Any]) -> dict[Any, Any]:
    names = {key: keystr((key,), simple=True) for key in keys}
    return {key: group[name] for key, name in names.items() if name in group}


def _paths_below(path: tuple[Any, ...], node: Any) -> list[str]:
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_container)[0]
    return [keystr((*path, *rest)) or "a target at its root" for rest, _ in below]

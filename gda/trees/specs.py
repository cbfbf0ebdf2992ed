"""Specs for a tree: which leaf gets which, and what to say where the two trees do not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from gda.arrays.global_array import GlobalArray
from gda.layout.text import join_some

# A model has hundreds; those that differ are named in any case.
_MOST_KEYS = 8
_EXAMPLES = {
    "PartitionSpec": "PartitionSpec('x', None)",
    "NamedSharding": "NamedSharding(mesh, PartitionSpec('x', None))",
}


def is_container(node: object) -> bool:
    """Whether a node of a tree is an array, though it is a pytree."""
    return isinstance(node, GlobalArray)


def is_partition_spec(node: object) -> bool:
    """Whether a node of a tree of specs is one."""
    return isinstance(node, PartitionSpec)


SpecOf = Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]


def spec_by(function: SpecOf, path: str, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    """Return the spec that a function of the user gives for a leaf.

    Args:
      path: of the leaf, such as ``'layers/0/weight'``.
      leaf: its ``shape``, ``dtype``, ``ndim`` and ``size``; of PRNG keys those of the keys, not of
        the numbers that they consist of.

    Raises:
      TypeError: the function returned something else.
      ValueError: the function ended with ``StopIteration``.
    """
    try:
        spec = function(path, leaf)
    except StopIteration as error:
        raise ValueError(
            f"specs gave nothing for {path!r}: it ended with StopIteration, as next(...) does "
            "where no rule matches; add a rule, or a default, as in next(..., PartitionSpec())"
        ) from error
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"specs({path!r}, leaf) returned {spec!r:.80}, not a PartitionSpec")
    return spec


def specs_for(
    tree: Any,
    specs: Any,
    name: str,
    is_spec: Callable[[Any], bool] = is_partition_spec,
    kind: str = "PartitionSpec",
) -> tuple[list[tuple[Any, Any]], Any]:
    """Return ``(leaf, spec)`` for every leaf of ``tree``, and the structure to put them back in.

    Args:
      tree: any pytree.
      specs: a pytree that is a prefix of ``tree``: each of its leaves is for a whole subtree.
      name: what the user calls ``specs``, for the messages.
      is_spec: what is a leaf of ``specs``. Nothing else may be; ``None`` is for subtrees without
        leaves alone, unless this says otherwise.
      kind: the class of those leaves, for the messages.

    Raises:
      ValueError: ``specs`` is no prefix of ``tree``, or is ``None`` for a leaf.
      TypeError: a leaf of ``specs`` is not a spec.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    if is_spec(specs):
        return [(leaf, specs) for leaf in leaves], structure
    for path, leaf in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        if not is_spec(leaf):
            raise TypeError(
                f"{name}{keystr(path)} is {leaf!r}, not a {kind}; {name} is a {kind} or a tree of "
                f"them, such as {_EXAMPLES[kind]}"
            )
    pairs: list[tuple[Any, Any]] = []
    _descend(pairs, tree, specs, name, (), is_spec)
    return pairs, structure


def map_with_specs(
    function: Callable[[Any, Any], Any],
    tree: Any,
    specs: Any,
    name: str,
    is_spec: Callable[[Any], bool] = is_partition_spec,
    kind: str = "PartitionSpec",
) -> Any:
    """Return the tree of ``function(leaf, spec)``; an error of it gets a note of the leaf's path.

    The other arguments and what is raised are those of ``specs_for``.
    """
    pairs, structure = specs_for(tree, specs, name, is_spec, kind)
    leaves = []
    for leaf, spec in pairs:
        try:
            leaves.append(function(leaf, spec))
        except Exception as error:
            note_path(error, tree, len(leaves))
            raise
    return jax.tree.unflatten(structure, leaves)


def path_of(tree: Any, number: int) -> str:
    """Return the path of the leaf with a number as it is written in Python, such as ``['a'][0]``.

    A function of its own, because paths are needed for messages only and take a while to make.
    """
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)[0]
    return keystr(paths[number][0])


def note_path(error: Exception, tree: Any, number: int) -> None:
    """Add to an error at which leaf of the tree it happened."""
    if path := path_of(tree, number):
        note = f"gda: at {path} of the tree"
        if note not in getattr(error, "__notes__", ()):  # one that is raised again has it
            error.add_note(note)


def _descend(
    pairs: list[tuple[Any, Any]],
    tree: Any,
    specs: Any,
    name: str,
    path: Any,
    is_spec: Callable[[Any], bool],
) -> None:
    if is_spec(specs):
        pairs += [(leaf, specs) for leaf in jax.tree.leaves(tree, is_leaf=is_container)]
        return
    where = f"{name}{keystr(path)}"
    if specs is None:
        if jax.tree.leaves(tree, is_leaf=is_container):
            raise ValueError(
                f"{where} is None, which says nothing of how to cut an array; write "
                "PartitionSpec() for one that every device holds whole"
            )
        return
    children, structure = jax.tree_util.tree_flatten_with_path(
        specs, is_leaf=lambda node: node is not specs
    )
    try:
        if is_container(tree):
            raise ValueError  # a pytree, but not here
        subtrees = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a prefix of the tree that it is for, but {where} is "
            f"{_node_text(specs)}, and the tree has {_node_text(tree)} there"
            f"{_difference(specs, tree, where)}"
        ) from None
    for (key, below), subtree in zip(children, subtrees, strict=True):
        _descend(pairs, subtree, below, name, (*path, *key), is_spec)


def _difference(specs: Any, tree: Any, where: str) -> str:
    """Say which keys only one of two dicts has."""
    if not (isinstance(specs, dict) and isinstance(tree, dict)):
        return ""
    missing = [repr(key) for key in tree if key not in specs]
    surplus = [repr(key) for key in specs if key not in tree]
    parts = [f"{where} has nothing for {join_some(missing)}"] if missing else []
    parts += [f"the tree has no {join_some(surplus)}"] if surplus else []
    return f": {', and '.join(parts)}" if parts else ""


def _node_text(node: Any) -> str:
    """Say what a node is, without what is below it."""
    kind = type(node).__name__
    if is_container(node):
        return f"a {kind}"
    if isinstance(node, dict):
        if len(node) > _MOST_KEYS:
            return f"a {kind} of {len(node)} keys"
        return f"a {kind} with the keys {list(node)}"
    if isinstance(node, list | tuple):
        return f"a {kind} of {len(node)}"
    if isinstance(node, jax.Array):
        return "an array"
    return "None" if node is None else f"a {kind}"

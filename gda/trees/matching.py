"""Two trees side by side: the value in one for each leaf of the other.

They match by key, not by class, so that a dict matches a dataclass of the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

from gda.layout.text import join_some
from gda.storage.sources import is_group
from gda.trees.leaves import is_container, is_leaf, path_of

# A model has hundreds; a message names those that differ in any case.
_MOST_KEYS = 8

Keys = tuple[Any, ...]

NOTHING: Any = object()


class Pair(NamedTuple):
    """A leaf of a tree and its partner in the other tree; one of them may be ``NOTHING``."""

    keys: Keys  # the path of the leaf
    leaf: Any
    found: Any
    parting: tuple[Keys, Any, Any] | None = None  # without a partner: where the trees differ


def pairs_of(
    tree: Any, other: Any, covers: Callable[[Any, Any], bool], keys: Keys = ()
) -> Iterator[Pair]:
    """Yield a pair for every leaf of ``tree``, in order, and for every surplus leaf of ``other``.

    ``other`` may have mappings that JAX does not know, whose surplus leaves are ignored.
    ``covers(node, value)`` is True if the value is for all leaves of the node.
    """
    if covers(tree, other):
        yield from (Pair(path, leaf, other) for path, leaf in _leaves(tree, keys))
        return
    children = _children(tree)
    others = _of_group(other, children) if is_group(other) else _children(other)
    parting = (keys, tree, other)
    for name, (below, child) in children.items():
        path = (*keys, *below)
        if name in others:
            yield from pairs_of(child, others[name][1], covers, path)
        else:
            yield from (Pair(path, leaf, NOTHING, parting) for path, leaf in _leaves(child, path))
    for name, (below, child) in others.items():
        if name not in children:
            path = (*keys, *below)
            yield from (Pair(path, NOTHING, found, parting) for path, found in _leaves(child, path))


def check_match(pairs: Sequence[Pair], name: str, must: str, hint: str = "") -> None:
    """Raise ``ValueError`` that names all leaves without a partner, if there are any.

    ``name`` is the argument that is the other tree, which ``must``, for instance, be a prefix of
    the tree. The ``hint`` is for ``None`` in it.
    """
    partings = [pair.parting for pair in pairs if pair.parting is not None]
    if not partings:
        return
    keys, tree, other = partings[0]
    others = [pair for pair in pairs if pair.keys != keys]
    missing = [keystr(pair.keys) for pair in others if pair.found is NOTHING]
    surplus = [keystr(pair.keys) for pair in others if pair.leaf is NOTHING]
    parts = [f"{name} has nothing for {join_some(missing)}"] if missing else []
    parts += [f"the tree has no {join_some(surplus)}"] if surplus else []
    raise ValueError(
        f"{name} must {must}, but {name}{keystr(keys)} is {_node_text(other)}, and the tree has "
        f"{_node_text(tree)} there{': ' if parts else ''}{', and '.join(parts)}"
        f"{hint if other is None else ''}"
    )


def targets_for(tree: Any, targets: Any) -> list[Any]:
    """Return the target of each leaf of ``tree``, in order; ``ValueError`` as ``gda.store``."""
    pairs = list(pairs_of(tree, targets, lambda node, _: is_leaf(node)))
    check_match(pairs, "targets", "have the structure of the tree")
    first_with: dict[int, int] = {}
    for number, pair in enumerate(pairs):
        first = first_with.setdefault(id(pair.found), number)
        if first != number:
            raise ValueError(
                f"the arrays at {path_of(tree, first)} and {path_of(tree, number)} have the same "
                "target, so the second would overwrite the first; give each a target of its own"
            )
    return [pair.found for pair in pairs]


def names_of(keys: Keys) -> list[str]:
    """Return the names on the way to a leaf as texts."""
    return [str(name_of(key)) for key in keys]


def name_of(key: Any) -> Any:
    """Return the name of a child, without the kind of its node."""
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return name
        case SequenceKey(idx=number):
            return number
        case GetAttrKey(name=name):
            return name
        case _:
            return str(key)


def _children(node: Any) -> dict[Any, tuple[Keys, Any]]:
    """Return the children of a node by name; for a leaf, itself by a unique name."""
    if is_container(node):
        return {object(): ((), node)}
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    names = [name_of(*keys) if keys else object() for keys, _ in below]
    if len(set(names)) < len(names):  # a class may give several the same name
        names = range(len(names))
    return dict(zip(names, below, strict=True))


def _of_group(group: Any, names: Iterable[Any]) -> dict[Any, tuple[Keys, Any]]:
    return {name: ((), group[str(name)]) for name in names if str(name) in group}


def _leaves(node: Any, keys: Keys) -> list[tuple[Keys, Any]]:
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_container)[0]
    return [((*keys, *rest), leaf) for rest, leaf in below]


def _node_text(node: Any) -> str:
    """Return a text for a node, without its children."""
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

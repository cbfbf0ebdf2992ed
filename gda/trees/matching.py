"""Two trees side by side: for each leaf of one, the value in the other, a spec or a target.

They match by the text of their keys, not by class. So a dict matches a dataclass of the same
fields, and the ``"0"`` of an Orbax run matches the ``0`` of an ``nnx.List``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.layout.text import join_some
from gda.mesh import MESHES, memory_kind_of, mesh_and_spec, mesh_of_all
from gda.multihost.descriptions import leaf_path
from gda.trees.leaves import (
    Keys,
    held_by,
    is_container,
    is_leaf,
    is_value,
    name_of,
    names_of,
    opened,
    path_of,
    with_paths,
)

NOTHING: Any = object()


class Pair(NamedTuple):
    """A leaf of a tree and its partner in the other tree; one of them may be ``NOTHING``."""

    keys: Keys  # the path of the leaf
    leaf: Any
    found: Any


def pairs_of(
    tree: Any, other: Any, covers: Callable[[Any, Any], bool], keys: Keys = ()
) -> Iterator[Pair]:
    """Yield a pair for every leaf of ``tree``, in order, and for every surplus leaf of ``other``.

    ``covers(node, value)`` is True if the value is for all leaves of the node.
    """
    if covers(tree, other):
        yield from (Pair(path, leaf, other) for path, leaf in _leaves(tree, keys))
        return
    children, others = _children(tree), _children(other)
    for name, (below, child) in children.items():
        path = (*keys, *below)
        if name in others:
            yield from pairs_of(child, others[name][1], covers, path)
        else:
            yield from (Pair(path, leaf, NOTHING) for path, leaf in _leaves(child, path))
    for name, (below, child) in others.items():
        if name not in children:
            path = (*keys, *below)
            yield from (Pair(path, NOTHING, found) for path, found in _leaves(child, path))


def check_match(pairs: Sequence[Pair], name: str, must: str) -> None:
    """Raise ``ValueError`` that names all leaves without a partner, if there are any.

    ``name`` is the argument that is the other tree.
    """
    missing = [leaf_path(pair.keys) or "the tree" for pair in pairs if pair.found is NOTHING]
    surplus = [leaf_path(pair.keys) or "leaf" for pair in pairs if pair.leaf is NOTHING]
    parts = [f"{name} has nothing for {join_some(missing)}"] if missing else []
    parts += [f"the tree has no {join_some(surplus)}"] if surplus else []
    if parts:
        raise ValueError(f"{name} must {must}, but {', and '.join(parts)}")


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


# A function of a leaf's path, such as 'layers/0/weight', and its shape, dtype, ndim and size: for
# PRNG keys those of the keys, not of their data.
SpecOf = Callable[[str, jax.ShapeDtypeStruct], PartitionSpec]


class EntryKind(NamedTuple):
    """The leaves that a tree of specs may have."""

    name: str  # of the class, for messages
    classes: tuple[type, ...]
    written: str  # a leaf in Python, with {} for the entries of a spec

    def has(self, node: object) -> bool:
        return isinstance(node, self.classes)


SPECS = EntryKind("PartitionSpec", (PartitionSpec,), "PartitionSpec({})")
SPECS_OR_NONE = SPECS._replace(classes=(PartitionSpec, NoneType))
SHARDINGS = EntryKind(
    "NamedSharding", (NamedSharding, SingleDeviceSharding), "NamedSharding(mesh, PartitionSpec({}))"
)


def check_kind(specs: Any, name: str, kind: EntryKind) -> None:
    """Raise ``TypeError`` if a leaf of ``specs``, the argument ``name``, is of another kind."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(specs, is_leaf=kind.has)[0]:
        if not kind.has(leaf):
            entries = repr(leaf) if isinstance(leaf, str) else "'x', None"
            raise TypeError(
                f"{leaf_path(path, name)} is {leaf!r:.80}, not a {kind.name}; {name} is a "
                f"{kind.name} or a tree of them, such as {kind.written.format(entries)}"
            )


class Prefix(NamedTuple):
    """The value that a prefix of a tree, the argument ``name``, gives to each leaf."""

    name: str
    kind: EntryKind
    pairs: list[Pair]  # each leaf with its entry, and those without a partner

    def of_each_leaf(self) -> list[Any]:
        """Return the entry of each leaf, or raise ``ValueError``; values need none."""
        of_arrays = [pair for pair in self.pairs if not is_value(pair.leaf)]
        must = f"be a prefix of the tree that it is for, with a {self.kind.name} for each branch"
        check_match(of_arrays, self.name, must)
        return [None if pair.found is NOTHING else pair.found for pair in self.pairs]


def prefix_of(tree: Any, specs: Any, name: str, kind: EntryKind = SPECS) -> Prefix:
    """Return the entry of ``specs`` for each leaf of ``tree``; ``TypeError`` as ``check_kind``."""
    specs = opened(specs)
    check_kind(specs, name, kind)
    return Prefix(name, kind, list(pairs_of(tree, specs, lambda _, node: kind.has(node))))


def map_with_specs(
    function: Callable[[Any, Any], Any], tree: Any, specs: Any, name: str, kind: EntryKind = SPECS
) -> Any:
    """Return the tree of ``function(leaf, spec)``; its error gets the leaf's path."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_container)
    # One spec for all is the usual case of a batch, in every step.
    is_one = kind.has(specs)
    found = [specs] * len(leaves) if is_one else prefix_of(tree, specs, name, kind).of_each_leaf()
    results = with_paths(tree, function, leaves, found)
    return jax.tree.unflatten(structure, results)


def specs_per_leaf(
    tree: Any,
    mesh: Any,
    specs: Any,
    shaped: Callable[[Any], jax.ShapeDtypeStruct | None],
    name: str = "specs",
) -> Prefix:
    """Return the spec of each leaf, or its sharding if shardings are given instead of specs.

    Arguments and errors are those of ``load_tree``. ``shaped`` returns the leaf that a function
    ``specs`` sees, or ``None`` to skip it. ``name`` is the argument that is ``specs``.
    """
    if specs is not None and mesh is None:
        raise TypeError(
            f"{name} {specs!r:.80} was given without a mesh; pass the mesh too, or a NamedSharding"
        )
    over: Any = mesh
    if isinstance(mesh, MESHES) == (specs is None):
        mesh_and_spec(over, specs, MESHES)  # raises: one is missing, or surplus
    if specs is None:
        return prefix_of(tree, mesh, "mesh", SHARDINGS)
    # A module that can be called may be a tree of the specs of its parameters.
    if not callable(specs) or any(map(SPECS.has, jax.tree.leaves(specs, is_leaf=SPECS.has))):
        return prefix_of(tree, specs, name)

    function: Any = specs

    def by_function(pair: Pair) -> Pair:
        leaf = None if is_value(pair.leaf) else shaped(pair.leaf)
        if leaf is None:
            return pair._replace(found=NOTHING)
        path = "/".join(names_of(pair.keys))
        spec = function(path, leaf)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"{name}({path!r}, leaf) returned {spec!r:.80}, not a PartitionSpec")
        return pair._replace(found=spec)

    pairs = list(pairs_of(tree, None, lambda *_: True))
    return Prefix(name, SPECS, with_paths(tree, by_function, pairs))


def mesh_and_spec_of(
    mesh: Any, found: PartitionSpec | Any, leaf: Any = None
) -> tuple[Any, PartitionSpec | None]:
    """Return mesh and spec of an entry of ``specs_per_leaf``, or a sharding and ``None``.

    A leaf that stays in another memory than the default has a sharding too.
    """
    if not isinstance(found, PartitionSpec):
        return found, None
    sharding = getattr(held_by(leaf), "sharding", None)
    kind = None if sharding is None else memory_kind_of(sharding)
    if kind is None:
        return mesh, found
    return NamedSharding(mesh, found, memory_kind=kind), None


def mesh_named_by(mesh: Any) -> Mesh | None:
    """Return the mesh, or one of all devices of a tree of shardings; ``None`` if it has none."""
    if isinstance(mesh, Mesh):
        return mesh
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(mesh, is_leaf=SHARDINGS.has):
        if SHARDINGS.has(leaf) and isinstance(getattr(leaf, "mesh", None), Mesh | None):
            devices |= leaf.device_set
    return mesh_of_all(devices)


def _children(node: Any) -> dict[Any, tuple[Keys, Any]]:
    """Return the children of a node by the text of their keys; a leaf by a unique name."""
    if is_container(node):
        return {object(): ((), node)}
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    names: Sequence[Any] = [str(name_of(*keys)) if keys else object() for keys, _ in below]
    if len(set(names)) < len(names):  # a class may give several the same name
        names = range(len(names))
    return dict(zip(names, below, strict=True))


def _leaves(node: Any, keys: Keys) -> list[tuple[Keys, Any]]:
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_container)[0]
    return [((*keys, *rest), leaf) for rest, leaf in below]


def makes_plain(plain: bool | None, mesh: Any, pad: bool) -> bool:
    """Return True if a call makes ``jax.Array``s: by default, if shardings are given."""
    if plain and pad:
        raise ValueError(
            "plain=True and pad=True exclude each other: no jax.Array has the shape of a padded one"
        )
    return not (pad or mesh is None or isinstance(mesh, Mesh)) if plain is None else plain

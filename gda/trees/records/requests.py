"""The request of a restore or a pull: the leaves that it returns, each with its type and layout.

They come from ``like``, a tree of arrays and values, or from a mesh and specs. Every mismatch with
the recorded tree is found here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from gda.arrays.dtypes import is_extended, is_weak
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.layout.text import join_some, near_name
from gda.mesh import MeshAndSpec, memory_kind_of, mesh_and_spec
from gda.multihost.descriptions import leaf_path
from gda.storage.casts import Origin, cast
from gda.storage.stores.errors import repr_of
from gda.trees.leaves import held_by, is_container
from gda.trees.matching import NOTHING, makes_plain, mesh_and_spec_of, specs_per_leaf
from gda.trees.per_process import PerProcess
from gda.trees.plain import to_jax
from gda.trees.records.arrivals import (
    Arrival,
    ContainerClass,
    kept_dtype,
    number_arrival,
    sharded_arrival,
    uncommitted_arrival,
)
from gda.trees.records.recorded_tree import (
    ArrayLeaf,
    Leaf,
    Path,
    PerProcessLeaf,
    RecordedTree,
    ValueLeaf,
    checked_path,
    format_path,
    key_dtype,
    key_ndim,
    path_in,
    path_of_keys,
    saved_type,
    unflatten,
)

T = TypeVar("T")


@dataclass
class Request:
    """The leaves that a restore or a pull returns, as its arguments of these names give them."""

    like: Any
    mesh: Any
    specs: Any
    at: Any
    partial: bool
    pad: bool
    plain: bool | None
    cast: bool = False
    keeps_missing: bool = False
    merge: Callable[[list[Any], int], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        self.at = checked_path(self.at)
        if isinstance(self.like, Mesh | Sharding):
            raise TypeError(
                f"like is the layout {self.like!r:.80}, and not a tree; pass mesh= and specs="
            )
        if self.like is None:
            for_like = {"cast": self.cast, "partial": self.partial, "missing": self.keeps_missing}
            if given := [name for name, value in for_like.items() if value]:
                raise TypeError(f"{given[0]} was given without like; pass like= too")
            for_mesh = {"pad": self.pad, "plain": self.plain}
            if self.mesh is None and (given := [name for name, value in for_mesh.items() if value]):
                raise TypeError(
                    f"{given[0]} was given without a mesh; pass mesh= and specs=, or like="
                )
        layouts = self.mesh if self.like is None else None  # with like, each leaf is of its kind
        self.plain = makes_plain(self.plain, layouts, self.pad)
        if self.plain:
            self.like = to_jax(self.like)

    def match(self, tree: RecordedTree) -> RequestedTree:
        """Return the requested part of a recorded tree; raise unless they fit each other."""
        request = replace(self, at=path_in(tree.structure, self.at))
        if request.like is None:
            return RequestedTree(request, tree, _leaves_by_layouts(request, tree))
        return _requested_like(request, tree)


class RequestedTree:
    """The part of a recorded tree that a request returns.

    Attributes:
      arrivals: its arrays, in order.
      per_process: its values that each process has by itself.
      values: these values, by path, for the caller to fill.
      difference: the leaves that only ``like`` has or only the recorded tree; empty if none.
    """

    def __init__(
        self,
        request: Request,
        tree: RecordedTree,
        leaves: list[Arrival | Any],
        definition: Any = None,
        difference: str = "",
    ) -> None:
        self._request, self._structure, self.difference = request, tree.structure, difference
        self._leaves, self._definition = leaves, definition  # that of ``like``, if there is one
        self.arrivals = [*dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Arrival))]
        self.per_process = [leaf for leaf in leaves if isinstance(leaf, PerProcessLeaf)]
        self.values: dict[Path, PerProcess] = {}

    @property
    def layouts(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The layouts of its arrays, by path, which must be the same in all processes."""
        return {"/".join(map(str, each.record.path)): each.shared_layout for each in self.arrivals}

    def tree(self) -> Any:
        """Return the tree, when its arrays have arrived and ``values`` has the others."""
        values = [
            self.values[leaf.path]
            if isinstance(leaf, PerProcessLeaf)
            else leaf.value
            if isinstance(leaf, Arrival)
            else leaf
            for leaf in self._leaves
        ]
        if self._definition is not None:
            return jax.tree.unflatten(self._definition, values)
        tree = unflatten(self._structure, values, self._request.at)
        return to_jax(tree) if self._request.plain else tree


# Leaves by the layouts that a mesh and specs give.


def _shaped(leaf: Leaf) -> jax.ShapeDtypeStruct | None:
    if not isinstance(leaf, ArrayLeaf) or leaf.kind == "number":
        return None
    return jax.ShapeDtypeStruct(*saved_type(leaf))


class _GivenLayouts(NamedTuple):
    """The layouts that a mesh and specs give to leaves of a recorded tree, by path."""

    name: str  # of the argument that gives them; empty if none does
    places: dict[Path, MeshAndSpec]
    surplus: list[str]  # a message about layouts for leaves that the recorded tree does not have


def _layouts_given(request: Request, tree: RecordedTree) -> _GivenLayouts:
    mesh, specs = request.mesh, request.specs
    if mesh is None and specs is None:
        return _GivenLayouts("", {}, [])
    given = unflatten(tree.structure, tree.leaves, request.at)
    name, _, pairs = specs_per_leaf(given, mesh, specs, _shaped)
    places = {
        pair.leaf.path: mesh_and_spec(*mesh_and_spec_of(mesh, pair.found))
        for pair in pairs
        if pair.leaf is not NOTHING and pair.found is not NOTHING
    }
    surplus = [leaf_path(pair.keys) for pair in pairs if pair.leaf is NOTHING]
    differences = [f"it has no {join_some(surplus)}, which {name} has"] if surplus else []
    return _GivenLayouts(name, places, differences)


def _leaves_by_layouts(request: Request, tree: RecordedTree) -> list[Arrival | Any]:
    """Return an arrival or a value for every leaf at the path; ``None`` for the others."""
    at, (name, places, problems) = request.at, _layouts_given(request, tree)
    results: list[Arrival | Any] = []
    made: dict[Any, Arrival] = {}
    unfit: list[tuple[Path, str]] = []
    lacking: list[str] = []
    for leaf in tree.leaves:
        if leaf.path[: len(at)] != at:
            results.append(None)
            continue
        try:
            if isinstance(leaf, ValueLeaf):
                results.append(leaf.value)
            elif isinstance(leaf, PerProcessLeaf):
                results.append(_of_as_many(request, leaf))
            elif leaf.kind == "number":
                results.append(number_arrival(leaf, leaf.dtype))
            elif name and leaf.path not in places:
                lacking.append(format_path(leaf.path))
            else:
                place = places.get(leaf.path)
                make = partial(_arrival_at, leaf, place, request.pad)
                results.append(_tied(made, tree.place_of(leaf), (leaf.kind, place), make))
        except (ValueError, TypeError) as error:
            unfit.append((leaf.path, str(error)))
    problems += [f"{name} has nothing for {join_some(lacking)}"] if lacking else []
    problems += _reasons(unfit)
    if problems:
        raise ValueError(f"{tree.what} does not fit{name and ' ' + name}: {join_some(problems)}")
    return results


def _tied(made: dict[Any, T], place: Any, key: Any, make: Callable[[], T]) -> T:
    """Return the result of ``make``: one for all leaves with the same place in files and key."""
    if place is None:
        return make()
    if (place, key) not in made:
        made[place, key] = make()
    return made[place, key]


def _of_as_many(request: Request, leaf: PerProcessLeaf) -> PerProcessLeaf:
    """Return the leaf; raise if the number of processes has changed and no ``merge`` is given."""
    saved, count = len(leaf.files), jax.process_count()
    if saved != count and request.merge is None:
        raise ValueError(
            f"it has the values of {saved} processes, and this program has {count}; pass merge=, a "
            f"function that takes the list of the {saved} values and {count}, and returns {count} "
            "values"
        )
    return leaf


def _arrival_at(leaf: ArrayLeaf, place: MeshAndSpec | None, pad: bool) -> Arrival:
    # A NumPy array stays one where JAX does not have its dtype.
    if place is not None and (leaf.kind != "numpy" or kept_dtype(leaf.dtype) == leaf.dtype):
        # jax.random takes no container of keys.
        is_bare = leaf.key_impl is not None and leaf.kind == "jax.Array"
        container = None if is_bare else GlobalArray
        return sharded_arrival(leaf, leaf.dtype, place, container, pad, leaf.weak_type)
    if leaf.key_impl is not None:  # NumPy has no keys
        return uncommitted_arrival(leaf, leaf.dtype, None, stays_weak=False)
    return Arrival(leaf, leaf.dtype)


def _reasons(problems: Sequence[tuple[Path, str]]) -> list[str]:
    """Return every reason once, with its paths."""
    paths: dict[str, list[str]] = {}
    for path, reason in problems:
        paths.setdefault(reason, []).append(format_path(path))
    return [f"at {join_some(places)}, {reason}" for reason, places in paths.items()]


# Leaves as those of ``like``.


def _requested_like(request: Request, tree: RecordedTree) -> RequestedTree:
    """Return an arrival or a value for every leaf of ``like``."""
    at = request.at
    wanted, definition = jax.tree_util.tree_flatten_with_path(request.like, is_leaf=is_container)
    below = [leaf for leaf in tree.leaves if leaf.path[: len(at)] == at]
    recorded = {leaf.path[len(at) :]: leaf for leaf in below}
    paths = _paths_in(recorded, [path_of_keys(keys) for keys, _ in wanted])
    keeps_missing = request.keeps_missing
    expected = [path for path in paths if path in recorded] if keeps_missing else paths
    if paths and not expected:
        raise ValueError(
            f"{tree.what} has no leaf of like, so nothing would be restored; check at= and the "
            "keys of like"
        )
    _check_same_leaves(request, tree, expected, recorded)
    name, places, surplus = _layouts_given(request, tree)
    if surplus and not keeps_missing:
        raise ValueError(f"{tree.what} does not fit {name}: {surplus[0]}")
    results: list[Arrival | Any] = []
    made: dict[Any, Any] = {}
    problems: list[tuple[Path, str]] = []
    for path, (_, like) in zip(paths, wanted, strict=True):
        try:
            if path not in recorded:
                results.append(_kept_leaf(like))
                continue
            place, leaf = places.get(at + path), recorded[path]
            make = partial(_leaf_like, request, tree, leaf, like, place)
            key = id(held_by(like)), type(like), place
            results.append(_tied(made, tree.place_of(leaf), key, make))
        except (ValueError, TypeError) as error:
            problems.append((at + path, str(error)))
    if problems:
        raise ValueError(f"{tree.what} does not match like: {join_some(_reasons(problems))}")
    kept = [format_path(at + path) for path in paths if path not in recorded]
    taken = {at + path for path in paths}
    omitted = [format_path(leaf.path) for leaf in tree.leaves if leaf.path not in taken]
    notes = [f"like's own value stays at {join_some(kept)}"] if kept else []
    notes += [f"not restored: {join_some(omitted)}"] if omitted else []
    return RequestedTree(request, tree, results, definition, "; ".join(notes))


def _paths_in(recorded: Collection[Path], paths: Sequence[Path]) -> list[Path]:
    """Return the recorded path for each path; keys may differ in type, as ``0`` and ``"0"``."""
    rest = {*recorded} - {*paths}
    by_text = {tuple(map(str, path)): path for path in rest}
    return [
        path if path in recorded else by_text.pop(tuple(map(str, path)), path) for path in paths
    ]


def _kept_leaf(like: Any) -> Any:
    array = held_by(like)
    is_deleted = isinstance(array, jax.Array) and array.is_deleted()
    if is_deleted or isinstance(array, jax.ShapeDtypeStruct):
        what = "a deleted array" if is_deleted else "a jax.ShapeDtypeStruct"
        raise ValueError(
            f"it has no such leaf, and like has {what}, which has no value to keep; give like an "
            "array there"
        )
    return like


def _check_same_leaves(
    request: Request, tree: RecordedTree, paths: Sequence[Path], recorded: dict[Path, Leaf]
) -> None:
    at, expected = request.at, set(paths)
    missing = [format_path(at + path) for path in paths if path not in recorded]
    surplus = [format_path(at + path) for path in recorded if path not in expected]
    problems = []
    if missing:
        near = near_name(missing[0], surplus) if request.partial else ""  # else it is listed below
        problems.append(f"it has no {join_some(missing)}{tree.missing_argument}{near}")
    if surplus and not request.partial:
        problems.append(f"like has no {join_some(surplus)} (partial=True omits them)")
    if problems:
        raise ValueError(f"{tree.what} does not match like: {'; '.join(problems)}")


def _leaf_like(
    request: Request, tree: RecordedTree, leaf: Leaf, like: Any, place: MeshAndSpec | None
) -> Any:
    if isinstance(leaf, PerProcessLeaf):
        if not isinstance(like, PerProcess):
            raise ValueError(
                f"it has a value for each process, and like has {_in_words(like)}; put a "
                "gda.checkpoint.PerProcess there"
            )
        return _of_as_many(request, leaf)
    # A step count is a number until the first jitted step makes it an array.
    if isinstance(leaf, ValueLeaf):
        if _is_array_for(like, leaf.value):
            return _array_of_number(request, tree, leaf, like, place)
        return _value_like(leaf.value, like)
    if leaf.shape == () and _is_number_of(leaf.dtype, like):
        return Arrival(leaf, leaf.dtype, wrap=lambda array: array.item())
    container: ContainerClass = GlobalArray if is_container(like) else None
    if isinstance(like, PaddedArray):
        container = PaddedArray
    array = like if container is None else like.array
    pad = request.pad or container is PaddedArray
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(f"it has an array of shape {leaf.shape}, and like has {_in_words(like)}")
    is_key = is_extended(array.dtype)
    if is_key != (leaf.key_impl is not None):
        kinds = ("PRNG keys", f"an array of {leaf.dtype}")
        raise ValueError(
            f"it has {kinds[not leaf.key_impl]}, and like has {kinds[not is_key]}; "
            "convert with jax.random.wrap_key_data or key_data"
        )
    shape = leaf.shape[: len(leaf.shape) - key_ndim(leaf.key_impl)]
    # For a ``GlobalArray``, the shape of its array: a tree function may have put anything into it.
    wanted_shape = tuple(like.shape if container is PaddedArray else array.shape)
    if wanted_shape != shape:
        raise ValueError(f"it has shape {shape}, and like has {wanted_shape}")
    dtype = leaf.dtype
    if leaf.key_impl is not None:
        if array.dtype != key_dtype(leaf.key_impl):
            raise ValueError(f"it has keys of {leaf.key_impl!r}, and like has {array.dtype}")
    elif (wanted := np.dtype(array.dtype).newbyteorder("=")) != leaf.dtype:
        if not request.cast:
            raise TypeError(
                f"it has dtype {leaf.dtype}, and like has {wanted}; pass {tree.cast_argument}"
            )
        dtype = wanted
    if isinstance(array, np.generic):
        return number_arrival(leaf, dtype)
    if isinstance(array, np.ndarray):
        return Arrival(leaf, dtype)
    sharding = getattr(array, "sharding", None)
    if place is not None:
        if place.memory_kind is None and sharding is not None:
            place = place._replace(memory_kind=memory_kind_of(sharding))
        sharding = place
    if sharding is None:
        raise ValueError(
            "like has no sharding for the array; give its ShapeDtypeStruct one, or pass mesh and "
            "specs"
        )
    if isinstance(sharding, SingleDeviceSharding) and not getattr(array, "committed", True):
        return uncommitted_arrival(leaf, dtype, container, is_weak(array))
    return sharded_arrival(leaf, dtype, sharding, container, pad, is_weak(array))


def _value_like(value: Any, like: Any) -> Any:
    if isinstance(like, np.str_ | np.bytes_):
        like = like.item()
    kind = type(value)
    if kind is type(like):
        return value
    raise ValueError(
        f"it has the {kind.__name__} {repr_of(value):.40}, and like has {_in_words(like)}; put a "
        f"value of type {kind.__name__} there"
    )


def _is_array_for(like: Any, value: Any) -> bool:
    """Return True if ``like`` is an array or a number of NumPy that a Python number can become."""
    array = held_by(like)
    dtype = getattr(array, "dtype", None)
    if isinstance(value, str | bytes) or getattr(array, "shape", None) != () or is_extended(dtype):
        return False
    return _is_number_of(dtype, value)


def _is_number_of(dtype: Any, value: Any) -> bool:
    """Return True if a value has the type of Python that elements of a dtype become."""
    return type(np.zeros((), dtype).item()) is type(value)


def _array_of_number(
    request: Request, tree: RecordedTree, leaf: ValueLeaf, like: Any, place: MeshAndSpec | None
) -> Any:
    dtype = np.dtype(held_by(like).dtype)
    arrival = _leaf_like(request, tree, ArrayLeaf(leaf.path, "number", (), dtype), like, place)
    number = np.asarray(leaf.value)
    if number.dtype.hasobject:  # of more than 64 bits
        raise ValueError(f"it has the int {repr_of(leaf.value):.40}, which {dtype} cannot hold")
    arrival.blocks = [cast(number, dtype, Origin.of_block("the saved number", ()))]
    arrival.finish()
    return arrival.value


def _in_words(like: Any) -> str:
    shape = getattr(like, "shape", None)
    if shape is None:
        return f"the {type(like).__name__} {like!r:.40}"
    return f"an array of shape {tuple(shape)}"

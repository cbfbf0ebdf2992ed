"""The leaves that a restore or a pull returns, each with its type and layout.

They come from ``like``, a tree of arrays and values, or from a mesh and specs. Every mismatch with
the recorded tree is found here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import keystr

from gda.arrays.construction.placing import LocalBlocks, local_blocks_over
from gda.arrays.dtypes import KEPT_DTYPES, is_extended
from gda.arrays.global_array import GlobalArray
from gda.arrays.padded_array import PaddedArray
from gda.arrays.weak_types import is_weak, weakly_typed
from gda.layout.indices import start_of
from gda.layout.spec import Shape, check_spec
from gda.layout.text import join_some
from gda.mesh import MeshAndSpec, memory_kind_of, mesh_and_spec, mesh_grid
from gda.multihost.settings import own_settings
from gda.storage.casts import DoesNotFitError, Origin, cast
from gda.storage.stores.errors import repr_of
from gda.trees.leaves import held_by, is_container
from gda.trees.matching import NOTHING
from gda.trees.records.recorded_leaves import ArrayLeaf, Leaf, Path, RecordedTree, ValueLeaf
from gda.trees.records.structure import format_path, path_of_keys, unflatten
from gda.trees.specs import mesh_and_spec_of, specs_per_leaf

# The container of an array; ``None`` for a ``jax.Array`` without one.
ContainerClass = type[GlobalArray] | type[PaddedArray] | None


@dataclass(frozen=True, slots=True)
class RestoredLeaf:
    """An array of the checkpoint, and the value to make from it."""

    saved: ArrayLeaf
    dtype: np.dtype[Any]  # to restore; for keys that of their data
    plan: LocalBlocks | None  # the blocks that this process needs; None for a NumPy array
    wrap: Callable[[Any], Any]  # makes the value from the jax.Array or the NumPy array

    def value_of(self, blocks: Sequence[np.ndarray[Any, Any]]) -> Any:
        """Return the value, made of the blocks that this process needs, of the saved dtype."""
        plan, dtype = self.plan, self.dtype
        if dtype != self.saved.dtype:
            rank = len(self.saved.shape)
            starts = [(0,) * rank] if plan is None else [start_of(index) for index in plan.distinct]
            blocks = [
                cast(block, dtype, Origin.of_block("the saved array", start))
                for block, start in zip(blocks, starts, strict=True)
            ]
        if plan is None:
            return self.wrap(blocks[0])
        return self.wrap(plan.place(blocks, dtype, lambda: np.zeros(plan.grid.shard_shape, dtype)))


def saved_type(leaf: ArrayLeaf) -> tuple[Shape, Any]:
    """Return shape and dtype of the saved array; for keys not those of their data."""
    if leaf.key_impl is None:
        return leaf.shape, leaf.dtype
    return leaf.shape[: -_key_ndim(leaf.key_impl)], _key_dtype(leaf.key_impl)


class _Mismatch(Exception):  # noqa: N818
    """A reason why a leaf does not fit."""


def leaves_like(
    tree: RecordedTree,
    like: Any,
    at: Path,
    partial: bool,
    casts: bool,
    layout: Layout | None,
    pad: bool,
    keeps_missing: bool = False,
) -> tuple[list[RestoredLeaf | Any], Any]:
    """Return a leaf to restore or a value for every leaf of ``like``, and its structure.

    With ``keeps_missing``, a leaf that is not recorded is the value.
    """
    wanted, definition = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_container)
    saved = {path[len(at) :]: leaf for path, leaf in tree.leaves_at(at).items()}
    paths = [path_of_keys(keys) for keys, _ in wanted]
    expected = [path for path in paths if path in saved] if keeps_missing else paths
    if paths and not expected:
        raise ValueError(
            f"{tree.what} has no leaf of like, so nothing would be restored; check at= and the "
            "keys of like"
        )
    _check_same_leaves(tree, expected, saved, partial, at)
    if layout is not None and layout.surplus and not keeps_missing:
        raise ValueError(join_some(layout.surplus))
    results: list[RestoredLeaf | Any] = []
    problems: list[tuple[Path, str]] = []
    are_dtypes = True
    for path, (_, leaf) in zip(paths, wanted, strict=True):
        try:
            if path not in saved:
                results.append(_leaf_of_like(leaf))
                continue
            place = None if layout is None else layout.place_of(path)
            results.append(_leaf_like(tree, saved[path], leaf, casts, place, pad))
        except (_Mismatch, ValueError, TypeError) as error:
            are_dtypes = are_dtypes and isinstance(error, TypeError)
            problems.append((at + path, str(error)))
    if problems:
        kind = TypeError if are_dtypes else ValueError
        raise kind(f"{tree.what} does not match like: {_listed(problems)}")
    return results, definition


def _leaf_of_like(leaf: Any) -> Any:
    """Return a leaf of ``like`` that the checkpoint does not have."""
    array = held_by(leaf)
    is_deleted = isinstance(array, jax.Array) and array.is_deleted()
    if is_deleted or isinstance(array, jax.ShapeDtypeStruct):
        what = "a deleted array" if is_deleted else "a jax.ShapeDtypeStruct"
        raise _Mismatch(
            f"it has no such leaf, and like has {what}, which has no value to keep; give like an "
            "array there"
        )
    return leaf


@dataclass(frozen=True)
class Layout:
    """The layouts that the arguments give to leaves of a checkpoint, by path."""

    places: dict[Path, MeshAndSpec]
    name: str  # of the argument that gives them, for messages
    surplus: list[str]  # messages about layouts for leaves that the checkpoint does not have

    def place_of(self, path: Path) -> MeshAndSpec | None:
        """Return the layout of a leaf, if it has one; also that of a value must fit the mesh."""
        place = self.places.get(path)
        if place is not None:
            mesh_grid((0,) * len(tuple(place.spec)), place.mesh, place.spec)  # 0 fits any spec
        return place


def _listed(problems: Sequence[tuple[Path, str]]) -> str:
    """Return every reason once, with its paths."""
    paths: dict[str, list[str]] = {}
    for path, reason in problems:
        paths.setdefault(reason, []).append(format_path(path))
    return join_some([f"at {join_some(places)}, {reason}" for reason, places in paths.items()])


def layout_of(mesh: Any, specs: Any, tree: RecordedTree, at: Path) -> Layout | None:
    """Return the layouts that the arguments give below a path; ``None`` if they give none."""
    if mesh is None and specs is None:
        return None
    if isinstance(specs, list | tuple) and all(
        entry is None or isinstance(entry, str | tuple) for entry in specs
    ):
        specs = PartitionSpec(*specs)
    leaves = unflatten(tree.structure, tree.leaves, at)
    prefix = specs_per_leaf(leaves, mesh, specs, _shaped)
    surplus = [keystr(pair.keys) for pair in prefix.pairs if pair.leaf is NOTHING]
    places = {
        pair.leaf.path[len(at) :]: mesh_and_spec(*mesh_and_spec_of(mesh, pair.found))
        for pair in prefix.pairs
        if pair.leaf is not NOTHING and pair.found is not NOTHING
    }
    said = f"{tree.what} has no {join_some(surplus)}, which {prefix.name} has"
    return Layout(places, prefix.name, [said] if surplus else [])


def _shaped(leaf: Leaf) -> jax.ShapeDtypeStruct | None:
    if isinstance(leaf, ValueLeaf) or leaf.kind == "number":
        return None
    return jax.ShapeDtypeStruct(*saved_type(leaf))


def leaves_of(
    tree: RecordedTree, at: Path, layout: Layout | None, pad: bool
) -> list[RestoredLeaf | Any]:
    """Return a leaf to restore or a value for every leaf; ``None`` outside of ``at``.

    Without a layout every array but keys becomes a NumPy array.
    """
    results: list[RestoredLeaf | Any] = []
    problems = [] if layout is None else [*layout.surplus]
    unfit: list[tuple[Path, str]] = []
    lacking = []
    for leaf in tree.leaves:
        path = leaf.path[len(at) :]
        if leaf.path[: len(at)] != at:
            results.append(None)
            continue
        try:
            place = None if layout is None else layout.place_of(path)
            if isinstance(leaf, ValueLeaf):
                results.append(leaf.value)
            elif leaf.kind == "number":
                results.append(_number_leaf(leaf, leaf.dtype))
            elif layout is not None and place is None:
                lacking.append(format_path(leaf.path))
            else:
                results.append(_leaf_of(leaf, place, pad))
        except (ValueError, TypeError) as error:
            unfit.append((leaf.path, str(error)))
    if unfit:
        problems.append(_listed(unfit))
    if lacking:
        problems.append(f"{layout and layout.name} has nothing for {join_some(lacking)}")
    if problems:
        what = f"{layout.name} does not fit {tree.what}" if layout else f"{tree.what} does not fit"
        raise ValueError(f"{what}: {join_some(problems)}")
    return results


def _leaf_of(leaf: ArrayLeaf, place: MeshAndSpec | None, pad: bool) -> RestoredLeaf:
    sharding = None if place is None else _sharding(leaf, place, pad)
    # A NumPy array stays one where JAX does not have its dtype.
    if sharding is not None and (leaf.kind != "numpy" or _kept(leaf.dtype) == leaf.dtype):
        # jax.random takes no container of keys.
        is_bare = leaf.key_impl is not None and leaf.kind == "jax.Array"
        container = None if is_bare else GlobalArray
        return _jax_leaf(leaf, leaf.dtype, sharding, container, pad, leaf.weak_type)
    if leaf.key_impl is not None:  # NumPy has no keys
        return _uncommitted_leaf(leaf, leaf.dtype, None, stays_weak=False)
    return RestoredLeaf(leaf, leaf.dtype, None, lambda array: array)


def _number_leaf(leaf: ArrayLeaf, dtype: np.dtype[Any]) -> RestoredLeaf:
    return RestoredLeaf(leaf, dtype, None, lambda array: array[()])


def _sharding(leaf: ArrayLeaf, place: MeshAndSpec, pad: bool) -> NamedSharding:
    """Return the sharding of an array; errors as for any array."""
    mesh, spec, memory_kind = place
    mesh_grid(saved_type(leaf)[0], mesh, spec, pad)
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)


def _check_same_leaves(
    tree: RecordedTree, paths: Sequence[Path], saved: dict[Path, Leaf], partial: bool, at: Path
) -> None:
    missing = [format_path(at + path) for path in paths if path not in saved]
    there = set(paths)
    surplus = [] if partial else [format_path(at + path) for path in saved if path not in there]
    said = []
    if missing:
        said.append(f"it has no {join_some(missing)}{tree.missing_argument}")
    if surplus:
        said.append(f"like has no {join_some(surplus)} (partial=True omits them)")
    if missing and (parts := _parts_with(paths, saved)):
        where = join_some([str([*at, *part]) for part in parts])
        said.append(f"it has all leaves of like with at= one of {where}")
    if said:
        raise ValueError(f"{tree.what} does not match like: {'; '.join(said)}")


def _parts_with(paths: Sequence[Path], saved: dict[Path, Leaf]) -> list[Path]:
    """Return the parts of a checkpoint with all paths of a tree: params, and their moments."""
    first = paths[0]
    parts = [path[: -len(first)] for path in saved if first and path[-len(first) :] == first]
    return sorted((part for part in parts if all(part + path in saved for path in paths)), key=len)


def _leaf_like(
    tree: RecordedTree, leaf: Leaf, like: Any, casts: bool, place: MeshAndSpec | None, pad: bool
) -> Any:
    # A step count is a number until the first jitted step makes it an array.
    if isinstance(leaf, ValueLeaf):
        if _is_array_for(like, leaf.value, casts):
            return _array_of_number(tree, leaf, like, place)
        return _value_like(leaf.value, like, casts)
    is_like = type(np.zeros((), leaf.dtype).item()) is type(like)
    if leaf.shape == () and _is_number(like) and (is_like or casts):
        return RestoredLeaf(leaf, leaf.dtype, None, partial(_item_like, like, casts))
    container = _container_of(like)
    array = like if container is None else like.array
    pad = pad or container is PaddedArray
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise _Mismatch(f"it has an array of shape {leaf.shape}, and like has {_said(like)}")
    is_key = is_extended(array.dtype)
    if is_key != (leaf.key_impl is not None):
        kinds = ("PRNG keys", f"an array of {leaf.dtype}")
        raise _Mismatch(
            f"it has {kinds[not leaf.key_impl]}, and like has {kinds[not is_key]}; "
            "convert with jax.random.wrap_key_data or key_data"
        )
    shape = leaf.shape[: len(leaf.shape) - _key_ndim(leaf.key_impl)]
    # Of other containers the array, because a tree function may have put anything into them.
    wanted_shape = tuple(like.shape if container is PaddedArray else array.shape)
    if wanted_shape != shape:
        raise _Mismatch(f"it has shape {shape}, and like has {wanted_shape}")
    dtype = leaf.dtype
    if leaf.key_impl is not None:
        if array.dtype != _key_dtype(leaf.key_impl):
            raise _Mismatch(f"it has keys of {leaf.key_impl!r}, and like has {array.dtype}")
    elif (wanted := np.dtype(array.dtype).newbyteorder("=")) != leaf.dtype:
        if not casts:
            raise TypeError(
                f"it has dtype {leaf.dtype}, and like has {wanted}; pass {tree.cast_argument}"
            )
        dtype = wanted
    if isinstance(array, np.generic):
        return _number_leaf(leaf, dtype)
    if isinstance(array, np.ndarray):
        return RestoredLeaf(leaf, dtype, None, lambda array: array)
    sharding = getattr(array, "sharding", None)
    if place is not None:
        if place.memory_kind is None and sharding is not None:
            place = place._replace(memory_kind=memory_kind_of(sharding))
        sharding = _sharding(leaf, place, pad)
    if sharding is None:
        raise _Mismatch(
            "like has no sharding for the array; give its ShapeDtypeStruct one, or pass mesh and "
            "specs"
        )
    if isinstance(sharding, SingleDeviceSharding) and not getattr(array, "committed", True):
        return _uncommitted_leaf(leaf, dtype, container, is_weak(array))
    return _jax_leaf(leaf, dtype, sharding, container, pad, is_weak(array))


def _container_of(like: Any) -> ContainerClass:
    if isinstance(like, PaddedArray):
        return PaddedArray
    return GlobalArray if is_container(like) else None


def _contained(container: ContainerClass, array: Any, shape: Shape) -> Any:
    if container is PaddedArray:
        return PaddedArray(array, shape)
    return array if container is None else GlobalArray(array=array)


def _value_like(value: Any, like: Any, casts: bool) -> Any:
    if isinstance(like, np.str_ | np.bytes_):
        like = like.item()
    kind = type(like)
    if type(value) is kind:
        return value
    if casts and _is_number(value) and _is_number(like):
        if isinstance(value, complex) and not value.imag:
            value = value.real
        with suppress(ValueError, OverflowError, TypeError):
            cast_value = kind(value)
            if kind is not bool or cast_value == value:
                return cast_value
        raise _Mismatch(f"it has {repr_of(value):.40}, which does not fit {kind.__name__}")
    raise _Mismatch(
        f"it has the {type(value).__name__} {repr_of(value):.40}, and like has {_said(like)}; put "
        f"a value of type {type(value).__name__} there"
    )


def _item_like(like: Any, casts: bool, array: np.ndarray[Any, Any]) -> Any:
    """Return the number of an array as one of the type of ``like``."""
    try:
        return _value_like(array.item(), like, casts)
    except _Mismatch as mismatch:
        raise DoesNotFitError(str(mismatch)) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _is_array_for(like: Any, value: Any, casts: bool) -> bool:
    """Return True if ``like`` is an array or a number of NumPy that a Python number can become."""
    array = held_by(like)
    dtype = getattr(array, "dtype", None)
    if not _is_number(value) or getattr(array, "shape", None) != () or is_extended(dtype):
        return False
    return casts or type(np.zeros((), dtype).item()) is type(value)


def _array_of_number(
    tree: RecordedTree, leaf: ValueLeaf, like: Any, place: MeshAndSpec | None
) -> Any:
    value, dtype = leaf.value, np.dtype(held_by(like).dtype)
    saved = ArrayLeaf(leaf.path, "number", (), dtype)
    restored = _leaf_like(tree, saved, like, False, place, False)
    try:
        number = cast(np.asarray(value), dtype, Origin.of_block("the saved number", ()))
    except (DoesNotFitError, OverflowError):
        raise _Mismatch(
            f"it has the {type(value).__name__} {repr_of(value):.40}, and like has {dtype}, which "
            "cannot hold it"
        ) from None
    with own_settings():  # as for arrays
        return restored.value_of([number])


def _said(like: Any) -> str:
    shape = getattr(like, "shape", None)
    if shape is None:
        return f"the {type(like).__name__} {like!r:.40}"
    return f"an array of shape {tuple(shape)}"


def _key_ndim(impl: str | None) -> int:
    """Return the number of last dimensions that belong to one key."""
    return 0 if impl is None else _key_data(impl).ndim


def _key_data(impl: str) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the data of one key."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _uncommitted_leaf(
    leaf: ArrayLeaf, dtype: np.dtype[Any], container: ContainerClass, stays_weak: bool
) -> RestoredLeaf:
    """Return the leaf of an array that is not committed to devices, such as a step count."""
    _check_kept(dtype)
    check_keys(leaf)

    def wrap(data: Any) -> Any:
        array = jax.device_put(data)  # jax.numpy would commit it to the current mesh
        if leaf.key_impl is not None:
            array = jax.random.wrap_key_data(array, impl=leaf.key_impl)
        if stays_weak:
            array = weakly_typed(array)
        return _contained(container, array, saved_type(leaf)[0])

    return RestoredLeaf(leaf, dtype, None, wrap)


def _jax_leaf(
    leaf: ArrayLeaf,
    dtype: np.dtype[Any],
    sharding: Sharding,
    container: ContainerClass,
    pad: bool,
    stays_weak: bool,
) -> RestoredLeaf:
    _check_kept(dtype)
    check_keys(leaf)
    placement = _placement(leaf.shape, leaf.key_impl, sharding, container, pad, stays_weak)
    return RestoredLeaf(leaf, dtype, *placement)


@lru_cache(maxsize=256)  # a tree has many arrays of few shapes and layouts
def _placement(
    shape: Shape,
    key_impl: str | None,
    sharding: Sharding,
    container: ContainerClass,
    pad: bool,
    stays_weak: bool,
) -> tuple[LocalBlocks, Callable[[Any], Any]]:
    """Return the blocks of this process, and the function that makes the value."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        named: Any = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    else:
        named = sharding
    if not isinstance(named, NamedSharding) or not isinstance(named.mesh, Mesh):
        raise _Mismatch(
            f"like has the sharding {sharding!r}, which has no mesh and spec; use a NamedSharding"
        )
    # The data of keys has more dimensions, which are not sharded.
    rank = len(shape) - _key_ndim(key_impl)
    spec = check_spec(named.spec, shape[:rank], named.mesh.shape)
    over = MeshAndSpec(named.mesh, PartitionSpec(*spec), memory_kind_of(sharding))
    plan = local_blocks_over(shape, over, pad)
    container = PaddedArray if plan.grid.is_padded else container

    def wrap(array: Any) -> Any:
        if isinstance(sharding, SingleDeviceSharding) and array.is_fully_addressable:
            array = jax.device_put(array, sharding)
        if key_impl is not None:
            array = jax.random.wrap_key_data(array, impl=key_impl)
        if stays_weak:
            array = weakly_typed(array)
        return _contained(container, array, shape[:rank])

    return plan, wrap


def check_keys(leaf: ArrayLeaf) -> None:
    """Raise ``ValueError`` if JAX does not have this kind of PRNG keys, or their data differs."""
    if leaf.key_impl is None:
        return
    key = _key_data(leaf.key_impl)
    if leaf.dtype != key.dtype or leaf.shape[len(leaf.shape) - key.ndim :] != key.shape:
        raise ValueError(
            f"it has keys of {leaf.key_impl!r}, which are {key.dtype}{list(key.shape)} each, but "
            f"their data is {leaf.dtype}{list(leaf.shape)}"
        )


def _kept(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that JAX has for arrays of a saved dtype."""
    return dtype if dtype in KEPT_DTYPES else jax.dtypes.canonicalize_dtype(dtype)


def _check_kept(dtype: np.dtype[Any]) -> None:
    if (final := _kept(dtype)) != dtype:
        raise TypeError(
            f"it has dtype {dtype}, which JAX narrows to {final} without jax_enable_x64; set it, "
            "ask for another dtype, or pass a NumPy array in like="
        )

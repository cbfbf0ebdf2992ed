"""What a restore is to give: of every leaf, the type and the layout.

They come from ``like``, a tree of what is wanted, or from a mesh and specs. Everything that does
not fit the checkpoint is found here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gda.agreement import join_some
from gda.array import GlobalArray
from gda.checkpoint.errors import said
from gda.checkpoint.manifest import ArrayLeaf, Leaf, Manifest, Path, ValueLeaf
from gda.checkpoint.structure import format_path, path_of_keys
from gda.indices import mesh_grid
from gda.plan import Plan, plan_of
from gda.spec import Shape, check_spec
from gda.trees import is_container, is_partition_spec


@dataclass(frozen=True)
class Target:
    """What becomes of one array of the checkpoint.

    Attributes:
      leaf: the array.
      dtype: what it is to have; of keys that of their numbers.
      plan: which blocks this process needs, and where they go; ``None`` for a NumPy array.
      wrap: makes what the user gets of the ``jax.Array`` or of the NumPy array.
    """

    leaf: ArrayLeaf
    dtype: np.dtype[Any]
    plan: Plan | None
    wrap: Callable[[Any], Any]


def saved_type(leaf: ArrayLeaf) -> tuple[Shape, Any]:
    """Return shape and dtype of what was saved: of keys, not those of their numbers."""
    if leaf.key_impl is None:
        return leaf.shape, leaf.dtype
    return leaf.shape[: -_key_ndim(leaf)], _key_dtype(leaf.key_impl)


class _Mismatch(Exception):  # noqa: N818
    """One line of what does not fit."""


def targets_like(
    manifest: Manifest, like: Any, at: Path, partial: bool, cast: bool, layout: Layout | None
) -> tuple[list[Target | Any], Any]:
    """Return a target or a value for every leaf of ``like``, and the structure to put them in.

    Raises:
      ValueError: leaves are missing or surplus, or a shape or a kind differs: all in one message.
      TypeError: a dtype differs.
    """
    wanted, definition = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_container)
    saved = {leaf.path[len(at) :]: leaf for leaf in manifest.leaves if leaf.path[: len(at)] == at}
    paths = [path_of_keys(keys) for keys, _ in wanted]
    _check_same_leaves(paths, saved, partial, at)
    results: list[Target | Any] = []
    problems: list[tuple[Path, str]] = []
    are_dtypes = True
    for path, (_, leaf) in zip(paths, wanted, strict=True):
        try:
            results.append(_target_like(saved[path], leaf, cast, layout, path))
        except (_Mismatch, ValueError, TypeError) as error:
            are_dtypes = are_dtypes and isinstance(error, TypeError)
            problems.append((at + path, str(error)))
    if problems:
        kind = TypeError if are_dtypes else ValueError
        raise kind(f"the checkpoint is not like the tree: {_listed(problems)}")
    return results, definition


@dataclass(frozen=True)
class Layout:
    """A mesh, and the spec of each path; a spec holds for all below its path."""

    mesh: Mesh
    specs: dict[Path, PartitionSpec]

    def spec_of(self, path: Path) -> PartitionSpec | None:
        for length in range(len(path), -1, -1):
            if path[:length] in self.specs:
                return self.specs[path[:length]]
        return None


def _listed(problems: Sequence[tuple[Path, str]]) -> str:
    """Return every reason once, with the paths that it holds for."""
    paths: dict[str, list[str]] = {}
    for path, reason in problems:
        paths.setdefault(reason, []).append(format_path(path))
    return join_some([f"at {join_some(places)}, {reason}" for reason, places in paths.items()])


def layout_of(mesh: Mesh | None, specs: Any, leaves: Sequence[Leaf], at: Path) -> Layout | None:
    """Return the layout that the arguments of a restore say, if they say one.

    Args:
      specs: a spec, a tree of them, or a function of path and leaf, which is asked for each array
        of ``leaves`` that is below ``at``.

    Raises:
      TypeError: one of the two is missing, or something in ``specs`` is no spec.
    """
    if mesh is None and specs is None:
        return None
    if mesh is None or specs is None:
        raise TypeError("mesh and specs say together how arrays are laid out; give both")
    if callable(specs):
        return Layout(mesh, _specs_by(specs, leaves, at))
    if isinstance(specs, list | tuple) and not isinstance(specs, PartitionSpec):
        is_one = all(entry is None or isinstance(entry, str | tuple) for entry in specs)
        specs = PartitionSpec(*specs) if is_one else specs
    by_path = {}
    for keys, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_partition_spec)[0]:
        path = path_of_keys(keys)
        if not isinstance(spec, PartitionSpec):
            where = f"specs{format_path(path)}" if path else "specs"
            raise TypeError(f"{where} is {spec!r:.80}, not a PartitionSpec")
        by_path[path] = spec
    return Layout(mesh, by_path)


def _specs_by(
    function: Callable[[str, ArrayLeaf], Any], leaves: Sequence[Leaf], at: Path
) -> dict[Path, PartitionSpec]:
    specs: dict[Path, PartitionSpec] = {}
    for leaf in leaves:
        if leaf.path[: len(at)] != at or not isinstance(leaf, ArrayLeaf) or leaf.kind == "numpy":
            continue
        path = leaf.path[len(at) :]
        name = "/".join(map(str, path))
        try:
            spec = function(name, leaf)
        except Exception as error:
            error.add_note(f"gda: at {format_path(leaf.path)} of the tree")
            raise
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"specs({name!r}, leaf) returned {spec!r:.80}, not a PartitionSpec")
        specs[path] = spec
    return specs


def targets_of(manifest: Manifest, at: Path, layout: Layout | None) -> list[Target | Any]:
    """Return a target or a value for every leaf of the manifest; ``None`` outside of ``at``.

    Without a layout every array but keys becomes a NumPy array.

    Raises:
      ValueError: an array has no spec, a spec is for nothing, or does not fit its array.
      KeyError: there is nothing at ``at``.
    """
    results: list[Target | Any] = []
    problems: list[str] = []
    unfit: list[tuple[Path, str]] = []
    lacking = []
    inside = [leaf for leaf in manifest.leaves if leaf.path[: len(at)] == at]
    if layout is not None:
        below = [leaf.path[len(at) :] for leaf in inside]
        there = {path[:length] for path in below for length in range(len(path) + 1)} | {()}
        for path in layout.specs:
            if path not in there:
                problems.append(f"specs has {format_path(path)}, and the checkpoint has not")
    for leaf in manifest.leaves:
        path = leaf.path[len(at) :]
        if leaf.path[: len(at)] != at:
            results.append(None)
        elif isinstance(leaf, ValueLeaf):
            results.append(leaf.value)
        elif layout is not None and leaf.kind != "numpy" and layout.spec_of(path) is None:
            lacking.append(format_path(leaf.path))
        else:
            try:
                results.append(_target_of(leaf, layout, path))
            except (ValueError, TypeError) as error:
                unfit.append((leaf.path, str(error)))
    if unfit:
        problems.append(_listed(unfit))
    if lacking:
        problems.append(f"specs says nothing of {join_some(lacking)}")
    if problems:
        what = "it cannot be restored" if layout is None else "specs does not fit the checkpoint"
        raise ValueError(f"{what}: {join_some(problems)}")
    return results


def _target_of(leaf: ArrayLeaf, layout: Layout | None, path: Path) -> Target:
    spec = None if layout is None or leaf.kind == "numpy" else layout.spec_of(path)
    is_global = leaf.kind == "GlobalArray"
    if layout is not None and spec is not None:
        return _jax_target(leaf, leaf.dtype, _sharding(leaf, layout.mesh, spec), is_global)
    if leaf.key_impl is not None:  # which NumPy does not have
        return _uncommitted_target(leaf, leaf.dtype, is_global=False, is_weak=False)
    return _numpy_target(leaf, leaf.dtype)


def _sharding(leaf: ArrayLeaf, mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of an array, or say as for any array why there is none."""
    mesh_grid(leaf.shape, mesh, spec)
    return NamedSharding(mesh, spec)


def _check_same_leaves(
    paths: Sequence[Path], saved: dict[Path, Leaf], partial: bool, at: Path
) -> None:
    missing = [format_path(at + path) for path in paths if path not in saved]
    there = set(paths)
    surplus = [] if partial else [format_path(at + path) for path in saved if path not in there]
    said = []
    if missing:
        said.append(f"it has no {join_some(missing)}")
    if surplus:
        said.append(f"like has no {join_some(surplus)} (partial=True leaves them out)")
    if said:
        raise ValueError(f"the checkpoint is not like the tree: {'; '.join(said)}")


def _target_like(leaf: Leaf, like: Any, cast: bool, layout: Layout | None, path: Path) -> Any:
    if isinstance(leaf, ValueLeaf):
        return _value_like(leaf.value, like, cast)
    is_global = isinstance(like, GlobalArray)
    array = like.array if is_global else like
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise _Mismatch(f"it has an array of shape {leaf.shape}, and like {_said(like)}")
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_key != (leaf.key_impl is not None):
        kinds = ("PRNG keys", f"an array of {leaf.dtype}")
        raise _Mismatch(
            f"it has {kinds[not leaf.key_impl]}, and like {kinds[not is_key]}; "
            "jax.random.wrap_key_data and key_data make one of the other"
        )
    shape = leaf.shape[: len(leaf.shape) - _key_ndim(leaf)]
    if tuple(array.shape) != shape:
        raise _Mismatch(f"it has shape {shape}, and like {tuple(array.shape)}")
    dtype = leaf.dtype
    if leaf.key_impl is not None:
        if array.dtype != _key_dtype(leaf.key_impl):
            raise _Mismatch(f"it has keys of {leaf.key_impl!r}, and like {array.dtype}")
    elif (wanted := np.dtype(array.dtype).newbyteorder("=")) != leaf.dtype:
        if not cast:
            raise TypeError(f"it has dtype {leaf.dtype}, and like {wanted}; cast=True converts it")
        dtype = wanted
    if isinstance(array, np.ndarray | np.generic):
        return _numpy_target(leaf, dtype)
    sharding = getattr(array, "sharding", None)
    if layout is not None and (spec := layout.spec_of(path)) is not None:
        sharding = _sharding(leaf, layout.mesh, spec)
    if sharding is None:
        raise _Mismatch(
            "like does not say where the array goes; give its ShapeDtypeStruct a sharding, or "
            "restore with mesh and specs"
        )
    if isinstance(sharding, SingleDeviceSharding) and not getattr(array, "committed", True):
        return _uncommitted_target(leaf, dtype, is_global, getattr(array, "weak_type", False))
    return _jax_target(leaf, dtype, sharding, is_global)


def _value_like(value: Any, like: Any, cast: bool) -> Any:
    if isinstance(like, np.str_ | np.bytes_):
        like = like.item()
    if type(value) is type(like):
        return value
    if cast and isinstance(like, bool | int | float | complex):
        return type(like)(value)
    raise _Mismatch(
        f"it has the {type(value).__name__} {said(value):.40}, and like {_said(like)}; put a value "
        f"of type {type(value).__name__} there"
    )


def _said(like: Any) -> str:
    shape = getattr(like, "shape", None)
    return (
        f"the {type(like).__name__} {like!r:.40}"
        if shape is None
        else f"an array of shape {tuple(shape)}"
    )


def _key_ndim(leaf: ArrayLeaf) -> int:
    """Return how many of the last dimensions are those of one key."""
    if leaf.key_impl is None:
        return 0
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.key_impl))).ndim


def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def _numpy_target(leaf: ArrayLeaf, dtype: np.dtype[Any]) -> Target:
    return Target(leaf, dtype, None, _same)


def _uncommitted_target(
    leaf: ArrayLeaf, dtype: np.dtype[Any], is_global: bool, is_weak: bool
) -> Target:
    """Return the target of what goes along with arrays on any devices, such as a step count.

    Args:
      is_weak: whether it is to give way to the dtype of others, as Python's numbers do.
    """
    _check_kept(dtype)
    _check_keys(leaf)

    def wrap(data: Any) -> Any:
        # jax.numpy would commit it to a mesh that is set.
        array = jax.device_put(data.item() if is_weak and not data.ndim else data)
        if array.dtype != data.dtype:
            array = jax.device_put(data)
        if leaf.key_impl is not None:
            array = jax.random.wrap_key_data(array, impl=leaf.key_impl)
        return GlobalArray(array=array) if is_global else array

    return Target(leaf, dtype, None, wrap)


def _jax_target(
    leaf: ArrayLeaf, dtype: np.dtype[Any], sharding: Sharding, is_global: bool
) -> Target:
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        named: Any = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    else:
        named = sharding
    if not isinstance(named, NamedSharding) or not isinstance(named.mesh, Mesh):
        raise _Mismatch(f"like has the sharding {sharding!r}, which names no devices and spec")
    _check_kept(dtype)
    _check_keys(leaf)
    # Of keys, their numbers have more dimensions, which are not to be cut.
    spec = check_spec(named.spec, leaf.shape[: len(leaf.shape) - _key_ndim(leaf)])
    plan = plan_of(leaf.shape, named.mesh, spec)

    def wrap(array: Any) -> Any:
        if isinstance(sharding, SingleDeviceSharding) and array.is_fully_addressable:
            array = jax.device_put(array, sharding)
        if leaf.key_impl is not None:
            array = jax.random.wrap_key_data(array, impl=leaf.key_impl)
        if sharding.memory_kind is not None and array.sharding.memory_kind != sharding.memory_kind:
            array = jax.device_put(array, array.sharding.with_memory_kind(sharding.memory_kind))
        return GlobalArray(array=array) if is_global else array

    return Target(leaf, dtype, plan, wrap)


def _check_keys(leaf: ArrayLeaf) -> None:
    if leaf.key_impl is None:
        return
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.key_impl)))
    if leaf.dtype != key.dtype or leaf.shape[len(leaf.shape) - key.ndim :] != key.shape:
        raise ValueError(
            f"it has keys of {leaf.key_impl!r}, each of which is {key.dtype}{list(key.shape)}, and "
            f"their numbers are {leaf.dtype}{list(leaf.shape)}"
        )


def _check_kept(dtype: np.dtype[Any]) -> None:
    final = jax.dtypes.canonicalize_dtype(dtype)
    if final != dtype:
        raise TypeError(
            f"it has dtype {dtype}, which JAX makes {final} without jax_enable_x64; set that, or "
            "ask for a cast with like=... of another dtype and cast=True"
        )


def _same(array: Any) -> Any:
    return array

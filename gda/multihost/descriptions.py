"""Descriptions of arrays and trees as text, which processes compare."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.layout.dtype_names import as_dtype
from gda.layout.spec import check_shape, entries_of, format_spec, partitions_of, reductions_of
from gda.layout.text import path_text
from gda.mesh import checked_partition_spec, is_tracer, mesh_and_spec

# (path in the tree, name of the field) -> text. gda treats arrays with equal texts as the same.
Description = dict[tuple[str, str], str]

STRUCTURE = ("", "structure")


def describe(tree: Any) -> Description:
    """Return the fields of every leaf of a tree, and its structure."""
    description: Description = {}
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        # The leaf of a `GlobalArray` is its array, one step further down.
        of_container = path and path[-1] == jax.tree_util.GetAttrKey("array")
        description.update(leaf_fields(leaf_path(path[:-1] if of_container else path), leaf))
    description[STRUCTURE] = _structure_text(structure)
    return description


def leaf_path(keys: Sequence[Any], within: str = "") -> str:
    """Return the path of a leaf as text, after the name of its tree if it is given."""
    return path_text([jax.tree_util.keystr((key,), simple=True) for key in keys], within)


def describe_wanted(given: dict[str, Any]) -> Description:
    """Return the fields of the array that a constructor builds from these arguments."""
    shape = check_shape(given["global_shape"])
    mesh, spec, _ = mesh_and_spec(given["mesh"], given.get("spec"))
    padded = f", padded with {given.get('fill', 0)}" if given.get("pad") else ""
    return {
        ("", "shape"): f"{shape}{padded}",
        ("", "spec"): _spec_text(checked_partition_spec(spec, shape, mesh.shape)),
        ("", "dtype"): _dtype_text(given.get("dtype")),
        **_mesh_fields("", mesh),
    }


def _dtype_text(dtype: Any) -> str:
    if dtype is None:
        return "not given"
    # NumPy has no PRNG keys.
    is_key = not isinstance(dtype, str) and jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return str(dtype if is_key else as_dtype(dtype))


def _structure_text(structure: Any) -> str:
    """Return a text that is equal for equal structures, in every process."""
    if (node := structure.node_data()) is None:
        return "*"
    kind, aux = node
    children = [_structure_text(child) for child in structure.children()]
    if kind is dict:
        keys = map(stable_text, aux)
        return f"{{{', '.join(f'{key}: {of}' for key, of in zip(keys, children, strict=True))}}}"
    if kind in (list, tuple):
        opening, closing = "[]" if kind is list else "()"
        return f"{opening}{', '.join(children)}{closing}"
    if kind is type(None):
        return "None"
    beside = [] if aux is None else [stable_text(aux)]
    return f"{kind.__qualname__}({', '.join([*beside, *children])})"


def stable_text(value: Any) -> str:
    """Return the repr without addresses and hash orders, which differ between processes."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(stable_text, value)))}}}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(stable_text, value))}{',' * (len(value) == 1)})"
    text = repr(value)
    for each in getattr(value, "__dict__", {}).values():  # of a dataclass
        if isinstance(each, set | frozenset):
            text = text.replace(repr(each), stable_text(each))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def leaf_fields(path: str, leaf: Any) -> Description:
    """Return the fields of one leaf of a tree."""
    if isinstance(leaf, Mesh | AbstractMesh):
        kind = "a mesh" if isinstance(leaf, Mesh) else "an abstract mesh"
        return {(path, "kind"): kind, **_mesh_fields(path, leaf)}
    if isinstance(leaf, PartitionSpec):
        return {(path, "spec"): _spec_text(leaf)}
    if isinstance(leaf, NamedSharding):
        return {(path, "kind"): "a sharding", **_sharding_fields(path, leaf)}
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return {(path, "type"): type(leaf).__name__}
    fields = {(path, "shape"): str(tuple(leaf.shape)), (path, "dtype"): str(leaf.dtype)}
    sharding = None if is_tracer(leaf) else getattr(leaf, "sharding", None)
    return fields | _sharding_fields(path, sharding)


def _sharding_fields(path: str, sharding: Any) -> Description:
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return {}  # local to this process, or without a layout yet
    if not isinstance(sharding, NamedSharding):
        return {(path, "sharding"): type(sharding).__name__}
    return {
        (path, "spec"): _spec_text(sharding.spec),
        (path, "memory kind"): str(sharding.memory_kind),
        **_mesh_fields(path, sharding.mesh),
    }


def _mesh_fields(path: str, mesh: Mesh | AbstractMesh) -> Description:
    return {(path, field): value for field, value in _mesh_texts(mesh)}


@lru_cache(maxsize=64)
def _mesh_texts(mesh: Mesh | AbstractMesh) -> list[tuple[str, str]]:
    kinds = [kind.name for kind in mesh.axis_types]
    named = kinds[:1] if len(set(kinds)) == 1 else kinds
    axes = [("mesh", f"{dict(mesh.shape)} of {', '.join(named)} axes")]
    if isinstance(mesh, AbstractMesh):
        return axes
    order = ", ".join([str(device.id) for device in mesh.devices.flat])
    if len(order) > 200:
        digest = sha256(order.encode()).hexdigest()[:12]
        order = f"{order[:90]} ... {order[-60:]} (sha256 {digest})"
    return [*axes, ("device order", order)]


def _spec_text(spec: Any) -> str:
    """Return a spec as text, equal for specs of the same meaning."""
    listed = [entry if isinstance(entry, tuple) else [entry] for entry in partitions_of(spec)]
    entries = entries_of(tuple(tuple(filter(None, names)) for names in listed))
    return format_spec(PartitionSpec(*entries, **reductions_of(spec)))

"""Descriptions of arrays and trees as text, which processes compare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gda.layout.dtype_names import as_dtype
from gda.layout.spec import Shape, entries_of, format_spec, partitions_of, reductions_of
from gda.layout.text import (
    MOST_CHARACTERS,
    format_processes,
    join_some,
    path_text,
    shortened,
    where_they_differ,
)
from gda.mesh import is_tracer

# (path in the tree, name of the field) -> text. gda treats arrays with equal texts as the same.
Description = dict[tuple[str, str], str]

STRUCTURE = ("", "structure")
# Of the message of a difference.
_CHARACTERS_OF_VALUES = 280
_CHARACTERS_OF_PATH = 160


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


def note_path(error: Exception, path: str) -> None:
    """Add the path of a leaf to its error."""
    note = f"gda: at {path} of the tree"
    if path and note not in getattr(error, "__notes__", ()):  # an error raised again has it
        error.add_note(note)


def describe_wanted(
    shape: Shape, sharding: NamedSharding, dtype: Any, padded_with: object = None
) -> Description:
    """Return the fields of an array that is to be built."""
    padded = "" if padded_with is None else f", padded with {padded_with}"
    return {
        ("", "shape"): f"{shape}{padded}",
        ("", "spec"): _spec_text(sharding.spec),
        ("", "dtype"): _dtype_text(dtype),
        **{("", field): text for field, text in _mesh_texts(sharding.mesh).items()},
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
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text) if " at 0x" in text else text


def leaf_fields(path: str, leaf: Any) -> Description:
    """Return the fields of one leaf of a tree."""
    return {(path, field): text for field, text in _leaf_texts(leaf).items()}


def _leaf_texts(leaf: Any) -> dict[str, str]:
    if isinstance(leaf, Mesh | AbstractMesh):
        kind = "a mesh" if isinstance(leaf, Mesh) else "an abstract mesh"
        return {"kind": kind, **_mesh_texts(leaf)}
    if isinstance(leaf, PartitionSpec):
        return {"spec": _spec_text(leaf)}
    if isinstance(leaf, NamedSharding):
        return {"kind": "a sharding", **_sharding_texts(leaf)}
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return {"type": type(leaf).__name__}
    sharding = None if is_tracer(leaf) else getattr(leaf, "sharding", None)
    texts = {"shape": str(tuple(leaf.shape)), "dtype": _name_of(leaf.dtype)}
    return texts | ({} if sharding is None else _sharding_texts(sharding))


# The leaves of a large tree share few dtypes and shardings.
_name_of = lru_cache(maxsize=64)(str)


@lru_cache(maxsize=64)
def _sharding_texts(sharding: Any) -> dict[str, str]:
    if isinstance(sharding, SingleDeviceSharding):
        return {}  # local to this process, or without a layout yet
    if not isinstance(sharding, NamedSharding):
        return {"sharding": type(sharding).__name__}
    return {
        "spec": _spec_text(sharding.spec),
        "memory kind": str(sharding.memory_kind),
        **_mesh_texts(sharding.mesh),
    }


@lru_cache(maxsize=64)
def _mesh_texts(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    kinds = [kind.name for kind in mesh.axis_types]
    named = kinds[:1] if len(set(kinds)) == 1 else kinds
    axes = {"mesh": f"{dict(mesh.shape)} of {', '.join(named)} axes"}
    if isinstance(mesh, AbstractMesh):
        return axes
    order = ", ".join([str(device.id) for device in mesh.devices.flat])
    if len(order) > 200:
        digest = sha256(order.encode()).hexdigest()[:12]
        order = f"{order[:90]} ... {order[-60:]} (sha256 {digest})"
    return {**axes, "device order": order}


def _spec_text(spec: Any) -> str:
    """Return a spec as text, equal for specs of the same meaning."""
    listed = [entry if isinstance(entry, tuple) else [entry] for entry in partitions_of(spec)]
    entries = entries_of(tuple(tuple(filter(None, names)) for names in listed))
    return format_spec(PartitionSpec(*entries, **reductions_of(spec)))


# The difference of descriptions.


def first_differences(groups: Sequence[list[int]], descriptions: Sequence[Description]) -> str:
    """Return the first paths and fields in which the descriptions of groups differ, in words."""
    keys = dict.fromkeys(key for each in descriptions for key in each)
    # The call comes first, and the structure last: most differences of it show at a path.
    in_order = sorted(keys, key=lambda key: (key == STRUCTURE, key[0] != ""))
    return join_some([*_differences(groups, descriptions, in_order)], MOST_CHARACTERS)


def _differences(
    groups: Sequence[list[int]],
    descriptions: Sequence[Description],
    keys: Iterable[tuple[str, str]],
) -> Iterator[str]:
    """Yield the first field of each path that differs, and the paths that some groups lack."""
    paths = [{path for path, _ in each} for each in descriptions]
    seen: set[str] = set()
    for path, field in keys:
        holders: dict[str, list[int]] = {}
        for group, description in zip(groups, descriptions, strict=True):
            holders.setdefault(description.get((path, field), "missing"), []).extend(group)
        is_known = path and path in seen  # of the call, whose path is empty, all fields are named
        if len(holders) == 1 or is_known or (seen and (path, field) == STRUCTURE):
            continue
        seen.add(path)
        where = shortened(path, _CHARACTERS_OF_PATH)
        having = [group for group, known in zip(groups, paths, strict=True) if path in known]
        if len(having) < len(groups):
            yield f"only in {format_processes(chain.from_iterable(having))}: {where}"
            continue
        values = sorted(holders, key=lambda value: len(holders[value]))
        shown = where_they_differ(values, _CHARACTERS_OF_VALUES // len(values))
        minority, *others = [
            (format_processes(holders[value]), text)
            for value, text in zip(values, shown, strict=True)
        ]
        first = f"{minority[0]}: {field} {minority[1]}"
        yield ", ".join([*([f"at {where}"] if path else []), first, *map(": ".join, others)])

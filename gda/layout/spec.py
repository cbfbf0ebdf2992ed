"""Partition specs: the mesh axes of each dimension of a shape, and the errors of specs.

Pure functions on tuples and names: no JAX, no devices. A *spec* is a sequence of at most one entry
per dimension: ``None`` (not sharded), an axis name, or a tuple of axis names, slowest first.
``jax.sharding.PartitionSpec`` is such a sequence.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gda.layout.text import counted, format_mesh, near_name, printable

Shape = tuple[int, ...]
Index = tuple[slice, ...]
SpecEntry = str | tuple[str, ...] | None
SpecLike = Iterable[str | Sequence[str] | None]
AxesByDimension = tuple[tuple[str, ...], ...]

_SUGGESTIONS = 4
_ASSIGNMENTS_TO_TRY = 4096

# Iterable, but a string is one name and the others have no order of dimensions: that of a set of
# names even differs between processes.
_NOT_A_SPEC = (str, set, frozenset, dict)


def integers(
    values: Iterable[Any], expected: str = "a sequence of integers such as (8, 2)"
) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple of Python's; ``TypeError`` if it is none."""
    try:
        if isinstance(values, (*_NOT_A_SPEC, bytes)):
            raise TypeError
        given = tuple(values)
        if bool in map(type, given):  # a mistake, which operator.index takes for 0 or 1
            raise TypeError
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"expected {expected}, not {values!r}") from None


def integer(value: Any, expected: str) -> int:
    """Return an integer as Python's; ``TypeError`` if it is none."""
    try:
        if isinstance(value, bool):  # a mistake, as in integers
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"expected {expected}, not {value!r}") from None


def check_shape(sizes: Iterable[int], kind: str = "global") -> Shape:
    """Return a shape as a tuple of Python ints; ``kind`` names it in messages."""
    try:
        shape = integers(sizes)
    except TypeError:
        raise TypeError(
            f"{kind}_shape must be a sequence of integers such as (8, 2), not {sizes!r}"
        ) from None
    if shape and min(shape) < 0:
        raise ValueError(f"{kind}_shape {shape} has a negative size; sizes are 0 or more")
    return shape


def check_mesh_shape(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Return ``mesh_shape`` as a dict from axis name to size, in mesh order."""
    if not isinstance(mesh_shape, Mapping):
        raise TypeError(
            "mesh_shape must map axis names to sizes, in mesh order, such as {'x': 4, 'y': 2}, "
            f"not {mesh_shape!r}; of a jax.sharding.Mesh it is mesh.shape"
        )
    try:
        sizes = dict(zip(mesh_shape, map(operator.index, mesh_shape.values()), strict=True))
    except TypeError:
        raise TypeError(f"sizes of mesh axes must be integers: {dict(mesh_shape)}") from None
    if sizes and min(sizes.values()) < 1:
        raise ValueError(f"mesh {sizes} has an axis without devices; sizes are 1 or more")
    return sizes


def check_spec(
    spec: SpecLike, shape: Shape, mesh_shape: Mapping[str, int] | None = None, kind: str = "global"
) -> tuple[SpecEntry, ...]:
    """Return the entries of ``spec``, hashable and at most one per dimension of ``shape``.

    Surplus entries that shard nothing are dropped, as JAX does: ``P(None)`` on a scalar and, where
    ``mesh_shape`` tells the sizes, axes of size 1. Which axes the entries name is checked later, by
    ``axes_by_dimension``.
    """
    if isinstance(spec, _NOT_A_SPEC):
        raise _not_a_spec_error(spec)
    check_reduced(spec)
    try:
        entries = partitions_of(spec)  # without reduced axes, which do not change the layout
    except TypeError:
        raise _not_a_spec_error(spec) from None
    if list in map(type, entries):
        entries = tuple(tuple(entry) if type(entry) is list else entry for entry in entries)
    for dimension, entry in enumerate(entries):
        _names_of(entry, dimension, entries)  # raises if it cannot be an entry
    rank = len(shape)
    sizes = mesh_shape or {}
    for surplus in entries[rank:]:
        if any(sizes.get(name, 2) > 1 for name in _names_of(surplus, rank, entries)):
            raise ValueError(
                f"spec {format_spec(entries)} has {counted(len(entries), 'entry', 'entries')}, but "
                f"{kind} shape {shape} has {counted(rank, 'dimension')}; give at most one entry "
                "per dimension"
            )
    return entries[:rank]


def check_reduced(spec: Any) -> None:
    """Raise ``ValueError`` for the spec of an array whose devices hold partial sums."""
    if getattr(spec, "unreduced", None):
        raise ValueError(
            f"spec {format_spec(spec)} has unreduced axes, so the devices hold partial sums and "
            "the array has no fixed layout; reduce it first, for instance with jax.sharding.reshard"
        )


def partitions_of(spec: SpecLike) -> tuple[Any, ...]:
    """Return the entries of a spec; JAX refuses to iterate over one with reduced axes."""
    return tuple(getattr(spec, "partitions", spec))


def reductions_of(spec: object) -> dict[str, frozenset[str]]:
    """Return the arguments ``unreduced`` and ``reduced`` of a ``PartitionSpec``, if not empty."""
    named = {kind: getattr(spec, kind, frozenset()) for kind in ("unreduced", "reduced")}
    return {kind: names for kind, names in named.items() if names}


def _not_a_spec_error(spec: object) -> TypeError:
    if isinstance(spec, str):
        return TypeError(f"spec {spec!r} is a string; write P({spec!r}) or [{spec!r}]")
    return TypeError(
        "spec must be a PartitionSpec or a sequence of None, axis names and tuples of them, one "
        f"entry per dimension, not {spec!r}"
    )


def axes_by_dimension(
    entries: Sequence[SpecEntry], rank: int, mesh_shape: Mapping[str, int]
) -> AxesByDimension:
    """Return, for each of ``rank`` dimensions, the mesh axes that shard it, slowest first."""
    axes = tuple([_names_of(entry, dimension, entries) for dimension, entry in enumerate(entries)])
    if errors := list(axis_errors(axes, entries, mesh_shape)):
        raise errors.pop(0)  # a frame that holds its own error keeps the caller's arrays alive
    return axes + ((),) * (rank - len(axes))


def axis_errors(
    axes: AxesByDimension, entries: Sequence[SpecEntry], mesh_shape: Mapping[str, int]
) -> Iterator[ValueError]:
    """Yield an error for each axis of a spec that the mesh lacks, or that was used before."""
    seen = set()
    for dimension, names in enumerate(axes):
        for name in names:
            if name not in mesh_shape:
                yield _unknown_axis_error(name, dimension, entries, mesh_shape)
            elif name in seen:
                yield ValueError(
                    f"spec {format_spec(entries)} uses mesh axis {name!r} twice; "
                    "use each axis for one dimension"
                )
            seen.add(name)


def _names_of(entry: object, dimension: int, entries: Sequence[object]) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    if "UNCONSTRAINED" in repr(entry):
        raise ValueError(
            f"spec {format_spec(entries)} leaves dimension {dimension} UNCONSTRAINED, so it has no "
            "fixed layout; write None (not sharded) or the axes that shard it"
        )
    raise TypeError(
        f"entry {dimension} of the spec is {entry!r}; an entry is None, the name of a mesh axis or "
        "a tuple of names"
    )


def _unknown_axis_error(
    name: str, dimension: int, entries: Sequence[object], mesh_shape: Mapping[str, int]
) -> ValueError:
    return ValueError(
        f"spec {format_spec(entries)} shards dimension {dimension} by mesh axis {name!r}, but the "
        f"mesh has the axes {dict(mesh_shape)}{near_name(name, mesh_shape)}"
    )


def entries_of(axes: AxesByDimension) -> tuple[SpecEntry, ...]:
    """Return the shortest spec that means ``axes``: no trailing ``None``, no 1-tuples."""
    entries = [names[0] if len(names) == 1 else (names or None) for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def format_spec(spec: Iterable[Any]) -> str:
    """Return a spec as a user writes it: ``P('x', None, ('y', 'z'))``, equal in all processes."""
    arguments = [*map(repr, partitions_of(spec))]
    for kind, names in reductions_of(spec).items():
        arguments.append(f"{kind}={{{', '.join(sorted(map(repr, names)))}}}")
    return f"P({', '.join(arguments)})"


def format_layout(spec: Iterable[Any], mesh_shape: Mapping[str, int]) -> str:
    """Return a spec on a mesh, without control characters: ``P('x') on x=4,y=2``."""
    return f"{printable(format_spec(spec))} on {format_mesh(mesh_shape)}"


def indivisible_error(
    axes: AxesByDimension, shape: Shape, mesh_shape: Mapping[str, int]
) -> ValueError:
    """Return the error of dimensions that the mesh axes do not divide, with specs that fit."""
    complaints = []
    for dimension, (size, names) in enumerate(zip(shape, axes, strict=True)):
        ways = math.prod(mesh_shape[name] for name in names)
        if size % ways:
            by = " and ".join(f"{name!r}" for name in names)
            plural = "axis" if len(names) == 1 else "axes"
            complaints.append(
                f"dimension {dimension} of size {size} is sharded {ways} ways by mesh {plural} "
                f"{by}, and {size} is not divisible by {ways}; {nearest_sizes(size, ways)}"
            )
    fitting = fitting_specs(axes, shape, mesh_shape)
    some = ", for instance" if len(fitting) == _SUGGESTIONS else ""
    return ValueError(
        f"global shape {shape} cannot be sharded by {format_spec(entries_of(axes))} on the mesh "
        f"{dict(mesh_shape)}: {'. Also, '.join(complaints)}. Specs of this mesh that fit {shape} "
        f"as it stands{some}: {', '.join(format_spec(entries_of(other)) for other in fitting)}. "
        "With padding any size fits: gda.PaddedArray, or ShardGrid(..., pad=True)"
    )


def nearest_sizes(size: int, ways: int) -> str:
    """Return the sizes near ``size`` that are divisible by ``ways``, for a message."""
    below = size // ways * ways
    if not below:
        return f"{ways} is the nearest size that divides"
    return f"{below} and {below + ways} are the nearest sizes that divide"


def fitting_specs(
    axes: AxesByDimension, shape: Shape, mesh_shape: Mapping[str, int]
) -> list[AxesByDimension]:
    """Return a few specs that divide ``shape``: with the fewest moved axes, then most shards."""
    wanted = {name: dimension for dimension, names in enumerate(axes) for name in names}
    movable = [name for name, size in mesh_shape.items() if size > 1]
    places: list[list[int | None]] = [[None, *range(len(shape))] for _ in movable]
    if math.prod(map(len, places)) > _ASSIGNMENTS_TO_TRY:
        places = [[None, wanted[name]] if name in wanted else [None] for name in movable]
    found = []
    for assignment in itertools.islice(itertools.product(*places), _ASSIGNMENTS_TO_TRY):
        place = dict(zip(movable, assignment, strict=True))
        # Axes keep the order the user gave them; axes that are new to a dimension come last.
        order = [*wanted, *(name for name in movable if name not in wanted)]
        candidate = tuple(
            tuple(name for name in order if place.get(name) == dimension)
            for dimension in range(len(shape))
        )
        ways = [math.prod(mesh_shape[name] for name in names) for names in candidate]
        if any(size % way for size, way in zip(shape, ways, strict=True)):
            continue
        kept = sum(place.get(name) == dimension for name, dimension in wanted.items())
        text = format_spec(entries_of(candidate))
        found.append(((-kept, -math.prod(ways), len(text), text), candidate))
    return [candidate for _, candidate in sorted(found)[:_SUGGESTIONS]]

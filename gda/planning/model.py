"""A whole model on a mesh: the bytes of each device, and rows of equal parameters.

The file of ``gda plan --tree`` is a JSON object, as ``gda.layouts(tree).to_json()`` writes it, with

- ``parameters``: for each name ``{"shape": [...], "dtype": ..., "spec": ...}``, and perhaps
  ``memory_kind``, as JAX names it: ``"pinned_host"`` is the memory of the host;
- ``mesh``: sizes of the axes by name, in mesh order; the option ``--mesh`` overrides it;
- ``dtype``: for the parameters without their own;
- ``about``: anything a reader should know.

A dtype is a name as ``--dtype`` takes it. A spec is a list of null, axes and lists of axes; a
parameter without one is not sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gda.layout.dtype_names import bits_of
from gda.layout.grid import ShardGrid
from gda.layout.padding import Padding, padding_of
from gda.layout.spec import AxesByDimension, SpecEntry, axes_by_dimension, entries_of
from gda.layout.strict_json import parse_json
from gda.planning.device_kinds import is_on_host
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.name_ranges import alike_in_ranges
from gda.planning.notation.numbers import parse_dtype
from gda.planning.planned_array import PlannedArray, check_devices_per_process, planned_grid


@dataclass(frozen=True)
class Parameter(PlannedArray):
    """An array of a model on a mesh."""

    name: str
    memory_kind: str | None = None


@dataclass(frozen=True)
class ParameterRow:
    """Parameters that differ only in numbers in their names."""

    name: str
    names: tuple[str, ...]
    parameter: Parameter

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def title(self) -> str:
        """Its name and the number of its parameters."""
        return f"{self.name} (x{self.count})" if self.count > 1 else self.name

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all of them on one device."""
        return self.count * self.parameter.block_bytes

    @property
    def padding(self) -> Padding:
        return padding_of([(self.parameter.grid, self.count * bits_of(self.parameter.dtype))])

    @cached_property
    def better_spec(self) -> tuple[SpecEntry, ...]:
        return better_spec(self.parameter.grid)

    @cached_property
    def bytes_saved_per_device(self) -> int:
        """The bytes that ``better_spec`` would save on a device, for all of them."""
        if is_on_host(self.parameter.memory_kind):
            return 0
        grid = self.parameter.grid
        better = ShardGrid(grid.global_shape, grid.mesh_shape, self.better_spec, pad=True)
        return self.bytes_per_device - self.count * replace(self.parameter, grid=better).block_bytes


@dataclass(frozen=True)
class ModelPlan:
    """All parameters of a model on one mesh."""

    mesh: Mapping[str, int]
    devices_per_process: int
    parameters: Sequence[Parameter]

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def num_elements(self) -> int:
        return sum(math.prod(p.grid.global_shape) for p in self.parameters)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        """Bytes in the memory of one device."""
        return sum(p.block_bytes for p in self.parameters if not is_on_host(p.memory_kind))

    @property
    def bytes_on_host(self) -> int:
        """Bytes of the blocks of one device that are in the memory of its host."""
        return sum(parameter.block_bytes for parameter in self.parameters) - self.bytes_per_device

    @property
    def padding(self) -> Padding:
        return padding_of((p.grid, bits_of(p.dtype)) for p in self.parameters)

    @cached_property
    def rows(self) -> list[ParameterRow]:
        """Most bytes per device first; of equal ones, in the order of the file."""
        by_name = {parameter.name: parameter for parameter in self.parameters}
        layouts = ((name, _layout_of(parameter)) for name, parameter in by_name.items())
        rows = [
            ParameterRow(name, tuple(names), by_name[names[0]])
            for name, names, _ in alike_in_ranges(layouts)
        ]
        return sorted(rows, key=lambda row: -row.bytes_per_device)

    @cached_property
    def savings(self) -> list[ParameterRow]:
        """The rows that could be sharded further, most saved first."""
        rows = [row for row in self.rows if row.bytes_saved_per_device]
        return sorted(rows, key=lambda row: -row.bytes_saved_per_device)


def plan_model(
    path: Path,
    mesh: Mapping[str, int] | None,
    devices_per_process: int | None,
    *,
    pad: bool,
) -> ModelPlan:
    """Return the plan of the model that a file describes; ``mesh`` overrides that of the file."""
    try:
        document = parse_json(path.read_text("utf-8-sig"))
        sizes = _with_keys(document, {"parameters", "mesh", "dtype", "about"}).get("mesh")
        sizes = _mesh_of(sizes) if mesh is None else dict(mesh)
        parameters = _with_keys(document.get("parameters"), None)
    except ValueError as error:
        raise MistakesError(
            f'{path}: {error}; expected is {{"mesh": {{"data": 16}}, "parameters": '
            '{NAME: {"shape": [4096], "dtype": "bfloat16", "spec": ["data"]}}}'
        ) from None
    found = []
    for name, entry in parameters.items():
        try:
            found.append(_parameter(name, entry, document.get("dtype"), sizes, pad=pad))
        except (TypeError, ValueError) as error:
            raise MistakesError(f"{path}: {name}: {error}") from None
    return ModelPlan(sizes, check_devices_per_process(devices_per_process, sizes), found)


def _with_keys(given: Any, known: set[str] | None) -> dict[str, Any]:
    """Return an object of JSON; ``known`` are all keys that it may have."""
    if not isinstance(given, dict):
        raise ValueError(f"an object was expected, not {given!r:.80}")
    if known is not None and (unknown := given.keys() - known):
        raise ValueError(f"{min(unknown)!r:.80} is not known; known are {', '.join(sorted(known))}")
    return given


def _mesh_of(given: Any) -> dict[str, int]:
    if not isinstance(given, dict) or any(type(n) is not int or n < 1 for n in given.values()):
        raise ValueError(f"no sizes of axes are here or in --mesh, such as 16, but {given!r:.80}")
    return given


def _parameter(
    name: str, entry: Any, dtype: Any, mesh: Mapping[str, int], *, pad: bool
) -> Parameter:
    given = _with_keys(entry, {"shape", "dtype", "spec", "memory_kind"})
    shape = given.get("shape")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f'"shape": a list of sizes was expected, not {shape!r:.80}')
    dtype = parse_dtype(str(given.get("dtype") or dtype))
    grid = planned_grid(tuple(shape), dtype, mesh, given.get("spec") or (), pad=pad)
    kind = given.get("memory_kind")
    if not isinstance(kind, str | None):
        raise ValueError(f'"memory_kind": a name was expected, not {kind!r:.80}')
    return Parameter(grid, dtype, name, kind)


def _layout_of(parameter: Parameter) -> tuple[Any, ...]:
    grid = parameter.grid
    return grid.global_shape, parameter.dtype, grid.spec, parameter.memory_kind


def axes_of(grid: ShardGrid) -> AxesByDimension:
    """Return the mesh axes that shard each dimension."""
    return axes_by_dimension(grid.spec, len(grid.global_shape), grid.mesh_shape)


def better_spec(grid: ShardGrid) -> tuple[SpecEntry, ...]:
    """Return the spec with unused mesh axes added, if their sizes divide a dimension.

    The largest axis comes first. Each becomes the last axis of the dimension with the largest
    blocks, so that the present axes stay in place.
    """
    axes = [list(names) for names in axes_of(grid)]
    left = list(grid.shard_shape)
    used = {name for names in axes for name in names}
    sizes = sorted(grid.mesh_shape.items(), key=lambda item: -item[1])
    for name, size in sizes:
        dimensions = [d for d, rest in enumerate(left) if rest and rest % size == 0]
        if name not in used and size > 1 and dimensions:
            chosen = max(dimensions, key=left.__getitem__)
            axes[chosen].append(name)
            left[chosen] //= size
    return entries_of(tuple(map(tuple, axes)))

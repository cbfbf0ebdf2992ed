"""A whole model on a mesh: its rows, and the document of ``gda plan --tree --json``.

In the document, ``nbytes_per_device``, ``nbytes_per_process`` and ``nbytes_on_devices`` count all
replicas, and padding, without ``nbytes_on_host``, the blocks of one device in the memory of its
host; ``nbytes_padding`` is the padding on all devices, ``percent_padding`` of the rest;
``nbytes_distinct_per_process`` are the bytes that a process reads, as ``[least, most]``.

``parameters`` are rows, most bytes per device first. A row is one parameter, or ``count`` of them
that differ only in numbers in their ``names``; its bytes per device and of padding are of all of
them, the rest is of each. ``savings`` are the replicated rows that could be sharded, most saved
first. ``memory``, with ``--device``, is that of ``ModelMemory``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gda.layout.dtype_names import bits_of, packed_nbytes
from gda.layout.grid import ShardGrid
from gda.layout.padding import Padding, padding_of
from gda.layout.spec import AxesByDimension, SpecEntry, axes_by_dimension, entries_of
from gda.planning.device_kinds import is_on_host
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.model_file import ModelText, Parameter, read_model
from gda.planning.notation.name_ranges import alike_in_ranges
from gda.planning.planned_array import check_devices_per_process, distinct_of, spec_for_json


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

    def document(self) -> dict[str, Any]:
        grid = self.parameter.grid
        return {
            "name": self.name,
            "names": list(self.names),
            "count": self.count,
            "nbytes_per_device": self.bytes_per_device,
            "shape": list(grid.global_shape),
            "dtype": self.parameter.dtype.name,
            "memory_kind": self.parameter.memory_kind,
            "spec": spec_for_json(grid.spec),
            "shard_shape": list(grid.shard_shape),
            "padded_shape": list(grid.padded_shape),
            **self.padding.document(),
            "num_replicas": grid.num_replicas,
            "nbytes": self.parameter.nbytes,
        }

    def document_of_saving(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "count": self.count,
            "spec": spec_for_json(self.parameter.grid.spec),
            "better_spec": spec_for_json(self.better_spec),
            "nbytes_saved_per_device": self.bytes_saved_per_device,
        }


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
        return sum(parameter.block_bytes for parameter in self.on_devices)

    @property
    def bytes_on_host(self) -> int:
        """Bytes of the blocks of one device that are in the memory of its host."""
        return sum(parameter.block_bytes for parameter in self.parameters) - self.bytes_per_device

    @property
    def on_devices(self) -> list[Parameter]:
        """The parameters that are not in the memory of the host."""
        return [each for each in self.parameters if not is_on_host(each.memory_kind)]

    @property
    def padding(self) -> Padding:
        return padding_of((p.grid, bits_of(p.dtype)) for p in self.parameters)

    @cached_property
    def distinct_bytes(self) -> tuple[int, int]:
        """The least and the most distinct bytes of one process, over all processes."""
        nbytes: dict[Any, int] = defaultdict(int)
        grids: dict[Any, ShardGrid] = {}
        for parameter in self.parameters:
            grid, dtype = parameter.grid, parameter.dtype
            # Blocks of a padded array have several sizes, so only equal arrays are added up.
            layout = axes_of(grid), (grid.global_shape, dtype) if grid.is_padded else None
            nbytes[layout] += 1 if grid.is_padded else parameter.block_bytes
            grids.setdefault(layout, grid)
        totals: Any = np.zeros(self.num_devices // self.devices_per_process, np.int64)
        for layout, grid in grids.items():
            blocks, elements = distinct_of(grid, self.devices_per_process)
            _, of_padded = layout
            sizes = packed_nbytes(elements, of_padded[1]) if of_padded else blocks
            totals += nbytes[layout] * sizes
        return int(totals.min()), int(totals.max())

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

    def document(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "mesh": dict(self.mesh),
            "num_devices": self.num_devices,
            "num_processes": self.num_devices // self.devices_per_process,
            "devices_per_process": self.devices_per_process,
            "num_parameters": len(self.parameters),
            "num_elements": self.num_elements,
            "nbytes": self.nbytes,
            "nbytes_per_device": self.bytes_per_device,
            "nbytes_on_host": self.bytes_on_host,
            "nbytes_per_process": self.bytes_per_device * self.devices_per_process,
            "nbytes_on_devices": self.bytes_per_device * self.num_devices,
            **self.padding.document(),
            "nbytes_distinct_per_process": list(self.distinct_bytes),
            "parameters": [row.document() for row in self.rows],
            "savings": [row.document_of_saving() for row in self.savings],
        }


def plan_model(
    file: ModelText,
    mesh: Mapping[str, int] | None,
    devices_per_process: int | None,
    *,
    pad: bool,
) -> ModelPlan:
    """Return the plan of the model in a file; the arguments are those of ``read_model``."""
    sizes, parameters = read_model(file, mesh, pad=pad)
    model = ModelPlan(sizes, check_devices_per_process(devices_per_process, sizes), parameters)
    if model.bytes_per_device * model.num_devices >= 2**63:
        raise MistakesError(f"{file.path} has more than 2**63 bytes in all; check its sizes")
    return model


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

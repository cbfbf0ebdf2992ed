"""``gda plan --tree FILE``: what every device holds of a whole model.

What the file is like is in ``gda/cli/trees.py``. With ``--json`` the answer is one document:

- ``mesh``, ``num_devices``, ``num_processes``, ``devices_per_process``;
- ``num_parameters``, ``num_elements`` and ``nbytes``: of the model once;
- ``nbytes_per_device``, ``nbytes_per_process``, ``nbytes_on_devices``: all replicas counted;
  ``distinct_nbytes_per_process``: ``[least, most]`` over the processes, what they read;
- ``parameters``: rows, most bytes per device first. A row is one parameter, or several that differ
  only in numbers in their names: ``name`` (with ranges such as ``0-31``), ``names``, ``count``,
  ``nbytes_per_device`` of all of them, and what is the same for each: ``shape``, ``dtype``,
  ``spec``, ``shard_shape``, ``num_replicas``, ``nbytes``;
- ``savings``: rows that are replicated and could be cut, most saved first: ``name``, ``count``,
  ``spec``, ``better_spec``, and ``nbytes_saved_per_device`` by all of the row.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gda.cli.answers import blocks_by_process
from gda.cli.arrays import (
    check_devices_per_process,
    format_mesh,
    format_shape,
    print_json,
    spec_for_json,
)
from gda.cli.commands import OK
from gda.cli.names import with_ranges
from gda.cli.tables import counted, facts, listed, table
from gda.cli.trees import Parameter, read_model
from gda.cli.words import MistakesError, parse_mesh, parse_number, read_option
from gda.grid import ShardGrid
from gda.spec import AxesByDimension, SpecEntry, axes_by_dimension, entries_of, format_spec
from gda.wording import format_bytes

_OF_ONE_ARRAY = ("shape", "dtype", "spec", "process", "locate")
_SAVINGS_SHOWN = 10


@dataclass(frozen=True)
class Row:
    """Parameters that are alike but for numbers in their names."""

    name: str
    names: tuple[str, ...]
    parameter: Parameter

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def bytes_per_device(self) -> int:
        """Of all of them."""
        return self.count * _block_bytes(self.parameter.grid, self.parameter.dtype.itemsize)

    @property
    def title(self) -> str:
        sizes = ",".join(map(str, self.parameter.grid.global_shape))
        return f"{self.parameter.dtype.name}[{sizes}]"

    @cached_property
    def better_spec(self) -> tuple[SpecEntry, ...]:
        """A spec that also cuts by the axes over which it is replicated, where they divide it.

        The largest axis first; each cuts the dimension that has most left, and goes last there, so
        that what was cut stays cut as it was.
        """
        grid = self.parameter.grid
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

    @cached_property
    def bytes_saved_per_device(self) -> int:
        """What ``better_spec`` would save, of all of them."""
        grid, itemsize = self.parameter.grid, self.parameter.dtype.itemsize
        better = ShardGrid(grid.global_shape, grid.mesh_shape, self.better_spec)
        return self.bytes_per_device - self.count * _block_bytes(better, itemsize)

    def describe(self) -> dict[str, Any]:
        grid, itemsize = self.parameter.grid, self.parameter.dtype.itemsize
        return {
            "name": self.name,
            "names": list(self.names),
            "count": self.count,
            "nbytes_per_device": self.bytes_per_device,
            "shape": list(grid.global_shape),
            "dtype": self.parameter.dtype.name,
            "spec": spec_for_json(grid.spec),
            "shard_shape": list(grid.shard_shape),
            "num_replicas": grid.num_replicas,
            "nbytes": math.prod(grid.global_shape) * itemsize,
        }

    def describe_saving(self) -> dict[str, Any]:
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
    def num_processes(self) -> int:
        return self.num_devices // self.devices_per_process

    @property
    def num_elements(self) -> int:
        return sum(math.prod(p.grid.global_shape) for p in self.parameters)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(p.grid.global_shape) * p.dtype.itemsize for p in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        return sum(_block_bytes(p.grid, p.dtype.itemsize) for p in self.parameters)

    @cached_property
    def distinct_bytes(self) -> tuple[int, int]:
        """The least and the most distinct bytes of one process, over all processes."""
        bytes_by_layout: dict[AxesByDimension, int] = defaultdict(int)
        grids: dict[AxesByDimension, ShardGrid] = {}
        for parameter in self.parameters:
            if size := _block_bytes(parameter.grid, parameter.dtype.itemsize):
                bytes_by_layout[axes_of(parameter.grid)] += size
                grids.setdefault(axes_of(parameter.grid), parameter.grid)
        totals: Any = sum(
            nbytes * blocks_by_process(grids[axes], self.devices_per_process)
            for axes, nbytes in bytes_by_layout.items()
        )
        return (int(totals.min()), int(totals.max())) if bytes_by_layout else (0, 0)

    @cached_property
    def rows(self) -> list[Row]:
        """Most bytes per device first; of equal ones, in the order of the file."""
        alike: dict[Any, list[Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            grid = parameter.grid
            alike[grid.global_shape, parameter.dtype, grid.spec].append(parameter)
        rows = [
            Row(name, tuple(names), parameters[0])
            for parameters in alike.values()
            for name, names in with_ranges(parameter.name for parameter in parameters)
        ]
        return sorted(rows, key=lambda row: -row.bytes_per_device)

    @cached_property
    def savings(self) -> list[Row]:
        """The rows that could be cut further, most saved first."""
        rows = [row for row in self.rows if row.bytes_saved_per_device]
        return sorted(rows, key=lambda row: -row.bytes_saved_per_device)

    def describe(self) -> dict[str, Any]:
        """Return what a JSON document says."""
        return {
            "mesh": dict(self.mesh),
            "num_devices": self.num_devices,
            "num_processes": self.num_processes,
            "devices_per_process": self.devices_per_process,
            "num_parameters": len(self.parameters),
            "num_elements": self.num_elements,
            "nbytes": self.nbytes,
            "nbytes_per_device": self.bytes_per_device,
            "nbytes_per_process": self.bytes_per_device * self.devices_per_process,
            "nbytes_on_devices": self.bytes_per_device * self.num_devices,
            "distinct_nbytes_per_process": list(self.distinct_bytes),
            "parameters": [row.describe() for row in self.rows],
            "savings": [row.describe_saving() for row in self.savings],
        }


def axes_of(grid: ShardGrid) -> AxesByDimension:
    """Return for each dimension the mesh axes that cut it."""
    return axes_by_dimension(grid.spec, len(grid.global_shape), grid.mesh_shape)


def _block_bytes(grid: ShardGrid, itemsize: int) -> int:
    return math.prod(grid.shard_shape) * itemsize


def plan_tree(options: argparse.Namespace) -> int:
    """Do ``gda plan --tree``."""
    model = _read(options)
    if options.json:
        print_json(model.describe())
        return OK
    from gda.cli.pictures import terminal_width

    print(*_summary(model), sep="\n")
    if model.rows:
        print("", *_rows(model, terminal_width()), sep="\n")
    if model.savings:
        print("", *_savings(model), sep="\n")
    return OK


def _read(options: argparse.Namespace) -> ModelPlan:
    if given := [f"--{name}" for name in _OF_ONE_ARRAY if getattr(options, name)]:
        raise MistakesError(f"{listed(given)} of one array cannot be said with --tree")
    mesh = options.mesh and read_option("--mesh", options.mesh, parse_mesh)
    devices = options.devices_per_process
    if devices is not None:
        devices = read_option("--devices-per-process", devices, parse_number)
    path = options.tree
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise MistakesError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise MistakesError(f"{path} is not a text in UTF-8: {error}") from None
    sizes, parameters = read_model(text, "stdin" if path == "-" else path, mesh)
    model = ModelPlan(sizes, check_devices_per_process(devices, sizes), parameters)
    if model.bytes_per_device * model.num_devices >= 2**63:
        raise MistakesError(f"{path} has more than 2**63 bytes in all; check its sizes")
    return model


# For people.


def _summary(model: ModelPlan) -> list[str]:
    devices = counted(model.num_devices, "device")
    if model.num_processes > 1:
        devices += f" in {model.num_processes:,} processes of {model.devices_per_process:,}"
    everywhere = model.bytes_per_device * model.num_devices
    times = f": {everywhere / model.nbytes:.4g} times the model" if model.nbytes else ""
    parameters = counted(len(model.parameters), "parameter")
    elements = counted(model.num_elements, "element")
    return facts(
        [
            ("model", f"{parameters} of {elements}, {format_bytes(model.nbytes)}"),
            ("mesh", f"{format_mesh(model.mesh)}: {devices}"),
            ("", ""),
            ("per device", format_bytes(model.bytes_per_device)),
            ("per process", _bytes_of_a_process(model)),
            ("all devices", f"{format_bytes(everywhere)}{times}"),
        ]
    )


def _bytes_of_a_process(model: ModelPlan) -> str:
    held = format_bytes(model.bytes_per_device * model.devices_per_process)
    distinct = list(dict.fromkeys(map(format_bytes, model.distinct_bytes)))
    return held if distinct == [held] else f"{held}; {' to '.join(distinct)} of it distinct"


def _rows(model: ModelPlan, width: int) -> list[str]:
    """Return one line for each row where that is not too wide, else two."""
    one_line = table(
        ["per device", "parameter", "", "array", "spec", "shard shape", "replicas"],
        [
            [
                format_bytes(row.bytes_per_device),
                row.name,
                _times(row),
                row.title,
                format_spec(row.parameter.grid.spec),
                format_shape(row.parameter.grid.shard_shape),
                str(row.parameter.grid.num_replicas),
            ]
            for row in model.rows
        ],
        right={"per device", "replicas"},
    )
    if max(map(len, one_line)) <= width:
        return one_line
    names = table(
        ["per device", "parameter"],
        [[format_bytes(row.bytes_per_device), f"{row.name} {_times(row)}"] for row in model.rows],
        right={"per device"},
    )
    details = table(
        ["array", "spec", "shard shape", "replicas"],
        [
            [
                row.title,
                format_spec(row.parameter.grid.spec),
                format_shape(row.parameter.grid.shard_shape),
                counted(row.parameter.grid.num_replicas, "replica"),
            ]
            for row in model.rows
        ],
    )
    return _interleaved(names, details)


def _interleaved(names: Sequence[str], details: Sequence[str]) -> list[str]:
    lines = []
    for name, detail in zip(names, details, strict=True):
        lines += [name.rstrip(), f"{'':12}{detail}"]
    return lines


def _savings(model: ModelPlan) -> list[str]:
    shown = model.savings[:_SAVINGS_SHOWN]
    total = format_bytes(sum(row.bytes_saved_per_device for row in model.savings))
    rows = [
        [format_bytes(row.bytes_saved_per_device), f"{row.name} {_times(row)}".rstrip()]
        for row in shown
    ]
    names = table(["per device", "parameter"], rows, right={"per device"})
    better = [
        f"{format_spec(row.parameter.grid.spec)} to {format_spec(row.better_spec)}" for row in shown
    ]
    left = counted(len(model.savings) - len(shown), "more row")
    more = [f"… {left}; --json lists them"] if len(model.savings) > len(shown) else []
    head = f"Replicated, but could be cut: {total} per device would be saved."
    return [head, "", *_interleaved(names, ["spec, and one that also divides", *better]), *more]


def _times(row: Row) -> str:
    return f"(x{row.count})" if row.count > 1 else ""

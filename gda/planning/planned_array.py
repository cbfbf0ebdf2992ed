"""An array that need not exist, on devices that need not exist: its grid and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gda.layout.padding import format_padding
from gda.layout.text import counted, format_mesh, format_shape, in_processes
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.planned_grid import TypedGrid, plan_grid

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.spec import Shape, SpecEntry


@dataclass(frozen=True)
class PlannedArray(TypedGrid):
    """An array that need not exist, on devices that need not exist; its grid has processes.

    Each process has ``devices_per_process``, consecutive in device order. ``notes`` are surprises,
    in words.
    """

    devices_per_process: int
    notes: tuple[str, ...] = ()

    @property
    def num_processes(self) -> int:
        return self.grid.num_devices // self.devices_per_process

    @property
    def devices_and_processes(self) -> str:
        """Numbers in words: ``1,024 devices in 128 processes of 8``."""
        return in_processes(self.grid.num_devices, self.devices_per_process)

    def document(self) -> dict[str, Any]:
        """Return its part of a JSON document."""
        grid = self.grid
        return {
            "shape": list(grid.global_shape),
            "dtype": self.dtype.name,
            "itemsize": self.dtype.itemsize,
            "nbytes": self.nbytes,
            "mesh": dict(grid.mesh_shape),
            "spec": spec_for_json(grid.spec),
            "shard_shape": list(grid.shard_shape),
            "padded_shape": list(grid.padded_shape),
            "num_devices": grid.num_devices,
            "num_shards": grid.num_shards,
            "num_replicas": grid.num_replicas,
            "num_processes": self.num_processes,
            "devices_per_process": self.devices_per_process,
            "nbytes_per_device": self.block_bytes,
            "nbytes_per_process": self.block_bytes * self.devices_per_process,
            "nbytes_on_devices": self.block_bytes * grid.num_devices,
            **self.padding.document(),
            "notes": list(self.notes),
        }


def plan_array(
    shape: Shape,
    dtype: np.dtype[Any],
    mesh: Mapping[str, int],
    spec: Sequence[SpecEntry],
    devices_per_process: int | None,
    *,
    pad: bool,
) -> PlannedArray:
    """Return the array that parsed options describe."""
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.processes import Processes

    grid = plan_grid(shape, dtype, mesh, spec, pad=pad)
    devices = check_devices_per_process(devices_per_process, mesh)
    processes = Processes(np.arange(grid.num_devices) // devices)
    notes = []
    if empty := _num_empty_devices(grid):
        notes.append(f"{counted(empty, 'device')} of {grid.num_devices:,} would hold padding alone")
    grid = ShardGrid(shape, mesh, spec, pad=pad, process_of=processes)
    return PlannedArray(grid, dtype, devices, tuple(notes))


def _num_empty_devices(grid: ShardGrid) -> int:
    """Return the number of devices that hold padding alone."""
    if not grid.is_padded or 0 in grid.global_shape:
        return 0
    sizes = zip(grid.global_shape, grid.shard_shape, strict=True)
    return grid.num_devices - grid.num_replicas * math.prod(
        -(-size // step) for size, step in sizes
    )


def check_devices_per_process(devices_per_process: int | None, mesh: Mapping[str, int]) -> int:
    """Return the devices of each process; all devices by default."""
    devices = math.prod(mesh.values())
    if devices_per_process is None:
        return devices
    if devices_per_process and not devices % devices_per_process:
        return devices_per_process
    raise MistakesError(
        f"{devices_per_process} devices per process do not divide the {devices} devices of the "
        f"mesh {format_mesh(mesh)}; give a number that does"
    )


# Output.


def padding_words(array: PlannedArray) -> list[str]:
    """Return the padding of an array in words, if it has any."""
    shape = format_shape(array.grid.padded_shape)
    words = f"to {shape}: {format_padding(array.padding)} more on all devices"
    return [words] if array.grid.is_padded else []


def spec_for_json(spec: Iterable[SpecEntry]) -> list[Any]:
    """Return a spec as ``--tree`` reads it: null, names and lists of names."""
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]

"""An array that need not exist, on devices that need not exist: its grid and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.layout.dtype_names import packed_nbytes
from gda.layout.text import counted, format_mesh
from gda.planning.notation.mistakes import MistakesError
from gda.planning.notation.planned_grid import TypedGrid, plan_grid

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.numbering import IntArray
    from gda.layout.spec import Shape, SpecEntry


@dataclass(frozen=True)
class PlannedArray(TypedGrid):
    """An array that need not exist, on devices that need not exist; its grid has processes.

    Each process has ``devices_per_process``, consecutive in device order. ``notes`` are surprises,
    in words.
    """

    devices_per_process: int
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the document of ``gda plan --json``, in elements and bytes.

        ``nbytes`` is the array once. ``nbytes_per_device``, ``nbytes_per_process`` and
        ``nbytes_on_devices`` count every replica, and padding; ``nbytes_padding`` is that on all
        devices, ``percent_padding`` of the rest. ``nbytes_distinct_per_process`` are the bytes that
        a process reads, each of its blocks once and without padding, as ``[least, most]``.
        """
        grid, per_process = self.grid, self.devices_per_process
        distinct = packed_nbytes(distinct_of(grid, per_process).elements, self.dtype)
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
            "num_processes": grid.num_devices // per_process,
            "devices_per_process": per_process,
            "nbytes_per_device": self.block_bytes,
            "nbytes_per_process": self.block_bytes * per_process,
            "nbytes_on_devices": self.block_bytes * grid.num_devices,
            **self.padding.document(),
            "notes": list(self.notes),
            "nbytes_distinct_per_process": [int(distinct.min()), int(distinct.max())],
        }


class Distinct(NamedTuple):
    """The distinct blocks of each process, and their elements: int64 ``[num_processes]``."""

    blocks: IntArray
    elements: IntArray


def distinct_of(grid: ShardGrid, devices_per_process: int) -> Distinct:
    """Return the distinct blocks of each process, and their elements without padding."""
    import numpy as np

    from gda.layout.reshard.flow import tiling_of

    blocks = np.sort(grid.block_ids.reshape(-1, devices_per_process), axis=1)
    is_first = np.diff(blocks, axis=1, prepend=-1) != 0
    sizes = tiling_of(grid).sizes(blocks)
    return Distinct(is_first.sum(axis=1, dtype=np.int64), (sizes * is_first).sum(axis=1))


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
    if grid.is_padded and 0 not in shape:
        sizes = zip(shape, grid.shard_shape, strict=True)
        used = grid.num_replicas * math.prod(-(-size // step) for size, step in sizes)
        if empty := grid.num_devices - used:
            of_all = f"{counted(empty, 'device')} of {grid.num_devices:,}"
            notes.append(f"{of_all} would hold padding alone")
    grid = ShardGrid(shape, mesh, spec, pad=pad, process_of=processes)
    return PlannedArray(grid, dtype, devices, tuple(notes))


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


def spec_for_json(spec: Iterable[SpecEntry]) -> list[Any]:
    """Return a spec as ``--tree`` reads it: null, names and lists of names."""
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]

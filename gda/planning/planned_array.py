"""An array that need not exist, on devices that need not exist: its grid and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.layout.text import format_mesh
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

    Each process has ``devices_per_process``, consecutive in device order.
    """

    devices_per_process: int


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
    grid = ShardGrid(shape, mesh, spec, pad=pad, process_of=processes)
    return PlannedArray(grid, dtype, devices)


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

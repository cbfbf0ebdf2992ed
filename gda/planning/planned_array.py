"""An array that need not exist, on devices that need not exist: its grid and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gda.layout.dtype_names import bits_of, packed_nbytes
from gda.layout.padding import Padding, padding_of
from gda.layout.text import format_mesh, typed_shape
from gda.planning.notation.mistakes import MistakesError

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.numbering import IntArray
    from gda.layout.spec import Shape, SpecEntry

_MOST_DEVICES = 2**22  # some answers take O(devices)


@dataclass(frozen=True)
class PlannedArray:
    """An array that need not exist: its layout and the dtype of its elements."""

    grid: ShardGrid
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return packed_nbytes(math.prod(self.grid.global_shape), self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which are the bytes on one device."""
        return packed_nbytes(math.prod(self.grid.shard_shape), self.dtype)

    @property
    def padding(self) -> Padding:
        return padding_of([(self.grid, bits_of(self.dtype))])

    @property
    def title(self) -> str:
        return typed_shape(self.dtype.name, self.grid.global_shape)


def planned_grid(
    shape: Shape,
    dtype: np.dtype[Any],
    mesh: Mapping[str, int],
    spec: Sequence[SpecEntry],
    *,
    pad: bool,
    devices_per_process: int | None = None,
) -> ShardGrid:
    """Return the grid of an array; consecutive devices are of one process, if so many are given."""
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.processes import Processes
    from gda.layout.spec import WITH_PADDING

    devices = math.prod(mesh.values())
    if devices > _MOST_DEVICES:
        raise MistakesError(f"a plan is for at most {_MOST_DEVICES:,} devices; the mesh has more")
    processes = None
    if devices_per_process is not None:
        processes = Processes(np.arange(devices) // devices_per_process)
    try:
        grid = ShardGrid(shape, mesh, spec, pad=pad, process_of=processes)
    except (TypeError, ValueError) as error:
        hint = "; in a shell, --pad pads it" if WITH_PADDING in str(error) else ""
        raise MistakesError(f"{error}{hint}") from None
    if packed_nbytes(math.prod(grid.shard_shape), dtype) * devices >= 2**63:
        raise MistakesError("this array takes 2**63 bytes or more on all devices; check its sizes")
    return grid


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


def check_devices_per_process(devices_per_process: int | None, mesh: Mapping[str, int]) -> int:
    """Return the devices of each process; all devices by default."""
    devices = math.prod(mesh.values())
    if devices_per_process is None:
        return devices
    if devices % devices_per_process == 0:
        return devices_per_process
    raise MistakesError(
        f"{devices_per_process} devices per process do not divide the {devices} devices of the "
        f"mesh {format_mesh(mesh)}; give a number that does"
    )

"""The grid of a shape, a mesh and a spec that people wrote, within limits.

No devices are needed. The mesh has a limit because some answers take O(devices).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gda.layout.dtype_names import bits_of, packed_nbytes
from gda.layout.padding import Padding, format_percent, padding_of
from gda.layout.text import format_mesh, typed_shape
from gda.planning.notation.mistakes import MistakesError

if TYPE_CHECKING:
    import numpy as np

    from gda.layout.grid import ShardGrid
    from gda.layout.spec import Shape, SpecEntry

MAX_DEVICES = 2**22
_MAX_DIMENSIONS = 64  # of an array in NumPy, and so of a mesh


@dataclass(frozen=True)
class TypedGrid:
    """A layout and the dtype of the elements."""

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


def plan_grid(
    shape: Shape,
    dtype: np.dtype[Any],
    mesh: Mapping[str, int],
    spec: Sequence[SpecEntry],
    *,
    pad: bool,
) -> ShardGrid:
    """Return the grid of an array, on a mesh without processes."""
    from gda.layout.grid import ShardGrid

    check_shape_and_mesh(shape, mesh)
    try:
        grid = ShardGrid(shape, mesh, spec, pad=pad)
    except ValueError as error:
        raise MistakesError(f"{error}{_hint_of_padding(shape, mesh, spec)}") from None
    nbytes = packed_nbytes(math.prod(grid.shard_shape), dtype) * grid.num_devices
    if nbytes >= 2**63:
        raise MistakesError(
            f"this array takes {_power(nbytes)} bytes on all devices; a plan counts to 2**63; "
            "check the sizes"
        )
    return grid


def _hint_of_padding(shape: Shape, mesh: Mapping[str, int], spec: Sequence[SpecEntry]) -> str:
    from gda.layout.grid import ShardGrid

    try:
        grid = ShardGrid(shape, mesh, spec, pad=True)
    except ValueError:
        return ""
    percent = format_percent(padding_of([(grid, 1)]).percent)
    return f"; or give --pad: padded to {grid.padded_shape}, {percent} more"


def check_shape_and_mesh(shape: Shape, mesh: Mapping[str, int]) -> None:
    """Check that the shape and the mesh are within the limits of a plan."""
    check_dimensions("shape", shape)
    check_dimensions("mesh", mesh)
    if (devices := math.prod(mesh.values())) > MAX_DEVICES:
        count = f"{devices:,}" if devices < 10**9 else _power(devices)
        raise MistakesError(
            f"the mesh {format_mesh(mesh):.80} has {count} devices; a plan is for at most "
            f"{MAX_DEVICES:,}"
        )


def check_dimensions(kind: str, value: Sized) -> None:
    """Raise ``MistakesError`` if a shape, a mesh or a spec has more than 64 dimensions."""
    if len(value) > _MAX_DIMENSIONS:
        raise MistakesError(
            f"this {kind} has {len(value)} dimensions; an array has at most {_MAX_DIMENSIONS}"
        )


def _power(number: int) -> str:
    """Return the magnitude of a number, even if too large for a float: ``about 10**18``."""
    return f"about 10**{len(str(number)) - 1}"

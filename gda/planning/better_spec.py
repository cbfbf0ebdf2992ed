"""The spec that shards an array over all axes of its mesh that fit."""

from __future__ import annotations

from gda.layout.grid import ShardGrid
from gda.layout.spec import SpecEntry, axes_by_dimension, entries_of


def better_spec(grid: ShardGrid) -> tuple[SpecEntry, ...]:
    """Return the spec with unused mesh axes added, if their sizes divide a dimension.

    The largest axis comes first. Each becomes the last axis of the dimension with the largest
    blocks, so that the present axes stay in place.
    """
    of_grid = axes_by_dimension(grid.spec, len(grid.global_shape), grid.mesh_shape)
    axes = [list(names) for names in of_grid]
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

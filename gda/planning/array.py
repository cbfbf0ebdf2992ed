"""The document of ``gda plan --json`` for one array, with the keys

- ``shape``, ``dtype``, ``itemsize`` (bytes of one element in NumPy), ``nbytes`` (of the array
  once), ``mesh`` (axis sizes by name), ``spec`` (for each dimension null, an axis or a list of
  axes; dimensions at the end that are not sharded are omitted);
- ``shard_shape``, ``padded_shape`` (``shape`` if the mesh divides it), ``num_devices``,
  ``num_shards`` (distinct blocks), ``num_replicas`` (devices that hold each), ``num_processes``,
  ``devices_per_process``;
- ``nbytes_per_device``, ``nbytes_per_process`` and ``nbytes_on_devices``: every replica
  counted, and padding; ``nbytes_padding``: the padding on all devices, ``percent_padding`` of the
  rest; ``nbytes_distinct_per_process``: the bytes that a process reads, each of its blocks once and
  without padding, as ``[least, most]`` over the processes;
- ``notes``: surprises, in words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gda.layout.dtype_names import packed_nbytes
from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray
from gda.layout.reshard.flow import tiling_of
from gda.planning.planned_array import PlannedArray


def document_of(array: PlannedArray) -> dict[str, Any]:
    """Return the document of ``--json``."""
    elements = distinct_of(array.grid, array.devices_per_process).elements
    nbytes = packed_nbytes(elements, array.dtype)
    return {
        **array.document(),
        "nbytes_distinct_per_process": [int(nbytes.min()), int(nbytes.max())],
    }


class Distinct(NamedTuple):
    """The distinct blocks of each process, and their elements: int64 ``[num_processes]``."""

    blocks: IntArray
    elements: IntArray


def distinct_of(grid: ShardGrid, devices_per_process: int) -> Distinct:
    """Return the distinct blocks of each process, and their elements without padding."""
    blocks = np.sort(grid.block_ids.reshape(-1, devices_per_process), axis=1)
    is_first = np.diff(blocks, axis=1, prepend=-1) != 0
    sizes = tiling_of(grid).sizes(blocks)
    return Distinct(is_first.sum(axis=1, dtype=np.int64), (sizes * is_first).sum(axis=1))

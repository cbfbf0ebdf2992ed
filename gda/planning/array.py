"""The document of ``gda plan --json`` for one array, with the keys

- ``shape``, ``dtype``, ``itemsize`` (bytes of one element), ``nbytes`` (of the array once),
  ``mesh`` (axis sizes by name), ``spec`` (for each dimension null, an axis or a list of axes;
  dimensions at the end that are not sharded are omitted);
- ``shard_shape``, ``padded_shape`` (``shape`` if the mesh divides it), ``num_devices``,
  ``num_shards`` (distinct blocks), ``num_replicas`` (devices that hold each), ``num_processes``,
  ``devices_per_process``;
- ``nbytes_per_device``, ``nbytes_per_process`` and ``nbytes_on_devices``: every replica
  counted, and padding; ``nbytes_padding``: the padding on all devices, ``percent_padding`` of the
  rest; ``nbytes_distinct_per_process``: the bytes that a process reads, each of its blocks once and
  without padding, as ``[least, most]`` over the processes;
- ``notes``: surprises, in words;
- ``processes``: for each ``--process`` its number as ``process``; ``nbytes_on_devices``,
  ``nbytes_read`` and ``nbytes_written``; ``blocks``, each with its number as ``block``, ``index``
  (``[start, stop]`` of each dimension) and ``is_written``, true if this process is the one that
  writes it; ``devices``, each with its position as ``device``, its ``coordinates``
  in the mesh, ``block`` and ``replica_id``;
- ``elements``: for each ``--locate`` its coordinates as ``element``; ``block``, ``index`` and
  ``offset`` within the block; ``devices``, each with ``device``, ``coordinates``, ``process`` and
  ``replica_id``.

``num_devices`` and ``num_blocks`` count all; the lists have at most the first 16,384 of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gda.layout.grid import ShardGrid
from gda.layout.numbering import IntArray
from gda.layout.reshard.flow import tiling_of
from gda.planning.planned_array import LISTED, PlannedArray, index_for_json


def document_of(
    array: PlannedArray, processes: Sequence[int], elements: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return the document of ``--json``."""
    nbytes = distinct_of(array.grid, array.devices_per_process).elements * array.dtype.itemsize
    return {
        **array.document(),
        "nbytes_distinct_per_process": [int(nbytes.min()), int(nbytes.max())],
        "processes": [about_process(array, process) for process in processes],
        "elements": [about_element(array, element) for element in elements],
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


def about_process(array: PlannedArray, process: int, limit: int = LISTED) -> dict[str, Any]:
    """Return the bytes, blocks and devices of one process; at most ``limit`` blocks and devices."""
    view, grid, itemsize = array.grid.view(process), array.grid, array.dtype.itemsize
    written = view.written_blocks()
    is_written = {*written}
    size_written = int(tiling_of(grid).sizes(np.array(written, np.int64)).sum())
    blocks, devices = view.block_ids, view.positions
    return {
        "process": process,
        "nbytes_on_devices": view.nbytes_on_devices(itemsize),
        "nbytes_read": view.nbytes(itemsize),
        "nbytes_written": size_written * itemsize,
        "num_blocks": len(blocks),
        "num_blocks_written": len(written),
        "num_devices": len(devices),
        "blocks": [
            {
                "block": block,
                "index": index_for_json(grid.block_index(block), grid.global_shape),
                "is_written": block in is_written,
            }
            for block in blocks[:limit]
        ],
        "devices": [
            {
                "device": device,
                "coordinates": mesh_coordinates(device, grid.mesh_shape),
                "block": grid.block_id(device),
                "replica_id": grid.replica_id(device),
            }
            for device in devices[:limit].tolist()
        ],
    }


def about_element(
    array: PlannedArray, element: tuple[int, ...], limit: int = LISTED
) -> dict[str, Any]:
    """Return the devices that hold an element, at most ``limit``, and its place in their block."""
    grid = array.grid
    holders = grid.locate(element)
    block = grid.block_id(int(holders[0]))
    index = index_for_json(grid.block_index(block), grid.global_shape)
    starts = [start for start, _ in index]
    return {
        "element": list(element),
        "block": block,
        "index": index,
        "offset": [at - start for at, start in zip(element, starts, strict=True)],
        "num_devices": len(holders),
        "devices": [
            {
                "device": device,
                "coordinates": mesh_coordinates(device, grid.mesh_shape),
                "process": device // array.devices_per_process,
                "replica_id": replica,
            }
            for replica, device in enumerate(holders[:limit].tolist())
        ],
    }


def mesh_coordinates(position: int, mesh: Mapping[str, int]) -> list[int]:
    """Return the coordinates of a device in its mesh."""
    return [*map(int, np.unravel_index(position, tuple(mesh.values())))]

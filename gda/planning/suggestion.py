"""A target that moves less of a model: with its axes or its processes in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gda.layout.grid import ShardGrid
from gda.layout.reshard.flow import tiling_of
from gda.layout.reshard.overlaps import Pieces
from gda.planning.moves import Alike, ListedMoves, ModelMoves
from gda.planning.planned_array import LISTED

# A second or less each.
_MOST_PLANNED = 2**17  # devices, of all plans together
_MOST_COMPARED = 2**22  # pairs of devices

_MOST_AXES = 4
_LEAST_SAVED = 0.01


class Suggestion(NamedTuple):
    """Another target, and the bytes that move to it.

    Attributes:
      mesh: its axes in another order; None for the given mesh.
      process_order: the process at each place of the mesh; None for the present order.
    """

    mesh: Mapping[str, int] | None
    process_order: tuple[int, ...] | None
    nbytes_between_processes: int
    nbytes_moved: int


def suggestion_for(moves: ModelMoves) -> Suggestion | None:
    """Return a target that moves less between processes, or less in all; None if there is none.

    It is found with the largest arrays. Its bytes are those of the whole model.
    """
    meshes: list[Mapping[str, int]] = [moves.target.mesh, *_other_meshes(moves.target.mesh)]
    count = _MOST_PLANNED // (len(meshes) * moves.target.num_devices)
    with_bytes = sorted(moves.alike, key=lambda group: -group.nbytes)
    sample = replace(moves, alike=[group for group in with_bytes[:count] if group.nbytes])
    if not moves.nbytes_moved or not sample.alike:
        return None
    mesh = min(meshes, key=lambda mesh: _cost(_on_mesh(sample, mesh)))
    if mesh is not meshes[0] and not _saves(_on_mesh(sample, mesh), sample):
        mesh = meshes[0]
    sample = _on_mesh(sample, mesh)
    order = _other_order(sample)
    if order is not None and not _saves(replace(sample, order=order), sample):
        order = None
    found = replace(_on_mesh(moves, mesh), order=order)
    if not _saves(found, moves):
        return None
    return Suggestion(None if mesh is meshes[0] else mesh, order, *_cost(found))


def _cost(moves: ModelMoves) -> tuple[int, int]:
    return moves.nbytes_between_processes, moves.nbytes_moved


def _saves(some: ModelMoves, others: ModelMoves) -> bool:
    return _cost(some) < tuple((1 - _LEAST_SAVED) * nbytes for nbytes in _cost(others))


def _other_meshes(mesh: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """Yield the mesh with its axes in other orders; an axis of size 1 comes last."""
    names = [name for name, size in mesh.items() if size > 1]
    ones = [name for name in mesh if name not in names]
    if len(names) <= _MOST_AXES:
        for order in itertools.islice(itertools.permutations(names), 1, None):
            yield {name: mesh[name] for name in (*order, *ones)}


def _on_mesh(moves: ModelMoves, mesh: Mapping[str, int]) -> ModelMoves:
    def on_mesh(group: Alike) -> Alike:
        grid = group.after.grid
        grid = ShardGrid(grid.global_shape, mesh, grid.spec, pad=True)
        return group._replace(after=replace(group.after, grid=grid))

    return replace(moves, alike=[on_mesh(group) for group in moves.alike])


def _other_order(moves: ModelMoves) -> tuple[int, ...] | None:
    """Return an order of the processes of the target in which they keep more, if there is one.

    The place and the process that share most are put together first, then the next.
    """
    size, places = moves.target.devices_per_process, moves.target.num_processes
    if size != moves.source.devices_per_process or places == 1:
        return None
    known = min(places, moves.source.num_processes)
    compared = moves.alike[: _MOST_COMPARED // (places * known * size)]
    if not compared:
        return None
    shared = np.zeros((places, places), np.int64)
    for group in compared:
        before, after = group.before.grid, group.after.grid
        old = before.block_ids.reshape(-1, size)[None, :known]
        new = after.block_ids.reshape(-1, size)[:, None]
        pairs = [blocks.ravel() for blocks in np.broadcast_arrays(old, new)]
        elements = Pieces(tiling_of(before), tiling_of(after)).overlaps(*pairs)
        nbytes = group.before.dtype.itemsize * len(group.names)
        shared[:, :known] += elements.reshape(places, known, size).sum(axis=2) * nbytes
    order: dict[int, int] = {}
    taken = set()
    for pair in np.argsort(-shared, axis=None, kind="stable").tolist():
        place, process = divmod(pair, places)
        if place not in order and process not in taken:
            order[place] = process
            taken.add(process)
    found = tuple(order[place] for place in range(places))
    return None if found == tuple(range(places)) else found


def document_of(
    listed: ListedMoves, processes: Sequence[Mapping[str, Any]], suggestion: Suggestion | None
) -> dict[str, Any]:
    """Return the document of ``gda reshard --tree --json``."""
    moves = listed.moves
    assert isinstance(moves, ModelMoves)
    return {
        "source": moves.source.document_of_totals(),
        "target": moves.target.document_of_totals(),
        **listed.document(),
        "nbytes_peak_per_device": moves.nbytes_peak_per_device,
        "nbytes_peak_per_process": moves.nbytes_peak_per_process,
        "nbytes_peak_one_by_one": moves.nbytes_peak_one_by_one,
        "processes": processes[:LISTED],
        "parameters": [row.document() for row in moves.rows],
        "suggestion": None if suggestion is None else suggestion._asdict(),
    }

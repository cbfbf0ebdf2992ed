"""The reads of a restore by all processes together: each chunk in one of those that need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from gda.arrays.construction.placing import LocalBlocks
from gda.arrays.construction.reading_once import mesh_of_several
from gda.arrays.transport.exchanging import Part, exchange
from gda.checkpoint.format.manifest import Chunk
from gda.checkpoint.reading.blocks import Arrival, Use, uses_of
from gda.checkpoint.reading.files import Files
from gda.layout.sharing import readers_of
from gda.mesh import processes_of
from gda.multihost.agreement import watching
from gda.trees.records.restored_leaves import RestoredLeaf

NAME = "gda.checkpoint.restore"


class _SharedChunk(NamedTuple):
    """A chunk that several processes need, and the parts of all their blocks in it."""

    chunk: Chunk
    holders: tuple[int, ...]
    uses: list[Use]


def processes_together(leaves: Sequence[RestoredLeaf]) -> tuple[int, ...]:
    """Return the processes of all meshes of several devices; without a mesh, all; or none."""
    plans = [leaf.plan for leaf in leaves if leaf.plan is not None]
    if plans:
        mesh = mesh_of_several(plan.sharding for plan in plans if not _is_on_one_device(plan))
        return () if mesh is None else processes_of(mesh).numbers
    return tuple(range(jax.process_count())) if jax.process_count() > 1 else ()


def _is_on_one_device(plan: LocalBlocks | None) -> bool:
    """Return True for an array that each process may have on a device of its own."""
    return plan is not None and plan.sharding.mesh.size == 1


def layout_to_share(leaf: RestoredLeaf) -> jax.ShapeDtypeStruct:
    """Return what is the same in all processes: shape, dtype, and a layout of several processes."""
    plan = leaf.plan
    sharding = None
    if plan is not None and len(processes_of(plan.sharding.mesh).numbers) > 1:
        sharding = plan.sharding
    return jax.ShapeDtypeStruct(leaf.saved.shape, leaf.dtype, sharding=sharding)


def read_chunks_once(
    files: Files,
    arrivals: Sequence[Arrival],
    processes: tuple[int, ...],
    read: Callable[[dict[Chunk, list[Use]]], object],
) -> None:
    """Fill the blocks of some arrays, with ``read``. Communicates: all ``processes`` call it."""
    arrays = files.manifest.arrays
    together = [each for each in arrivals if not _is_on_one_device(each.leaf.plan)]
    uses = uses_of(together, files.manifest, lambda arrival: arrival.boxes_of(processes))
    shared: list[_SharedChunk] = []
    own = uses_of([each for each in arrivals if _is_on_one_device(each.leaf.plan)], files.manifest)
    for chunk, parts in sorted(uses.items()):
        cuts = [cut for use in parts for cut in use.cuts.each]
        holders = tuple(sorted({process for cut in cuts for process in cut.box.holders}))
        if holders[1:]:
            shared.append(_SharedChunk(chunk, holders, parts))
        elif holders == (jax.process_index(),):
            own.setdefault(chunk, []).extend(parts)
    nbytes = [arrays[each.chunk[0]].nbytes_per_chunk for each in shared]
    sent_parts: list[tuple[Use, int]] = []
    sent: list[Part] = []
    for reader, each in zip(readers_of([s.holders for s in shared], nbytes), shared, strict=True):
        if reader == jax.process_index():
            own.setdefault(each.chunk, []).extend(each.uses)
        itemsize = arrays[each.chunk[0]].dtype.itemsize
        for use in each.uses:
            for number, cut in enumerate(use.cuts.each):
                between = tuple(sorted({reader, *cut.box.holders}))
                sent.append(Part(reader, between, math.prod(cut.shape) * itemsize))
                sent_parts.append((use, number))
    with watching(NAME, processes) as watch:
        read(own)
        exchange(sent, lambda n: sent_parts[n][0].memory(sent_parts[n][1]), watch)

"""Chunks that several processes need, each read by one of them and sent to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gda.arrays.construction.reading_once import mesh_of_several
from gda.arrays.transport.exchanging import Part
from gda.checkpoint.format.manifest import Chunk, Manifest
from gda.checkpoint.reading.chunk_parts import Use, uses_of
from gda.layout.sharing import readers_of
from gda.mesh import processes_of
from gda.trees.records.arrivals import Arrival


class SharedReads(NamedTuple):
    """The reads of this process, for itself and for others, and the parts that are sent then."""

    own: dict[Chunk, list[Use]]
    sent: list[Part]
    uses: list[tuple[Use, int]]  # of each part that is sent

    def memory(self, number: int) -> np.ndarray[Any, Any]:
        """Return the memory of a part that is sent."""
        use, cut = self.uses[number]
        return use.memory(cut)


def processes_together(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Return the processes of all meshes of several devices; without a mesh, all; or none."""
    plans = [arrival.plan for arrival in arrivals if arrival.plan is not None]
    if plans:
        mesh = mesh_of_several(plan.sharding for plan in plans if plan.sharding.mesh.size > 1)
        return () if mesh is None else processes_of(mesh).numbers
    return tuple(range(jax.process_count())) if jax.process_count() > 1 else ()


def _is_on_one_device(arrival: Arrival) -> bool:
    """Return True for an array that each process may have on a device of its own."""
    return arrival.plan is not None and arrival.plan.sharding.mesh.size == 1


def shared_reads(
    manifest: Manifest, arrivals: Sequence[Arrival], processes: tuple[int, ...]
) -> SharedReads:
    """Divide the chunks of some arrays between processes: each is read in one that needs it."""
    own = uses_of([each for each in arrivals if _is_on_one_device(each)], manifest)
    together = [each for each in arrivals if not _is_on_one_device(each)]
    shared: list[tuple[Chunk, tuple[int, ...], list[Use]]] = []
    for chunk, uses in sorted(uses_of(together, manifest, processes).items()):
        cuts = [cut for use in uses for cut in use.cuts.each]
        holders = tuple(sorted({process for cut in cuts for process in cut.block.holders}))
        if holders[1:]:
            shared.append((chunk, holders, uses))
        elif holders == (jax.process_index(),):
            own.setdefault(chunk, []).extend(uses)
    nbytes = [manifest.arrays[array].nbytes_per_chunk for (array, _), _, _ in shared]
    readers = readers_of([holders for _, holders, _ in shared], nbytes)
    sent: list[Part] = []
    sent_uses: list[tuple[Use, int]] = []
    for reader, (chunk, _, uses) in zip(readers, shared, strict=True):
        if reader == jax.process_index():
            own.setdefault(chunk, []).extend(uses)
        itemsize = manifest.arrays[chunk[0]].dtype.itemsize
        for use in uses:
            for number, cut in enumerate(use.cuts.each):
                between = tuple(sorted({reader, *cut.block.holders}))
                sent.append(Part(reader, between, math.prod(cut.shape) * itemsize))
                sent_uses.append((use, number))
    return SharedReads(own, sent, sent_uses)

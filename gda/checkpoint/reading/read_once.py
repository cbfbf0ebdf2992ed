"""The reads of a restore by all processes together: each chunk in one of those that need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from gda.arrays.construction.placing import Plan
from gda.arrays.transport.exchanging import Needed, Part, read_shared
from gda.arrays.transport.reading_once import mesh_of_several
from gda.checkpoint.reading.blocks import Arrival, Use, uses_of
from gda.checkpoint.reading.files import Chunk, Files
from gda.checkpoint.reading.restored_leaves import RestoredLeaf
from gda.mesh import processes_of

NAME = "gda.checkpoint.restore"


class _SharedChunk(NamedTuple):
    """A chunk that several processes need, and the parts of all their blocks in it."""

    chunk: Chunk
    needed: Needed
    uses: list[Use]


def processes_together(leaves: Sequence[RestoredLeaf]) -> tuple[int, ...]:
    """Return the processes that restore these values together, with this one; or none.

    They are those of all meshes of several devices; without a mesh, all.
    """
    plans = [leaf.plan for leaf in leaves if leaf.plan is not None]
    if plans:
        mesh = mesh_of_several(plan.sharding for plan in plans if not _is_on_one_device(plan))
        return () if mesh is None else processes_of(mesh).numbers
    return tuple(range(jax.process_count())) if jax.process_count() > 1 else ()


def _is_on_one_device(plan: Plan | None) -> bool:
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
    *,
    always: bool,
) -> None:
    """Fill the blocks of some arrays. Communicates: all ``processes`` call it.

    Args:
      read: reads some chunks, and gives each use its part.
      always: as in ``read_shared``.
    """
    arrays = files.manifest.arrays
    together = [each for each in arrivals if not _is_on_one_device(each.leaf.plan)]
    uses = uses_of(together, arrays, lambda arrival: arrival.boxes_of(processes))
    shared: list[_SharedChunk] = []
    own = uses_of([each for each in arrivals if _is_on_one_device(each.leaf.plan)], arrays)
    for chunk, parts in sorted(uses.items()):
        needed_by = tuple(sorted({process for use in parts for process in use.box.holders}))
        if needed_by[1:]:
            needed = Needed(needed_by, arrays[chunk[0]].nbytes_per_chunk)
            shared.append(_SharedChunk(chunk, needed, parts))
        elif needed_by == (jax.process_index(),):
            own.setdefault(chunk, []).extend(parts)
    own_nbytes = sum(arrays[array].nbytes_per_chunk for array, _ in own)

    def read_some(numbers: Iterable[int]) -> None:
        some = dict(own)
        own.clear()
        for number in numbers:
            chunk = shared[number].chunk
            some[chunk] = [*some.get(chunk, ()), *shared[number].uses]
        read(some)

    def sent(readers: Sequence[int]) -> Any:
        sent_uses: list[Use] = []
        parts: list[Part] = []
        for reader, each in zip(readers, shared, strict=True):
            for use in each.uses:
                between = tuple(sorted({reader, *use.box.holders}))
                nbytes = math.prod(use.shape) * arrays[each.chunk[0]].dtype.itemsize
                parts.append(Part(reader, between, nbytes))
                sent_uses.append(use)
        return parts, lambda number: sent_uses[number].memory

    needed = [each.needed for each in shared]
    read_shared(NAME, processes, needed, read_some, sent, own_nbytes=own_nbytes, always=always)
